//! The language: a scenario file as serde reads it. Nothing here knows whether names exist; `plan` checks that.

mod cm;
mod expect;
mod fault;
mod settings;
mod workload;

pub use cm::{
    AcceptSpec, CmSpec, ConnectSpec, ConnectionEventName, ConnectionExpectation, ListenSpec, RejectSpec,
};
pub use expect::{
    AreaName, CompletedName, CompletionExpectation, CounterExpectation, EventExpectation, ExpectSpec,
    FairnessExpectation, FinishExpectation, GoodputExpectation, Invariant, LatencyExpectation,
    MemoryExpectation, OrderItem, PacketExpectation, PauseExpectation, StateExpectation, SwitchExpectation,
    VerbErrorExpectation,
};
pub use fault::{
    AsyncEventName, BurstSpec, ClassName, CmName, CorruptSpec, Errno, FaultAction, FaultSpec, FieldName,
    FlapSpec, LinkDirections, LinkDownSpec, LuminaEvent, LuminaKind, NakName, OneOrMany, PacketMatch,
    PauseStormSpec, ReorderSpec, RewriteSpec, StatusName, Verb,
};
pub use settings::{
    AccessRight, AcksName, CongestionAlgorithm, CongestionControlSpec, ConnectionSpec, DeviceSpec, EcnSpec,
    HostSpec, LinkSpec, PairSpec, ParameterSpec, PayloadName, PfcSpec, RecoveryName, StateName, SwitchSpec,
    Topology, TransportName, WatchdogAction, WatchdogSpec,
};
pub use workload::{
    AtomicSpec, CommandSpec, IncastSpec, KeyValueSpec, ModifySpec, OperationName, PermutationSpec,
    PingPongSpec, ReceiveSpec, RemoteTarget, StepSpec, StreamSpec, TransferSpec, WorkloadKind, WorkloadSpec,
};

use crate::quantity::Time;
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use std::collections::BTreeMap;

/// Two of a thing. An array of the standard library takes what comes first and does not look at the rest.
fn two<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<[T; 2], D::Error> {
    let all = Vec::<T>::deserialize(deserializer)?;
    let length = all.len();
    all.try_into().map_err(|_| D::Error::invalid_length(length, &"an array of length 2"))
}

/// Two of a thing, where it is given.
fn two_if_given<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<[T; 2]>, D::Error> {
    two(deserializer).map(Some)
}

/// A SoftHCA scenario: hosts, what they do, what goes wrong, and what must come of it.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ScenarioFile {
    /// What the scenario shows, in one sentence.
    pub title: String,
    /// More words about it.
    #[serde(default)]
    pub description: String,
    /// The seed unless the command line gives one.
    #[serde(default = "one")]
    pub seed: u64,
    /// When the run is cut off; without it the run goes on until nothing is left to happen.
    pub duration: Option<Time>,
    /// Values that `--set` or the seed may change; `"$name"` anywhere in the file stands for one.
    #[serde(default)]
    pub parameters: BTreeMap<String, ParameterSpec>,
    /// Settings of every card, unless a host says otherwise.
    #[serde(default)]
    pub device: DeviceSpec,
    /// Settings of every connection, unless a pair says otherwise.
    #[serde(default)]
    pub connection: ConnectionSpec,
    /// The hosts by name. `"h[1..4]"` stands for h1, h2, h3 and h4.
    pub hosts: BTreeMap<String, HostSpec>,
    /// Switches by name.
    #[serde(default)]
    pub switches: BTreeMap<String, SwitchSpec>,
    /// Cables between all hosts in a well-known shape, instead of one by one.
    pub topology: Option<Topology>,
    /// Cables, one by one.
    #[serde(default)]
    pub link: Vec<LinkSpec>,
    /// Pairs of queue pairs. They are connected before the run begins, unless a step listens or connects.
    #[serde(default)]
    pub pair: Vec<PairSpec>,
    /// Single work requests, connections and changes of state, each at its time.
    #[serde(default)]
    pub step: Vec<StepSpec>,
    /// Traffic of a well-known shape.
    #[serde(default)]
    pub workload: Vec<WorkloadSpec>,
    /// What goes wrong.
    #[serde(default)]
    pub fault: Vec<FaultSpec>,
    /// Faults in the notation of Lumina: relative queue pair, relative PSN, iteration.
    #[serde(default)]
    pub data_pkt_events: Vec<LuminaEvent>,
    /// What must come of it.
    #[serde(default)]
    pub expect: Vec<ExpectSpec>,
    /// What must hold at every moment.
    #[serde(default)]
    pub invariants: Vec<Invariant>,
}

const fn one() -> u64 {
    1
}

/// The JSON Schema of scenario files, as `scenarios/schema.json` holds it.
pub fn schema() -> String {
    let schema = schemars::schema_for!(ScenarioFile);
    let mut text = serde_json::to_string_pretty(&schema).expect("a schema is JSON");
    text.push('\n');
    text
}
