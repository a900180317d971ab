//! Networks of a test's own: a fresh network namespace, made by `unshare` as root or as anybody who may have a
//! user namespace.

use std::process::{Command, Stdio};

/// Brings up loopback and becomes the program that follows.
const SETUP_SCRIPT: &str = "ip link set lo up && exec \"$0\" \"$@\"";

/// The words before a command that put it into a network namespace of its own, if this machine allows that.
pub fn wrapper() -> Option<&'static [&'static str]> {
    // As root, so that the limits of the system do not bind; as anybody, so that they do.
    let wrappers: [&'static [&'static str]; 2] = [
        &["unshare", "--net", "sh", "-c", SETUP_SCRIPT],
        &["unshare", "--map-root-user", "--net", "sh", "-c", SETUP_SCRIPT],
    ];
    wrappers.into_iter().find(|wrapper| works(wrapper))
}

fn works(wrapper: &[&str]) -> bool {
    let mut command = Command::new(wrapper[0]);
    command.args(&wrapper[1..]).arg("true").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Why there is none.
pub const NOT_ALLOWED: &str = "not allowed here: a network namespace (needs `unshare` and `ip`, and root or \
                               unprivileged user namespaces)";

/// Whether what is missing makes a test fail, as in CI.
pub fn is_required() -> bool {
    std::env::var_os("SOFTHCA_REQUIRE_TOOLS").is_some_and(|value| value == "1")
}
