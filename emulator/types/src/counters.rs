//! Counters, with the names of `rdma statistic` and of the Linux drivers.

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $field:ident,)*) => {
        /// The counters of an HCA.
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $field: u64,)*
        }

        impl Counters {
            /// Names and descriptions, in the order of [`Counters::iter`].
            pub const DESCRIPTIONS: &'static [(&'static str, &'static str)] =
                &[$((stringify!($field), concat!($($doc),+)),)*];

            /// Names and values, in a fixed order.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field),)*].into_iter()
            }

            /// The counters with these values, in the order of [`Counters::iter`]. Missing ones are 0.
            pub fn from_values(values: impl IntoIterator<Item = u64>) -> Counters {
                let mut values = values.into_iter();
                Counters { $($field: values.next().unwrap_or(0),)* }
            }

            /// Adds other counters to these.
            pub fn add(&mut self, other: &Counters) {
                $(self.$field = self.$field.wrapping_add(other.$field);)*
            }

            /// The difference to an earlier reading.
            pub fn since(&self, earlier: &Counters) -> Counters {
                Counters { $($field: self.$field.saturating_sub(earlier.$field),)* }
            }
        }
    };
}

counters! {
    /// Packets sent.
    sent_pkts,
    /// Packets received for a queue pair of the HCA.
    rcvd_pkts,
    /// Payload bytes sent.
    sent_bytes,
    /// Payload bytes received.
    rcvd_bytes,
    /// Duplicate requests received.
    duplicate_request,
    /// Requests received with a PSN beyond the expected one.
    out_of_sequence,
    /// Sequence NAKs received.
    packet_seq_err,
    /// Responses received with a PSN beyond the expected one (implied NAK).
    implied_nak_seq_err,
    /// RNR NAKs received.
    rcvd_rnr_err,
    /// RNR NAKs sent.
    sent_rnr_err,
    /// Work requests that failed with an exceeded RNR retry count.
    rnr_nak_retry_err,
    /// Expired ACK timers.
    local_ack_timeout_err,
    /// Work requests that failed with an exceeded retry count.
    retry_exceeded_err,
    /// Packets retransmitted.
    retransmitted_pkts,
    /// Adaptive retransmissions: before the first ACK timeout, on cards that have them.
    roce_adp_retrans,
    /// SENDs received without a posted receive.
    out_of_buffer,
    /// Requests rejected because of their rkey, bounds or access rights.
    resp_remote_access_errors,
    /// Requests rejected as invalid.
    resp_remote_invalid_request,
    /// Remote access error NAKs received.
    req_remote_access_errors,
    /// Invalid request NAKs received.
    req_remote_invalid_request,
    /// Remote operational error NAKs received.
    req_remote_op_errors,
    /// Local length or protection errors of the responder.
    resp_local_length_error,
    /// Completions with an error, flushes excluded.
    completion_errors,
    /// Flushed work requests.
    wr_flushed,
    /// Completion queue overflows.
    cq_overflow,
    /// Packets received with a wrong ICRC.
    rx_icrc_encapsulated,
    /// Malformed packets received.
    rx_malformed,
    /// Packets dropped for any other reason; the event log has the reason.
    rx_dropped,
    /// Packets that the kernel delivered out of order and that the driver reordered.
    host_reordered,
    /// Link control messages rejected because of another version.
    link_version_err,
    /// Link control messages rejected as malformed, or because of their source or destination port.
    link_malformed_err,
    /// Link control messages rejected because of their token: forged, or from before a restart.
    link_token_err,
    /// Link control messages rejected because one of the ports has restarted since.
    link_stale_err,
    /// Link control messages rejected because of an impossible value, or because the port has too many peers.
    link_bounds_err,
    /// Grants revoked because a peer neither used nor returned them while another one waited.
    link_grants_revoked,
    /// READ requests received.
    rx_read_requests,
    /// WRITE requests received.
    rx_write_requests,
    /// Atomic requests received.
    rx_atomic_requests,
    /// CNPs sent.
    np_cnp_sent,
    /// CNPs received.
    rp_cnp_handled,
    /// Packets received with an ECN congestion mark.
    np_ecn_marked_roce_packets,
    /// PFC pause frames received, including those that end a pause.
    rx_pause_frames,
    /// How often the port went down.
    link_downed,
}

