//! Messages on their way to QP1 of other ports: built when the port asks for them.

use crate::card::Card;
use crate::cm::{CmIgnored, CmKind};
use crate::{CmId, Context, Event, Gate, Packet, Run};
use alloc::collections::{BTreeMap, VecDeque};
use core::net::IpAddr;
use softhca_wire::cm::Datagram;
use softhca_wire::{
    Bth, Deth, Envelope, Header, ICRC_LEN, MadHeader, Opcode, Operation, Position, Psn, Qpn, QueueKey,
    Service, Trailer,
};

/// Messages that may wait. Every one that matters is sent again when it gets no answer.
const MOST: usize = 65_536;
/// The UDP source port of QP1, the one that Linux uses.
pub(super) const SOURCE_PORT: u16 = 0xd872;
/// Bytes of a message on the wire, from the BTH to the ICRC.
const SEGMENT: usize = Bth::LEN + Deth::LEN + MadHeader::DATAGRAM_LEN + ICRC_LEN;

struct Outgoing {
    id: Option<CmId>,
    envelope: Envelope,
    datagram: Datagram,
    again: bool,
}

#[derive(Default)]
pub(crate) struct Outbox {
    waiting: VecDeque<Outgoing>,
    /// Messages to ports that nothing may be sent to now.
    parked: BTreeMap<IpAddr, VecDeque<Outgoing>>,
    count: usize,
    next: Psn,
    is_ready: bool,
}

impl Outbox {
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Puts a message in.
    pub fn push(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        id: Option<CmId>,
        envelope: Envelope,
        datagram: Datagram,
        again: bool,
    ) {
        if self.count >= MOST {
            let (message, peer) = (CmKind::of(&datagram.message), envelope.destination);
            return ctx.tell(Event::CmIgnored { id, message, peer, reason: CmIgnored::OutboxFull });
        }
        self.count += 1;
        self.waiting.push_back(Outgoing { id, envelope, datagram, again });
        self.wake(card);
    }

    fn wake(&mut self, card: &mut Card) {
        if !self.is_ready && !self.waiting.is_empty() {
            self.is_ready = true;
            card.ready.push_back(Qpn::GSI);
        }
    }

    /// Builds messages to one port in `buffer`.
    pub fn fill_run(
        &mut self,
        card: &mut Card,
        ctx: &mut Context<'_>,
        gate: &mut dyn Gate,
        buffer: &mut [u8],
        most: usize,
    ) -> Option<Run> {
        self.is_ready = false;
        let mut run: Option<Run> = None;
        let mut most = most;
        while let Some(next) = self.waiting.front() {
            let envelope = next.envelope;
            let destination = envelope.destination;
            match &run {
                None => {
                    let held = self.parked.contains_key(&destination);
                    most = if held { 0 } else { most.min(gate.packets(&envelope, SEGMENT)) };
                    if most == 0 {
                        if !held {
                            card.parked.entry(destination).or_default().push(Qpn::GSI);
                        }
                        let next = self.waiting.pop_front().expect("it was just looked at");
                        self.parked.entry(destination).or_default().push_back(next);
                        most = usize::MAX;
                        continue;
                    }
                }
                Some(run) if run.envelope != envelope || run.count == most => break,
                Some(run) if run.bytes + SEGMENT > buffer.len() => break,
                Some(_) => {}
            }
            if buffer.len() < SEGMENT {
                break;
            }
            let next = self.waiting.pop_front().expect("it was just looked at");
            self.count -= 1;
            let run = run.get_or_insert(Run {
                envelope,
                segment: SEGMENT,
                count: 0,
                bytes: 0,
                queue_pair: Qpn::GSI,
                service_level: 0,
                elided: 0,
            });
            self.build(card, ctx, &next, &mut buffer[run.bytes..run.bytes + SEGMENT]);
            run.count += 1;
            run.bytes += SEGMENT;
        }
        self.wake(card);
        run
    }

    fn build(&mut self, card: &mut Card, ctx: &mut Context<'_>, next: &Outgoing, buffer: &mut [u8]) {
        let opcode = Opcode::new(Service::Ud, Operation::Send, Position::Only, Trailer::None);
        let psn = self.next;
        self.next = psn.plus(1);
        let mut header = Header::new(Bth::new(opcode.expect("datagrams are sent"), Qpn::GSI, psn));
        header.bth.ack_request = true;
        header.deth = Some(Deth { queue_key: QueueKey::GSI, source: Qpn::GSI });
        let at = header.emit(buffer);
        let end = at + MadHeader::DATAGRAM_LEN;
        buffer[at..end].copy_from_slice(&next.datagram.emit());
        buffer[end..].fill(0);
        card.counters.sent_pkts += 1;
        card.counters.sent_bytes += MadHeader::DATAGRAM_LEN as u64;
        let peer = next.envelope.destination;
        let packet = Packet::of(&header, MadHeader::DATAGRAM_LEN, peer);
        ctx.tell(Event::CmSent {
            id: next.id,
            message: CmKind::of(&next.datagram.message),
            peer,
            again: next.again,
        });
        ctx.tell(Event::PacketSent { qp: Qpn::GSI, packet, work: None, again: false });
    }

    /// Messages to `destination` may go again.
    pub fn unpark(&mut self, card: &mut Card, destination: IpAddr) {
        for message in self.parked.remove(&destination).unwrap_or_default().into_iter().rev() {
            self.waiting.push_front(message);
        }
        self.wake(card);
    }

    /// Messages to `destination` will never arrive.
    pub fn forget(&mut self, destination: IpAddr) {
        self.parked.remove(&destination);
        self.waiting.retain(|message| message.envelope.destination != destination);
        self.count = self.waiting.len() + self.parked.values().map(VecDeque::len).sum::<usize>();
    }
}
