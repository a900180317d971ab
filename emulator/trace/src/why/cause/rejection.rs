//! Requests that were rejected: by the peer, by the own card, and receives that could not take their message.

use super::{CauseFinder, Conclusion, conclude};

/// The reason of a denied access, for a WRITE with immediate as for any other request.
fn plain_access(reason: &str) -> &str {
    reason.strip_prefix("write-with-imm-").unwrap_or(reason)
}

/// The code of the NAK that a refusal sends.
fn nak_code(reason: &str) -> String {
    match reason {
        reason if reason.starts_with("nak/") => reason.into(),
        reason if reason.starts_with("access/") => "nak/remote-access-error".into(),
        "receive-access" => "nak/remote-operational-error".into(),
        _ => "nak/invalid-request".into(),
    }
}

/// What to do about a refused request, by the reason of the refusal.
fn refusal_advice(reason: &str) -> &'static str {
    match reason {
        "nak/remote-access-error" => {
            "The rkey, the address range, the access flags or the protection domain do not permit the access; the NAK does not say which. Compare va, rkey and len of the request (`softhca trace --json`) with what the peer registered and sent, and see that the region is still registered."
        }
        "nak/invalid-request" => {
            "The NAK does not say more. Common causes: the two ends use different path MTUs; a SEND is longer than the receive; an atomic is not aligned to 8 bytes; more READs or atomics are outstanding than max_dest_rd_atomic of the peer."
        }
        "nak/remote-operational-error" => {
            "The peer failed for a reason of its own: its receive names memory that it cannot write, or is too small (rxe answers so). The completions of the peer show which."
        }
        "access/unknown-key" | "access/stale-key" | "access/invalidated" => {
            "The key (rkey) is not, or no longer, one of the peer's: exchange it after every registration, and keep the region registered until the last operation on it has completed."
        }
        "access/out-of-bounds" => {
            "Address and length must lie inside of the region: compare the address that the peer sent with the one that is used, and count in bytes."
        }
        "access/insufficient-access" => {
            "Register the region with the right that the operation needs (REMOTE_WRITE with LOCAL_WRITE, REMOTE_READ, REMOTE_ATOMIC), and give the queue pair the same in qp_access_flags at INIT: both are checked."
        }
        "access/queue-pair-access" => {
            "Give the peer's queue pair the right that the operation needs in qp_access_flags at INIT (REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC). The rights of the region are checked besides."
        }
        "access/pd-mismatch" => "Region and queue pair must be of one protection domain at the peer.",
        "access/qp-mismatch" => "A window of type 2 serves only the queue pair that it was bound on.",
        "access/unreachable" => {
            "The memory behind the region went away before the region did: deregister first, free afterwards."
        }
        "misaligned-atomic" => "An atomic works on eight bytes at an address that is a multiple of eight.",
        "receive-too-small" => {
            "Post receives as large as the largest message, or agree on a maximum: a SEND does not continue in the next receive."
        }
        "receive-access" => {
            "The receive that the peer posted points to memory that its card may not write: LOCAL_WRITE is needed, and the region must be as long as the entry."
        }
        "too-many-rd-atomic" => {
            "max_rd_atomic here must not be larger than max_dest_rd_atomic at the peer: exchange both when connecting."
        }
        "payload-length" => {
            "The two ends have different path MTUs: exchange the smaller one before going to RTR."
        }
        "invalidate-failed" => {
            "The key to invalidate must be one that the peer's queue pair may use: a window of type 2 bound on it."
        }
        "no-such-srq" => "The number of the XRC shared receive queue is wrong, or it was destroyed.",
        _ => "docs/reference/errors.md lists what each NAK can mean.",
    }
}

