//! The event log's form of every event, derived from the declarations of the engine and the fabric.

use super::value::{EffectData, FieldSchema, Keyword, LogField, LogValue, log_struct};
use serde::{Deserialize, Serialize};
use softhca_engine::{
    AsyncEvent, ClientId, CmChannelId, CmDropReason, CmFailure, CmId, CmMessageKind, CqId, DropReason, Event,
    InjectedPoint, Instant, LinkReject, PacketSummary, QpConfiguration, QpState, QpType, RateCause, Reason,
    Recovery, RequestError, RetransmitCause,
};
use softhca_fabric::{FabricEvent, FrameDropReason, PacketId, PauseEndReason};
use softhca_types::cm::{CmState, EventType};
use softhca_types::{
    AccessFlags, CallSite, Completion, CompletionOpcode, CorruptRing, ProgramAction, Sge, Verb,
};
use softhca_wire::{Mtu, Opcode, Psn, Qpn};
use std::net::IpAddr;
use std::time::Duration;

softhca_wire::named_enum! {
    /// The emphasis of an event in a ladder.
    #[derive(Default)]
    pub enum Emphasis {
        /// Expected.
        #[default]
        Normal => "normal",
        /// An operation succeeded.
        Success => "success",
        /// A retransmission, or the effect of a fault rule.
        Unusual => "unusual",
        /// An operation failed.
        Error => "error",
    }
}

/// An event of the log, as the reference page and the explorer show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventSchema {
    /// Category and name.
    pub name: &'static str,
    /// The meaning.
    pub description: &'static str,
    /// Its emphasis.
    pub emphasis: Emphasis,
    /// Its text, with the names of fields in braces.
    pub text: &'static str,
    fields: &'static [FieldSchema],
}

impl EventSchema {
    /// The keys of its data with their meanings, in order. A nested key follows its parent and a dot.
    pub fn fields(&self) -> Vec<(String, &'static str)> {
        let mut all = Vec::new();
        list_fields(self.fields, "", &mut all);
        all
    }
}

fn list_fields(fields: &'static [FieldSchema], prefix: &str, all: &mut Vec<(String, &'static str)>) {
    for field in fields {
        let name = format!("{prefix}{}", field.name);
        let prefix = if field.is_flat { prefix.to_owned() } else { format!("{name}.") };
        if !field.is_flat {
            all.push((name, field.description.trim()));
        }
        list_fields(field.nested, &prefix, all);
    }
}

/// The queue pair of a field, if the field names one.
macro_rules! queue_pair_of {
    (qp $value:expr) => {
        Some(*$value)
    };
    (completion $value:expr) => {
        Some($value.qp)
    };
    ($other:ident $value:expr) => {{
        let _ = $value;
        None
    }};
}

macro_rules! emphasis {
    (normal) => {
        Emphasis::Normal
    };
    (success) => {
        Emphasis::Success
    };
    (unusual) => {
        Emphasis::Unusual
    };
    (error) => {
        Emphasis::Error
    };
}

