//! The messages between a client and a daemon.
//!
//! A client sends a [`Hello`] and then [`Request`]s, each of which gets one [`Response`]. It may send the first before
//! it has the [`Welcome`]. The daemon sends [`Notification`]s at any time: between responses until a device is open,
//! then over a separate socket. A caller thus reads its own response. Rings and memory regions are passed as
//! descriptors.

use crate::{DeviceChange, HandedOverPacket, ProtocolError, SubnetRequest, SubnetResponse, SubnetSettings};
use alloc::string::String;
use alloc::vec::Vec;
use core::net::IpAddr;
use serde::{Deserialize, Serialize};
use softhca_types::{
    AsyncEvent, CallSite, CmChannelId, CmId, Command, Counters, CqId, DeviceLimits, FaultTrigger,
    InjectedEvent, PortState, QpSnapshot, QpState, QpType, Reply, VerbsError, cm,
};
use softhca_wire::{Gid, Mtu, Psn, Qpn, QpnSlot};

/// The version of the messages and of the ring layouts. Every change of either increments it.
pub const PROTOCOL_VERSION: u32 = 21;

/// The environment variable that selects the host of a daemon that a program runs on.
pub const HOST_VARIABLE: &str = "SOFTHCA_HOST";

/// The environment variable with which a program declines the direct data path: `daemon`. With `direct`, or without it,
/// the daemon chooses.
pub const DATA_PATH_VARIABLE: &str = "SOFTHCA_DATA_PATH";

/// The first message of a client. Its first fields are the same in every version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Always [`Hello::MAGIC`].
    pub magic: [u8; 8],
    /// [`PROTOCOL_VERSION`] of the client.
    pub protocol: u32,
    /// The version of the client library, for messages.
    pub version: String,
}

impl Hello {
    /// Identifies the protocol.
    pub const MAGIC: [u8; 8] = *b"SOFTHCA\n";

    /// The message of this library.
    pub fn current() -> Hello {
        Hello { magic: Self::MAGIC, protocol: PROTOCOL_VERSION, version: env!("CARGO_PKG_VERSION").into() }
    }
}

/// The daemon's response to [`Hello`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// [`PROTOCOL_VERSION`] of the daemon.
    pub protocol: u32,
    /// The version of the daemon, for messages.
    pub version: String,
    /// The process ID of the daemon.
    pub pid: u32,
    /// The hosts.
    pub hosts: Vec<HostDevice>,
    /// The InfiniBand subnet. A daemon with a subnet has no hosts in `hosts`: [`SubnetRequest::Devices`] names those of one.
    pub subnet: Option<SubnetSettings>,
}

/// A device of a daemon, and the host that it belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostDevice {
    /// The name of the device in logs and requests: that of the host for its first device, `HOST:DEVICE` for others.
    pub name: String,
    /// The name of the host in the daemon's configuration.
    pub host: String,
    /// The name of the device.
    pub device_name: String,
    /// The IP address; the first GID of a port of an InfiniBand subnet.
    pub address: IpAddr,
    /// The largest path MTU of the network.
    pub active_mtu: Mtu,
    /// The limits of one client.
    pub limits: DeviceLimits,
    /// The card whose behaviour the device has where cards differ.
    pub profile: String,
    /// The recovery mode after packet loss.
    pub recovery: String,
    /// How the host's traffic to itself is carried.
    pub loopback: String,
    /// The data path of programs, unless something needs the daemon's: `direct` or `daemon`.
    pub data_path: String,
    /// A fault removed it.
    pub is_removed: bool,
    /// The node GUID of an HCA of an InfiniBand subnet. A RoCE device has none of its own.
    pub node_guid: Option<u64>,
}

/// The most fault rules of a host.
pub const MAX_RULES: usize = 1024;

/// The data that a process needs to execute the transport itself, on the sockets of its slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectPath {
    /// The QPNs of the process.
    pub slot: QpnSlot,
    /// The recovery mode of connections to a foreign peer.
    pub foreign_recovery: String,
    /// The most unacknowledged packets to a foreign peer.
    pub foreign_window: u32,
    /// The congestion control.
    pub congestion: String,
    /// A reserved port for the first connection ([`cm::Command::ReservePort`]), if one is free.
    pub reserved: Option<(CmId, u16)>,
    /// Changes of the host before the process opened the device: its fault rules and flows, and the state of its device.
    pub changes: Vec<Notification>,
}

