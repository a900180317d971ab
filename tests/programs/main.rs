//! Programs that may not be installed: Debian's and those of other packages under `softhca exec`, and tshark. The test of a
//! program that is missing counts as ignored.

mod connection_fidelity;
mod exec;
mod fault_parity;
mod faults;
mod libraries;
mod rig;
mod rsockets;
mod stacks;
mod sweeps;
mod tshark;
mod verb_faults;

use libtest_mimic::Trial;
use softhca_tests::tools;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut groups: Vec<tools::Group> =
        vec![("connection_fidelity", connection_fidelity::trials), ("tshark", tshark::trials)];
    if cfg!(target_os = "linux") {
        groups.extend([
            ("exec", exec::trials as fn() -> Vec<Trial>),
            ("fault_parity", fault_parity::trials),
            ("faults", faults::trials),
            ("libraries", libraries::trials),
            ("rsockets", rsockets::trials),
            ("stacks", stacks::trials),
            ("sweeps", sweeps::trials),
            ("verb_faults", verb_faults::trials),
        ]);
    }
    tools::run_groups(&groups)
}
