//! Signs that a program is ready: the programs after it in a file can start.

use softhca::DaemonControl;
use std::net::TcpListener;

/// A free TCP port. `${PORT}` in the arguments of a program.
pub fn free_tcp_port() -> Result<u16, String> {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    Ok(free.map_err(|error| format!("no free TCP port: {error}"))?.port())
}

/// Whether a process of this machine listens on a TCP port.
pub fn listens_on(port: u16) -> bool {
    let wanted = format!(":{port:04X}");
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|path| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.lines().any(|line| {
            let mut words = line.split_whitespace().skip(1);
            words.next().is_some_and(|local| local.ends_with(&wanted)) && words.nth(1) == Some("0A")
        })
    })
}

/// Whether a program of a host listens for connections of the connection manager.
pub fn host_listens(connection: &mut DaemonControl, host: &str) -> Result<bool, String> {
    let status = connection.status().map_err(|error| error.to_string())?;
    let host = status.hosts.iter().find(|status| status.host.name == host);
    Ok(host.is_some_and(|host| !host.listening_ports.is_empty()))
}
