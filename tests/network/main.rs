//! Devices in network namespaces of their own, which the tests create. Without permission for that, they count as ignored.

mod addresses;
mod connections_ipv6;
mod veth;

use softhca_tests::process;
use softhca_tests::tools;
use std::process::ExitCode;

/// A role of this binary inside a namespace, with its name.
type Role = (&'static str, fn());

fn main() -> ExitCode {
    if let Some(role) = process::role() {
        let mut roles = [addresses::ROLES, connections_ipv6::ROLES, veth::ROLES].concat().into_iter();
        let (_, run) = roles.find(|(name, _)| *name == role).expect("a role of this binary");
        run();
        return ExitCode::SUCCESS;
    }
    tools::run_groups(&[
        ("addresses", addresses::trials),
        ("connections_ipv6", connections_ipv6::trials),
        ("veth", veth::trials),
    ])
}
