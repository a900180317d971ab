//! The work request of a packet and the cause of its transmission, which the event of the card alone does not contain.

use crate::describe::kebab_case;
use softhca_engine::{Event, PacketSummary};
use softhca_wire::{Psn, Qpn, Syndrome};
use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

/// How many work requests of a queue pair are remembered: more than any queue holds at once.
const MAX_REMEMBERED_WORK_REQUESTS: usize = 4096;

#[derive(Debug)]
struct WorkRequest {
    wr_id: u64,
    first_psn: Psn,
    packets: u32,
}

#[derive(Debug, Default)]
struct QueuePairHistory {
    work_requests: VecDeque<WorkRequest>,
    /// Why it sends again, since it last went back.
    retransmit_cause: Option<String>,
    /// Why it last refused a request.
    last_rejection: Option<String>,
    /// The next answer is one to a duplicate.
    duplicate_response_next: bool,
}

/// A queue pair by the address of its host.
type QueuePairKey = (IpAddr, Qpn);

/// Follows the work requests of every card that reports events.
#[derive(Debug, Default)]
pub(super) struct PacketAttribution {
    queue_pairs: BTreeMap<QueuePairKey, QueuePairHistory>,
    /// The queue pair that sends requests from a host to a queue pair. Packets of a connection do not name it.
    senders: BTreeMap<(IpAddr, QueuePairKey), Qpn>,
    /// The host of the current event.
    current_host: Option<IpAddr>,
}

impl PacketAttribution {
    fn queue_pair(&mut self, address: IpAddr, qp: Qpn) -> &mut QueuePairHistory {
        self.queue_pairs.entry((address, qp)).or_default()
    }

    /// Updates the state before an event is logged.
    pub fn before_entry(&mut self, here: Option<IpAddr>, event: &Event) {
        self.current_host = here;
        let Some(address) = here else { return };
        match *event {
            Event::WqeFetched { qp, wr_id: id, first_psn: first, packets, .. } => {
                let works = &mut self.queue_pair(address, qp).work_requests;
                works.truncate(MAX_REMEMBERED_WORK_REQUESTS - 1);
                works.push_front(WorkRequest { wr_id: id, first_psn: first, packets });
            }
            Event::Retransmitted { qp, cause, .. } => {
                self.queue_pair(address, qp).retransmit_cause = Some(kebab_case(&cause))
            }
            Event::RequestRejected { qp, error, .. } => {
                self.queue_pair(address, qp).last_rejection = Some(kebab_case(&error))
            }
            Event::DuplicateRequestHandled { qp, .. } => {
                self.queue_pair(address, qp).duplicate_response_next = true
            }
            Event::PacketSent { qp, packet, .. } if packet.opcode.operation().is_request() => {
                self.senders.insert((address, (packet.peer, packet.dest_qp)), qp);
            }
            _ => {}
        }
    }

    /// Forgets what was good for one packet only.
    pub fn after_entry(&mut self, event: &Event) {
        if let (Event::PacketSent { qp, packet, .. }, Some(address)) = (event, self.current_host)
            && !packet.opcode.operation().is_request()
            && let Some(qp) = self.queue_pairs.get_mut(&(address, *qp))
        {
            qp.duplicate_response_next = false;
        }
    }

    fn wr_id(&self, requester: QueuePairKey, psn: Psn) -> Option<u64> {
        let works = &self.queue_pairs.get(&requester)?.work_requests;
        works.iter().find(|work| psn.is_within(work.first_psn, work.packets)).map(|work| work.wr_id)
    }

    /// The work request that an answer is to.
    pub fn request_of_response(&self, packet: &PacketSummary) -> Option<u64> {
        self.wr_id((packet.peer, packet.dest_qp), packet.psn)
    }

    /// The work request that a packet belongs to which came to `qp`.
    pub fn request_of_received(&self, qp: Qpn, packet: &PacketSummary) -> Option<u64> {
        let here = self.current_host?;
        if !packet.opcode.operation().is_request() {
            return self.wr_id((here, qp), packet.psn);
        }
        let sender = self.senders.get(&(packet.peer, (here, packet.dest_qp)))?;
        self.wr_id((packet.peer, *sender), packet.psn)
    }

    /// Why a packet left.
    pub fn cause(&self, qp: Qpn, packet: &PacketSummary, again: bool) -> Cow<'static, str> {
        let place = self.current_host.and_then(|here| self.queue_pairs.get(&(here, qp)));
        let is_request = packet.opcode.operation().is_request();
        let refused = matches!(packet.syndrome, Some(Syndrome::Nak(_) | Syndrome::RnrNak(_)));
        let known = match place {
            Some(place) if is_request && again => place.retransmit_cause.clone(),
            Some(place) if !is_request && refused => place.last_rejection.clone(),
            Some(place) if !is_request && (again || place.duplicate_response_next) => {
                Some("duplicate".into())
            }
            _ => None,
        };
        match known {
            Some(cause) => cause.into(),
            None if is_request => "work".into(),
            None => "request".into(),
        }
    }
}
