//! What a client and a daemon say to each other, besides the rings.
//!
//! A client says [`Hello`], and then one [`Call`] after the other, each with one [`Reply`]. [`News`] come
//! unasked: over a socket of their own once a device is open, so that whoever calls reads its answer itself; before
//! that, between replies. Rings and regions travel as descriptors beside the frames.

mod framing;
mod runtime_dir;

pub use framing::{FramedMessage, MAX_DESCRIPTORS, MAX_MESSAGE, MessageReader, ProtocolError, send_message};
pub use runtime_dir::{DEFAULT_NAME, NAME_VARIABLE, RuntimeDir};

use crate::{
    AsyncEvent, CmChannelId, Command, Counters, CqId, DeviceLimits, PortState, QpType, Reply, VerbsError, cm,
};
use alloc::string::String;
use alloc::vec::Vec;
use core::net::IpAddr;
use serde::{Deserialize, Serialize};
use softhca_wire::{Gid, Mtu};

/// The version of the messages and of the layout of rings. It changes with every change of either.
pub const PROTOCOL_VERSION: u32 = 9;

/// The environment variable that names the host of a daemon that a program runs on.
pub const HOST_VARIABLE: &str = "SOFTHCA_HOST";

/// The first frame of a connection, from the client. Its beginning is the same in every version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Always [`Hello::MAGIC`].
    pub magic: [u8; 8],
    /// [`PROTOCOL`] of the client.
    pub protocol: u32,
    /// The version of the client's library, for sentences.
    pub version: String,
}

impl Hello {
    /// Tells the protocol from noise.
    pub const MAGIC: [u8; 8] = *b"SOFTHCA\n";

    /// The greeting of this library.
    pub fn current() -> Hello {
        Hello { magic: Self::MAGIC, protocol: PROTOCOL_VERSION, version: env!("CARGO_PKG_VERSION").into() }
    }
}

/// The daemon's answer to [`Hello`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// [`PROTOCOL`] of the daemon.
    pub protocol: u32,
    /// Its version, for sentences.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Its hosts.
    pub hosts: Vec<HostDevice>,
}

/// A host of a daemon, and the device that programs see there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostDevice {
    /// Its name in the daemon's configuration.
    pub name: String,
    /// The name of its device.
    pub device_name: String,
    /// Its address.
    pub address: IpAddr,
    /// The largest path MTU that its network carries.
    pub active_mtu: Mtu,
    /// What one client can have there.
    pub limits: DeviceLimits,
    /// What a lost packet does.
    pub recovery: String,
    /// Where goes what it sends to itself.
    pub loopback: String,
}

/// Where the memory of a region is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RegionBacking {
    /// In the memory file that comes with the call.
    MemoryFile,
    /// At this address of the client's own.
    ProcessMemory {
        /// Its first byte.
        address: u64,
        /// The part of it that is also in the memory file that comes with the call, if one does.
        shared: Option<SharedRange>,
    },
}

/// A part of a region, in bytes from its first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedRange {
    /// Where it begins.
    pub offset: u64,
    /// How long it is.
    pub length: u64,
}

/// What a port of the network between the hosts of a daemon counted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricPort {
    /// The switch, host or other machine that it belongs to.
    pub node: String,
    /// What is at the other end of its cable.
    pub peer: String,
    /// The host that another machine's port sends to.
    pub host: Option<String>,
    /// Names and values; what is counted for each priority has eight.
    pub counters: Vec<(String, Vec<u64>)>,
}

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each is the verb of its name, with the operands of that verb")]
pub enum Request {
    /// Become a client of this host, or of the first. A descriptor of /proc/self/mem may come with it.
    Open { host: Option<String> },
    /// What runs here.
    Status,
    /// What the card of a host counted.
    Counters { host: Option<String> },
    /// What the ports of the network between the hosts counted.
    PortCounters,
    /// Tell every asynchronous event of every host from now on.
    WatchAsyncEvents,
    /// End the daemon.
    Stop,
    /// Put fault rules on the cable of a host, behind those that are there. Without a name, of the own one.
    AddFaultRules {
        host: Option<String>,
        /// Decides the draws, if there were no rules before.
        seed: u64,
        /// The rules with their names, as the fabric writes them down.
        rules: Vec<u8>,
    },
    /// Let the rules of a host know queue pairs by their roles.
    AddFlows {
        host: Option<String>,
        seed: u64,
        /// The flows, as the fabric writes them down.
        flows: Vec<u8>,
    },
    /// Give these roles to the next queue pairs of a host that become ready to receive, each to the first of
    /// its kind; all hosts of the daemon know them by it.
    AssignRoles { host: Option<String>, seed: u64, roles: Vec<(QpType, u32)> },
    /// The rules of a host and how often each fired.
    QueryFaultRules { host: Option<String> },
    /// Take all rules, flows and names of a host away. What they hold back still arrives.
    ClearFaultRules { host: Option<String> },
    /// Write what the cards do to the descriptors that come with it, until this connection ends: first a
    /// capture, then an event log, as far as they are asked for.
    StartRecording { capture: bool, log: bool },
    /// End the records of this connection: everything has been written when the reply comes.
    StopRecordings,
    /// Execute a control verb. A verb that (re)registers memory says where the memory is.
    Execute { command: Command, backing: Option<RegionBacking> },
    /// Take the port of a host down or bring it up, until this connection ends.
    SetPortState { host: String, state: PortState },
}

