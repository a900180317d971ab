//! The device towards its network: peers that stall, end or are foreign, and what waits for them.

use crate::core::control_packets::{Body, ControlPacket};
use crate::core::peer_window::PeerWindow;
use crate::{Context, Event, Hca, Peer, QpType, Reason, Settings};
use alloc::vec::Vec;
use core::net::IpAddr;
use softhca_queue::{AckPath, RecordedAck};
use softhca_types::CompletionStatus;
use softhca_wire::{
    AddressHeaders, Aeth, Bth, Gid, ImmOrInvalidate, Opcode, Operation, Position, Qpn, Syndrome,
    TransportHeader,
};

impl Hca {
    /// The peer does not respond: suspends the timers of its connections.
    pub fn stall(&mut self, peer: impl Into<Peer>) {
        self.state.peers.stalled.insert(peer.into());
    }

    /// The peer responds again: restarts the timers of its connections.
    pub fn resume(&mut self, ctx: &mut Context<'_>, peer: impl Into<Peer>) {
        let peer = peer.into();
        // The host may have had another number of processes when the peer stalled.
        let is_same =
            |stalled: &Peer| stalled.address == peer.address && stalled.slot.number == peer.slot.number;
        let stalled = self.state.peers.stalled.len();
        self.state.peers.stalled.retain(|stalled| !is_same(stalled));
        if self.state.peers.stalled.len() == stalled {
            return;
        }
        for qpn in self.queue_pairs.numbers(|qp| qp.is_connected_to(peer)) {
            if let Some(qp) = self.queue_pairs.get_mut(qpn) {
                qp.restart_timers(&mut self.state, ctx);
            }
        }
        self.cm_call(ctx).resume(peer);
    }

    /// The port at `peer` has no link control, or has one again. A foreign peer gets a window of unacknowledged packets
    /// and its own recovery mode.
    pub fn set_foreign(&mut self, ctx: &mut Context<'_>, peer: IpAddr, is_foreign: bool) {
        if is_foreign == self.state.peers.windows.contains_key(&peer) {
            return;
        }
        if is_foreign {
            let Settings { foreign_window: window, foreign_recovery: recovery, .. } = self.state.settings;
            self.state.peers.windows.insert(peer, PeerWindow::new(window));
            ctx.emit(Event::ForeignPeerDetected { peer, recovery, window });
        } else if let Some(window) = self.state.peers.windows.remove(&peer) {
            self.state.egress.queue.extend(window.waiting);
        }
        let has_other_recovery = self.state.settings.recovery != self.state.settings.foreign_recovery;
        for qpn in self.queue_pairs.numbers(|qp| qp.addressing.destination == peer) {
            let Some(qp) = self.queue_pairs.get_mut(qpn) else { continue };
            qp.requester.windowed = 0;
            qp.requester.ack_timeout = qp.ack_timeout(&self.state);
            qp.update_window(&mut self.state, false);
            if has_other_recovery && qp.state.accepts_requests() {
                ctx.emit(Event::QpConfigured { qp: qp.qpn, configuration: qp.configuration(&self.state) });
            }
        }
    }

    /// The transmit gate of `destination` is open again. The ACK timers of the blocked queue pairs restart.
    pub fn unblock(&mut self, ctx: &mut Context<'_>, destination: IpAddr) {
        for qpn in self.state.egress.blocked_qps.remove(&destination).unwrap_or_default() {
            if qpn == Qpn::GSI {
                self.transport.cm.mad_queue.unblock(&mut self.state, destination);
            }
            if let Some(qp) = self.queue_pairs.get_mut(qpn.value()) {
                qp.is_blocked = false;
                qp.restart_ack_timer(&mut self.state, ctx);
                qp.schedule_transmit(&mut self.state);
            }
        }
        self.state.egress.control_packets.unblock();
    }

    /// Whether ACKs, CNPs or MADs that no queue pair would send again are still waiting for transmission.
    pub fn has_orphaned_acks(&self) -> bool {
        !self.state.egress.control_packets.is_empty() || !self.transport.cm.mad_queue.is_empty()
    }

    /// Queues the last ACK of a queue pair whose process has ended. Its peer may have had it.
    pub fn queue_recorded_ack(&mut self, ctx: &mut Context<'_>, ack: &RecordedAck) {
        let RecordedAck { path, psn, msn } = *ack;
        let AckPath { qpn, source, destination, service_level, .. } = path;
        if !self.state.gids.contains(&Gid::from(source)) || source.is_ipv4() != destination.is_ipv4() {
            return;
        }
        let service = if path.is_xrc { QpType::XrcTarget } else { QpType::Rc }.service();
        let opcode = Opcode::new(service, Operation::Acknowledge, Position::Only, ImmOrInvalidate::None);
        let opcode = opcode.expect("a reliable service has all response opcodes");
        let mut header = TransportHeader::new(Bth::new(opcode, path.dest_qpn, psn));
        header.aeth = Some(Aeth { syndrome: Syndrome::ACK, msn });
        let addressing = AddressHeaders {
            traffic_class: path.traffic_class,
            flow_label: path.flow_label,
            ..AddressHeaders::between(source, destination)
        };
        let (body, retransmission) = (Body::Reserved(0), false);
        let packet = ControlPacket { qpn, addressing, service_level, header, body, retransmission };
        self.state.egress.control_packets.push(ctx, packet);
    }

    /// Forgets the recorded ACK of a queue pair: nothing sends it again when the process ends.
    pub fn clear_recorded_ack(&mut self, qpn: Qpn) {
        self.state.processes.clear_ack(qpn);
    }

    /// Discards the control packets to a peer that is dead or has restarted.
    pub fn discard_orphaned_acks(&mut self, peer: impl Into<Peer>) {
        let peer = peer.into();
        self.state
            .egress
            .control_packets
            .discard(|packet| peer.contains(packet.addressing.destination, packet.header.bth.destination_qp));
    }

    /// Fails the connections to a peer that is dead.
    pub fn fail_peer(&mut self, ctx: &mut Context<'_>, peer: impl Into<Peer>) {
        let peer = peer.into();
        for qpn in self.waiting_for(peer) {
            if let Some(qp) = self.queue_pairs.get_mut(qpn) {
                qp.fail_oldest_wqe(
                    &mut self.state,
                    ctx,
                    CompletionStatus::RetryExceededError,
                    Reason::PeerUnreachable,
                );
            }
        }
        self.cm_call(ctx).fail_peer(peer);
        self.discard_orphaned_acks(peer);
        self.handle_cq_overflows(ctx);
    }

    /// A process has ended. Requests to it fail a little later, as after an ACK timeout. A program that has received
    /// all that it expects may end before its peer has polled its last completions.
    pub fn on_process_gone(&mut self, ctx: &mut Context<'_>, peer: Peer) {
        let detects = self.state.settings.profile.detects_dead_processes;
        for qpn in if detects { self.waiting_for(peer) } else { Vec::new() } {
            if let Some(qp) = self.queue_pairs.get_mut(qpn)
                && !core::mem::replace(&mut qp.requester.peer_gone, true)
            {
                qp.restart_ack_timer(&mut self.state, ctx);
            }
        }
        self.state.processes.on_peer_gone(peer);
        self.discard_orphaned_acks(peer);
    }

    /// The connected queue pairs with requests that a peer has not acknowledged.
    fn waiting_for(&self, peer: Peer) -> Vec<u32> {
        self.queue_pairs
            .numbers(|qp| qp.kind.is_reliable() && qp.is_connected_to(peer) && qp.requester.has_outstanding())
    }
}
