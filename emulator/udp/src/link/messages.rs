//! Received messages: what they change, and the answers to those of strangers.

use super::*;

impl LinkControl {
    /// Processes a link control message. A rejected message changes nothing.
    pub fn on_message(&mut self, from: IpAddr, message: &Message, now: u64) -> Result<(), LinkReject> {
        let from = PeerPort { address: from, slot: message.slots.source };
        let is_for_other = message.slots.destination != self.slot.number;
        if is_for_other {
            self.report_vacancy(from, message);
        }
        if is_for_other || self.is_local(from) || self.is_disabled {
            return Err(LinkReject::NoSuchPort);
        }
        let is_authentic = message.token == Some(self.secret.token(from));
        match message.body {
            Body::Hello(hello) if is_authentic => return self.on_hello(from, message, hello, now),
            Body::Hello(Hello { exchange: ExchangeKind::Query, token, .. }) => {
                self.answer(from, ExchangeKind::Reply, Some(token), Some(message.sender), now);
                return Ok(());
            }
            _ if !is_authentic => {
                // This port may have restarted. A reply to a forged HELLO gets no answer.
                if !matches!(message.body, Body::Hello(_)) {
                    self.answer(from, ExchangeKind::Query, None, None, now);
                }
                return Err(LinkReject::BadToken);
            }
            _ => {}
        }
        let current = self.peers.get_mut(&from).filter(|peer| {
            let is_current = message.receiver == Some(peer.local_incarnation);
            is_current && peer.is_established() && peer.remote_incarnation == Some(message.sender)
        });
        let Some(peer) = current else {
            // One side does not know the other's current incarnation.
            match self.peers.get_mut(&from).filter(|peer| peer.remote_token.is_some()) {
                Some(peer) => peer.pending_hello = Some(ExchangeKind::Query),
                None => self.answer(from, ExchangeKind::Query, None, None, now),
            }
            self.has_pending_messages = true;
            return Err(LinkReject::Stale);
        };
        match message.body {
            Body::Hello(_) => {}
            Body::Request(request) => {
                self.grant_issuer.on_request(from, &request, now).map_err(|_| LinkReject::OutOfBounds)?;
            }
            Body::Grant(grant) => {
                let budget = peer.remote_budget;
                peer.grant_balance.on_grant(&grant, budget, now).map_err(|_| LinkReject::OutOfBounds)?;
            }
            Body::Heartbeat(Heartbeat { exchange: ExchangeKind::Query, stamp, .. }) => {
                peer.pending_heartbeat_reply = Some(stamp)
            }
            Body::Heartbeat(Heartbeat { exchange: ExchangeKind::Reply, stamp, returned }) => {
                peer.grant_balance.on_heartbeat_reply(returned);
                peer.awaiting_heartbeat_reply = false;
                if stamp >= peer.min_reply_stamp {
                    peer.lease_renewed_at = peer.lease_renewed_at.max(Some(stamp.min(now)));
                }
            }
            Body::Pause(pause) if pause.classes > 0xff || (1..MIN_PAUSE_RATE).contains(&pause.rate) => {
                return Err(LinkReject::OutOfBounds);
            }
            Body::Pause(_) if self.events.len() >= MAX_EVENTS => return Err(LinkReject::OutOfBounds),
            Body::Pause(pause) => self.emit(from, LinkChange::PauseReceived(pause)),
            Body::Vacancy(_) if from.slot != 0 => return Err(LinkReject::OutOfBounds),
            Body::Vacancy(vacancy) => self.on_vacancy(from.address, vacancy, now),
        }
        if let Some(peer) = self.peers.get_mut(&from) {
            peer.remote_order = message.frame_order;
        }
        self.has_pending_messages = true;
        self.on_peer_activity(from);
        Ok(())
    }

    /// As slot 0, tells the sender of a message to another slot that the slot has no process: its own sockets would have got
    /// the message.
    fn report_vacancy(&mut self, from: PeerPort, message: &Message) {
        let is_slot_0 = self.slot.number == 0 && self.slot.bits > 0;
        let (Some(incarnation), true) = (message.receiver, is_slot_0) else { return };
        if let Some(peer) = self.peers.get_mut(&from).filter(|peer| peer.is_established()) {
            peer.pending_vacancy = Some(Vacancy { slot: message.slots.destination, incarnation });
            self.has_pending_messages = true;
        }
    }

