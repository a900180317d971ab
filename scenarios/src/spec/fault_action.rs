//! The actions of faults, declared once: name, value, targets, example and effect.
//!
//! The declaration yields [`FaultAction`], its notation in files and in the JSON Schema, the error for an action that
//! does not apply to its target, and the tables of the reference pages.

use super::fault::{
    CmEventSpec, CorruptSpec, FlapSpec, LinkDownSpec, PauseStormSpec, ReorderSpec, RewriteSpec,
};
use super::{EcnSpec, PfcSpec};
use crate::quantity::{Rate, Size, Time};
use serde::Deserialize;
use softhca_types::{CompletionStatus, Errno, InjectedEvent};
use std::num::NonZeroU32;

/// The target of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultTarget {
    Packets,
    Link,
    Switch,
    Host,
    Completions,
    Calls,
}

impl FaultTarget {
    /// All targets, in the order of the reference page.
    pub const ALL: [FaultTarget; 6] = [
        FaultTarget::Packets,
        FaultTarget::Link,
        FaultTarget::Switch,
        FaultTarget::Host,
        FaultTarget::Completions,
        FaultTarget::Calls,
    ];

    /// Its key in a file.
    pub const fn key(self) -> &'static str {
        match self {
            FaultTarget::Packets => "`on`",
            FaultTarget::Link => "`link`",
            FaultTarget::Switch => "`switch`",
            FaultTarget::Host => "`host`",
            FaultTarget::Completions => "`qp`",
            FaultTarget::Calls => "`host` and `verb`",
        }
    }

    /// Its name in sentences.
    pub const fn name(self) -> &'static str {
        match self {
            FaultTarget::Packets => "packets on a link",
            FaultTarget::Link => "links",
            FaultTarget::Switch => "switches",
            FaultTarget::Host => "hosts",
            FaultTarget::Completions => "completions of a queue pair",
            FaultTarget::Calls => "calls of a verb",
        }
    }
}

/// The declaration of an action.
#[derive(Debug)]
pub struct ActionDeclaration {
    /// Its name in files.
    pub name: &'static str,
    /// The targets that it applies to.
    pub targets: &'static [FaultTarget],
    /// An example in the notation of files.
    pub example: &'static str,
    /// Its effect.
    pub effect: &'static str,
}

impl ActionDeclaration {
    /// The targets in a sentence.
    pub fn list_targets(&self, word: fn(FaultTarget) -> &'static str) -> String {
        let words: Vec<&str> = self.targets.iter().map(|target| word(*target)).collect();
        match &words[..] {
            [first, middle @ .., last] if !middle.is_empty() => {
                format!("{first}, {}, or {last}", middle.join(", "))
            }
            words => words.join(", or "),
        }
    }
}

