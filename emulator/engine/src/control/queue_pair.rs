//! Control verbs of queue pairs.

use super::{at_most, check_receive};
use crate::inbound::Inbound;
use crate::outbound::Outbound;
use crate::queue_pair::QueuePair;
use crate::{
    Attributes, ClientId, Context, Error, Event, Hca, Modify, QpInit, QpKind, QpView, Reason, Resource,
    State, address, transition,
};
use core::net::{IpAddr, Ipv4Addr};
use softhca_queue::{ReceiveConsumer, SendConsumer};
use softhca_wire::{Envelope, Mtu, Qpn};

/// The card's ends of a queue pair's rings.
#[derive(Default)]
pub struct QpRings {
    /// The send queue, unless it is an XRC target.
    pub send: Option<SendConsumer>,
    /// The receive queue, unless receives are shared.
    pub receive: Option<ReceiveConsumer>,
}

impl Hca {
    /// Creates a queue pair, in RESET.
    pub fn create_queue_pair(
        &mut self,
        client: ClientId,
        init: QpInit,
        rings: QpRings,
    ) -> Result<Qpn, Error> {
        let tag = self.tag();
        self.add_queue_pair(client, init, rings, |table, make| table.insert(tag, make))
    }

    /// Creates a queue pair under a number of the caller's choice, if it is free. For replaying captures.
    pub fn create_queue_pair_as(
        &mut self,
        client: ClientId,
        init: QpInit,
        rings: QpRings,
        number: Qpn,
    ) -> Result<Qpn, Error> {
        self.add_queue_pair(client, init, rings, |table, make| table.insert_at(number.value(), make))
    }

    fn add_queue_pair(
        &mut self,
        client: ClientId,
        init: QpInit,
        rings: QpRings,
        insert: impl FnOnce(&mut crate::table::Table<QueuePair>, &mut dyn FnMut(u32) -> QueuePair) -> Option<u32>,
    ) -> Result<Qpn, Error> {
        self.known(client)?;
        self.check_init(client, &init, &rings)?;
        let limit = self.limits.queue_pairs;
        if !self.queue_pairs.has_room() {
            return Err(Error::Exhausted { resource: Resource::QueuePair, limit });
        }
        if let Some(domain) = init.domain {
            self.card.protection.hold(client, domain)?;
        }
        let (mut rings, mtu) = (Some(rings), self.card.settings.mtu);
        let mut make = |number| {
            let rings = rings.take().unwrap_or_default();
            new_queue_pair(client, Qpn::new(number), &init, rings, mtu)
        };
        let Some(number) = insert(&mut self.queue_pairs, &mut make) else {
            if let Some(domain) = init.domain {
                self.card.protection.release(domain);
            }
            return Err(Error::Exhausted { resource: Resource::QueuePair, limit });
        };
        for cq in [init.send_cq, init.receive_cq].into_iter().flatten() {
            self.completion_queue(client, cq)?.users += 1;
        }
        if let Some(srq) = init.shared_receive_queue {
            self.shared_receive_queue(client, srq)?.users += 1;
        }
        if let Some(domain) = init.xrc_domain {
            self.xrc_domain(domain)?.users += 1;
        }
        Ok(Qpn::new(number))
    }

    fn check_init(&mut self, client: ClientId, init: &QpInit, rings: &QpRings) -> Result<(), Error> {
        let invalid = |what, why| Err(Error::Invalid { what, why });
        for cq in [init.send_cq, init.receive_cq].into_iter().flatten() {
            self.completion_queue(client, cq)?;
        }
        if let Some(ring) = &rings.send {
            at_most("send work requests", ring.slots().into(), self.limits.work_requests.into())?;
            at_most("send entries", ring.entries() as u64, self.limits.entries as u64)?;
            at_most("inline data", ring.inline() as u64, self.limits.inline as u64)?;
        }
        if let Some(ring) = &rings.receive {
            check_receive(ring)?;
        }
        match init.kind {
            QpKind::XrcTarget => match init.xrc_domain {
                None => return invalid("XRC target", "it needs an XRC domain"),
                Some(domain) => {
                    self.xrc_domain(domain)?;
                }
            },
            _ if init.domain.is_none() => return invalid("queue pair", "it needs a protection domain"),
            _ if init.send_cq.is_none() => return invalid("queue pair", "it needs a send completion queue"),
            QpKind::XrcInitiator => {}
            _ if init.receive_cq.is_none() => {
                return invalid("queue pair", "it needs a receive completion queue");
            }
            _ => {}
        }
        if let Some(srq) = init.shared_receive_queue {
            if !matches!(init.kind, QpKind::Rc | QpKind::Ud) {
                return invalid("shared receive queue", "only RC and UD queue pairs take from one");
            }
            if self.shared_receive_queue(client, srq)?.extended.is_some() {
                return invalid("shared receive queue", "it is of XRC: senders name it, queue pairs do not");
            }
        }
        Ok(())
    }

    pub(super) fn queue_pair(&mut self, client: ClientId, number: Qpn) -> Result<&mut QueuePair, Error> {
        let found = self.queue_pairs.get_mut(number.value()).filter(|qp| qp.client == client);
        found.ok_or(Error::NotFound { resource: Resource::QueuePair, number: number.value() })
    }

