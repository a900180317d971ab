//! Fault rules: which packets they select, how often they act, and what they do.

mod action;
mod fault;
mod flow;
mod flow_history;
mod header_field;
mod packet_class;
mod repetition;
mod rule;
mod selector;
mod tally;

pub use action::{Action, BitPosition, DownDirections, FaultEffect, IcrcPolicy};
pub use fault::{Fault, FaultCause, LinkOutput};
pub use flow::{Endpoint, Flow, FlowId, FlowTable, PacketType};
pub use flow_history::{FlowHistory, ObservedPacket};
pub use header_field::{FieldValue, HeaderField};
pub use packet_class::{CmMessage, PacketClass, PacketClasses};
pub(crate) use repetition::DrawPurpose;
pub(crate) use rule::ActiveRule;
pub use rule::{Rule, RuleCounters, RuleId};
pub use selector::{InclusiveRange, Selector};
pub use softhca_types::{Choice, GilbertElliott, Pattern, PatternError, Repeat, Scope};
pub(crate) use tally::RuleTally;
