//! Event subscription: one trait for hosts in virtual and in real time.

use crate::{Direction, FabricEvent, Fault, HostId, LinkId, Node};
use alloc::boxed::Box;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::cell::RefCell;
use core::net::IpAddr;
use softhca_engine::{Event, Instant};
use softhca_wire::{AddressHeaders, Pfc};

/// Where on its path a frame is observed.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// It leaves a host and enters the link, before any fault.
    Admitted,
    /// It leaves a switch and enters the link, before any fault.
    Forwarded,
    /// It leaves the link and reaches a host.
    Delivered,
}

/// An event of an HCA, a link or a switch. A host in real time has one HCA and one link, both with number 0.
#[derive(Clone, Copy, Debug)]
pub enum NetworkEvent<'a> {
    /// An HCA emitted an event.
    Hca { host: HostId, event: &'a Event },
    /// A packet, from the BTH to the ICRC, passed a point of a link.
    Frame {
        link: LinkId,
        direction: Direction,
        stage: Stage,
        addressing: &'a AddressHeaders,
        packet: &'a [u8],
    },
    /// A PFC pause frame passed a point of a link.
    PauseFrame { link: LinkId, direction: Direction, stage: Stage, pause: &'a Pfc },
    /// A fault rule, or the state of a link, changed a packet.
    Fault { link: LinkId, fault: &'a Fault },
    /// A switch or the port of a host emitted an event.
    Fabric(FabricEvent),
    /// A port of another machine was attached. Its packets enter the link at its first end.
    PortAttached { port: HostId, address: IpAddr, link: LinkId, ends: [Node; 2] },
    /// Link control detected a change at a peer port.
    PeerLinkChanged { peer: IpAddr, change: &'static str },
}

/// Receives every event.
pub trait EventSink {
    /// `event` happened at `now`.
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>);

    /// Whether the sink uses frames, marks of switches, and the events of packets, work requests and memory. They are not
    /// prepared for a sink that does not, and the ICRC of packets that stay in memory is left out.
    fn is_enabled(&self) -> bool {
        true
    }

    /// Every packet that arrived together is processed, or a control verb is complete. A sink that wakes
    /// applications does so here: they then find all completions.
    fn flush(&mut self) {}
}

/// Ignores every event.
impl EventSink for () {
    fn on_event(&mut self, _: Instant, _: &NetworkEvent<'_>) {}

    fn is_enabled(&self) -> bool {
        false
    }
}

/// Passes events to several sinks, in order.
impl<S: EventSink> EventSink for Vec<S> {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        self.iter_mut().for_each(|sink| sink.on_event(now, event));
    }

    fn is_enabled(&self) -> bool {
        self.iter().any(|sink| sink.is_enabled())
    }

    fn flush(&mut self) {
        self.iter_mut().for_each(|sink| sink.flush());
    }
}

/// Passes events to a shared sink that the owner reads afterwards.
impl<S: EventSink> EventSink for Rc<RefCell<S>> {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        self.borrow_mut().on_event(now, event);
    }

    fn is_enabled(&self) -> bool {
        self.borrow().is_enabled()
    }

    fn flush(&mut self) {
        self.borrow_mut().flush();
    }
}

impl<S: EventSink + ?Sized> EventSink for Box<S> {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        (**self).on_event(now, event);
    }

    fn is_enabled(&self) -> bool {
        (**self).is_enabled()
    }

    fn flush(&mut self) {
        (**self).flush();
    }
}
