//! Who sees what happens in a network.

use crate::{CableId, Direction, FabricEvent, Fault, Frame, HostId, Node};
use alloc::boxed::Box;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::cell::RefCell;
use core::net::IpAddr;
use softhca_engine::{Event, Instant};
use softhca_wire::Pfc;

/// Where on its way a frame is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// It leaves a host and enters the cable, before any fault.
    Admitted,
    /// It leaves a switch and enters the cable, before any fault.
    Forwarded,
    /// It comes out of the cable and reaches a host.
    Delivered,
}

/// Sees what happens in a world. Every method does nothing unless it is written.
pub trait Observer {
    /// Whether it looks at all: for one that does not, frames need not be made ready to be seen.
    fn looks(&self) -> bool {
        true
    }

    /// A card told an event.
    fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        let _ = (now, host, event);
    }

    /// A frame went by.
    fn frame(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, frame: &Frame) {
        let _ = (now, cable, direction, stage, frame);
    }

    /// A pause frame went by.
    fn pause(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, pause: &Pfc) {
        let _ = (now, cable, direction, stage, pause);
    }

    /// A rule, or the state of a link, did something to a frame.
    fn fault(&mut self, now: Instant, cable: CableId, fault: &Fault) {
        let _ = (now, cable, fault);
    }

    /// A switch, or the port of a host, told an event.
    fn fabric(&mut self, now: Instant, event: &FabricEvent) {
        let _ = (now, event);
    }

    /// A port of another machine was connected, whose frames come over this cable from its first end.
    fn attached(&mut self, port: HostId, address: IpAddr, cable: CableId, ends: [Node; 2]) {
        let _ = (port, address, cable, ends);
    }
}

/// Sees nothing.
impl Observer for () {
    fn looks(&self) -> bool {
        false
    }
}

/// Shown to several, in order.
impl Observer for Vec<Box<dyn Observer>> {
    fn looks(&self) -> bool {
        self.iter().any(|observer| observer.looks())
    }

    fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        self.iter_mut().for_each(|observer| observer.card(now, host, event));
    }

    fn frame(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, frame: &Frame) {
        self.iter_mut().for_each(|observer| observer.frame(now, cable, direction, stage, frame));
    }

    fn pause(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, pause: &Pfc) {
        self.iter_mut().for_each(|observer| observer.pause(now, cable, direction, stage, pause));
    }

    fn fault(&mut self, now: Instant, cable: CableId, fault: &Fault) {
        self.iter_mut().for_each(|observer| observer.fault(now, cable, fault));
    }

    fn fabric(&mut self, now: Instant, event: &FabricEvent) {
        self.iter_mut().for_each(|observer| observer.fabric(now, event));
    }

    fn attached(&mut self, port: HostId, address: IpAddr, cable: CableId, ends: [Node; 2]) {
        self.iter_mut().for_each(|observer| observer.attached(port, address, cable, ends));
    }
}

/// Shown to one that somebody else keeps, to ask it afterwards.
impl<O: Observer> Observer for Rc<RefCell<O>> {
    fn looks(&self) -> bool {
        self.borrow().looks()
    }

    fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        self.borrow_mut().card(now, host, event);
    }

    fn frame(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, frame: &Frame) {
        self.borrow_mut().frame(now, cable, direction, stage, frame);
    }

    fn pause(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, pause: &Pfc) {
        self.borrow_mut().pause(now, cable, direction, stage, pause);
    }

    fn fault(&mut self, now: Instant, cable: CableId, fault: &Fault) {
        self.borrow_mut().fault(now, cable, fault);
    }

    fn fabric(&mut self, now: Instant, event: &FabricEvent) {
        self.borrow_mut().fabric(now, event);
    }

    fn attached(&mut self, port: HostId, address: IpAddr, cable: CableId, ends: [Node; 2]) {
        self.borrow_mut().attached(port, address, cable, ends);
    }
}

/// Shown to whatever is in the box.
impl<O: Observer + ?Sized> Observer for Box<O> {
    fn looks(&self) -> bool {
        (**self).looks()
    }

    fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        (**self).card(now, host, event);
    }

    fn frame(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, frame: &Frame) {
        (**self).frame(now, cable, direction, stage, frame);
    }

    fn pause(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, pause: &Pfc) {
        (**self).pause(now, cable, direction, stage, pause);
    }

    fn fault(&mut self, now: Instant, cable: CableId, fault: &Fault) {
        (**self).fault(now, cable, fault);
    }

    fn fabric(&mut self, now: Instant, event: &FabricEvent) {
        (**self).fabric(now, event);
    }

    fn attached(&mut self, port: HostId, address: IpAddr, cable: CableId, ends: [Node; 2]) {
        (**self).attached(port, address, cable, ends);
    }
}
