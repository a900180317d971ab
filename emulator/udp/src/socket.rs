//! A host's UDP socket: bound exclusively, never connected, never fragmenting.
//!
//! On an unconnected socket with forced path MTU discovery, the kernel writes the IPv4 identification that
//! [`RoceSocket::identification`] predicts, which the ICRC covers. The socket queues nothing and retries nothing: the
//! caller keeps what the kernel does not accept.

use crate::batch::{MAX_BATCH_BYTES, MAX_BATCH_SEGMENTS, ReceiveBatch};
use crate::socket_report::{NetworkError, ReceiveMemory};
use crate::{BindError, Interface, charge, system};
use socket2::{Domain, InterfaceIndexOrAddress, Protocol, Socket, Type};
use softhca_wire::ROCE_PORT;
use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use thiserror::Error;

/// How a batch is split into datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segmentation {
    /// By the kernel, in one call (UDP_SEGMENT): segment k has identification k.
    Gso,
    /// By the caller, one datagram each: every identification is zero.
    PerDatagram,
}

/// The options of a socket.
#[derive(Clone, Copy, Debug)]
pub struct SocketOptions {
    /// The receive buffer to request, in bytes. The kernel doubles it, and may grant less.
    pub receive_buffer: usize,
    /// The preferred segmentation.
    pub segmentation: Segmentation,
}

impl Default for SocketOptions {
    fn default() -> SocketOptions {
        SocketOptions { receive_buffer: 4 << 20, segmentation: Segmentation::Gso }
    }
}

/// Why a batch was not accepted. Nothing of it was sent.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SendError {
    /// The send buffer is full: try again after [`wait_writable`](crate::wait_writable).
    #[error("the socket's send buffer is full")]
    WouldBlock,
    /// The kernel had no memory, or a local queue overflowed.
    #[error("the kernel has no buffer for the datagram")]
    NoBuffers,
    /// Larger than the path MTU, which [`RoceSocket::poll_error`] returns.
    #[error("the datagram is larger than the path's MTU")]
    TooLarge,
    /// The path does not support GSO. From now on the socket uses [`Segmentation::PerDatagram`]: write the ICRCs
    /// again with the new identifications.
    #[error("the path does not support segmentation offload")]
    SegmentationUnsupported,
    /// Any other error.
    #[error(transparent)]
    Other(io::Error),
}

/// A UDP socket that carries RoCE or link control.
#[derive(Debug)]
pub struct RoceSocket {
    socket: Socket,
    local: SocketAddr,
    segmentation: Segmentation,
    receive_buffer: usize,
}

impl RoceSocket {
    /// Binds `address` exclusively. With port zero the kernel chooses one.
    pub fn bind(address: SocketAddr, options: SocketOptions) -> Result<RoceSocket, BindError> {
        RoceSocket::bind_with(address, options, false)
    }

    /// Binds an address that another socket of this user has and shares.
    pub(crate) fn bind_shared(address: SocketAddr, options: SocketOptions) -> Result<RoceSocket, BindError> {
        RoceSocket::bind_with(address, options, true)
    }

