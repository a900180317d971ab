//! Programs that may not be installed: Debian's and those of other packages under `softhca exec`, tshark, chromium; and
//! network namespaces. The test of a program that is missing counts as ignored.

mod connection_fidelity;
#[cfg(target_os = "linux")]
mod course;
mod exec;
#[path = "../explorer/mod.rs"]
mod explorer;
mod fault_parity;
mod faults;
mod infiniband;
mod infiniband_data;
mod libraries;
#[path = "../network/mod.rs"]
mod network;
mod rig;
mod rsockets;
mod stacks;
mod sweeps;
mod tshark;
mod verb_faults;

use softhca_tests::tools;
use std::process::ExitCode;

/// The first test of each group starts first, so the longest ones are there.
#[cfg(target_os = "linux")]
const GROUPS: &[tools::Group] = &[
    ("stacks", stacks::trials),
    ("course", course::trials),
    ("sweeps", sweeps::trials),
    ("verb_faults", verb_faults::trials),
    ("fault_parity", fault_parity::trials),
    ("faults", faults::trials),
    ("explorer", explorer::trials),
    ("network", network::trials),
    ("tshark", tshark::trials),
    ("connection_fidelity", connection_fidelity::trials),
    ("infiniband", infiniband::trials),
    ("infiniband_data", infiniband_data::trials),
    ("libraries", libraries::trials),
    ("rsockets", rsockets::trials),
    ("exec", exec::trials),
];
#[cfg(not(target_os = "linux"))]
const GROUPS: &[tools::Group] = &[
    ("explorer", explorer::trials),
    ("connection_fidelity", connection_fidelity::trials),
    ("tshark", tshark::trials),
];

fn main() -> ExitCode {
    if network::runs_a_role() {
        return ExitCode::SUCCESS;
    }
    let code = tools::run_groups(GROUPS);
    explorer::end_idle();
    code
}
