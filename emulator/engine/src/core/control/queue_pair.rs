//! Control verbs of queue pairs.

use super::limits::check_limit;
use crate::core::addressing::address_headers;
use crate::core::hca::Hca;
use crate::core::queue_pair::QueuePair;
use crate::core::table::Table;
use crate::core::transition::check_modify;
use crate::core::transport::Transport;
use crate::{
    ClientId, Context, Event, ModifyQp, QpAttributes, QpInitAttributes, QpSnapshot, QpState, QpType, Reason,
    Resource, VerbsError, VerbsResult,
};
use softhca_queue::{ReceiveConsumer, SendConsumer};
use softhca_wire::Qpn;

/// The card's ends of a queue pair's rings.
#[derive(Default)]
pub struct QpRings {
    /// The send queue, unless it is an XRC target.
    pub send: Option<SendConsumer>,
    /// The receive queue, unless receives are shared.
    pub receive: Option<ReceiveConsumer>,
}

impl<T: Transport> Hca<T> {
    /// Creates a queue pair, in RESET.
    pub fn create_queue_pair(
        &mut self,
        client: ClientId,
        init: QpInitAttributes,
        rings: QpRings,
    ) -> VerbsResult<Qpn> {
        let tag = self.next_tag();
        self.insert_queue_pair(client, init, rings, |table, make| table.insert(tag, make))
    }

    /// Creates a queue pair under a number of the caller's choice, if it is free. For replaying captures.
    pub fn create_queue_pair_with_qpn(
        &mut self,
        client: ClientId,
        init: QpInitAttributes,
        rings: QpRings,
        number: Qpn,
    ) -> VerbsResult<Qpn> {
        self.insert_queue_pair(client, init, rings, |table, make| table.insert_at(number.value(), make))
    }

    fn insert_queue_pair(
        &mut self,
        client: ClientId,
        init: QpInitAttributes,
        rings: QpRings,
        insert: impl FnOnce(&mut Table<QueuePair<T>>, &mut dyn FnMut(u32) -> QueuePair<T>) -> Option<u32>,
    ) -> VerbsResult<Qpn> {
        self.check_client(client)?;
        self.check_init(client, &init)?;
        let limit = self.limits.max_qp;
        if !self.queue_pairs.has_room() {
            return Err(VerbsError::Exhausted { resource: Resource::QueuePair, limit });
        }
        if let Some(domain) = init.pd {
            self.state.objects.protection.acquire_pd(client, domain)?;
        }
        let (mut rings, mtu) = (Some(rings), self.state.settings.mtu);
        let mut make = |number| {
            let rings = rings.take().unwrap_or_default();
            QueuePair::new(client, Qpn::new(number), &init, rings, mtu)
        };
        let Some(number) = insert(&mut self.queue_pairs, &mut make) else {
            if let Some(domain) = init.pd {
                self.state.objects.protection.release_pd(domain);
            }
            return Err(VerbsError::Exhausted { resource: Resource::QueuePair, limit });
        };
        for cq in [init.send_cq, init.recv_cq].into_iter().flatten() {
            self.completion_queue(client, cq)?.users += 1;
        }
        if let Some(srq) = init.srq {
            self.shared_receive_queue(client, srq)?.users += 1;
        }
        if let Some(domain) = init.xrcd {
            self.xrc_domain(domain)?.users += 1;
        }
        Ok(Qpn::new(number))
    }

    fn check_init(&mut self, client: ClientId, init: &QpInitAttributes) -> VerbsResult {
        let invalid = |what, why| Err(VerbsError::Invalid { what, why });
        for cq in [init.send_cq, init.recv_cq].into_iter().flatten() {
            self.completion_queue(client, cq)?;
        }
        match init.qp_type {
            QpType::XrcTarget => match init.xrcd {
                None => return invalid("XRC target", "it needs an XRC domain"),
                Some(domain) => {
                    self.xrc_domain(domain)?;
                }
            },
            _ if init.pd.is_none() => return invalid("queue pair", "it needs a protection domain"),
            _ if init.send_cq.is_none() => return invalid("queue pair", "it needs a send completion queue"),
            QpType::XrcInitiator => {}
            _ if init.recv_cq.is_none() => {
                return invalid("queue pair", "it needs a receive completion queue");
            }
            _ => {}
        }
        if let Some(srq) = init.srq {
            if !matches!(init.qp_type, QpType::Rc | QpType::Ud) {
                return invalid("shared receive queue", "only RC and UD queue pairs take from one");
            }
            if self.shared_receive_queue(client, srq)?.xrc.is_some() {
                return invalid("shared receive queue", "it is of XRC: senders name it, queue pairs do not");
            }
        }
        Ok(())
    }