    /// What a queue pair is doing.
    pub fn query_queue_pair(&self, client: ClientId, number: Qpn) -> Result<QpView, Error> {
        let found = self.queue_pairs.get(number.value()).filter(|qp| qp.client == client);
        found
            .map(QueuePair::view)
            .ok_or(Error::NotFound { resource: Resource::QueuePair, number: number.value() })
    }

    /// Every queue pair of the card, whoever owns it.
    pub fn queue_pairs(&self) -> impl Iterator<Item = QpView> {
        self.queue_pairs.iter().map(|(_, qp)| qp.view())
    }

    /// How many queue pairs there are.
    pub fn queue_pair_count(&self) -> usize {
        self.queue_pairs.len()
    }

    /// Changes a queue pair's attributes and state.
    pub fn modify_queue_pair(
        &mut self,
        ctx: &mut Context<'_>,
        client: ClientId,
        number: Qpn,
        modify: &Modify,
    ) -> Result<State, Error> {
        let qp = self.queue_pair(client, number)?;
        let (kind, from) = (qp.kind, qp.state);
        let to = transition::check(number, kind, from, modify)?;
        if let Some(path) = &modify.path {
            self.check_path(path)?;
        }
        if let Some(mtu) = modify.mtu {
            at_most("path MTU", mtu.bytes().into(), self.card.settings.mtu.bytes().into())?;
        }
        let gids = self.card.gids.clone();
        let card = &mut self.card;
        let qp = self.queue_pairs.get_mut(number.value()).expect("it was found above");
        match to {
            State::Reset => {
                qp.leave_last_words(card, ctx);
                qp.change_state(ctx, to, Reason::Asked);
                qp.reset();
                qp.attributes = Attributes::reset(card.settings.mtu);
                return Ok(to);
            }
            State::Error => {
                qp.leave_last_words(card, ctx);
                qp.enter_error(card, ctx, Reason::Asked, None);
                self.settle(ctx);
                return Ok(to);
            }
            _ => {}
        }
        qp.attributes.apply(modify);
        if let Some(path) = &modify.path {
            let source = gids[usize::from(path.source_index)];
            qp.envelope = address::envelope(path, source, number, qp.attributes.destination);
        }
        if let Some(psn) = modify.receive_psn {
            qp.forget_last_words(card);
            qp.inbound.start(psn);
        }
        if let Some(psn) = modify.send_psn {
            qp.outbound.start(psn);
        }
        qp.outbound.retries = qp.attributes.retry_count;
        qp.outbound.rnr_retries = qp.attributes.rnr_retry;
        if from != State::SendQueueDrained {
            qp.outbound.drained = false;
        }
        qp.change_state(ctx, to, Reason::Asked);
        if matches!(to, State::ReadyToReceive | State::ReadyToSend) {
            ctx.tell(Event::Configured { qp: number, profile: qp.profile(card) });
        }
        // What was posted before may be sent now; a queue that drains may have finished.
        qp.wake(card);
        self.settle(ctx);
        Ok(to)
    }

    /// Destroys a queue pair.
    pub fn destroy_queue_pair(
        &mut self,
        ctx: &mut Context<'_>,
        client: ClientId,
        number: Qpn,
    ) -> Result<(), Error> {
        self.queue_pair(client, number)?;
        let mut qp = self.queue_pairs.remove(number.value()).expect("it was found above");
        qp.leave_last_words(&mut self.card, ctx);
        qp.change_state(ctx, State::Reset, Reason::Asked);
        if let Some(domain) = qp.domain {
            self.card.protection.release(domain);
        }
        self.release_completion_queue(qp.send_cq);
        self.release_completion_queue(qp.receive_cq);
        self.release_xrc_domain(qp.xrc_domain);
        if let Some(srq) = qp.shared_receive_queue.filter(|_| qp.kind != QpKind::XrcTarget)
            && let Some(queue) = self.card.shared_receive_queues.get_mut(srq.0)
        {
            queue.users -= 1;
        }
        for members in self.card.groups.values_mut() {
            members.retain(|member| *member != number);
        }
        self.card.groups.retain(|_, members| !members.is_empty());
        Ok(())
    }
}

fn new_queue_pair(client: ClientId, number: Qpn, init: &QpInit, rings: QpRings, mtu: Mtu) -> QueuePair {
    let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    QueuePair {
        number,
        client,
        kind: init.kind,
        domain: init.domain,
        send_cq: init.send_cq,
        receive_cq: init.receive_cq,
        shared_receive_queue: init.shared_receive_queue,
        xrc_domain: init.xrc_domain,
        signal_all: init.signal_all,
        state: State::Reset,
        attributes: Attributes::reset(mtu),
        envelope: Envelope::between(nowhere, nowhere),
        outbound: Outbound::new(rings.send),
        inbound: Inbound::new(rings.receive),
        is_ready: false,
        is_parked: false,
        timer_at: None,
        is_halted: false,
        limiter: None,
        paced_at: None,
        notified_at: None,
        replies_last: true,
    }
}
