//! One host's socket: bound exclusively, never connected, never fragmenting.
//!
//! Unconnected and with path MTU discovery forced, the kernel writes the IPv4 identification that
//! [`RoceSocket::identification`] predicts, which the ICRC needs. Nothing is queued here and nothing is
//! tried again: what the kernel does not take is the caller's to keep.

use crate::{BindError, Interface, batch::ReceiveBatch, charge, system};
use socket2::{Domain, InterfaceIndexOrAddress, Protocol, Socket, Type};
use softhca_wire::ROCE_PORT;
use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd};
use thiserror::Error;

/// The most datagrams in one run; older kernels refuse more.
pub const MAX_BATCH_SEGMENTS: usize = 64;
/// The most bytes in one run: what fits behind an IPv4 and a UDP header.
pub const MAX_BATCH_BYTES: usize = 65_507;

/// How a run of datagrams becomes datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segmentation {
    /// One call, and the kernel cuts (UDP_SEGMENT): segment k has the identification k.
    Gso,
    /// A datagram each: every identification is zero.
    PerDatagram,
}

/// What may differ from one socket to another.
#[derive(Clone, Copy, Debug)]
pub struct SocketOptions {
    /// How many bytes of receive buffer to ask for. The kernel doubles it, and may give less.
    pub receive_buffer: usize,
    /// The best way to send runs that shall be used.
    pub segmentation: Segmentation,
}

impl Default for SocketOptions {
    fn default() -> SocketOptions {
        SocketOptions { receive_buffer: 4 << 20, segmentation: Segmentation::Gso }
    }
}

/// Why a run was not taken. Nothing of it was sent.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SendError {
    /// The send buffer is full: try again after [`wait_writable`](crate::wait_writable).
    #[error("the socket's send buffer is full")]
    WouldBlock,
    /// The kernel had no memory, or a local queue overflowed.
    #[error("the kernel has no buffer for the datagram")]
    NoBuffers,
    /// Larger than the path allows; [`RoceSocket::take_error`] knows the MTU.
    #[error("the datagram is larger than the path's MTU")]
    TooLarge,
    /// The path cannot cut a run. From now on the socket sends [`Segmentation::Separate`]: seal the
    /// datagrams again, with their new identifications.
    #[error("the path does not support segmentation offload")]
    SegmentationUnsupported,
    /// Anything else.
    #[error(transparent)]
    Other(io::Error),
}

/// What the network, or the kernel on its behalf, said about an earlier datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkError {
    /// Where the datagram went, if the kernel remembers.
    pub peer: Option<SocketAddr>,
    /// What happened to it.
    pub cause: NetworkErrorCause,
}

/// Why a datagram did not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkErrorCause {
    /// Nobody listens on that port (ICMP port unreachable).
    PortUnreachable,
    /// It was too long for a link on the way, which takes this many bytes of IP packet.
    TooLarge {
        /// The MTU.
        mtu: u32,
    },
    /// Another error number.
    Other(i32),
}

/// How full the receive buffer is (SO_MEMINFO).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiveMemory {
    /// Bytes charged now.
    pub charged: u32,
    /// The limit.
    pub limit: u32,
    /// Datagrams, or chunks of them, that were dropped since the socket was made.
    pub dropped: u32,
}

/// A UDP socket that can carry RoCE.
#[derive(Debug)]
pub struct RoceSocket {
    socket: Socket,
    local: SocketAddr,
    segmentation: Segmentation,
    receive_buffer: usize,
}