    pub(super) fn queue_pair(&mut self, client: ClientId, number: Qpn) -> VerbsResult<&mut QueuePair<T>> {
        let found = self.queue_pairs.get_mut(number.value()).filter(|qp| qp.client == client);
        found.ok_or(VerbsError::NotFound { resource: Resource::QueuePair, number: number.value() })
    }

    /// A snapshot of a queue pair.
    pub fn query_queue_pair(&self, client: ClientId, number: Qpn) -> VerbsResult<QpSnapshot> {
        let found = self.queue_pairs.get(number.value()).filter(|qp| qp.client == client);
        found
            .map(T::snapshot)
            .ok_or(VerbsError::NotFound { resource: Resource::QueuePair, number: number.value() })
    }

    /// Every queue pair of the card, of all clients.
    pub fn queue_pairs(&self) -> impl Iterator<Item = QpSnapshot> {
        self.queue_pairs_with_owners().map(|(_, qp)| qp)
    }

    /// Every queue pair of the card, with the client that owns it.
    pub fn queue_pairs_with_owners(&self) -> impl Iterator<Item = (ClientId, QpSnapshot)> {
        self.queue_pairs.iter().map(|(_, qp)| (qp.client, T::snapshot(qp)))
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
        modify: &ModifyQp,
    ) -> VerbsResult<QpState> {
        let max_rd_atomic = self.limits.max_qp_rd_atom;
        let qp = self.queue_pair(client, number)?;
        let (kind, from) = (qp.kind, qp.state);
        let modify = &modify.without_ignored(kind);
        let to = check_modify(number, kind, from, modify, max_rd_atomic)?;
        self.check_p_key_index(modify)?;
        if let Some(path) = &modify.address_vector {
            self.check_address_vector(path)?;
        }
        if let Some(mtu) = modify.path_mtu {
            check_limit("path MTU", mtu.bytes().into(), self.state.settings.mtu.bytes().into())?;
        }
        let card = &mut self.state;
        let qp = self.queue_pairs.get_mut(number.value()).expect("it was found above");
        match to {
            QpState::Reset => {
                T::leave(qp, card, ctx, to);
                qp.change_state(ctx, to, Reason::Requested);
                T::reset(qp, card);
                qp.attributes = QpAttributes::reset(card.settings.mtu);
                return Ok(to);
            }
            QpState::Error => {
                T::leave(qp, card, ctx, to);
                T::enter_error(qp, card, ctx, Reason::Requested, None);
                self.handle_cq_overflows(ctx);
                return Ok(to);
            }
            _ => {}
        }
        qp.attributes.apply(modify);
        if let Some(path) = &modify.address_vector {
            qp.addressing = address_headers(card, path, number, qp.attributes.dest_qpn);
        }
        T::start(qp, card, modify, from);
        qp.change_state(ctx, to, Reason::Requested);
        if matches!(to, QpState::ReadyToReceive | QpState::ReadyToSend) {
            ctx.emit(Event::QpConfigured { qp: number, configuration: qp.configuration(card) });
        }
        // Work requests that were posted before may be sent now. A queue that drains may have finished.
        qp.schedule_transmit(card);
        self.handle_cq_overflows(ctx);
        Ok(to)
    }

    /// Destroys a queue pair.
    pub fn destroy_queue_pair(
        &mut self,
        ctx: &mut Context<'_>,
        client: ClientId,
        number: Qpn,
    ) -> VerbsResult {
        self.queue_pair(client, number)?;
        let mut qp = self.queue_pairs.remove(number.value()).expect("it was found above");
        T::destroy(&mut qp, &mut self.state, ctx);
        qp.change_state(ctx, QpState::Reset, Reason::Requested);
        if qp.has_bound_windows {
            self.state.objects.protection.invalidate_windows_of(number);
        }
        if let Some(domain) = qp.pd {
            self.state.objects.protection.release_pd(domain);
        }
        self.release_completion_queue(qp.send_cq);
        self.release_completion_queue(qp.recv_cq);
        self.release_xrc_domain(qp.xrcd);
        if let Some(srq) = qp.srq.filter(|_| qp.kind != QpType::XrcTarget)
            && let Some(queue) = self.state.objects.shared_receive_queues.get_mut(srq.0)
        {
            queue.users -= 1;
        }
        for members in self.state.objects.multicast_groups.values_mut() {
            members.retain(|member| *member != number);
        }
        self.state.objects.multicast_groups.retain(|_, members| !members.is_empty());
        self.handle_cq_overflows(ctx);
        Ok(())
    }
}
