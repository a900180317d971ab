//! Connections of queue pairs in virtual time.

use super::{Verbs, World};
use softhca_engine::{AddressVector, ModifyQp, QpState, QpType, VerbsError};
use softhca_fabric::{Endpoint, Flow, FlowId, HostId};
use softhca_types::AccessFlags;
use softhca_wire::{Gid, Mtu, Psn, Qpn, QueueKey, RnrTimer};

/// Parameters of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectOptions {
    pub path_mtu: Mtu,
    /// The first PSN of each direction.
    pub first_psns: [Psn; 2],
    /// Access flags of both queue pairs.
    pub access: AccessFlags,
    /// Outstanding READs and atomics, in both directions.
    pub max_rd_atomic: u8,
    /// The ACK timeout as an exponent of 4.096 µs.
    pub timeout: u8,
    /// The transport retry count.
    pub retry_count: u8,
    /// The RNR retry count.
    pub rnr_retry: u8,
    /// The minimum RNR NAK timer.
    pub min_rnr_timer: RnrTimer,
    /// DSCP and ECN bits.
    pub traffic_class: u8,
    /// The service level: the priority if the DSCP is zero.
    pub service_level: u8,
    /// The flow IDs of the two queue pairs in fault rules.
    pub flow_ids: [Option<FlowId>; 2],
}

impl Default for ConnectOptions {
    fn default() -> ConnectOptions {
        ConnectOptions {
            path_mtu: Mtu::B1024,
            first_psns: [Psn::new(0), Psn::new(0)],
            access: AccessFlags::LOCAL_WRITE
                | AccessFlags::REMOTE_WRITE
                | AccessFlags::REMOTE_READ
                | AccessFlags::REMOTE_ATOMIC,
            max_rd_atomic: 16,
            timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: RnrTimer::new(12),
            traffic_class: 0,
            service_level: 0,
            flow_ids: [None, None],
        }
    }
}

impl Verbs<'_> {
    /// Moves a UD queue pair to RTS.
    pub fn start_datagrams(&mut self, qpn: Qpn, queue_key: QueueKey, psn: Psn) -> Result<(), VerbsError> {
        let modify = ModifyQp::default();
        self.modify_queue_pair(qpn, modify.state(QpState::Init).pkey_index(0).port(1).qkey(queue_key))?;
        self.modify_queue_pair(qpn, modify.state(QpState::ReadyToReceive))?;
        self.modify_queue_pair(qpn, modify.state(QpState::ReadyToSend).sq_psn(psn))?;
        Ok(())
    }

    /// Moves a queue pair to RTS with this peer.
    pub fn connect(
        &mut self,
        qpn: Qpn,
        (peer, peer_qpn): (HostId, Qpn),
        connection: &ConnectOptions,
        [send_psn, receive_psn]: [Psn; 2],
    ) -> Result<(), VerbsError> {
        let destination = Gid::from(self.world.host(peer).address());
        let kind = self.query_queue_pair(qpn)?.qp_type;
        let ConnectOptions { traffic_class, service_level, .. } = *connection;
        let path = AddressVector { traffic_class, service_level, ..AddressVector::to(destination) };
        let modify = ModifyQp::default();
        self.modify_queue_pair(
            qpn,
            modify.state(QpState::Init).pkey_index(0).port(1).access_flags(connection.access),
        )?;
        let mut receive = modify
            .state(QpState::ReadyToReceive)
            .address_vector(path)
            .path_mtu(connection.path_mtu)
            .dest_qpn(peer_qpn)
            .rq_psn(receive_psn);
        if matches!(kind, QpType::Rc | QpType::XrcTarget) {
            receive =
                receive.max_dest_rd_atomic(connection.max_rd_atomic).min_rnr_timer(connection.min_rnr_timer);
        }
        self.modify_queue_pair(qpn, receive)?;
        let mut send = modify.state(QpState::ReadyToSend).sq_psn(send_psn);
        if matches!(kind, QpType::Rc | QpType::XrcInitiator) {
            send = send
                .timeout(connection.timeout)
                .retry_count(connection.retry_count)
                .rnr_retry(connection.rnr_retry)
                .max_rd_atomic(connection.max_rd_atomic);
        } else if kind == QpType::XrcTarget {
            send = send.timeout(connection.timeout);
        }
        self.modify_queue_pair(qpn, send)?;
        Ok(())
    }
}

impl World {
    /// Connects two queue pairs and registers their flows.
    pub fn connect(
        &mut self,
        first: (HostId, Qpn),
        second: (HostId, Qpn),
        connection: &ConnectOptions,
    ) -> Result<(), VerbsError> {
        let [a, b] = connection.first_psns;
        self.verbs(first.0).connect(first.1, second, connection, [a, b])?;
        self.verbs(second.0).connect(second.1, first, connection, [b, a])?;
        let ends = [first, second].map(|(host, qpn)| Endpoint { address: self.host(host).address(), qpn });
        for (index, flow_id) in connection.flow_ids.into_iter().enumerate() {
            if let Some(flow_id) = flow_id {
                let (requester, responder) = (ends[index], Some(ends[1 - index]));
                let first_psn = connection.first_psns[index];
                self.flows_mut().insert(Flow { id: flow_id, requester, responder, first_psn });
            }
        }
        Ok(())
    }
}
