//! Counters, with the names that `rdma statistic` and perftest users know.

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $field:ident,)*) => {
        /// Everything that the card counts.
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $field: u64,)*
        }

        impl Counters {
            /// The names with what they mean, in the same order as [`Counters::iter`].
            pub const DESCRIPTIONS: &'static [(&'static str, &'static str)] =
                &[$((stringify!($field), concat!($($doc),+)),)*];

            /// Names and values, in a fixed order.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field),)*].into_iter()
            }

            /// What was counted since an earlier look.
            pub fn since(&self, earlier: &Counters) -> Counters {
                Counters { $($field: self.$field.saturating_sub(earlier.$field),)* }
            }
        }
    };
}

counters! {
    /// Packets sent.
    sent_pkts,
    /// Packets received and meant for a queue pair here.
    rcvd_pkts,
    /// Bytes of payload sent.
    sent_bytes,
    /// Bytes of payload received.
    rcvd_bytes,
    /// Requests seen again.
    duplicate_request,
    /// Packets beyond the expected PSN, seen by a responder.
    out_of_sequence,
    /// Sequence NAKs received by a requester.
    packet_seq_err,
    /// Responses that skipped one, seen by a requester.
    implied_nak_seq_err,
    /// RNR NAKs received.
    rcvd_rnr_err,
    /// RNR NAKs sent.
    sent_rnr_err,
    /// Work requests given up because the receiver was never ready.
    rnr_nak_retry_err,
    /// Ack timers that expired.
    local_ack_timeout_err,
    /// Work requests given up after too many tries.
    retry_exceeded_err,
    /// Packets sent again.
    retransmitted_pkts,
    /// Sends that found no receive posted.
    out_of_buffer,
    /// Requests refused for their key, bounds or rights.
    resp_remote_access_errors,
    /// Requests refused as nonsense.
    resp_remote_invalid_request,
    /// NAK remote access received.
    req_remote_access_errors,
    /// NAK invalid request received.
    req_remote_invalid_request,
    /// NAK remote operational error received.
    req_remote_op_errors,
    /// Local length or protection errors of a responder.
    resp_local_length_error,
    /// Completions in error, flushes excluded.
    completion_errors,
    /// Flushed work requests.
    wr_flushed,
    /// Completion queues that overflowed.
    cq_overflow,
    /// Packets with a wrong ICRC.
    rx_icrc_encapsulated,
    /// Packets that could not be parsed.
    rx_malformed,
    /// Packets dropped for any other reason; events say which.
    rx_dropped,
    /// Packets that came before their turn because the host had mixed them up, and that were put in order.
    host_reordered,
    /// READ requests received.
    rx_read_requests,
    /// WRITE requests received.
    rx_write_requests,
    /// Atomic requests received.
    rx_atomic_requests,
    /// Congestion notifications sent.
    np_cnp_sent,
    /// Congestion notifications received.
    rp_cnp_handled,
    /// Packets received with a congestion mark.
    np_ecn_marked_roce_packets,
    /// Priority pause frames received, those that end a pause included.
    rx_pause_frames,
}

/// What was counted: one number, or one for each priority.
trait Values {
    fn values(&self) -> &[u64];
}

impl Values for u64 {
    fn values(&self) -> &[u64] {
        core::slice::from_ref(self)
    }
}

impl Values for [u64; 8] {
    fn values(&self) -> &[u64] {
        self
    }
}

macro_rules! port_counters {
    ($($(#[doc = $doc:literal])+ $field:ident: $kind:ty,)*) => {
        /// What a port of a switch counted.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct PortCounters {
            $($(#[doc = $doc])+ pub $field: $kind,)*
        }

        impl PortCounters {
            /// The names with what they mean, in the same order as [`PortCounters::iter`].
            pub const DESCRIPTIONS: &'static [(&'static str, &'static str)] =
                &[$((stringify!($field), concat!($($doc),+)),)*];

            /// Names and values, in a fixed order; what is counted for each priority has eight.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, &[u64])> {
                [$((stringify!($field), self.$field.values()),)*].into_iter()
            }
        }
    };
}

port_counters! {
    /// Frames sent, pause frames excluded.
    sent_frames: u64,
    /// Their bytes.
    sent_bytes: u64,
    /// Frames that came, pause frames excluded.
    received_frames: u64,
    /// Frames that came here and were lost in the switch.
    dropped_frames: u64,
    /// Packets that got a mark on their way out.
    ecn_marked: u64,
    /// Pause frames sent, for each priority; those that let the peer go on included.
    pauses_sent: [u64; 8],
    /// Pause frames that came, for each priority.
    pauses_received: [u64; 8],
    /// How long each priority was stopped, in nanoseconds.
    paused_ns: [u64; 8],
    /// The most bytes that ever waited in one queue.
    max_queue_bytes: u64,
    /// How often the watchdog acted.
    watchdog_fired: u64,
}
