//! The seam between the core and a transport: a protocol between queue pairs.

use crate::core::context::Context;
use crate::core::control::QpRings;
use crate::core::hca::Hca;
use crate::core::hca_state::HcaState;
use crate::core::packet_batch::{PacketBatch, TransmitGate};
use crate::core::queue_pair::QueuePair;
use crate::core::reason::Reason;
use crate::core::settings::Settings;
use crate::core::time::Instant;
use core::time::Duration;
use softhca_types::{AsyncEvent, ClientId, CmId, ModifyQp, QpSnapshot, QpState, VerbsError, cm};
use softhca_wire::LocalKey;

/// A transport of a device. The core reaches it only through this trait; what arrives from the network is passed to the
/// transport directly.
///
/// The transport is a type parameter of the device and its queue pairs, so that no packet pays for a virtual call.
pub(crate) trait Transport: Sized {
    /// The sending half of a queue pair, with its send queue.
    type Requester;
    /// The receiving half of a queue pair, with its receive queue.
    type Responder;

    /// The state of the transport that all queue pairs of a device share.
    fn new(settings: &Settings) -> Self;

    /// Takes numbers from a secret instead of the seed.
    fn set_secret(&mut self, _secret: [u64; 2]) {}

    /// The halves of a new queue pair.
    fn create(rings: QpRings) -> (Self::Requester, Self::Responder);

    fn snapshot(qp: &QueuePair<Self>) -> QpSnapshot;

    /// The id of a send work request that uses memory with this key and has not completed.
    fn find_request(_qp: &QueuePair<Self>, _lkey: LocalKey) -> Option<u64> {
        None
    }

    /// The id of a send work request that used memory with this key and has completed. `unpolled` has the ids of the
    /// completions that the application has not polled, the newest first.
    fn find_completed_request(
        _qp: &QueuePair<Self>,
        _lkey: LocalKey,
        _unpolled: &mut dyn Iterator<Item = u64>,
    ) -> Option<u64> {
        None
    }

    /// How many requests the send queue and the receive queue hold.
    fn ring_slots(qp: &QueuePair<Self>) -> [u32; 2];

    /// The time without a response after which a queue pair assumes a loss, if its transport can lose packets.
    fn ack_timeout(_qp: &QueuePair<Self>, _hca: &HcaState) -> Option<Duration> {
        None
    }

    /// The attributes of a queue pair that is not in RESET or ERR have changed.
    fn start(qp: &mut QueuePair<Self>, hca: &mut HcaState, modify: &ModifyQp, from: QpState);

    /// The application takes the queue pair to RESET or ERR: what its peer may rely on must still be sent.
    fn leave(qp: &mut QueuePair<Self>, hca: &mut HcaState, ctx: &mut Context<'_>, to: QpState);

    /// Enters RESET: discards everything without completions.
    fn reset(qp: &mut QueuePair<Self>, hca: &mut HcaState);

    /// Enters ERR and flushes both queues.
    fn enter_error(
        qp: &mut QueuePair<Self>,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        reason: Reason,
        event: Option<AsyncEvent>,
    );

    /// The queue pair is about to be destroyed.
    fn destroy(qp: &mut QueuePair<Self>, hca: &mut HcaState, ctx: &mut Context<'_>);

    /// The application has posted work requests.
    fn on_doorbell(qp: &mut QueuePair<Self>, hca: &mut HcaState, ctx: &mut Context<'_>);

    /// Fills `buffer` with packets of one size. Schedules the queue pair again if it has more.
    fn fill_batch(
        qp: &mut QueuePair<Self>,
        hca: &mut HcaState,
        ctx: &mut Context<'_>,
        gate: &mut dyn TransmitGate,
        buffer: &mut [u8],
        max_packets: usize,
    ) -> Option<PacketBatch>;

    /// Whether the queue pair waits for a deadline.
    fn has_deadline(_qp: &QueuePair<Self>) -> bool {
        false
    }

    /// Handles expired deadlines of a queue pair.
    fn expire(_qp: &mut QueuePair<Self>, _hca: &mut HcaState, _ctx: &mut Context<'_>) {}

    /// Fills `buffer` with messages of the connection manager.
    fn fill_management_batch(
        _hca: &mut Hca<Self>,
        _ctx: &mut Context<'_>,
        _gate: &mut dyn TransmitGate,
        _buffer: &mut [u8],
        _max_packets: usize,
    ) -> Option<PacketBatch> {
        None
    }

    /// Whether the connection manager waits for a deadline.
    fn has_management_deadline(&self) -> bool {
        false
    }

    /// Handles expired deadlines of the connection manager.
    fn expire_management(_hca: &mut Hca<Self>, _ctx: &mut Context<'_>, _at: Instant) {}

    /// Carries out a call to the connection manager.
    fn execute_cm(
        _hca: &mut Hca<Self>,
        _ctx: &mut Context<'_>,
        _client: ClientId,
        _call: cm::Command,
    ) -> Result<cm::Reply, VerbsError> {
        Err(VerbsError::Unsupported { what: "a connection manager on this transport" })
    }

    /// A fault raises an event of the connection manager.
    fn raise_cm_event(
        _hca: &mut Hca<Self>,
        _ctx: &mut Context<'_>,
        _id: CmId,
        _event: cm::EventType,
        _status: i32,
    ) {
    }

    /// The device was removed.
    fn on_device_removed(_hca: &mut Hca<Self>, _ctx: &mut Context<'_>) {}

    /// A client is closed: its connections end.
    fn on_client_closed(_hca: &mut Hca<Self>, _ctx: &mut Context<'_>, _client: ClientId) {}
}
