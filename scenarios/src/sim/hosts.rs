//! What programs do to the cards and cables of a world.

use super::{Theatre, meeting};
use crate::language::{Errno, RaisedName};
use crate::plan::{Disturbance, SwitchChange, Work};
use crate::play::Hosts;
use crate::verbs::request_of;
use softhca_engine::{AsyncEvent, CmId, Instant, Modify, QpKind, State};
use softhca_fabric::{CableId, Direction, HostId, LinkState, SwitchId};
use softhca_queue::cm::{self, DatagramTarget, RejectReason};
use softhca_queue::{Access, Payload, Receive, Sge};
use softhca_wire::{LocalKey, RemoteKey};
use std::num::NonZeroU64;

impl Theatre {
    /// Changes for which priorities a card pauses its neighbours without reason.
    fn storm(&mut self, host: usize, change: impl Fn(u8) -> u8) {
        let host = HostId(host as u32);
        let mut receiver = *self.world.receiver(host);
        receiver.storm = change(receiver.storm);
        self.world.set_receiver(host, receiver);
    }

    fn place(&self, qp: usize) -> (u64, RemoteKey, u64) {
        let side = &self.sides[qp];
        (side.base, side.key, side.area)
    }
}

fn refused(error: softhca_engine::Error) -> Errno {
    Errno::of(error.errno())
}

impl Hosts for Theatre {
    fn post(&mut self, qp: usize, id: u64, work: &Work) -> Result<(), Errno> {
        let side = self.sides[qp];
        if side.is_gone {
            return Err(Errno::EINVAL);
        }
        let (mut request, sge) = request_of(id, work, self.place(qp), self.place(side.peer));
        request.datagram = side.datagram;
        let inline;
        let gather = [sge];
        request.payload = if work.inline {
            inline = self.world.on(side.host).read(side.key, sge.address, sge.length as usize);
            Payload::Inline(&inline)
        } else if work.bytes == 0 {
            Payload::Gather(&[])
        } else {
            Payload::Gather(&gather)
        };
        self.world.on(side.host).post_send(side.qpn, &request).map_err(|_| Errno::ENOMEM)
    }

    fn post_receive(&mut self, qp: usize, id: u64, offset: u64, bytes: u32) -> Result<(), Errno> {
        let side = self.sides[qp];
        if side.is_gone {
            return Err(Errno::EINVAL);
        }
        let entry = Sge { address: side.base + offset, length: bytes, key: LocalKey(side.key.0) };
        let receive = Receive { id, scatter: &[entry] };
        self.world.on(side.host).post_receive(side.qpn, &receive).map_err(|_| Errno::ENOMEM)
    }

    fn modify(&mut self, qp: usize, state: State, notify_drained: bool) -> Result<(), String> {
        let side = self.sides[qp];
        let mut modify = Modify::default().state(state);
        if notify_drained {
            modify = modify.notify_drained(true);
        }
        self.world.on(side.host).modify(side.qpn, modify).map(|_| ()).map_err(|why| why.to_string())
    }

    fn destroy(&mut self, qp: usize) {
        let side = &mut self.sides[qp];
        if !std::mem::replace(&mut side.is_gone, true) {
            let (host, qpn) = (side.host, side.qpn);
            let _ = self.world.on(host).destroy_queue_pair(qpn);
        }
    }

    fn unmap(&mut self, qp: usize) -> Result<(), String> {
        let side = self.sides[qp];
        self.world.on(side.host).unmap(side.key).map_err(|why| why.to_string())
    }

    fn deregister(&mut self, qp: usize) -> Result<(), String> {
        let side = self.sides[qp];
        self.world.on(side.host).deregister(side.key).map_err(|why| why.to_string())
    }

    fn reregister(&mut self, qp: usize, access: Access) -> Result<(), String> {
        let side = self.sides[qp];
        let changed = self.world.on(side.host).reregister(side.key, |region| region.access = access);
        changed.map(|_| ()).map_err(|why| why.to_string())
    }

    fn listen(&mut self, host: usize, kind: QpKind, port: u16) -> Result<u32, Errno> {
        meeting::listen(self, host, kind, port).map_err(refused)
    }

    fn connect(&mut self, qp: usize, port: u16, private_data: &[u8]) -> Result<u32, Errno> {
        meeting::connect(self, qp, port, private_data).map_err(refused)
    }