impl HostDevice {
    /// The number in the device name: 1 for `softhca1`.
    pub fn device_number(&self) -> u32 {
        self.device_name.trim_start_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or(0)
    }
}

/// Location of a region's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RegionBacking {
    /// In the memfd that accompanies the request.
    MemoryFile,
    /// In the address space of the client.
    ProcessMemory {
        /// The address of the first byte.
        address: u64,
    },
}

/// The counters of a port of the network between the hosts of a daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricPort {
    /// The switch, host or external machine of the port.
    pub node: String,
    /// The node at the other end of the link.
    pub peer: String,
    /// The host that an external machine is attached to.
    pub host: Option<String>,
    /// Names and values; a counter per priority has eight values.
    pub counters: Vec<(String, Vec<u64>)>,
}

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each is the verb of its name, with the operands of that verb")]
pub enum Request {
    /// Opens the device of a host; without a name, of the first host. A descriptor of /proc/self/mem may accompany it.
    Open {
        host: Option<String>,
        /// The client can execute the transport itself.
        can_be_direct: bool,
    },
    /// The resources of a client that executes the transport itself, after [`Notification::ReportRequested`].
    Report { queue_pairs: Vec<QueuePairStatus>, resources: Vec<(String, u32)> },
    /// A queue pair of a client that executes the transport itself entered RTR or RTS, while the host has roles.
    QueuePairReady { qp: QpSnapshot },
    /// Opens a socket that sends from this address of the host, from a port that the kernel chooses. It accompanies the
    /// response.
    OpenSendSocket { source: IpAddr },
    /// Opens rings to the process in a slot of the client's host. Their descriptors accompany the response.
    OpenRings { slot: u16 },
    /// Packets for other slots that arrived at the client's.
    HandOver { packets: Vec<HandedOverPacket> },
    /// The status of the daemon.
    Status,
    /// The counters of a host.
    Counters { host: Option<String> },
    /// The counters of the network between the hosts.
    PortCounters,
    /// Reports every asynchronous event of every host from now on.
    WatchAsyncEvents,
    /// Stops the daemon.
    Stop,
    /// Appends fault rules to the link of a host; without a name, of the client's host.
    AddFaultRules {
        host: Option<String>,
        /// The seed of random decisions, if the host has no rules yet.
        seed: u64,
        /// The rules and their names, as the fabric encodes them.
        rules: Vec<u8>,
    },
    /// Adds flows, which fault rules select.
    AddFlows {
        host: Option<String>,
        seed: u64,
        /// The flows, as the fabric encodes them.
        flows: Vec<u8>,
    },
    /// Assigns each role to the next queue pair of its type on a host that enters RTR. The rules of all hosts then
    /// select the queue pair by its role.
    AssignRoles { host: Option<String>, seed: u64, roles: Vec<(QpType, u32)> },
    /// The fault rules of a host and their counters.
    QueryFaultRules { host: Option<String> },
    /// Removes all rules, flows and roles of a host. Packets that a rule delays still arrive.
    ClearFaultRules { host: Option<String> },
    /// The rules and roles that this connection added stay after its end, until they are cleared.
    KeepFaultRules,
    /// Records all hosts until this connection ends. The descriptors of the capture, of the event log and of the stream of
    /// events, as far as requested, accompany the request in this order.
    StartRecording { capture: bool, log: bool, events: bool },
    /// Ends the recordings of this connection. They are complete when the response arrives. The reader of a stream of
    /// events must read it to its end meanwhile.
    StopRecordings,
    /// Executes a control verb. `backing` locates the memory of a (re)registration, `call_site` the call in the program
    /// while calls are recorded.
    Execute { command: Command, backing: Option<RegionBacking>, call_site: Option<CallSite> },
    /// Sets the state of the port of a host: until this connection ends, or for as long as the daemon runs.
    SetPortState { host: String, state: PortState, stays: bool },
    /// Raises an asynchronous event of the device of a host, with its consequences. Lasting consequences end with this
    /// connection. A client that executes the transport itself has raised it on its own card already.
    RaiseEvent { host: String, event: InjectedEvent },
    /// Reports something that fault rules of the programs of a host may wait for.
    NoteTrigger { host: String, trigger: FaultTrigger },
    /// The queue pairs of all clients of a host.
    QueuePairs { host: Option<String> },
    /// Concerns the InfiniBand subnet.
    Subnet(SubnetRequest),
}

