//! The file format of scenarios, as serde reads it. This module does not resolve names; `plan` does.

/// Declares two tables with the same optional settings: the defaults, and a table that overrides them.
macro_rules! overridable {
    (
        $(#[$defaults_meta:meta])* $defaults:ident { $($defaults_own:tt)* }
        $(#[$own_meta:meta])* $own:ident { $($own_own:tt)* }
        shared { $($(#[$meta:meta])* $field:ident: $type:ty,)* }
    ) => {
        $(#[$defaults_meta])*
        #[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(deny_unknown_fields, rename_all = "kebab-case")]
        pub struct $defaults { $($defaults_own)* $($(#[$meta])* pub $field: Option<$type>,)* }

        $(#[$own_meta])*
        #[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(deny_unknown_fields, rename_all = "kebab-case")]
        pub struct $own { $($own_own)* $($(#[$meta])* pub $field: Option<$type>,)* }

        impl $own {
            /// The settings of this table; those that it omits come from `defaults`.
            pub fn or(&self, defaults: &$defaults) -> $defaults {
                let mut merged = defaults.clone();
                $(if self.$field.is_some() {
                    merged.$field = self.$field.clone();
                })*
                merged
            }
        }
    };
}

mod cm;
mod expect;
mod fault;
mod fault_action;
mod settings;
mod workload;

pub use cm::{AcceptSpec, CmSpec, ConnectSpec, ConnectionExpectation, ListenSpec, RejectSpec};
pub use expect::{
    Area, CompletionExpectation, CounterExpectation, EventExpectation, ExpectSpec, FairnessExpectation,
    FinishExpectation, GoodputExpectation, Invariant, LatencyExpectation, MemoryExpectation, OrderItem,
    PauseExpectation, StateExpectation, SwitchExpectation, VerbErrorExpectation,
};
pub use fault::{
    BurstSpec, ClassName, CmEventSpec, CorruptSpec, Errno, FaultSpec, FlapSpec, HealSpec, InjectedEvent,
    LinkDirections, LinkDownSpec, LuminaEvent, LuminaKind, OneOrMany, PacketExpectation, PacketMatch,
    PauseStormSpec, ReorderSpec, RewriteSpec, TriggerSpec, Verb,
};
pub use fault_action::{ActionDeclaration, FaultAction, FaultTarget};
pub use settings::{
    AccessRight, CongestionControlSpec, ConnectionSpec, DeviceSpec, EcnSpec, HostSpec, LinkSpec, PairSpec,
    ParameterSpec, PfcSpec, SwitchSpec, Topology, WatchdogSpec,
};
pub use workload::{
    AtomicSpec, CommandSpec, IncastSpec, KeyValueSpec, ModifySpec, OperationName, PermutationSpec,
    PingPongSpec, ReceiveSpec, RemoteTarget, StepSpec, StreamSpec, TransferSpec, WorkloadSpec,
};

use crate::quantity::Time;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use std::collections::BTreeMap;

/// Deserializes exactly two items. The array of the standard library ignores further ones.
fn exactly_two<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<[T; 2], D::Error> {
    let all = Vec::<T>::deserialize(deserializer)?;
    let length = all.len();
    all.try_into().map_err(|_| D::Error::invalid_length(length, &"an array of length 2"))
}

/// Deserializes exactly two items of an optional key.
fn optional_two<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<[T; 2]>, D::Error> {
    exactly_two(deserializer).map(Some)
}

/// A SoftHCA scenario: hosts, their work, injected faults, and expectations about the result.
#[derive(Clone, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ScenarioFile {
    /// One sentence that states what the scenario shows.
    pub title: String,
    /// Further explanation.
    #[serde(default)]
    pub description: String,
    /// Seed of the run if the command line gives none.
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// Virtual time at which the run stops. By default, the run stops when no event is left.
    pub duration: Option<Time>,
    /// Values that `--set` or the seed can change. `"$name"` anywhere in the file refers to one.
    #[serde(default)]
    pub parameters: BTreeMap<String, ParameterSpec>,
    /// Default settings of all devices.
    #[serde(default)]
    pub device: DeviceSpec,
    /// Default settings of all connections.
    #[serde(default)]
    pub connection: ConnectionSpec,
    /// Hosts by name. `"h[1..4]"` declares h1, h2, h3 and h4.
    pub hosts: BTreeMap<String, HostSpec>,
    /// Switches by name.
    #[serde(default)]
    pub switches: BTreeMap<String, SwitchSpec>,
    /// Links between all hosts in a standard topology, in place of `link`.
    pub topology: Option<Topology>,
    /// Individual links.
    #[serde(default)]
    pub link: Vec<LinkSpec>,
    /// Pairs of queue pairs. They are connected before the run starts, unless a step listens or connects.
    #[serde(default)]
    pub pair: Vec<PairSpec>,
    /// Individual work requests, connection management calls and state changes.
    #[serde(default)]
    pub step: Vec<StepSpec>,
    /// Traffic with a standard pattern.
    #[serde(default)]
    pub workload: Vec<WorkloadSpec>,
    /// Injected faults.
    #[serde(default)]
    pub fault: Vec<FaultSpec>,
    /// Injected faults in the notation of Lumina: relative queue pair, relative PSN, iteration.
    #[serde(default)]
    pub data_pkt_events: Vec<LuminaEvent>,
    /// The end of all faults, after which the run must converge.
    pub heal: Option<HealSpec>,
    /// Conditions that must hold at the end of the run.
    #[serde(default)]
    pub expect: Vec<ExpectSpec>,
    /// Conditions that must hold throughout the run.
    #[serde(default)]
    pub invariants: Vec<Invariant>,
}

/// Expectations beside those of a scenario file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpectationFile {
    /// Conditions that must hold at the end of the run.
    #[serde(default)]
    pub expect: Vec<ExpectSpec>,
    /// Conditions that must hold throughout the run.
    #[serde(default)]
    pub invariants: Vec<Invariant>,
}

const fn default_seed() -> u64 {
    1
}

/// Generates [`SCHEMA`](crate::SCHEMA) from the types.
#[cfg(feature = "schema")]
pub fn generate_schema() -> String {
    let schema = schemars::schema_for!(ScenarioFile);
    let mut text = serde_json::to_string_pretty(&schema).expect("a schema is JSON");
    text.push('\n');
    text
}