    fn accept(&mut self, qp: usize, id: u32, private_data: &[u8]) -> Result<(), Errno> {
        meeting::accept(self, qp, CmId(id), private_data).map_err(refused)
    }

    fn reject(&mut self, qp: usize, id: u32, reason: u16, private_data: &[u8]) -> Result<(), Errno> {
        let (id, reason, private_data) = (CmId(id), RejectReason(reason), private_data.to_vec());
        let call = cm::Call::Reject { id, reason, private_data };
        self.world.on(self.sides[qp].host).cm(call).map(|_| ()).map_err(refused)
    }

    fn establish(&mut self, qp: usize, id: u32) -> Result<(), Errno> {
        meeting::establish(self, qp, CmId(id)).map_err(refused)
    }

    fn aim(&mut self, qp: usize, target: DatagramTarget) -> Result<(), Errno> {
        meeting::aim(self, qp, target).map_err(refused)
    }

    fn disconnect(&mut self, qp: usize, id: u32) -> Result<(), Errno> {
        let mut verbs = self.world.on(self.sides[qp].host);
        // One that is in the error state already is as good.
        let _ = verbs.modify(self.sides[qp].qpn, Modify::default().state(State::Error));
        verbs.cm(cm::Call::Disconnect(CmId(id))).map(|_| ()).map_err(refused)
    }

    fn close(&mut self, host: usize) {
        for id in self.meetings.forget(host) {
            // A request that nobody answered went with its listener.
            let _ = self.world.on(HostId(host as u32)).cm(cm::Call::Destroy(id));
        }
    }

    fn disturb(&mut self, what: &Disturbance) -> Result<(), String> {
        let directions = |ways: [bool; 2]| {
            [Direction::Forward, Direction::Backward].into_iter().zip(ways).filter(|(_, wanted)| *wanted)
        };
        match *what {
            Disturbance::Down { cable, ways, .. } => {
                for (direction, _) in directions(ways) {
                    self.world.set_link(CableId(cable as u32), direction, LinkState::Down);
                }
            }
            Disturbance::Up { cable, ways } => {
                for (direction, _) in directions(ways) {
                    self.world.set_link(CableId(cable as u32), direction, LinkState::Up);
                }
            }
            Disturbance::Rate { cable, rate } => {
                let cable = self.world.cable_mut(CableId(cable as u32));
                let mut line = *cable.line();
                line.bits_per_second = NonZeroU64::new(rate);
                cable.set_line(line);
            }
            Disturbance::Mtu { cable, mtu } => {
                let cable = self.world.cable_mut(CableId(cable as u32));
                let mut line = *cable.line();
                line.mtu = mtu;
                cable.set_line(line);
            }
            Disturbance::Stall { host, for_ns } => {
                let until = self.world.now().nanos() + for_ns;
                self.world.stall(HostId(host as u32), Instant::from_nanos(until));
            }
            Disturbance::Raise { host, event } => {
                let event = match event {
                    RaisedName::PortErr => AsyncEvent::PortDown,
                    RaisedName::PortActive => AsyncEvent::PortActive,
                    RaisedName::GidChange => AsyncEvent::GidChange,
                    RaisedName::DeviceFatal => AsyncEvent::DeviceFatal,
                };
                self.world.with_card(HostId(host as u32), |hca, ctx| hca.raise(ctx, event));
            }
            Disturbance::Switch { switch, change } => {
                let id = SwitchId(switch as u32);
                let mut settings = *self.world.switch(id).settings();
                match change {
                    SwitchChange::Buffer(bytes) => settings.buffer = bytes,
                    SwitchChange::Marking(marking) => settings.marking = Some(marking),
                    SwitchChange::FlowControl(flow) => settings.flow_control = Some(flow),
                }
                self.world.set_switch(id, settings);
            }
            Disturbance::PauseStorm { host, priority, .. } => {
                self.storm(host, |storm| storm | 1 << priority);
            }
            Disturbance::StormOver { host, priority } => {
                self.storm(host, |storm| storm & !(1 << priority));
            }
            Disturbance::Flap { .. }
            | Disturbance::NoReceives { .. }
            | Disturbance::SlowReceiver { .. }
            | Disturbance::Kill { .. } => unreachable!("the program does these itself"),
        }
        Ok(())
    }
}