/// A response of the daemon.
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
    /// The device is open. Descriptors accompany the response. They are the notification socket, an eventfd that wakes
    /// the engine thread, and the page with its sleep flag. The memory with the completion doorbell and doorbell ring
    /// follows.
    ///
    /// With a direct data path, the sockets of the process's slot follow the notification socket. Each address of the
    /// host has a RoCE socket and a link control socket. The page of the slot follows, and the memory with the counters of
    /// the host's fault rules.
    Opened {
        host: HostDevice,
        gids: Vec<Gid>,
        doorbell_slots: u32,
        direct: Option<DirectPath>,
    },
    /// The reply to a control verb. The memory of new rings accompanies it.
    Executed(Reply),
    Counters(Counters),
    PortCounters(Vec<FabricPort>),
    Status(DaemonStatus),
    /// At most [`MAX_QUEUE_PAIRS_LISTED`].
    QueuePairs(Vec<QueuePairStatus>),
    /// The rules and their counters, as the fabric encodes them.
    FaultRules(Vec<u8>),
    Subnet(SubnetResponse),
}

impl From<SubnetResponse> for Response {
    fn from(response: SubnetResponse) -> Response {
        Response::Subnet(response)
    }
}

/// A notification of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each field is the value of its name")]
pub enum Notification {
    /// A completion queue has the completion that its owner requested a notification for.
    CompletionNotified(CqId),
    /// An asynchronous event of this client.
    AsyncEventRaised(AsyncEvent),
    /// Connection manager events, oldest first. The client now owns them and the identifiers of connect requests.
    CmEventsRaised { channel: CmChannelId, events: Vec<cm::Event> },
    /// The process in a slot of the client's host has opened rings to it. Their descriptors accompany the notification.
    RingsOpened { slot: u16 },
    /// The daemon asks the client for a [`Request::Report`].
    ReportRequested,
    /// The host has further fault rules: a list of rules, as the fabric encodes it. The client counts in the page of its
    /// slot what it has applied.
    FaultRulesAdded { seed: u64, rules: Vec<u8> },
    /// The host has further flows, as in [`Request::AddFlows`]. The client counts as for rules.
    FlowsAdded { seed: u64, flows: Vec<u8> },
    /// The host has no rules and flows any more. The client counts as for rules.
    FaultRulesCleared,
    /// Packets for the client that arrived at another slot.
    PacketsHandedOver { packets: Vec<HandedOverPacket> },
    /// The device of the client's host has changed. The client counts as for rules.
    DeviceChanged(DeviceChange),
    /// The process in a slot, which had rings to the client, is gone.
    ProcessGone { slot: u16 },
    /// An asynchronous event of any host, after [`Request::WatchAsyncEvents`].
    AsyncEventObserved {
        host: String,
        /// The process ID of the client that the event is for; `None` if it is for all clients.
        pid: Option<u32>,
        event: AsyncEvent,
    },
}

/// A message of the daemon, after its [`Welcome`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::large_enum_variant, reason = "one at a time, and short-lived")]
pub enum Message {
    /// The response to the oldest open request.
    Response(Response),
    /// A notification.
    Notification(Notification),
}

/// The status of a daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// Its process.
    pub pid: u32,
    /// The version.
    pub version: String,
    /// The uptime in seconds.
    pub uptime_s: u64,
    /// Its hosts.
    pub hosts: Vec<HostStatus>,
}

/// The status of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostStatus {
    /// The host.
    pub host: HostDevice,
    /// The clients.
    pub clients: Vec<ClientStatus>,
    /// The number of queue pairs.
    pub queue_pairs: u32,
    /// The ports that listeners are bound to.
    pub listening_ports: Vec<u16>,
    /// The state of the device's port.
    pub port_state: PortState,
    /// Whether the device waits for a time to pass: to retransmit, for a connection, to release a completion.
    pub has_pending_timer: bool,
}