impl RoceSocket {
    /// Binds `address` for this socket alone. Port zero lets the kernel choose.
    pub fn bind(address: SocketAddr, options: SocketOptions) -> Result<RoceSocket, BindError> {
        let other = |source| BindError::Other { address, source };
        let socket =
            Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP)).map_err(other)?;
        socket.set_nonblocking(true).map_err(other)?;
        if address.is_ipv6() {
            socket.set_only_v6(true).map_err(other)?;
        }
        let offload = system::configure(&socket, address.is_ipv6(), options.receive_buffer).map_err(other)?;
        let receive_buffer = socket.recv_buffer_size().map_err(other)?;
        socket.bind(&address.into()).map_err(|source| BindError::from_io(address, source))?;
        let local = socket.local_addr().map_err(other)?.as_socket().unwrap_or(address);
        let segmentation = if offload { options.segmentation } else { Segmentation::PerDatagram };
        Ok(RoceSocket { socket, local, segmentation, receive_buffer })
    }

    /// A socket that gets what is sent to a multicast group on an interface, as do all others like it. The
    /// membership ends with it.
    pub fn join_multicast(
        group: IpAddr,
        interface: &Interface,
        options: SocketOptions,
    ) -> io::Result<RoceSocket> {
        let address = match group {
            IpAddr::V4(_) => SocketAddr::new(group, ROCE_PORT),
            IpAddr::V6(group) => SocketAddrV6::new(group, ROCE_PORT, 0, interface.index).into(),
        };
        let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
        socket.set_nonblocking(true)?;
        socket.set_reuse_address(true)?;
        if group.is_ipv6() {
            socket.set_only_v6(true)?;
        }
        system::configure(&socket, group.is_ipv6(), options.receive_buffer)?;
        system::disable_multicast_all(&socket, group.is_ipv6());
        let receive_buffer = socket.recv_buffer_size()?;
        socket.bind(&address.into())?;
        match group {
            IpAddr::V4(group) => {
                socket.join_multicast_v4_n(&group, &InterfaceIndexOrAddress::Index(interface.index))?;
            }
            IpAddr::V6(group) => socket.join_multicast_v6(&group, interface.index)?,
        }
        Ok(RoceSocket { socket, local: address, segmentation: Segmentation::PerDatagram, receive_buffer })
    }

    /// Sends multicast out of this interface, to members on this machine too, as far as unicast goes.
    pub fn set_multicast_interface(&self, interface: &Interface) -> io::Result<()> {
        const HOPS: u32 = 64;
        match self.local.ip() {
            IpAddr::V4(address) => {
                self.socket.set_multicast_if_v4(&address)?;
                self.socket.set_multicast_loop_v4(true)?;
                self.socket.set_multicast_ttl_v4(HOPS)
            }
            IpAddr::V6(_) => {
                self.socket.set_multicast_if_v6(interface.index)?;
                self.socket.set_multicast_loop_v6(true)?;
                self.socket.set_multicast_hops_v6(HOPS)
            }
        }
    }

    /// Where the socket is bound.
    pub fn local_address(&self) -> SocketAddr {
        self.local
    }

    /// How runs are sent now.
    pub fn segmentation(&self) -> Segmentation {
        self.segmentation
    }

    /// The kernel's limit on what the receive buffer is charged.
    pub fn receive_buffer(&self) -> usize {
        self.receive_buffer
    }

    /// The IPv4 identification that segment `index` of a run will have.
    pub fn identification(&self, index: usize) -> u16 {
        match self.segmentation {
            Segmentation::Gso => index as u16,
            Segmentation::PerDatagram => 0,
        }
    }

    /// The most datagrams of `segment_size` bytes in a run.
    pub fn max_batch_segments(segment_size: usize) -> usize {
        (MAX_BATCH_BYTES / segment_size.max(1)).min(MAX_BATCH_SEGMENTS)
    }

    /// What `segments` datagrams of `segment_size` bytes, sent as one run, are counted for in the link to
    /// `destination`. Only loopback is known to keep a run whole until it is read.
    pub fn batch_charge(&self, destination: IpAddr, segment_size: usize, segments: usize) -> u64 {
        match self.segmentation {
            Segmentation::Gso if destination.is_loopback() => charge(segment_size, segments),
            _ => charge(segment_size, 1) * segments as u64,
        }
    }

    /// How many datagrams of `segment_size` bytes fit into a run that may be charged `allowance`.
    pub fn max_segments_within(&self, destination: IpAddr, segment_size: usize, allowance: u64) -> usize {
        let capacity = Self::max_batch_segments(segment_size);
        let fits = match self.segmentation {
            Segmentation::Gso if destination.is_loopback() => {
                let overhead = charge(0, 2);
                allowance.saturating_sub(overhead) / segment_size.max(1) as u64
            }
            _ => 0,
        };
        let alone = allowance / charge(segment_size, 1);
        capacity.min(if fits > 1 { fits } else { alone } as usize)
    }

    /// Sends `bytes` as datagrams of `segment_size` bytes, the last one maybe shorter, to the same port of
    /// `destination` that this socket has. Returns how many datagrams the kernel took, at least one; fewer
    /// than all only with [`Segmentation::Separate`].
    ///
    /// # Panics
    /// If the run is empty, or longer than [`RoceSocket::run_capacity`].
    pub fn send_batch(
        &mut self,
        destination: IpAddr,
        traffic_class: u8,
        segment_size: usize,
        bytes: &[u8],
    ) -> Result<usize, SendError> {
        self.send_batch_to(
            SocketAddr::new(destination, self.local.port()),
            traffic_class,
            segment_size,
            bytes,
        )
    }

    /// The same, to any port.
    pub fn send_batch_to(
        &mut self,
        destination: SocketAddr,
        traffic_class: u8,
        segment_size: usize,
        bytes: &[u8],
    ) -> Result<usize, SendError> {
        assert!(!bytes.is_empty() && segment_size > 0, "a run has at least one byte");
        let segments = bytes.len().div_ceil(segment_size);
        assert!(segments <= MAX_BATCH_SEGMENTS && bytes.len() <= MAX_BATCH_BYTES, "a run fits into one send");
        let mut attempts = 0;
        loop {
            let sent = match self.segmentation {
                Segmentation::Gso => {
                    system::send_batch(&self.socket, destination, traffic_class, segment_size, bytes)
                        .map(|()| segments)
                }
                Segmentation::PerDatagram => {
                    system::send_datagrams(&self.socket, destination, traffic_class, segment_size, bytes)
                }
            };
            let error = match sent {
                Ok(sent) => return Ok(sent),
                Err(error) => error,
            };
            // The socket hands the error of an earlier datagram to whoever calls next. The error queue
            // has it too, so it is not lost when the call is made again.
            attempts += 1;
            let number = error.raw_os_error().unwrap_or(0);
            if attempts < 4
                && (system::is_deferred_network_error(number) || error.kind() == io::ErrorKind::Interrupted)
            {
                continue;
            }
            return Err(match number {
                libc::ENOBUFS | libc::ENOMEM => SendError::NoBuffers,
                libc::EMSGSIZE => SendError::TooLarge,
                libc::EIO | libc::EINVAL if segments > 1 && self.segmentation == Segmentation::Gso => {
                    self.segmentation = Segmentation::PerDatagram;
                    SendError::SegmentationUnsupported
                }
                _ if error.kind() == io::ErrorKind::WouldBlock => SendError::WouldBlock,
                _ => SendError::Other(error),
            });
        }
    }

    /// Fills `batch` with what has arrived, without waiting. An empty batch means that the socket was empty.
    pub fn receive(&self, batch: &mut ReceiveBatch) -> io::Result<()> {
        batch.clear();
        for _ in 0..4 {
            match system::receive(&self.socket, batch) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error)
                    if error.kind() == io::ErrorKind::Interrupted
                        || system::is_deferred_network_error(error.raw_os_error().unwrap_or(0)) => {}
                other => return other,
            }
        }
        Ok(())
    }

    /// The next thing that went wrong with an earlier datagram, if the kernel has noted one. Ask when the
    /// socket is [`Ready::error`](crate::Ready::error), and now and then.
    pub fn poll_error(&self) -> io::Result<Option<NetworkError>> {
        system::poll_error(&self.socket)
    }

    /// How full the receive buffer is and what it has dropped; zero where the system does not say.
    pub fn receive_memory(&self) -> io::Result<ReceiveMemory> {
        system::receive_memory(&self.socket)
    }
}

impl AsFd for RoceSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
