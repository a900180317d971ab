//! Devices in network namespaces of their own, which the tests create. Without permission for that, they count as ignored.

mod addresses;
mod connections_ipv6;
mod rxe_peer;
mod veth;

use libtest_mimic::Trial;
use softhca_tests::process;

/// A role of this binary inside a namespace, with its name.
type Role = (&'static str, fn());

/// Runs the role of this process, if it has one.
pub fn runs_a_role() -> bool {
    let Some(role) = process::role() else { return false };
    let mut roles =
        [addresses::ROLES, connections_ipv6::ROLES, rxe_peer::ROLES, veth::ROLES].concat().into_iter();
    let (_, run) = roles.find(|(name, _)| *name == role).expect("a role of this binary");
    run();
    true
}

pub fn trials() -> Vec<Trial> {
    [addresses::trials(), connections_ipv6::trials(), rxe_peer::trials(), veth::trials()]
        .into_iter()
        .flatten()
        .collect()
}
