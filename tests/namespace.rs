//! Network namespaces for tests, created by `unshare` as root or in a user namespace.

use std::process::{Command, Stdio};
use std::sync::LazyLock;

/// Brings up loopback and executes the program that follows.
const SETUP_SCRIPT: &str = "ip link set lo up && exec \"$0\" \"$@\"";

/// The command prefix that runs a program in its own network namespace, if this machine allows that.
pub fn wrapper() -> Option<&'static [&'static str]> {
    // Real root first, because it is not subject to the limits of unprivileged users.
    const WRAPPERS: [&[&str]; 2] = [
        &["unshare", "--net", "sh", "-c", SETUP_SCRIPT],
        &["unshare", "--map-root-user", "--net", "sh", "-c", SETUP_SCRIPT],
    ];
    static FOUND: LazyLock<Option<&[&str]>> =
        LazyLock::new(|| WRAPPERS.into_iter().find(|wrapper| works(wrapper)));
    *FOUND
}

fn works(wrapper: &[&str]) -> bool {
    let mut command = Command::new(wrapper[0]);
    command.args(&wrapper[1..]).arg("true").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// The reason if there is no namespace.
pub const NOT_ALLOWED: &str = "not allowed here: a network namespace (needs `unshare` and `ip`, and root or \
                               unprivileged user namespaces)";