    fn bind_with(
        address: SocketAddr,
        options: SocketOptions,
        is_shared: bool,
    ) -> Result<RoceSocket, BindError> {
        let other = |source| BindError::Other { address, source };
        let socket =
            Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP)).map_err(other)?;
        socket.set_nonblocking(true).map_err(other)?;
        if address.is_ipv6() {
            socket.set_only_v6(true).map_err(other)?;
        }
        let offload = system::configure(&socket, address.is_ipv6(), options.receive_buffer).map_err(other)?;
        let receive_buffer = socket.recv_buffer_size().map_err(other)?;
        if is_shared {
            socket.set_reuse_port(true).map_err(other)?;
        }
        socket.bind(&address.into()).map_err(|source| BindError::from_io(address, source))?;
        let local = socket.local_addr().map_err(other)?.as_socket().unwrap_or(address);
        let segmentation = if offload { options.segmentation } else { Segmentation::PerDatagram };
        Ok(RoceSocket { socket, local, segmentation, receive_buffer })
    }

    /// Accepts datagrams of this socket only.
    pub(crate) fn close_to_others(&self) -> io::Result<()> {
        self.socket.connect(&self.local.into())
    }

    /// Lets other sockets of this user bind the same port.
    pub(crate) fn share_port(&self) -> io::Result<()> {
        self.socket.set_reuse_port(true)
    }

    /// Gives the port up: the descriptor is that of an unbound socket from now on.
    pub(crate) fn release_port(&self) -> io::Result<()> {
        let unbound = Socket::new(Domain::for_address(self.local), Type::DGRAM, Some(Protocol::UDP))?;
        unbound.set_nonblocking(true)?;
        // A thread that waits for packets keeps the number of the descriptor.
        system::replace_descriptor(self.socket.as_fd(), unbound.as_fd())?;
        self.socket.set_cloexec(true)
    }

    /// A socket that another process has bound.
    pub fn adopt(descriptor: OwnedFd) -> io::Result<RoceSocket> {
        let socket = Socket::from(descriptor);
        let unbound =
            || io::Error::new(io::ErrorKind::InvalidInput, "the socket is not bound to an IP address");
        let local = socket.local_addr()?.as_socket().ok_or_else(unbound)?;
        let receive_buffer = socket.recv_buffer_size()?;
        let segmentation =
            if system::supports_gso(&socket) { Segmentation::Gso } else { Segmentation::PerDatagram };
        Ok(RoceSocket { socket, local, segmentation, receive_buffer })
    }

    /// Keeps datagrams apart that arrive together.
    pub(crate) fn disable_gro(&self) {
        system::disable_gro(&self.socket);
    }

    /// A socket that receives from a multicast group on an interface, together with all other sockets of the group.
    /// Closing it ends the membership.
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

    /// Sends multicast through this interface, also to members on this machine, with the hop limit of unicast.
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

    /// The bound address.
    pub fn local_address(&self) -> SocketAddr {
        self.local
    }

    /// The current segmentation.
    pub fn segmentation(&self) -> Segmentation {
        self.segmentation
    }

    /// The kernel's limit on the charge of the receive buffer.
    pub fn receive_buffer(&self) -> usize {
        self.receive_buffer
    }

    /// The IPv4 identification of segment `index` of a batch.
    pub fn identification(&self, index: usize) -> u16 {
        match self.segmentation {
            Segmentation::Gso => index as u16,
            Segmentation::PerDatagram => 0,
        }
    }

    /// The most datagrams of `segment_size` bytes in a batch.
    pub fn max_batch_segments(segment_size: usize) -> usize {
        (MAX_BATCH_BYTES / segment_size.max(1)).min(MAX_BATCH_SEGMENTS)
    }

    /// The charge of `segments` datagrams of `segment_size` bytes sent as one batch to `destination`. Only loopback
    /// is known to keep a batch in one piece until it is read.
    pub fn batch_charge(&self, destination: IpAddr, segment_size: usize, segments: usize) -> u64 {
        match self.segmentation {
            Segmentation::Gso if destination.is_loopback() => charge(segment_size, segments),
            _ => charge(segment_size, 1) * segments as u64,
        }
    }

    /// How many datagrams of `segment_size` bytes fit into a batch that may be charged `allowance`.
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

    /// Sends `bytes` as datagrams of `segment_size` bytes, the last possibly shorter, to this socket's port number at
    /// `destination`. Returns how many datagrams the kernel accepted: at least one, and all of them unless
    /// [`Segmentation::PerDatagram`] is used.
    ///
    /// # Panics
    /// If the batch is empty, or longer than [`RoceSocket::max_batch_segments`].
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

    /// Sends a batch to any port.
    pub fn send_batch_to(
        &mut self,
        destination: SocketAddr,
        traffic_class: u8,
        segment_size: usize,
        bytes: &[u8],
    ) -> Result<usize, SendError> {
        assert!(!bytes.is_empty() && segment_size > 0, "a batch has at least one byte");
        let segments = bytes.len().div_ceil(segment_size);
        assert!(
            segments <= MAX_BATCH_SEGMENTS && bytes.len() <= MAX_BATCH_BYTES,
            "a batch fits into one send"
        );
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
            // A call may return the error of an earlier datagram. The error queue has it too, so a retry does not
            // lose it.
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

    /// Fills `batch` with what has arrived, without waiting. An empty batch means that the socket is empty.
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

    /// Rejects further filters on the socket, and on its group through this socket.
    pub(crate) fn lock_filter(&self) -> io::Result<()> {
        system::lock_filter(&self.socket)
    }

    /// Discards what waits in the socket. Bounded: more may arrive meanwhile.
    pub(crate) fn discard_received(&self) {
        /// More datagrams than a receive buffer holds.
        const MAX_DISCARDED: usize = 1 << 16;
        let mut first_byte = [std::mem::MaybeUninit::uninit(); 1];
        for _ in 0..MAX_DISCARDED {
            if self.socket.recv(&mut first_byte).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
            {
                break;
            }
        }
    }

    /// The next entry of the error queue. Call it when [`Ready::error`](crate::Ready::error) is set, and from time to
    /// time.
    pub fn poll_error(&self) -> io::Result<Option<NetworkError>> {
        system::poll_error(&self.socket)
    }

    /// The fill level and the drops of the receive buffer; zero where the system does not report them.
    pub fn receive_memory(&self) -> io::Result<ReceiveMemory> {
        system::receive_memory(&self.socket)
    }
}

impl AsFd for RoceSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
