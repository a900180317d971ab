//! Losslessness on real sockets: no receive buffer overflows, even if its owner sleeps.

use softhca_udp::{
    HostSockets, LinkChange, LinkControl, LinkSecret, NetworkErrorCause, PeerState, ReceiveBatch,
    Segmentation, SendError, SocketOptions, UnreachablePort, grant_budget, wait_readable,
};
use softhca_wire::link_control::{Incarnation, Message};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A minimal driver: one step reads everything, sends what is due, and sleeps.
struct Node {
    sockets: HostSockets,
    links: LinkControl,
    begin: Instant,
    batch: ReceiveBatch,
    changes: Vec<LinkChange>,
}

impl Node {
    fn new(address: IpAddr, options: SocketOptions) -> Node {
        let sockets = HostSockets::bind(address, options).expect("a free loopback address");
        let links = LinkControl::new(
            Incarnation::new(1),
            LinkSecret::from_system(),
            grant_budget(sockets.roce.receive_buffer()),
            0,
        );
        Node { sockets, links, begin: Instant::now(), batch: ReceiveBatch::new(), changes: Vec::new() }
    }

    fn now(&self) -> u64 {
        self.begin.elapsed().as_nanos() as u64
    }

    /// Receives everything and calls `on_frame` with every data frame.
    fn receive(&mut self, mut on_frame: impl FnMut(IpAddr, &[u8])) {
        let now = self.now();
        for (socket, port) in
            [(&self.sockets.roce, UnreachablePort::Roce), (&self.sockets.link, UnreachablePort::Link)]
        {
            while let Some(error) = socket.poll_error().expect("the error queue can be read") {
                if let (Some(peer), NetworkErrorCause::PortUnreachable) = (error.peer, error.cause) {
                    self.links.on_unreachable(peer.ip().into(), port, now);
                }
            }
        }
        loop {
            self.sockets.link.receive(&mut self.batch).expect("the link socket can be read");
            for datagram in self.batch.datagrams() {
                let message = Message::parse(datagram.bytes).expect("a link control message");
                let _ = self.links.on_message(datagram.source.ip(), &message, now);
            }
            if self.batch.is_empty() {
                break;
            }
        }
        loop {
            self.sockets.roce.receive(&mut self.batch).expect("the RoCE socket can be read");
            for chunk in self.batch.chunks() {
                self.links.record_received(chunk.source.ip().into(), chunk.charge(), now);
                chunk.datagrams().for_each(|datagram| on_frame(datagram.source.ip(), datagram.bytes));
            }
            if self.batch.is_empty() {
                self.links.on_socket_empty(now);
                break;
            }
        }
        if self.links.next_timeout().is_some_and(|at| at <= now) {
            self.links.expire(now);
        }
    }

    fn transmit(&mut self) {
        let now = self.now();
        while let Some((to, message)) = self.links.transmit(now) {
            // Link control may be lost.
            let _ = self.sockets.link.send_batch(to.address, 0, Message::LEN, &message.emit());
        }
        while let Some(event) = self.links.poll_event() {
            self.changes.push(event.change);
        }
    }

    /// Sleeps until a datagram arrives or a timer is due.
    fn sleep(&self) {
        let until = self.links.next_timeout().map_or(10_000_000, |at| at.saturating_sub(self.now()));
        let descriptors = [self.sockets.roce.as_fd(), self.sockets.link.as_fd()];
        wait_readable(&descriptors, Some(Duration::from_nanos(until.min(10_000_000))))
            .expect("sockets can be polled");
    }

    /// Sends numbered frames of `size` bytes in batches as long as the grants allow. `waits` says whether it has used
    /// its grants or sent everything.
    fn flood(
        &mut self,
        to: IpAddr,
        size: usize,
        frames: u32,
        waits: &AtomicBool,
        finished: impl Fn() -> bool,
    ) {
        let mut next = 0u32;
        while !finished() {
            self.receive(|_, _| {});
            while next < frames {
                let now = self.now();
                let allowance = self.links.allowance(to.into(), now);
                let segments =
                    self.sockets.roce.max_segments_within(to, size, allowance).min((frames - next) as usize);
                waits.store(segments == 0, Ordering::Release);
                if segments == 0 {
                    let charge = self.sockets.roce.batch_charge(to, size, 1);
                    assert!(!self.links.may_send(to.into(), charge, now));
                    break;
                }
                let charge = self.sockets.roce.batch_charge(to, size, segments);
                assert!(self.links.may_send(to.into(), charge, now));
                let mut batch = vec![0; segments * size];
                for (index, frame) in batch.chunks_mut(size).enumerate() {
                    frame[..4].copy_from_slice(&(next + index as u32).to_be_bytes());
                }
                match self.sockets.roce.send_batch(to, 0, size, &batch) {
                    Ok(sent) => {
                        self.links.record_sent(
                            to.into(),
                            self.sockets.roce.batch_charge(to, size, sent),
                            now,
                        );
                        next += sent as u32;
                    }
                    Err(SendError::WouldBlock) => break,
                    Err(error) => panic!("loopback accepts every batch: {error}"),
                }
            }
            if next == frames {
                waits.store(true, Ordering::Release);
            }
            self.transmit();
            self.sleep();
        }
    }
}

