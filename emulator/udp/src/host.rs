//! Which address a host takes, and who has it when it is taken.

use crate::socket::{RoceSocket, SocketOptions};
use softhca_wire::ROCE_PORT;
use softhca_wire::link::LINK_PORT;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use thiserror::Error;

/// The environment variable that names the host's address.
pub const ADDRESS_VARIABLE: &str = "SOFTHCA_ADDRESS";

/// Who most likely has a port that is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A socket that no process has: rxe, the kernel's soft RoCE.
    Kernel,
    /// A process of this user.
    Process {
        /// Its number.
        id: u32,
        /// Its name.
        name: String,
    },
    /// A process that we may not look into.
    Unknown,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Owner::Kernel => {
                f.write_str("the kernel, most likely rxe (soft RoCE): `rdma link` lists its devices")
            }
            Owner::Process { id, name } => write!(f, "process {id} ({name}), most likely another card"),
            Owner::Unknown => f.write_str("somebody else, most likely another card"),
        }
    }
}

/// Why no socket could be bound.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BindError {
    /// Somebody has the port.
    #[error("{address} is in use by {owner}")]
    InUse {
        /// What was asked for.
        address: SocketAddr,
        /// Who has it.
        owner: Owner,
    },
    /// The address is not one of this machine.
    #[error("{} is not an address of this machine{}", address.ip(), advice(address.ip()))]
    NotLocal {
        /// What was asked for.
        address: SocketAddr,
    },
    /// `SOFTHCA_ADDRESS` is not an IP address.
    #[error("{ADDRESS_VARIABLE} is {value:?}, which is not an IP address")]
    BadVariable {
        /// Its value.
        value: String,
    },
    /// Anything else.
    #[error("cannot open {address}")]
    Other {
        /// What was asked for.
        address: SocketAddr,
        /// What the system says.
        source: io::Error,
    },
}

/// What to do where loopback addresses have to be made first.
fn advice(address: IpAddr) -> String {
    if cfg!(target_os = "macos") && address.is_loopback() {
        format!("; make it one: sudo ifconfig lo0 alias {address}")
    } else {
        String::new()
    }
}

impl BindError {
    /// What a failed bind means.
    pub(crate) fn explain(address: SocketAddr, source: io::Error) -> BindError {
        match source.kind() {
            io::ErrorKind::AddrInUse => BindError::InUse { address, owner: owner_of(address) },
            io::ErrorKind::AddrNotAvailable => BindError::NotLocal { address },
            _ => BindError::Other { address, source },
        }
    }
}

/// The receive buffer that link control asks for: what a kernel as it comes gives to anybody.
const LINK_BUFFER: usize = 212_992;

/// The two sockets of a host.
#[derive(Debug)]
pub struct HostSockets {
    /// Carries RoCE, on port 4791.
    pub roce: RoceSocket,
    /// Carries link control, on port 4792.
    pub link: RoceSocket,
}

impl HostSockets {
    /// Binds both ports of `address`. The options are those of the socket that carries RoCE.
    pub fn bind(address: IpAddr, options: SocketOptions) -> Result<HostSockets, BindError> {
        let bind = |port, options| RoceSocket::bind(SocketAddr::new(address, port), options);
        // Link control first: who finds it missing takes the port for another make.
        let link = bind(LINK_PORT, SocketOptions { receive_buffer: LINK_BUFFER, ..options })?;
        Ok(HostSockets { roce: bind(ROCE_PORT, options)?, link })
    }

    /// The host's address.
    pub fn address(&self) -> IpAddr {
        self.roce.local_address().ip()
    }
}

/// Takes the address in `SOFTHCA_ADDRESS`, or the first of 127.0.0.2 … 127.0.0.254 that is free.
pub fn bind_host(options: SocketOptions) -> Result<HostSockets, BindError> {
    if let Ok(value) = std::env::var(ADDRESS_VARIABLE) {
        let address = value.parse().map_err(|_| BindError::BadVariable { value })?;
        return HostSockets::bind(address, options);
    }
    // Looking who has an address takes longer than trying the next.
    let free =
        |ip: &Ipv4Addr| [ROCE_PORT, LINK_PORT].iter().all(|port| UdpSocket::bind((*ip, *port)).is_ok());
    for address in (2..=254).map(|last| Ipv4Addr::new(127, 0, 0, last)).filter(free) {
        match HostSockets::bind(address.into(), options) {
            Err(BindError::InUse { .. }) => {}
            result => return result,
        }
    }
    HostSockets::bind(Ipv4Addr::new(127, 0, 0, 2).into(), options)
}

/// Looks for the socket that keeps `address` from being bound. The kernel's tables are read in pieces, and one
/// that changes meanwhile may miss an entry: a second look finds it.
#[cfg(target_os = "linux")]
fn owner_of(address: SocketAddr) -> Owner {
    let mut looks = std::iter::repeat_with(|| look_for_owner(address)).take(5);
    looks.find(|owner| !matches!(owner, Owner::Unknown)).unwrap_or(Owner::Unknown)
}

#[cfg(target_os = "linux")]
fn look_for_owner(address: SocketAddr) -> Owner {
    let table = if address.is_ipv4() { "/proc/net/udp" } else { "/proc/net/udp6" };
    let words: Vec<String> = match address.ip() {
        IpAddr::V4(ip) => vec![hex_word(&ip.octets())],
        IpAddr::V6(ip) => ip.octets().chunks(4).map(hex_word).collect(),
    };
    let (wanted, port) = (words.concat(), format!("{:04X}", address.port()));
    let sockets = std::fs::read_to_string(table).unwrap_or_default();
    let found = sockets.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (ip, its_port) = fields.get(1)?.split_once(':')?;
        let everywhere = ip.bytes().all(|digit| digit == b'0');
        let conflicts = its_port == port && (ip == wanted || everywhere);
        conflicts.then_some((*fields.get(7)?, *fields.get(9)?, everywhere))
    });
    let Some((user, inode, everywhere)) = found else { return Owner::Unknown };
    match process_with(inode) {
        Some(owner) => owner,
        // rxe listens on every address, and no process has its socket.
        None if everywhere && user == "0" => Owner::Kernel,
        None => Owner::Unknown,
    }
}

/// Four bytes of an address as the kernel's tables show them.
#[cfg(target_os = "linux")]
fn hex_word(bytes: &[u8]) -> String {
    format!("{:08X}", u32::from_ne_bytes(bytes.try_into().expect("four bytes")))
}

/// The process that has the socket with this inode open.
#[cfg(target_os = "linux")]
fn process_with(inode: &str) -> Option<Owner> {
    let socket = format!("socket:[{inode}]");
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    processes.filter_map(|entry| Some((entry.path(), entry.file_name().to_str()?.parse().ok()?))).find_map(
        |(path, id): (_, u32)| {
            let mut open = std::fs::read_dir(path.join("fd")).ok()?.flatten();
            open.find(|file| {
                std::fs::read_link(file.path()).is_ok_and(|target| target.as_os_str() == &*socket)
            })?;
            let name = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
            Some(Owner::Process { id, name: name.trim().into() })
        },
    )
}

#[cfg(not(target_os = "linux"))]
fn owner_of(_address: SocketAddr) -> Owner {
    Owner::Unknown
}