/// What the daemon answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each carries what the verb of its name returns")]
#[allow(clippy::large_enum_variant, reason = "one at a time, and short-lived")]
pub enum Response {
    /// The control verb failed.
    VerbFailed(VerbsError),
    /// The daemon rejected the request.
    Error {
        errno: i32,
        message: String,
    },
    Done,
    /// The client is in. With it come, in this order: an event descriptor that wakes the card, the page that
    /// says whether that is needed, the socket that news come over, and the memory with the client's bell and its
    /// doorbell ring.
    Opened {
        host: HostDevice,
        gids: Vec<Gid>,
        doorbell_slots: u32,
    },
    /// The reply to a control verb. The memory of new rings accompanies it.
    Executed(Reply),
    Counters(Counters),
    PortCounters(Vec<FabricPort>),
    Status(DaemonStatus),
    /// The rules and their tallies, as the fabric writes them down.
    FaultRules(Vec<u8>),
}

/// What the daemon tells unasked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Notification {
    /// A completion queue has what its owner wanted to be woken for.
    CompletionNotified(CqId),
    /// An asynchronous event of the client's own.
    AsyncEventRaised(AsyncEvent),
    /// Events of connection management, oldest first. They are the client's from now on, and so are the identifiers
    /// of requests.
    CmEventsRaised {
        /// The channel that they came to.
        channel: CmChannelId,
        /// The events.
        events: Vec<cm::Event>,
    },
    /// An asynchronous event of some host, for those who watch.
    AsyncEventObserved {
        /// The host.
        host: String,
        /// The client that it is for, by its process; `None` if it is for all.
        pid: Option<u32>,
        /// The event.
        event: AsyncEvent,
    },
}

/// A frame from the daemon, after its [`Welcome`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::large_enum_variant, reason = "one at a time, and short-lived")]
pub enum Message {
    /// The answer to the oldest call without one.
    Response(Response),
    /// Something else.
    Notification(Notification),
}

/// What runs in a daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// Its process.
    pub pid: u32,
    /// Its version.
    pub version: String,
    /// How long it runs, in seconds.
    pub uptime_s: u64,
    /// Its hosts.
    pub hosts: Vec<HostStatus>,
}

/// What runs on a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostStatus {
    /// The host.
    pub host: HostDevice,
    /// Who uses it.
    pub clients: Vec<ClientStatus>,
    /// How many queue pairs it has.
    pub queue_pairs: u32,
    /// The ports at which somebody takes connections.
    pub listening_ports: Vec<u16>,
}

/// Who uses a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientStatus {
    /// The process.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// How many of each resource it has, by name.
    pub resources: Vec<(String, u32)>,
}

/// A process whose end can be waited for, whatever its number is used for later.
pub struct ProcessWatch {
    process: std::os::fd::OwnedFd,
}

impl ProcessWatch {
    /// Watches a process.
    pub fn new(number: u32) -> std::io::Result<ProcessWatch> {
        let missing = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let number = rustix::process::Pid::from_raw(number as i32).ok_or_else(missing)?;
        Ok(ProcessWatch {
            process: rustix::process::pidfd_open(number, rustix::process::PidfdFlags::empty())?,
        })
    }

    /// Waits until it is gone.
    pub fn wait(&self) {
        use rustix::event::{PollFd, PollFlags, poll};
        let mut polled = [PollFd::new(&self.process, PollFlags::IN)];
        while poll(&mut polled, None) == Err(rustix::io::Errno::INTR) {}
    }
}

/// Writes a message down.
pub fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    postcard::to_allocvec(message).expect("every message of ours can be written down")
}

/// Reads a message. Nothing may follow it.
pub fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, ProtocolError> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        _ => Err(ProtocolError::Undecodable),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AccessFlags, ModifyQp, QpState};
    use proptest::prelude::*;
    use softhca_wire::Qpn;

    proptest! {
        #[test]
        fn noise_is_refused_or_a_message_that_says_the_same_again(bytes: Vec<u8>) {
            if let Ok(call) = decode::<Request>(&bytes) {
                prop_assert_eq!(decode::<Request>(&encode(&call)), Ok(call));
            }
        }

        #[test]
        fn numbers_keep_their_width_whatever_comes(value: u32) {
            let number: Qpn = decode(&encode(&value)).unwrap();
            prop_assert!(number.value() < 1 << 24);
        }
    }

    #[test]
    fn a_call_survives_the_journey() {
        let modify = ModifyQp::default().state(QpState::Init).port(1).access_flags(AccessFlags::REMOTE_READ);
        let command = Command::ModifyQueuePair { qpn: Qpn::new(7), modify };
        let call = Request::Execute { command, backing: None };
        assert_eq!(decode(&encode(&call)), Ok(call));
    }

    #[test]
    fn an_error_of_a_verb_is_the_same_value_after_decoding() {
        let errors = [
            VerbsError::Invalid { what: "cqe", why: "at least one is required" },
            VerbsError::TooLarge { what: "cqe", value: 7, limit: 6 },
        ];
        for error in errors {
            assert_eq!(decode(&encode(&error)), Ok(error));
        }
    }
}