fn loopback(last: u8) -> IpAddr {
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 128 | high & 63, low, last).into()
}

/// Stops the other threads when one fails.
struct FailTogether<'a>(&'a AtomicBool);

impl Drop for FailTogether<'_> {
    fn drop(&mut self) {
        self.0.fetch_or(thread::panicking(), Ordering::AcqRel);
    }
}

/// Floods a receiver with a default-sized buffer, which sleeps from time to time, from several hosts at once.
fn nothing_is_dropped(group: u8, senders: u8, size: usize, frames: u32, segmentation: Segmentation) {
    let stock = SocketOptions { receive_buffer: 106_496, segmentation };
    let mut receiver = Node::new(loopback(group), stock);
    assert_eq!(receiver.sockets.roce.receive_buffer(), 212_992);
    let to = receiver.sockets.address();
    let arrived = AtomicUsize::new(0);
    let total = usize::from(senders) * frames as usize;
    let failed = AtomicBool::new(false);
    let finished = || failed.load(Ordering::Acquire) || arrived.load(Ordering::Acquire) == total;
    let waits: Vec<AtomicBool> = (0..senders).map(|_| AtomicBool::new(false)).collect();
    thread::scope(|scope| {
        let _fail_together = FailTogether(&failed);
        for (sender, waits) in (1..).zip(&waits) {
            let (failed, finished) = (&failed, &finished);
            scope.spawn(move || {
                let _fail_together = FailTogether(failed);
                Node::new(loopback(group + sender), stock).flood(to, size, frames, waits, finished);
            });
        }
        let mut expected = [0u32; 256];
        let mut naps = [total / 2, total / 4, 1].to_vec();
        while !finished() {
            let mut new = 0;
            receiver.receive(|from, bytes| {
                let IpAddr::V4(from) = from else { panic!("only IPv4 is used") };
                let next = &mut expected[usize::from(from.octets()[3])];
                assert_eq!(bytes.len(), size);
                assert_eq!(bytes[..4], next.to_be_bytes(), "nothing is lost, repeated or reordered");
                *next += 1;
                new += 1;
            });
            let so_far = arrived.fetch_add(new, Ordering::AcqRel) + new;
            receiver.transmit();
            if naps.pop_if(|at| so_far >= *at).is_some() {
                // Until its buffer holds everything that it granted.
                while !finished() && !waits.iter().all(|waits| waits.load(Ordering::Acquire)) {
                    thread::yield_now();
                }
            }
            let memory = receiver.sockets.roce.receive_memory().expect("SO_MEMINFO can be read");
            assert_eq!(memory.dropped, 0, "charged {} of {}", memory.charged, memory.limit);
            receiver.sleep();
        }
    });
    assert_eq!(receiver.sockets.roce.receive_memory().expect("SO_MEMINFO can be read").dropped, 0);
    println!(
        "{senders} senders of {size} B: link socket dropped {:?}",
        receiver.sockets.link.receive_memory()
    );
}

#[test]
fn two_senders_of_full_frames_lose_nothing() {
    nothing_is_dropped(10, 2, 4154, 20_000, Segmentation::Gso);
}

#[test]
fn two_senders_of_small_frames_lose_nothing() {
    nothing_is_dropped(20, 2, 64, 50_000, Segmentation::Gso);
}

#[test]
fn two_senders_without_offload_lose_nothing() {
    nothing_is_dropped(30, 2, 1082, 5_000, Segmentation::PerDatagram);
}

#[test]
fn twelve_senders_lose_nothing() {
    nothing_is_dropped(40, 12, 4154, 500, Segmentation::Gso);
}

#[test]
fn address_without_a_port_is_foreign_and_then_dead() {
    let mut node = Node::new(loopback(60), SocketOptions::default());
    let nobody = loopback(61);
    while !node.changes.contains(&LinkChange::StateChanged(PeerState::Dead)) {
        node.receive(|_, _| {});
        let (now, charge) = (node.now(), node.sockets.roce.batch_charge(nobody, 64, 1));
        if node.links.may_send(nobody.into(), charge, now) {
            node.sockets.roce.send_batch(nobody, 0, 64, &[0; 64]).expect("loopback accepts it");
            node.links.record_sent(nobody.into(), charge, now);
        }
        node.transmit();
        node.sleep();
    }
    assert_eq!(node.changes, [PeerState::Foreign, PeerState::Dead].map(LinkChange::StateChanged));
}
