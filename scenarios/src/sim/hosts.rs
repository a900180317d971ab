//! What programs do to the cards and cables of a world.

use super::Simulation;
use crate::executor::Hosts;
use crate::plan::{FabricChange, SwitchChange, WorkRequest};
use crate::spec::Errno;
use crate::verbs::send_request;
use softhca_engine::{Instant, ModifyQp, QpState};
use softhca_fabric::{Direction, HostId, LinkId, SwitchId};
use softhca_queue::{AccessFlags, Payload, ReceiveWorkRequest, Sge};
use softhca_wire::{Gid, LocalKey, RemoteKey};
use std::net::IpAddr;
use std::num::NonZeroU64;

impl Simulation {
    /// Changes for which priorities a card pauses its neighbours without reason.
    fn set_pause_storm(&mut self, host: usize, change: impl Fn(u8) -> u8) {
        let host = HostId(host as u32);
        let mut receiver = *self.world.receiver(host);
        receiver.pause_storm = change(receiver.pause_storm);
        self.world.set_receiver(host, receiver);
    }

    fn memory_of(&self, qp: usize) -> (u64, RemoteKey, u64) {
        let side = &self.qps[qp];
        (side.base, side.key, side.area)
    }
}

impl Hosts for Simulation {
    fn post(&mut self, qp: usize, id: u64, work: &WorkRequest) -> Result<(), Errno> {
        let side = self.qps[qp];
        if side.is_destroyed {
            return Err(Errno::EINVAL);
        }
        let (mut request, sge) = send_request(id, work, self.memory_of(qp), self.memory_of(side.peer));
        request.ud = work.group.map_or(side.datagram, |group| self.multicast.datagram(qp, group));
        let inline;
        let gather = [sge];
        request.payload = if work.inline {
            inline = self.world.verbs(side.host).read_memory(side.key, sge.address, sge.length as usize);
            Payload::Inline(&inline)
        } else if work.bytes == 0 {
            Payload::Gather(&[])
        } else {
            Payload::Gather(&gather)
        };
        self.world.verbs(side.host).post_send(side.qpn, &request).map_err(|_| Errno::ENOMEM)
    }

    fn post_receive(&mut self, qp: usize, id: u64, offset: u64, bytes: u32) -> Result<(), Errno> {
        let side = self.qps[qp];
        if side.is_destroyed {
            return Err(Errno::EINVAL);
        }
        let entry = Sge { address: side.base + offset, length: bytes, lkey: LocalKey(side.key.0) };
        let receive = ReceiveWorkRequest { wr_id: id, sg_list: &[entry] };
        self.world.verbs(side.host).post_receive(side.qpn, &receive).map_err(|_| Errno::ENOMEM)
    }

    fn modify(&mut self, qp: usize, state: QpState, notify_drained: bool) -> Result<(), String> {
        let side = self.qps[qp];
        let mut modify = ModifyQp::default().state(state);
        if notify_drained {
            modify = modify.sqd_async_notify(true);
        }
        self.world
            .verbs(side.host)
            .modify_queue_pair(side.qpn, modify)
            .map(|_| ())
            .map_err(|why| why.to_string())
    }

    fn destroy(&mut self, qp: usize) {
        let side = &mut self.qps[qp];
        if !std::mem::replace(&mut side.is_destroyed, true) {
            let (host, qpn) = (side.host, side.qpn);
            let _ = self.world.verbs(host).destroy_queue_pair(qpn);
        }
    }

    fn unmap(&mut self, qp: usize) -> Result<(), String> {
        let side = self.qps[qp];
        self.world.verbs(side.host).unmap(side.key).map_err(|why| why.to_string())
    }

    fn deregister(&mut self, qp: usize) -> Result<(), String> {
        let side = self.qps[qp];
        self.world.verbs(side.host).deregister_memory(side.key).map_err(|why| why.to_string())
    }

    fn reregister(&mut self, qp: usize, access: AccessFlags) -> Result<(), String> {
        let side = self.qps[qp];
        let changed =
            self.world.verbs(side.host).reregister_memory(side.key, |region| region.access_flags = access);
        changed.map(|_| ()).map_err(|why| why.to_string())
    }

    fn attach_multicast(&mut self, qp: usize, group: IpAddr) -> Result<(), String> {
        let side = self.qps[qp];
        let joined = self.world.verbs(side.host).attach_multicast(side.qpn, Gid::from(group));
        joined.map_err(|why| why.to_string())
    }

    fn detach_multicast(&mut self, qp: usize, group: IpAddr) -> Result<(), String> {
        let side = self.qps[qp];
        let left = self.world.verbs(side.host).detach_multicast(side.qpn, Gid::from(group));
        left.map_err(|why| why.to_string())
    }

    fn apply(&mut self, what: FabricChange) -> Result<(), String> {
        match what {
            FabricChange::LinkState { link: cable, directions: ways, state } => {
                for (direction, wanted) in [Direction::Forward, Direction::Backward].into_iter().zip(ways) {
                    if wanted {
                        self.world.set_link_state(LinkId(cable as u32), direction, state);
                    }
                }
            }
            FabricChange::LinkRate { link: cable, rate } => {
                let cable = self.world.link_mut(LinkId(cable as u32));
                let mut line = *cable.settings();
                line.bits_per_second = NonZeroU64::new(rate);
                cable.set_settings(line);
            }
            FabricChange::LinkMtu { link: cable, mtu } => {
                let cable = self.world.link_mut(LinkId(cable as u32));
                let mut line = *cable.settings();
                line.mtu = mtu;
                cable.set_settings(line);
            }
            FabricChange::Stall { host, for_ns } => {
                let until = self.world.now().nanos() + for_ns;
                self.world.stall(HostId(host as u32), Instant::from_nanos(until));
            }
            FabricChange::AsyncEvent { host, event } => {
                self.world.with_hca(HostId(host as u32), |hca, ctx| hca.raise_async_event(ctx, event));
            }
            FabricChange::Switch { switch, change } => {
                let id = SwitchId(switch as u32);
                let mut settings = *self.world.switch(id).settings();
                match change {
                    SwitchChange::Buffer(bytes) => settings.buffer = bytes,
                    SwitchChange::Marking(marking) => settings.ecn_marking = Some(marking),
                    SwitchChange::FlowControl(flow) => settings.pfc = Some(flow),
                }
                self.world.set_switch_settings(id, settings);
            }
            FabricChange::PauseStorm { host, priority } => {
                self.set_pause_storm(host, |storm| storm | 1 << priority);
            }
            FabricChange::PauseStormEnd { host, priority } => {
                self.set_pause_storm(host, |storm| storm & !(1 << priority));
            }
        }
        Ok(())
    }
}
