//! Swarm: the seed draws the configuration of a run. What a file sets stays; what it leaves open is drawn.
//!
//! A run with few kinds of faults, small messages or a slow link reaches states that one with everything never does.

use crate::parameters::ParameterValues;
use crate::plan::Plan;
use crate::quantity::{Rate, Size};
use crate::spec::{FaultSpec, OperationName, ScenarioFile, Topology, WorkloadSpec};
use softhca_engine::{AckPolicy, Profile, Recovery};
use softhca_fabric::Seed;

const MTUS: [u32; 5] = [256, 512, 1024, 2048, 4096];
/// Rates of links in bits per second; 0 for a link without a limit.
const RATES: [u64; 5] = [0, 1_000_000_000, 10_000_000_000, 25_000_000_000, 100_000_000_000];
/// The kinds of faults for a file without any, and their probabilities.
const FAULT_KINDS: [(&str, &str); 5] = [
    ("drop", "\"drop\""),
    ("duplicate", "{ duplicate = 1 }"),
    ("delay", "{ delay = \"20us\" }"),
    ("corrupt", "{ corrupt = {} }"),
    ("reorder", "{ reorder = { by = 2 } }"),
];
const PROBABILITIES: [&str; 3] = ["0.1%", "1%", "5%"];

/// The draws of a run. Each has a name, so that another draw changes none of them.
struct Draws(Seed);

impl Draws {
    fn word(name: &str) -> u64 {
        name.bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    }

    fn below(&self, limit: u64, name: &str, index: usize) -> u64 {
        self.0.below(limit, &[0x0073_7761_726d, Draws::word(name), index as u64])
    }

    fn pick<T: Copy>(&self, choices: &[T], name: &str) -> T {
        choices[self.below(choices.len() as u64, name, 0) as usize]
    }
}

/// Draws the settings that a file leaves open, and the sizes of messages up to those of the file. Returns the draws.
pub(crate) fn draw_settings(file: &mut ScenarioFile, seed: u64) -> ParameterValues {
    let draws = Draws(Seed(seed));
    let mut drawn = ParameterValues::new();
    let mut note = |name: &str, value: String| {
        drawn.insert(format!("swarm.{name}"), value);
    };
    if file.connection.mtu.is_none() && file.pair.iter().all(|pair| pair.mtu.is_none()) {
        let mtu = draws.pick(&MTUS, "mtu");
        file.connection.mtu = Some(mtu);
        note("mtu", mtu.to_string());
    }
    let device = &mut file.device;
    if device.profile.is_none() && file.hosts.values().all(|host| host.profile.is_none()) {
        let profile = draws.pick(&Profile::ALL, "profile").name;
        device.profile = Some(profile.into());
        note("profile", profile.into());
    }
    if device.recovery.is_none() && file.hosts.values().all(|host| host.recovery.is_none()) {
        let recovery = draws.pick(&Recovery::ALL, "recovery");
        device.recovery = Some(recovery);
        note("recovery", recovery.name().into());
    }
    if device.acks.is_none() && file.hosts.values().all(|host| host.acks.is_none()) {
        let acks = draws.pick(&[AckPolicy::PerRequest, AckPolicy::Coalesce], "acks");
        device.acks = Some(acks);
        note("acks", if acks == AckPolicy::Coalesce { "coalesce" } else { "per-request" }.into());
    }
    let links = file.link.iter_mut().map(|link| &mut link.rate);
    let rates: Vec<&mut Option<Rate>> = links.chain(file.topology.as_mut().map(rate_of)).collect();
    let rate = draws.pick(&RATES, "rate");
    let mut is_rate_drawn = false;
    for open in rates.into_iter().filter(|open| open.is_none()) {
        *open = Some(Rate(rate)).filter(|rate| rate.0 > 0);
        is_rate_drawn = true;
    }
    if is_rate_drawn {
        note("rate", if rate == 0 { "unlimited".into() } else { Rate(rate).to_string() });
    }
    for (index, workload) in file.workload.iter_mut().enumerate() {
        let Some(bytes) = bytes_of(workload) else { continue };
        // Small sizes are as likely as large ones.
        let bits = draws.below(u64::from(64 - bytes.0.leading_zeros()), "bits", index);
        bytes.0 = 1 + draws.below((1 << bits).min(bytes.0), "bytes", index);
        note(&format!("bytes-{}", index + 1), bytes.0.to_string());
    }
    if file.fault.is_empty() && file.data_pkt_events.is_empty() {
        for (kind, fault) in new_faults(file, &draws) {
            file.fault.push(fault);
            note(kind, "on".into());
        }
    }
    drawn
}

