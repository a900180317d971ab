//! Which process holds an address that is in use.

use std::fmt;
#[cfg(target_os = "linux")]
use std::net::IpAddr;
use std::net::SocketAddr;

/// The most likely owner of a port that is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortOwner {
    /// A socket without a process: rxe, the kernel's soft RoCE.
    Kernel,
    /// A process of this user.
    Process {
        /// The process ID.
        id: u32,
        /// The name of the process.
        name: String,
    },
    /// A process whose descriptors this user may not read.
    Unknown,
}

impl fmt::Display for PortOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PortOwner::Kernel => {
                f.write_str("the kernel, most likely rxe (soft RoCE): `rdma link` lists its devices")
            }
            PortOwner::Process { id, name } => {
                write!(f, "process {id} ({name}), most likely another SoftHCA device")
            }
            PortOwner::Unknown => f.write_str("an unknown process, most likely another SoftHCA device"),
        }
    }
}

/// Finds the socket that occupies `address`. The kernel returns its tables in pieces, and an entry may be missing if
/// the table changes meanwhile: another attempt finds it.
#[cfg(target_os = "linux")]
pub(crate) fn find_owner(address: SocketAddr) -> PortOwner {
    let mut attempts = std::iter::repeat_with(|| scan_for_owner(address)).take(5);
    attempts.find(|owner| !matches!(owner, PortOwner::Unknown)).unwrap_or(PortOwner::Unknown)
}

#[cfg(target_os = "linux")]
fn scan_for_owner(address: SocketAddr) -> PortOwner {
    let table = if address.is_ipv4() { "/proc/net/udp" } else { "/proc/net/udp6" };
    let words: Vec<String> = match address.ip() {
        IpAddr::V4(ip) => vec![hex_word(&ip.octets())],
        IpAddr::V6(ip) => ip.octets().chunks(4).map(hex_word).collect(),
    };
    let (wanted, port) = (words.concat(), format!("{:04X}", address.port()));
    let sockets = std::fs::read_to_string(table).unwrap_or_default();
    let found = sockets.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (ip, bound_port) = fields.get(1)?.split_once(':')?;
        let is_wildcard = ip.bytes().all(|digit| digit == b'0');
        let conflicts = bound_port == port && (ip == wanted || is_wildcard);
        conflicts.then_some((*fields.get(7)?, *fields.get(9)?, is_wildcard))
    });
    let Some((user, inode, is_wildcard)) = found else { return PortOwner::Unknown };
    match process_with_socket(inode) {
        Some(owner) => owner,
        // rxe listens on every address, and no process has its socket.
        None if is_wildcard && user == "0" => PortOwner::Kernel,
        None => PortOwner::Unknown,
    }
}

/// Four bytes of an address in the format of the kernel's tables.
#[cfg(target_os = "linux")]
fn hex_word(bytes: &[u8]) -> String {
    format!("{:08X}", u32::from_ne_bytes(bytes.try_into().expect("four bytes")))
}

/// The process that has the socket with this inode open.
#[cfg(target_os = "linux")]
fn process_with_socket(inode: &str) -> Option<PortOwner> {
    let socket = format!("socket:[{inode}]");
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    processes.filter_map(|entry| Some((entry.path(), entry.file_name().to_str()?.parse().ok()?))).find_map(
        |(path, id): (_, u32)| {
            let mut open = std::fs::read_dir(path.join("fd")).ok()?.flatten();
            open.find(|file| {
                std::fs::read_link(file.path()).is_ok_and(|target| target.as_os_str() == &*socket)
            })?;
            let name = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
            Some(PortOwner::Process { id, name: name.trim().into() })
        },
    )
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn find_owner(_address: SocketAddr) -> PortOwner {
    PortOwner::Unknown
}