    /// A process of a host is gone, and this port has missed what its slot sent afterwards.
    fn on_vacancy(&mut self, address: IpAddr, vacancy: Vacancy, now: u64) {
        let vacant = PeerPort { address, slot: vacancy.slot };
        let is_current =
            |peer: &PeerLink| peer.is_established() && peer.remote_incarnation == Some(vacancy.incarnation);
        if vacancy.slot != 0 && self.peers.get(&vacant).is_some_and(is_current) {
            self.close(vacant, PeerState::Dead, now);
        }
    }

    /// Answers a message without remembering it: sends a HELLO that gives the sender its token.
    fn answer(
        &mut self,
        to: PeerPort,
        exchange: ExchangeKind,
        token: Option<Token>,
        receiver: Option<Incarnation>,
        now: u64,
    ) {
        if now >= self.answer_period_began_at + ANSWER_PERIOD {
            (self.answer_period_began_at, self.answers_in_period) = (now, 0);
        }
        if self.answers_in_period >= MAX_ANSWERS_PER_PERIOD || self.answers.len() >= MAX_ANSWERS {
            return;
        }
        self.answers_in_period += 1;
        let known = self.peers.get(&to);
        let message = Message {
            sender: known.map_or(self.incarnation, |peer| peer.local_incarnation),
            // A reply names the incarnation of the peer that this port knows, not the one that asks.
            receiver: receiver.filter(|_| known.is_some_and(|peer| peer.remote_incarnation == receiver)),
            token,
            slots: self.slots(to),
            frame_order: self.transmit_order,
            body: Body::Hello(self.hello(to, exchange)),
        };
        self.answers.push_back((to, message));
    }

    fn hello(&self, to: PeerPort, exchange: ExchangeKind) -> Hello {
        let (token, budget) = (self.secret.token(to), self.grant_issuer.budget());
        Hello { exchange, token, budget, machine: self.machine }
    }

    /// Processes a HELLO that carries the token of its sender. A new incarnation has no state of the link.
    fn on_hello(
        &mut self,
        from: PeerPort,
        message: &Message,
        hello: Hello,
        now: u64,
    ) -> Result<(), LinkReject> {
        let peer = self.peer_or_insert(from, now).ok_or(LinkReject::TooManyPeers)?;
        if peer.remote_incarnation.is_some_and(|known| message.sender < known) {
            return Err(LinkReject::Stale);
        }
        peer.remote_token = Some(hello.token);
        if hello.exchange == ExchangeKind::Reply && message.receiver != Some(peer.local_incarnation) {
            // The peer does not know this incarnation yet, and now believes what this port says.
            if peer.state == PeerState::Dead {
                peer.start_probing(now);
            }
            peer.pending_hello = Some(ExchangeKind::Query);
            return Ok(());
        }
        let restarted = peer.remote_incarnation.is_some_and(|known| known != message.sender);
        if restarted {
            peer.reset(now);
            peer.remote_token = Some(hello.token);
        }
        if hello.exchange == ExchangeKind::Query {
            peer.pending_hello = Some(ExchangeKind::Reply);
        }
        let changed = !matches!(peer.state, PeerState::Alive);
        peer.state = PeerState::Alive;
        peer.remote_incarnation = Some(message.sender);
        peer.remote_budget = hello.budget;
        peer.remote_machine = hello.machine;
        peer.remote_order = message.frame_order;
        peer.slot_bits = message.slots.bits;
        peer.supports_link_control = true;
        peer.hello_interval = MIN_HELLO_INTERVAL;
        peer.silent_for = 0;
        peer.unanswered_probes = 0;
        peer.last_used_at = now;
        peer.heartbeat_due = true;
        peer.next_heartbeat_at = now + HEARTBEAT_INTERVAL;
        if from.slot != 0 {
            self.senders.retain(|_, sender| *sender != from);
            self.senders.insert((from.address, message.slots.source_port), from);
        }
        if restarted {
            self.grant_issuer.remove_sender(from, now);
            self.emit(from, LinkChange::Restarted);
        } else if changed {
            self.emit(from, LinkChange::StateChanged(PeerState::Alive));
        }
        Ok(())
    }
}
