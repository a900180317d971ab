//! Who sees what happens in a network.

use crate::{Direction, FabricEvent, Fault, Frame, HostId, LinkId, Node};
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
pub trait FabricSink {
    /// Whether it looks at all: for one that does not, frames need not be made ready to be seen.
    fn is_enabled(&self) -> bool {
        true
    }

    /// A card told an event.
    fn on_hca_event(&mut self, now: Instant, host: HostId, event: &Event) {
        let _ = (now, host, event);
    }

    /// A frame went by.
    fn on_frame(&mut self, now: Instant, cable: LinkId, direction: Direction, stage: Stage, frame: &Frame) {
        let _ = (now, cable, direction, stage, frame);
    }

    /// A pause frame went by.
    fn on_pause_frame(
        &mut self,
        now: Instant,
        cable: LinkId,
        direction: Direction,
        stage: Stage,
        pause: &Pfc,
    ) {
        let _ = (now, cable, direction, stage, pause);
    }

    /// A rule, or the state of a link, did something to a frame.
    fn on_fault(&mut self, now: Instant, cable: LinkId, fault: &Fault) {
        let _ = (now, cable, fault);
    }

    /// A switch, or the port of a host, told an event.
    fn on_fabric_event(&mut self, now: Instant, event: &FabricEvent) {
        let _ = (now, event);
    }

    /// A port of another machine was connected, whose frames come over this cable from its first end.
    fn on_port_attached(&mut self, port: HostId, address: IpAddr, cable: LinkId, ends: [Node; 2]) {
        let _ = (port, address, cable, ends);
    }
}

/// Sees nothing.
impl FabricSink for () {
    fn is_enabled(&self) -> bool {
        false
    }
}

/// Shown to several, in order.
impl FabricSink for Vec<Box<dyn FabricSink>> {
    fn is_enabled(&self) -> bool {
        self.iter().any(|observer| observer.is_enabled())
    }

    fn on_hca_event(&mut self, now: Instant, host: HostId, event: &Event) {
        self.iter_mut().for_each(|observer| observer.on_hca_event(now, host, event));
    }

    fn on_frame(&mut self, now: Instant, cable: LinkId, direction: Direction, stage: Stage, frame: &Frame) {
        self.iter_mut().for_each(|observer| observer.on_frame(now, cable, direction, stage, frame));
    }

    fn on_pause_frame(
        &mut self,
        now: Instant,
        cable: LinkId,
        direction: Direction,
        stage: Stage,
        pause: &Pfc,
    ) {
        self.iter_mut().for_each(|observer| observer.on_pause_frame(now, cable, direction, stage, pause));
    }

    fn on_fault(&mut self, now: Instant, cable: LinkId, fault: &Fault) {
        self.iter_mut().for_each(|observer| observer.on_fault(now, cable, fault));
    }

    fn on_fabric_event(&mut self, now: Instant, event: &FabricEvent) {
        self.iter_mut().for_each(|observer| observer.on_fabric_event(now, event));
    }

    fn on_port_attached(&mut self, port: HostId, address: IpAddr, cable: LinkId, ends: [Node; 2]) {
        self.iter_mut().for_each(|observer| observer.on_port_attached(port, address, cable, ends));
    }
}

/// Shown to one that somebody else keeps, to ask it afterwards.
impl<O: FabricSink> FabricSink for Rc<RefCell<O>> {
    fn is_enabled(&self) -> bool {
        self.borrow().is_enabled()
    }

    fn on_hca_event(&mut self, now: Instant, host: HostId, event: &Event) {
        self.borrow_mut().on_hca_event(now, host, event);
    }

    fn on_frame(&mut self, now: Instant, cable: LinkId, direction: Direction, stage: Stage, frame: &Frame) {
        self.borrow_mut().on_frame(now, cable, direction, stage, frame);
    }

    fn on_pause_frame(
        &mut self,
        now: Instant,
        cable: LinkId,
        direction: Direction,
        stage: Stage,
        pause: &Pfc,
    ) {
        self.borrow_mut().on_pause_frame(now, cable, direction, stage, pause);
    }

    fn on_fault(&mut self, now: Instant, cable: LinkId, fault: &Fault) {
        self.borrow_mut().on_fault(now, cable, fault);
    }

    fn on_fabric_event(&mut self, now: Instant, event: &FabricEvent) {
        self.borrow_mut().on_fabric_event(now, event);
    }

    fn on_port_attached(&mut self, port: HostId, address: IpAddr, cable: LinkId, ends: [Node; 2]) {
        self.borrow_mut().on_port_attached(port, address, cable, ends);
    }
}

/// Shown to whatever is in the box.
impl<O: FabricSink + ?Sized> FabricSink for Box<O> {
    fn is_enabled(&self) -> bool {
        (**self).is_enabled()
    }

    fn on_hca_event(&mut self, now: Instant, host: HostId, event: &Event) {
        (**self).on_hca_event(now, host, event);
    }

    fn on_frame(&mut self, now: Instant, cable: LinkId, direction: Direction, stage: Stage, frame: &Frame) {
        (**self).on_frame(now, cable, direction, stage, frame);
    }

    fn on_pause_frame(
        &mut self,
        now: Instant,
        cable: LinkId,
        direction: Direction,
        stage: Stage,
        pause: &Pfc,
    ) {
        (**self).on_pause_frame(now, cable, direction, stage, pause);
    }

    fn on_fault(&mut self, now: Instant, cable: LinkId, fault: &Fault) {
        (**self).on_fault(now, cable, fault);
    }

    fn on_fabric_event(&mut self, now: Instant, event: &FabricEvent) {
        (**self).on_fabric_event(now, event);
    }

    fn on_port_attached(&mut self, port: HostId, address: IpAddr, cable: LinkId, ends: [Node; 2]) {
        (**self).on_port_attached(port, address, cable, ends);
    }
}
