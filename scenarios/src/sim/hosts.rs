//! What programs do to the cards and cables of a world.

use super::Theatre;
use crate::language::{Errno, RaisedName};
use crate::plan::{Incident, SwitchChange, Work};
use crate::play::Hosts;
use crate::verbs::request_of;
use softhca_engine::{AsyncEvent, Instant, Modify, State};
use softhca_fabric::{CableId, Direction, HostId, SwitchId};
use softhca_queue::{Access, Payload, Receive, Sge};
use softhca_wire::{Gid, LocalKey, RemoteKey};
use std::net::IpAddr;
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

impl Hosts for Theatre {
    fn post(&mut self, qp: usize, id: u64, work: &Work) -> Result<(), Errno> {
        let side = self.sides[qp];
        if side.is_gone {
            return Err(Errno::EINVAL);
        }
        let (mut request, sge) = request_of(id, work, self.place(qp), self.place(side.peer));
        request.datagram = work.group.map_or(side.datagram, |group| self.groups.datagram(qp, group));
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

    fn join(&mut self, qp: usize, group: IpAddr) -> Result<(), String> {
        let side = self.sides[qp];
        let joined = self.world.on(side.host).attach_multicast(side.qpn, Gid::from(group));
        joined.map_err(|why| why.to_string())
    }

    fn leave(&mut self, qp: usize, group: IpAddr) -> Result<(), String> {
        let side = self.sides[qp];
        let left = self.world.on(side.host).detach_multicast(side.qpn, Gid::from(group));
        left.map_err(|why| why.to_string())
    }

    fn disturb(&mut self, what: Incident) -> Result<(), String> {
        match what {
            Incident::Link { cable, ways, state } => {
                for (direction, wanted) in [Direction::Forward, Direction::Backward].into_iter().zip(ways) {
                    if wanted {
                        self.world.set_link(CableId(cable as u32), direction, state);
                    }
                }
            }
            Incident::Rate { cable, rate } => {
                let cable = self.world.cable_mut(CableId(cable as u32));
                let mut line = *cable.line();
                line.bits_per_second = NonZeroU64::new(rate);
                cable.set_line(line);
            }
            Incident::Mtu { cable, mtu } => {
                let cable = self.world.cable_mut(CableId(cable as u32));
                let mut line = *cable.line();
                line.mtu = mtu;
                cable.set_line(line);
            }
            Incident::Stall { host, for_ns } => {
                let until = self.world.now().nanos() + for_ns;
                self.world.stall(HostId(host as u32), Instant::from_nanos(until));
            }
            Incident::Raise { host, event } => {
                let event = match event {
                    RaisedName::PortErr => AsyncEvent::PortDown,
                    RaisedName::PortActive => AsyncEvent::PortActive,
                    RaisedName::GidChange => AsyncEvent::GidChange,
                    RaisedName::DeviceFatal => AsyncEvent::DeviceFatal,
                };
                self.world.with_card(HostId(host as u32), |hca, ctx| hca.raise(ctx, event));
            }
            Incident::Switch { switch, change } => {
                let id = SwitchId(switch as u32);
                let mut settings = *self.world.switch(id).settings();
                match change {
                    SwitchChange::Buffer(bytes) => settings.buffer = bytes,
                    SwitchChange::Marking(marking) => settings.marking = Some(marking),
                    SwitchChange::FlowControl(flow) => settings.flow_control = Some(flow),
                }
                self.world.set_switch(id, settings);
            }
            Incident::PauseStorm { host, priority } => {
                self.storm(host, |storm| storm | 1 << priority);
            }
            Incident::StormOver { host, priority } => {
                self.storm(host, |storm| storm & !(1 << priority));
            }
        }
        Ok(())
    }
}
