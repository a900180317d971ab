//! The port of a device on an InfiniBand subnet: what its subnet manager sets, and the events that follow from it.

use crate::core::addressing::address_headers;
use crate::core::hca::Hca;
use crate::core::transport::Transport;
use crate::{AsyncEvent, Context, PortState};
use alloc::boxed::Box;
use softhca_types::{InfiniBandPort, QpType};
use softhca_wire::{PartitionKey, Qpn, QueueKey};

impl<T: Transport> Hca<T> {
    /// Makes the port one of an InfiniBand subnet, or changes its attributes. Applications get the events of the changes.
    pub fn set_infiniband_port(&mut self, ctx: &mut Context<'_>, port: InfiniBandPort) {
        let state = if port.is_active() { PortState::Active } else { PortState::Down };
        self.state.gids.clone_from(&port.gids);
        let Some(before) = self.state.infiniband.replace(Box::new(port)) else {
            // Nobody has opened the device yet.
            self.state.health.port_state = state;
            return;
        };
        let Some(now) = &self.state.infiniband else { return };
        let changes = [
            (AsyncEvent::LidChange, (before.lid, before.lmc) != (now.lid, now.lmc)),
            (AsyncEvent::SmChange, (before.sm_lid, before.sm_sl) != (now.sm_lid, now.sm_sl)),
            (AsyncEvent::PkeyChange, before.p_keys != now.p_keys),
            (AsyncEvent::GidChange, before.gids != now.gids),
            (AsyncEvent::ClientReregister, before.reregistrations != now.reregistrations),
        ];
        for qpn in self.queue_pairs.numbers(|qp| qp.attributes.address_vector.dlid != 0) {
            if let Some(qp) = self.queue_pairs.get_mut(qpn) {
                let path = qp.attributes.address_vector;
                qp.addressing = address_headers(&self.state, &path, qp.qpn, qp.attributes.dest_qpn);
            }
        }
        for (event, _) in changes.into_iter().filter(|(_, has_changed)| *has_changed) {
            self.raise_async_event(ctx, event);
        }
        self.set_port_state(ctx, state);
    }

    /// The port, if it is one of an InfiniBand subnet.
    pub fn infiniband_port(&self) -> Option<&InfiniBandPort> {
        self.state.infiniband.as_deref()
    }

    /// The Q_Key that a datagram queue pair accepts.
    pub fn q_key_of(&self, qpn: Qpn) -> Option<QueueKey> {
        let qp = self.queue_pairs.get(qpn.value()).filter(|qp| qp.kind == QpType::Ud)?;
        Some(qp.attributes.qkey)
    }

    /// The P_Key of the packets of a queue pair on an InfiniBand port; that of index 0 for packets without one. `None` if
    /// the entry of the table is unused.
    pub fn p_key_of(&self, qpn: Qpn) -> Option<PartitionKey> {
        let index = self.queue_pairs.get(qpn.value()).map_or(0, |qp| qp.attributes.pkey_index);
        self.infiniband_port()?.p_key(index)
    }
}
