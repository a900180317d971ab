//! Which work request a packet belongs to, and why it left: what one card's event alone does not tell.

use crate::words::slug;
use softhca_engine::{Event, Packet};
use softhca_wire::{Psn, Qpn, Syndrome};
use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

/// How many work requests of a queue pair are remembered: more than any queue holds at once.
const REMEMBERED: usize = 4096;

#[derive(Debug)]
struct Work {
    id: u64,
    first: Psn,
    packets: u32,
}

#[derive(Debug, Default)]
struct QueuePair {
    works: VecDeque<Work>,
    /// Why it sends again, since it last went back.
    back: Option<String>,
    /// Why it last refused a request.
    refusal: Option<String>,
    /// The next answer is one to a duplicate.
    duplicate: bool,
}

/// A queue pair by the address of its host.
type Place = (IpAddr, Qpn);

/// Follows the work requests of every card that is heard.
#[derive(Debug, Default)]
pub(super) struct Provenance {
    queue_pairs: BTreeMap<Place, QueuePair>,
    /// Who sends requests from a host to a queue pair: the packets of a connection do not tell.
    senders: BTreeMap<(IpAddr, Place), Qpn>,
    /// The host whose event is told now.
    here: Option<IpAddr>,
}

impl Provenance {
    fn at(&mut self, address: IpAddr, qp: Qpn) -> &mut QueuePair {
        self.queue_pairs.entry((address, qp)).or_default()
    }

    /// Takes note of an event before it is told.
    pub fn hear(&mut self, here: Option<IpAddr>, event: &Event) {
        self.here = here;
        let Some(address) = here else { return };
        match *event {
            Event::WorkStarted { qp, id, first, packets, .. } => {
                let works = &mut self.at(address, qp).works;
                works.truncate(REMEMBERED - 1);
                works.push_front(Work { id, first, packets });
            }
            Event::WentBack { qp, cause, .. } => self.at(address, qp).back = Some(slug(&cause)),
            Event::Refused { qp, refusal, .. } => self.at(address, qp).refusal = Some(slug(&refusal)),
            Event::DuplicateAnswered { qp, .. } => self.at(address, qp).duplicate = true,
            Event::PacketSent { qp, packet, .. } if packet.opcode.operation().is_request() => {
                self.senders.insert((address, (packet.peer, packet.destination)), qp);
            }
            _ => {}
        }
    }

    /// Forgets what was good for one packet only.
    pub fn told(&mut self, event: &Event) {
        if let (Event::PacketSent { qp, packet, .. }, Some(address)) = (event, self.here)
            && !packet.opcode.operation().is_request()
            && let Some(qp) = self.queue_pairs.get_mut(&(address, *qp))
        {
            qp.duplicate = false;
        }
    }

    fn work(&self, requester: Place, psn: Psn) -> Option<u64> {
        let works = &self.queue_pairs.get(&requester)?.works;
        works.iter().find(|work| psn.is_within(work.first, work.packets)).map(|work| work.id)
    }

    /// The work request that an answer is to.
    pub fn of_sent(&self, packet: &Packet) -> Option<u64> {
        self.work((packet.peer, packet.destination), packet.psn)
    }

    /// The work request that a packet belongs to which came to `qp`.
    pub fn of_received(&self, qp: Qpn, packet: &Packet) -> Option<u64> {
        let here = self.here?;
        if !packet.opcode.operation().is_request() {
            return self.work((here, qp), packet.psn);
        }
        let sender = self.senders.get(&(packet.peer, (here, packet.destination)))?;
        self.work((packet.peer, *sender), packet.psn)
    }

    /// Why a packet left.
    pub fn cause(&self, qp: Qpn, packet: &Packet, again: bool) -> Cow<'static, str> {
        let place = self.here.and_then(|here| self.queue_pairs.get(&(here, qp)));
        let is_request = packet.opcode.operation().is_request();
        let refused = matches!(packet.syndrome, Some(Syndrome::Nak(_) | Syndrome::RnrNak(_)));
        let known = match place {
            Some(place) if is_request && again => place.back.clone(),
            Some(place) if !is_request && refused => place.refusal.clone(),
            Some(place) if !is_request && (again || place.duplicate) => Some("duplicate".into()),
            _ => None,
        };
        match known {
            Some(cause) => cause.into(),
            None if is_request => "work".into(),
            None => "request".into(),
        }
    }
}