impl Counters {
    /// The counters of the port, with the names of the files in `counters/`. A data counter counts words of four bytes,
    /// here of payload. The counters of layers that an emulated port does not have stay 0, as on a RoCE card.
    pub fn port_files(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("port_xmit_data", self.sent_bytes / 4),
            ("port_rcv_data", self.rcvd_bytes / 4),
            ("port_xmit_packets", self.sent_pkts),
            ("port_rcv_packets", self.rcvd_pkts),
            ("port_rcv_errors", self.rx_icrc_encapsulated.wrapping_add(self.rx_malformed)),
            ("port_rcv_discards", self.rx_dropped),
            ("link_downed", self.link_downed),
            ("excessive_buffer_overrun_errors", 0),
            ("link_error_recovery", 0),
            ("local_link_integrity_errors", 0),
            ("port_rcv_constraint_errors", 0),
            ("port_rcv_remote_physical_errors", 0),
            ("port_rcv_switch_relay_errors", 0),
            ("port_xmit_constraint_errors", 0),
            ("port_xmit_discards", 0),
            ("port_xmit_wait", 0),
            ("symbol_error", 0),
            ("VL15_dropped", 0),
        ]
        .into_iter()
    }

    /// The names and values of the files in `hw_counters/`: all counters, and the names that rxe has for some of them.
    pub fn hardware_files(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let rxe = [
            ("out_of_seq_request", self.out_of_sequence),
            ("rcvd_seq_err", self.packet_seq_err),
            ("send_rnr_err", self.sent_rnr_err),
            ("retry_rnr_exceeded_err", self.rnr_nak_retry_err),
        ];
        self.iter().chain(rxe)
    }
}

/// The values of a counter: one, or one per priority.
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
        /// The counters of a switch port.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct PortCounters {
            $($(#[doc = $doc])+ pub $field: $kind,)*
        }

        impl PortCounters {
            /// Names and descriptions, in the order of [`PortCounters::iter`].
            pub const DESCRIPTIONS: &'static [(&'static str, &'static str)] =
                &[$((stringify!($field), concat!($($doc),+)),)*];

            /// Names and values, in a fixed order; a counter per priority has eight values.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, &[u64])> {
                [$((stringify!($field), self.$field.values()),)*].into_iter()
            }
        }
    };
}

port_counters! {
    /// Frames sent, pause frames excluded.
    sent_frames: u64,
    /// Bytes of the frames sent.
    sent_bytes: u64,
    /// Frames received, pause frames excluded.
    received_frames: u64,
    /// Frames received here and dropped by the switch.
    dropped_frames: u64,
    /// Packets marked with ECN congestion experienced when they left.
    ecn_marked: u64,
    /// Pause frames sent, per priority, including those that end a pause.
    pauses_sent: [u64; 8],
    /// Pause frames received, per priority.
    pauses_received: [u64; 8],
    /// Time that each priority was paused, in nanoseconds.
    paused_ns: [u64; 8],
    /// The highest fill level of a queue, in bytes.
    max_queue_bytes: u64,
    /// Actions of the PFC watchdog.
    watchdog_fired: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process writes the counters of its slot, and the daemon reads them.
    #[test]
    fn counters_of_a_hostile_process_can_be_shown() {
        let mut all =
            Counters { rx_icrc_encapsulated: u64::MAX, rx_malformed: u64::MAX, ..Counters::default() };
        all.add(&all.clone());
        assert!(all.port_files().chain(all.hardware_files()).count() > 50);
    }
}