/// Declares the actions: name, variant with its value, targets, example.
macro_rules! fault_actions {
    ($(
        $(#[doc = $effect:literal])+
        $name:literal $variant:ident $(($value:ty))? [$($target:ident),+] $example:literal,
    )*) => {
        /// The action of a fault.
        #[derive(Clone, Debug, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(deny_unknown_fields)]
        pub enum FaultAction { $(
            $(#[doc = $effect])+
            #[serde(rename = $name)]
            $variant $(($value))?,
        )* }

        impl FaultAction {
            /// Every action, in the order of the reference page.
            pub const DECLARATIONS: &[ActionDeclaration] = &[$( ActionDeclaration {
                name: $name,
                targets: &[$(FaultTarget::$target),+],
                example: $example,
                effect: concat!($($effect),+),
            }, )*];

            /// The name of the action in files.
            const fn name(&self) -> &'static str {
                match self { $( FaultAction::$variant { .. } => $name, )* }
            }
        }
    };
}

fault_actions! {
    /// Does nothing. Other faults can wait for it.
    "count" Count [Packets, Completions, Calls] "\"count\"",
    /// Drops the packet.
    "drop" Drop [Packets] "\"drop\"",
    /// Inserts this many copies behind the packet.
    "duplicate" Duplicate(u32) [Packets] "{ duplicate = 2 }",
    /// Holds the packet back until this many others have passed, for 1 ms by default at most.
    "reorder" Reorder(ReorderSpec) [Packets] "{ reorder = { by = 2, within = \"1ms\" } }",
    /// Delays the packet by this time. Later packets can overtake it.
    "delay" Delay(Time) [Packets] "{ delay = \"50us\" }",
    /// Sends the packets that match at this rate, in order.
    "limit-rate" LimitRate(Rate) [Packets] "{ limit-rate = \"1gbit\" }",
    /// Delays the packet by a random time up to this, in order.
    "jitter" Jitter(Time) [Packets] "{ jitter = \"10us\" }",
    /// Flips one bit: `bit` from the BTH or `payload-bit` from the payload, any by default. `fix-icrc` hides the damage.
    "corrupt" Corrupt(CorruptSpec) [Packets] "{ corrupt = { payload-bit = 3, fix-icrc = true } }",
    /// Sets the CE mark.
    "mark-ce" MarkCe [Packets] "\"mark-ce\"",
    /// Sets a header field to `value`, or adds `add` to it, and recomputes the ICRC.
    "rewrite" Rewrite(RewriteSpec) [Packets] "{ rewrite = { field = \"rkey\", value = 7 } }",
    /// The link goes down, with `on` when the packet is sent: for a time or for ever, in both directions or one of
    /// `forward` and `backward` (a one-way partition).
    "link-down" LinkDown(LinkDownSpec) [Packets, Link] "{ link-down = { for = \"1ms\", direction = \"forward\" } }",
    /// The link goes down and up repeatedly.
    "flap" Flap(FlapSpec) [Link] "{ flap = { down = \"1ms\", up = \"1ms\", times = 2 } }",
    /// The link has another rate.
    "set-rate" SetRate(Rate) [Link] "{ set-rate = \"10gbit\" }",
    /// The link has another MTU, in bytes of an IP packet.
    "set-mtu" SetMtu(u32) [Link] "{ set-mtu = 1500 }",
    /// The shared buffer has another size.
    "set-buffer" SetBuffer(Size) [Switch] "{ set-buffer = \"1MiB\" }",
    /// The ECN marking changes.
    "set-ecn" SetEcn(EcnSpec) [Switch] "{ set-ecn = { kmin = \"100KB\", kmax = \"400KB\", pmax = 0.1 } }",
    /// The PFC thresholds change.
    "set-pfc" SetPfc(PfcSpec) [Switch] "{ set-pfc = { xoff = \"128KiB\" } }",
    /// The device sends pause frames without end, like a NIC with a broken receive pipeline.
    "pause-storm" PauseStorm(PauseStormSpec) [Host] "{ pause-storm = { for = \"1ms\", priority = 3 } }",
    /// The program stands still for this time. Under `exec` its process stops (SIGSTOP) and continues, and with it the
    /// card on the direct data path. On embedded cards and in a simulation the card neither sends nor receives. To stall
    /// at a packet or a call, begin `after` a fault with the action `"count"`.
    "stall" Stall(Time) [Host] "{ stall = \"1ms\" }",
    /// The device takes this time for each packet that it sends, whatever its size: requests, responses and ACKs, one
    /// after the other. It is slow from the beginning, or from what it waits for; with `on`, for packets that match.
    "slow-device" SlowDevice(Time) [Host, Packets] "{ slow-device = \"10us\" }",
    /// The program posts no receives for this time. Programs of your own do not support it.
    "withhold-receives" WithholdReceives(Time) [Host] "{ withhold-receives = \"1ms\" }",
    /// The program waits this time after each receive before it posts the next. Programs of your own do not support it.
    "delay-receives" DelayReceives(Time) [Host] "{ delay-receives = \"10us\" }",
    /// The process ends as by SIGKILL; with `verb`, before the call has an effect.
    "kill" Kill [Host, Calls] "\"kill\"",
    /// The program is killed and started again, with counts from the beginning. Only programs of `softhca exec` and
    /// `command` support it.
    "restart" Restart [Host] "\"restart\"",
    /// The daemon of all hosts ends as by SIGKILL: programs get DEVICE_FATAL, their work requests are flushed, calls
    /// fail. Only programs support it.
    "kill-daemon" KillDaemon [Host] "\"kill-daemon\"",
    /// The daemon ends as with `kill-daemon`. A new daemon starts at once with the same command line, name and addresses:
    /// devices can be opened again. Only programs support it.
    "restart-daemon" RestartDaemon [Host] "\"restart-daemon\"",
    /// The device raises an asynchronous event with its consequences, see below.
    "raise-event" RaiseEvent(InjectedEvent) [Host, Calls] "{ raise-event = \"port-err\" }",
    /// The call fails with this errno and has no effect.
    "fail" Fail(Errno) [Calls] "{ fail = \"ENOMEM\" }",
    /// The call succeeds, and its result is this event: `addr-error`, `route-error`, `unreachable`, `rejected` with its
    /// reason, and others. Only verbs of a connection identifier support it.
    "cm-event" CmEvent(CmEventSpec) [Calls] "{ cm-event = { event = \"rejected\", status = 28 } }",
    /// The memory of the n-th region of the process becomes inaccessible, as if it were unmapped: LOC_PROT_ERR, or a NAK
    /// for remote accesses.
    "unmap" Unmap(NonZeroU32) [Calls] "{ unmap = 1 }",
    /// The completion has this status, and the vendor error of the key `vendor-error`. If it is a failure, the queue pair
    /// enters ERR and flushes, as after a failure of its own.
    "set-status" SetStatus(CompletionStatus) [Completions] "{ set-status = \"RETRY_EXC_ERR\" }",
    /// The completion comes later, and all later ones of its queue behind it.
    "delay-completion" DelayCompletion(Time) [Completions] "{ delay-completion = \"2ms\" }",
    /// Completions wait until this many have gathered in their queue, or for a second, and come at once.
    "burst-completions" BurstCompletions(u32) [Completions] "{ burst-completions = 8 }",
    /// The completion overflows its completion queue: CQ_ERR, and its queue pairs fail.
    "overflow-cq" OverflowCq [Completions] "\"overflow-cq\"",
    /// The completion is in the queue, and the notification that the program requested never comes.
    "drop-notification" DropNotification [Completions] "\"drop-notification\"",
}

impl FaultAction {
    /// Its declaration.
    pub fn declaration(&self) -> &'static ActionDeclaration {
        let name = self.name();
        let found = FaultAction::DECLARATIONS.iter().find(|declaration| declaration.name == name);
        found.expect("every action is declared")
    }

    /// Whether it applies to this target.
    pub fn applies_to(&self, target: FaultTarget) -> bool {
        self.declaration().targets.contains(&target)
    }
}