const fn rate_of(topology: &mut Topology) -> &mut Option<Rate> {
    match topology {
        Topology::Pair { rate, .. }
        | Topology::Star { rate, .. }
        | Topology::Dumbbell { rate, .. }
        | Topology::LeafSpine { rate, .. }
        | Topology::Ring { rate, .. }
        | Topology::FatTree { rate, .. } => rate,
    }
}

fn bytes_of(workload: &mut WorkloadSpec) -> Option<&mut Size> {
    let WorkloadSpec { stream, incast, permutation, ping_pong, key_value, .. } = workload;
    // An atomic has 8 bytes.
    let has_size = |op: OperationName| op != OperationName::FetchAdd;
    let (stream, incast) = (stream.as_mut(), incast.as_mut());
    let permutation = permutation.as_mut();
    let bytes = [
        stream.filter(|spec| has_size(spec.op)).map(|spec| &mut spec.bytes),
        incast.filter(|spec| has_size(spec.op)).map(|spec| &mut spec.bytes),
        permutation.filter(|spec| has_size(spec.op)).map(|spec| &mut spec.bytes),
        ping_pong.as_mut().map(|spec| &mut spec.bytes),
        key_value.as_mut().map(|spec| &mut spec.bytes),
    ];
    bytes.into_iter().flatten().next().filter(|bytes| bytes.0 > 0)
}

/// Faults of the first link, each kind with a probability of one half.
fn new_faults(file: &ScenarioFile, draws: &Draws) -> Vec<(&'static str, FaultSpec)> {
    let names: Vec<&String> = file.hosts.keys().collect();
    let ends = match (&file.link[..], &file.topology, &names[..]) {
        ([link, ..], ..) => link.between.clone(),
        ([], None | Some(Topology::Pair { .. }), [first, second]) => [(*first).clone(), (*second).clone()],
        _ => return Vec::new(),
    };
    let mut faults = Vec::new();
    for (kind, action) in FAULT_KINDS {
        if draws.below(2, kind, 0) == 0 {
            continue;
        }
        let probability = PROBABILITIES[draws.below(PROBABILITIES.len() as u64, kind, 1) as usize];
        let text = format!(
            "name = \"swarm: {kind}\"\non = \"{} - {}\"\naction = {action}\nprobability = \"{probability}\"\noptional = true",
            ends[0], ends[1]
        );
        let fault = toml::from_str(&text).expect("the notation of files");
        faults.push((kind, fault));
    }
    faults
}

/// Keeps each fault of the file with a probability of one half. None of them need happen.
pub(crate) fn draw_faults(plan: &mut Plan) {
    let draws = Draws(Seed(plan.seed));
    let mut index = 0;
    let mut removed = Vec::new();
    plan.faults.retain(|fault| {
        index += 1;
        let is_kept = fault.name.starts_with("swarm: ") || draws.below(2, "fault", index) == 1;
        if !is_kept {
            removed.push(fault.name.clone());
        }
        is_kept
    });
    plan.faults.iter_mut().for_each(|fault| fault.optional = true);
    if !removed.is_empty() {
        plan.parameters.insert("swarm.without".into(), removed.join(", "));
    }
}