macro_rules! log_events {
    (
        fault {
            $(#[doc = $fault_meaning:literal])+
            $fault_name:literal $fault:ident [$fault_emphasis:ident $fault_text:literal] {
                $( $(#[doc = $fault_about:literal])+ $fault_field:ident: $fault_type:ty, )*
            }
        }
        configuration {
            $(#[doc = $struct_doc:literal])+
            $struct:ident { $( $(#[doc = $attribute_doc:literal])+ $attribute:ident: $attribute_type:ty, )* }
        }
        hca {$(
            $(#[doc = $meaning:literal])+
            $name:literal $variant:ident [$emphasis:ident $text:literal] {
                $( $(#[doc = $about:literal])+ $(#[serde($($serde:tt)*)])? $field:ident: $type:ty, )*
            } $(log { $( $(#[doc = $extra_about:literal])+ $extra:ident: $extra_type:ty, )* })?
        )*}
        fabric {$(
            $(#[doc = $fabric_meaning:literal])+
            $fabric_name:literal $fabric_variant:ident [$fabric_emphasis:ident $fabric_text:literal] {
                $( $(#[doc = $fabric_about:literal])+ $fabric_field:ident: $fabric_type:ty, )*
            }
        )*}
    ) => {
        log_struct! {
            $(#[doc = $struct_doc])+
            ConfigurationData {
                $( $(#[doc = $attribute_doc])+ $attribute: <$attribute_type as LogField>::Log, )*
            }
        }

        impl LogField for $struct {
            type Log = ConfigurationData;

            fn log(&self) -> ConfigurationData {
                ConfigurationData { $( $attribute: self.$attribute.log(), )* }
            }
        }

        /// An event: the keys `name` and `data` of an entry.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "name", content = "data")]
        pub enum LogEvent {
            $(
                $(#[doc = $meaning])+
                #[serde(rename = $name)]
                $variant {
                    $(
                        $(#[doc = $about])+
                        #[serde(skip_serializing_if = "LogValue::is_absent" $(, $($serde)*)?)]
                        $field: <$type as LogField>::Log,
                    )*
                    $($(
                        $(#[doc = $extra_about])+
                        #[serde(skip_serializing_if = "LogValue::is_absent")]
                        $extra: $extra_type,
                    )*)?
                },
            )*
            $(
                $(#[doc = $fabric_meaning])+
                #[serde(rename = $fabric_name)]
                $fabric_variant {
                    /// The link.
                    link: u32,
                    /// The priority.
                    priority: u8,
                    $( $(#[doc = $fabric_about])+ $fabric_field: <$fabric_type as LogField>::Log, )*
                },
            )*
            $(#[doc = $fault_meaning])+
            #[serde(rename = $fault_name)]
            $fault {
                $(
                    $(#[doc = $fault_about])+
                    #[serde(skip_serializing_if = "LogValue::is_absent")]
                    $fault_field: $fault_type,
                )*
            },
        }

        /// Every event of the log.
        pub const EVENT_SCHEMAS: &[EventSchema] = &[
            $( EventSchema {
                name: $name,
                description: concat!($($meaning),+),
                emphasis: emphasis!($emphasis),
                text: $text,
                fields: &[
                    $( FieldSchema {
                        is_flat: !stringify!($($($serde)*)?).is_empty(),
                        ..FieldSchema::new::<<$type as LogField>::Log>(stringify!($field), concat!($($about),+))
                    }, )*
                    $($( FieldSchema::new::<$extra_type>(stringify!($extra), concat!($($extra_about),+)), )*)?
                ],
            }, )*
            $( EventSchema {
                name: $fabric_name,
                description: concat!($($fabric_meaning),+),
                emphasis: emphasis!($fabric_emphasis),
                text: $fabric_text,
                fields: &[
                    FieldSchema::new::<u32>("link", " The link."),
                    FieldSchema::new::<u8>("priority", " The priority."),
                    $( FieldSchema::new::<<$fabric_type as LogField>::Log>(
                        stringify!($fabric_field), concat!($($fabric_about),+)
                    ), )*
                ],
            }, )*
            EventSchema {
                name: $fault_name,
                description: concat!($($fault_meaning),+),
                emphasis: emphasis!($fault_emphasis),
                text: $fault_text,
                fields: &[$(
                    FieldSchema::new::<$fault_type>(stringify!($fault_field), concat!($($fault_about),+)),
                )*],
            },
        ];

        impl LogEvent {
            /// Category and name.
            pub const fn name(&self) -> &'static str {
                match self {
                    $( LogEvent::$variant { .. } => $name, )*
                    $( LogEvent::$fabric_variant { .. } => $fabric_name, )*
                    LogEvent::$fault { .. } => $fault_name,
                }
            }

            /// The queue pair of an HCA event, if it has one.
            pub fn queue_pair(&self) -> Option<u32> {
                match self {
                    $( LogEvent::$variant { $($field,)* .. } => {
                        let found: [Option<u32>; [$( stringify!($field) ),*].len()] =
                            [$( queue_pair_of!($field $field) ),*];
                        found.into_iter().flatten().next()
                    } )*
                    _ => None,
                }
            }

            /// The event in the log, and why it happened. Fields that only the log has are empty.
            pub(crate) fn from_event(event: &Event) -> (LogEvent, Option<String>) {
                match event {
                    $( Event::$variant { $($field),* } => {
                        let trigger = None;
                        $( let trigger = trigger.or_else(|| LogField::trigger($field)); )*
                        let event = LogEvent::$variant {
                            $( $field: LogField::log($field), )*
                            $($( $extra: Default::default(), )*)?
                        };
                        (event, trigger)
                    } )*
                }
            }

            pub(super) fn from_fabric_event(event: &FabricEvent) -> (LogEvent, Option<String>) {
                match event {
                    $( FabricEvent::$fabric_variant { link, priority, $($fabric_field,)* .. } => {
                        let trigger = None;
                        $( let trigger = trigger.or_else(|| LogField::trigger($fabric_field)); )*
                        let event = LogEvent::$fabric_variant {
                            link: link.0,
                            priority: *priority,
                            $( $fabric_field: LogField::log($fabric_field), )*
                        };
                        (event, trigger)
                    } )*
                }
            }
        }
    };
}

macro_rules! with_fabric_events {
    ($($declarations:tt)*) => {
        softhca_fabric::fabric_events! { log_events! { $($declarations)* } }
    };
}

softhca_engine::hca_events! { with_fabric_events! {
    fault {
        /// A fault rule, or the state of a link, changed a packet.
        "fabric:fault" Fault
        [error "{opcode!a packet}{opcode}{relative_psn? {relative_psn|signed}}{link|link}: {trigger}"] {
            /// The link; absent if a capture shows the fault.
            link: Option<u32>,
            /// `forward` from the first end of the link, or `backward`.
            direction: Keyword,
            /// `rule`, `link-down` or `exceeds-mtu`; `capture` if it is inferred from a capture.
            cause: Keyword,
            /// The number of the rule, if the cause is a rule.
            rule: Option<u32>,
            /// The change.
            effect: EffectData,
            /// The class of the packet.
            class: Keyword,
            /// Its opcode, unless it is malformed.
            opcode: Option<Keyword>,
            /// Its PSN, unless it is malformed.
            psn: Option<u32>,
            /// Its PSN relative to the first of its flow, if it belongs to one.
            relative_psn: Option<i64>,
            /// Its flow, if it belongs to one.
            flow: Option<u32>,
            /// Its destination queue pair, if a capture shows the fault.
            dest_qp: Option<u32>,
            /// How often this PSN was observed, including this time; 0 if it is not counted.
            transmission: u64,
        }
    }
} }