impl CauseFinder<'_> {
    /// The peer said no.
    pub(super) fn nak_received(&self) -> Conclusion {
        let other = self.peer_name();
        let nak = self.symptoms.nak.as_ref();
        let Some((reason, sentence)) = nak.map(|(reason, text)| (plain_access(reason), text)) else {
            return conclude(
                "nak",
                format!(
                    "{other} refused the request: {}. Its own log would say why.",
                    self.symptoms.completion_reason.1
                ),
                "Write the log at the peer too; docs/reference/errors.md lists what each NAK can mean.",
            );
        };
        let cause = format!("{other} refused the request, and a NAK ends the connection: {sentence}.");
        conclude(&self.nak_code(), cause, refusal_advice(reason))
    }

    /// The queue pair stopped because it refused a request, and no request of the log tells it: the peer has no log, or
    /// the queue pair is connected to itself.
    pub(super) fn request_refused(&self, reason: &str, sentence: &str) -> Conclusion {
        let (own, other) = (self.local_name(), self.peer_name());
        let whose = if own == other { "its own request".into() } else { format!("a request of {other}") };
        let cause = format!(
            "{own} refused {whose} and stopped: {sentence}. Everything that waited there was flushed."
        );
        conclude(&nak_code(reason), cause, refusal_advice(plain_access(reason)))
    }

    /// The code of the NAK that the peer sent.
    pub(super) fn nak_code(&self) -> String {
        self.symptoms.nak.as_ref().map_or_else(|| "nak".into(), |(reason, _)| nak_code(reason))
    }

    /// A receive that did not get its message.
    pub(super) fn receive_error(&self, reason: &str) -> Conclusion {
        let cause = format!(
            "A message came for this receive and could not be placed: {}.",
            self.symptoms.completion_reason.1
        );
        let advice = match reason {
            "request-rejected/receive-too-small" => {
                "Post receives as large as the largest message. On UD add 40 bytes: the routing header (GRH) stands before the data."
            }
            reason if reason.starts_with("request-rejected/write-with-imm-access") => {
                "The peer's WRITE with immediate named memory that it may not write. The data is rejected and the connection ends; exchange the rkey anew."
            }
            reason if reason.starts_with("request-rejected/invalidate-failed") => {
                "The peer's SEND asked this card to invalidate a key that is not a bound window of type 2 of this queue pair. Only this side learns of it: this queue pair is in ERR, and the peer's SEND ends with RETRY_EXC_ERR when its ACK timeout expires."
            }
            "request-rejected/receive-access" => {
                "The receive must point into a region of this queue pair's protection domain, with LOCAL_WRITE, and stay inside of it."
            }
            _ => "docs/reference/errors.md lists the causes.",
        };
        conclude("receive-error", cause, advice)
    }

    /// This side alone is to blame.
    pub(super) fn local_error(&self, reason: &str, sentence: &str) -> Conclusion {
        let title = self.work_request.title();
        let cause = match (self.symptoms.was_sent, self.work_request.operation.as_str()) {
            (false, _) => format!("{title} never left: {sentence}."),
            (true, "read" | "compare-swap" | "fetch-add") if reason.starts_with("local-access") => {
                format!("The answer to {title} could not be placed: {sentence}.")
            }
            (true, _) => format!("{title} was under way when this side ended it: {sentence}."),
        };
        let advice = match reason {
            "local-access/unknown-key" | "local-access/stale-key" | "local-access/invalidated" => {
                "The lkey in the scatter/gather entry is not that of a region that is registered now: register before posting, and deregister only after the completion."
            }
            "local-access/out-of-bounds" => {
                "The scatter/gather entry reaches beyond its region: check address and length, in bytes."
            }
            "local-access/insufficient-access" => {
                "A READ or an atomic writes into local memory: register that region with LOCAL_WRITE."
            }
            "local-access/pd-mismatch" => "Region and queue pair must be of one protection domain.",
            reason if reason.starts_with("local-access") => {
                "See that the memory is registered, mapped and long enough until the completion came."
            }
            "message-too-long" => {
                "A connection carries up to 2 GiB in one message, a datagram no more than the path MTU, and an atomic needs eight bytes of room: split the message, or use a connection."
            }
            "unsupported" => {
                "Not every transport has every operation: READ and atomics need RC or XRC, WRITE needs RC, XRC or UC."
            }
            "rd-atomic-disabled" => "Set max_rd_atomic to at least 1 when going to RTS.",
            "bad-address-handle" => "The address handle was destroyed, or is of another protection domain.",
            reason if reason.starts_with("memory-window-bind") => {
                "The region needs the right to bind windows, and the window must be inside of it."
            }
            "completion-queue-overflow" => {
                "Make the completion queue at least as large as all queues that complete to it, or poll it more often."
            }
            "invalid-wqe" | "corrupt-ring" => {
                "The ring in shared memory was written by something else than the library."
            }
            "client-exited" => "The program ended while its requests were under way.",
            "injected" => {
                "A fault rule of the run did this, not the program or the network: see the event fault:injected."
            }
            "device-failed" => {
                "The device raised DEVICE_FATAL: every queue pair is in ERR. Close the device and open it again."
            }
            _ => "docs/reference/errors.md lists the causes.",
        };
        conclude("local-error", cause, advice)
    }
}