/// The most queue pairs in a [`Response::QueuePairs`].
pub const MAX_QUEUE_PAIRS_LISTED: usize = 4096;

/// A queue pair, as `rdma resource show qp` lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuePairStatus {
    /// Its number.
    pub qpn: Qpn,
    /// The type.
    pub qp_type: QpType,
    /// The state.
    pub state: QpState,
    /// The number of its peer, if it is connected.
    pub dest_qpn: Qpn,
    /// The next PSN that the requester sends.
    pub next_psn: Psn,
    /// The PSN that the responder expects.
    pub expected_psn: Psn,
    /// The WQEs that the HCA has dequeued and not completed.
    pub outstanding: u32,
    /// The process that owns it.
    pub pid: Option<u32>,
}

impl QueuePairStatus {
    /// The status of a queue pair of a process.
    pub fn new(qp: &QpSnapshot, pid: Option<u32>) -> QueuePairStatus {
        QueuePairStatus {
            qpn: qp.qpn,
            qp_type: qp.qp_type,
            state: qp.state,
            dest_qpn: qp.attributes.dest_qpn,
            next_psn: qp.next_psn,
            expected_psn: qp.expected_psn,
            outstanding: qp.outstanding,
            pid,
        }
    }
}

/// The status of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientStatus {
    /// The process ID.
    pub pid: u32,
    /// The name of the process.
    pub name: String,
    /// The number of resources, by type.
    pub resources: Vec<(String, u32)>,
    /// It executes the transport itself.
    pub is_direct: bool,
}

/// Waits for the exit of a process, even if its number is reused.
pub struct ProcessWatch {
    process: std::os::fd::OwnedFd,
}

impl ProcessWatch {
    /// Watches the process with this number.
    pub fn new(number: u32) -> std::io::Result<ProcessWatch> {
        let missing = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let number = rustix::process::Pid::from_raw(number as i32).ok_or_else(missing)?;
        Ok(ProcessWatch {
            process: rustix::process::pidfd_open(number, rustix::process::PidfdFlags::empty())?,
        })
    }

    /// Waits until the process has exited.
    pub fn wait(&self) {
        use rustix::event::{PollFd, PollFlags, poll};
        let mut polled = [PollFd::new(&self.process, PollFlags::IN)];
        while poll(&mut polled, None) == Err(rustix::io::Errno::INTR) {}
    }
}

/// Encodes a message.
pub fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    postcard::to_allocvec(message).expect("every message can be encoded")
}

/// Decodes a message. No bytes may follow it.
pub fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, ProtocolError> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        _ => Err(ProtocolError::Undecodable),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use softhca_types::{AccessFlags, ModifyQp};

    proptest! {
        #[test]
        fn random_bytes_are_an_error_or_a_message_that_encodes_to_itself(bytes: Vec<u8>) {
            if let Ok(call) = decode::<Request>(&bytes) {
                prop_assert_eq!(decode::<Request>(&encode(&call)), Ok(call));
            }
        }

        #[test]
        fn a_decoded_qpn_has_24_bits(value: u32) {
            let number: Qpn = decode(&encode(&value)).unwrap();
            prop_assert!(number.value() < 1 << 24);
        }
    }

    #[test]
    fn a_request_is_decoded_as_it_was_encoded() {
        let modify = ModifyQp::default().state(QpState::Init).port(1).access_flags(AccessFlags::REMOTE_READ);
        let command = Command::ModifyQueuePair { qpn: Qpn::new(7), modify };
        let call_site = Some(CallSite::new("program", 7));
        let call = Request::Execute { command, backing: None, call_site };
        assert_eq!(decode(&encode(&call)), Ok(call));
    }

    #[test]
    fn an_error_of_a_verb_is_the_same_value_after_decoding() {
        let errors = [
            VerbsError::Invalid { what: "cqe", why: "at least one is required" },
            VerbsError::LimitExceeded { what: "cqe", value: 7, limit: 6 },
        ];
        for error in errors {
            assert_eq!(decode(&encode(&error)), Ok(error));
        }
    }
}
