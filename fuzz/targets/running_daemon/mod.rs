//! A daemon that runs as long as the fuzzer.

use softhca_daemon::{Config, Daemon, HostConfig};
use std::path::PathBuf;
use std::sync::LazyLock;

/// Its socket. It is the default daemon of this process.
pub static SOCKET: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("softhca-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    // SAFETY: no other thread runs yet that reads variables.
    unsafe { std::env::set_var("XDG_RUNTIME_DIR", &folder) };
    let hosts = ["alice", "bob"].map(|name| HostConfig { name: name.into(), address: None }).into();
    let mut daemon = Daemon::start(Config { hosts, ..Config::default() }).expect("a daemon");
    let socket = daemon.socket().to_path_buf();
    std::thread::spawn(move || daemon.run(None));
    socket
});
