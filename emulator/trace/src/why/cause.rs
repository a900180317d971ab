//! The cause of an outcome and what to do about it, in words that need no knowledge of the protocol.

mod rejection;

use super::evidence::Symptoms;
use crate::describe::{duration, times};
use crate::log::Certainty;
use crate::parsed_log::{ParsedLog, WorkRequest};

/// A cause: what `why --json` calls it, the sentences, and what to do.
#[derive(Debug)]
pub(super) struct Conclusion {
    pub code: String,
    pub cause: String,
    pub advice: String,
}

/// The cause, and what to do.
pub(super) fn cause_and_advice(log: &ParsedLog, work: &WorkRequest, findings: &Symptoms) -> Conclusion {
    let judge = CauseFinder { log, work_request: work, symptoms: findings };
    match work.status.as_deref() {
        None if work.completed.is_none() => judge.incomplete(),
        None | Some("SUCCESS") => judge.delayed(),
        Some("WR_FLUSH_ERR") => judge.flushed(),
        Some(_) => judge.failed(),
    }
}

/// What to do about packets that overtake each other.
fn reordering_advice(recovery: &str) -> &'static str {
    match recovery {
        "fatal" => {
            "Nothing was lost: packets of one connection overtook each other, and a receiver takes a gap for a loss. Keep a flow on one path: hash on the UDP source port, without packet spraying or adaptive routing. A device whose recovery is go-back-n survives it, at the price of retransmissions."
        }
        _ => {
            "Nothing was lost: packets of one connection overtook each other, and a receiver takes a gap for a loss. Keep a flow on one path: hash on the UDP source port, without packet spraying or adaptive routing. Each overtaking costs a retransmission of everything since."
        }
    }
}

struct CauseFinder<'a> {
    log: &'a ParsedLog,
    work_request: &'a WorkRequest,
    symptoms: &'a Symptoms,
}

const PARTIAL_ANSWER_ADVICE: &str = "Look in the log for the packets of this request that the peer received, and for what it answered. Responses that are lost on the way back look the same from here.";

fn conclude(code: &str, cause: impl Into<String>, advice: impl Into<String>) -> Conclusion {
    Conclusion { code: code.into(), cause: cause.into(), advice: advice.into() }
}

impl CauseFinder<'_> {
    fn local_name(&self) -> String {
        self.log.name(self.work_request.queue_pair)
    }

    fn peer_name(&self) -> String {
        self.log.peer_name(self.work_request.queue_pair)
    }

    fn recovery(&self) -> &str {
        if self.log.is_capture {
            return "unknown";
        }
        self.log.attributes(self.work_request.queue_pair).map_or("fatal", |profile| &profile.recovery)
    }

    /// What the recovery setting does with a loss.
    fn recovery_text(&self) -> String {
        let tries = self.log.attributes(self.work_request.queue_pair).map_or(0, |profile| profile.retry_cnt);
        match self.recovery() {
            "unknown" => String::new(),
            "fatal" => "With recovery `fatal`, the default, a lost packet ends a reliable connection: that is what a lossless fabric means, and no packet is sent again.".into(),
            mode => format!("With recovery `{mode}` lost packets are sent again, but retry_cnt allows only {tries} tries in a row without progress."),
        }
    }

    /// The ends count from different PSNs. Every other statement about what is missing would follow from that.
    fn psn_mismatch(&self) -> Option<Conclusion> {
        let (why, certainty) = self.symptoms.psn_mismatch.as_ref()?;
        let cause = match certainty {
            Certainty::Known => format!("The two ends do not agree about the first PSN: {why}."),
            Certainty::Inferred => format!("{} counts from another PSN: {why}.", self.peer_name()),
            Certainty::Ambiguous => format!("{} expects an earlier PSN: {why}.", self.peer_name()),
        };
        Some(conclude(
            "psn-mismatch",
            cause,
            "Exchange the PSN with the queue pair number: sq_psn of one end must be rq_psn of the other. Compare what both ends set (sq_psn at RTS, rq_psn at RTR).",
        ))
    }

    fn failed(&self) -> Conclusion {
        let (reason, sentence) = &self.symptoms.completion_reason;
        let is_of_peer = matches!(reason.as_str(), "sequence-nak" | "response-gap" | "ack-timeout" | "nak");
        if let Some(conclusion) = self.psn_mismatch().filter(|_| is_of_peer) {
            return conclusion;
        }
        match reason.as_str() {
            "sequence-nak" | "response-gap" => self.packet_lost(),
            "ack-timeout" | "peer-unreachable" => self.no_response(),
            "rnr-retry-exceeded" => self.rnr_retry_exceeded(),
            "nak" => self.nak_received(),
            "bad-response" => conclude(
                "bad-response",
                format!("The answer of {} does not fit the request: {sentence}.", self.peer_name()),
                "Two ends that disagree about the path MTU do this, and so does a packet that was changed on the way. Compare path_mtu at both ends and look at the packet in the capture.",
            ),
            reason if reason.starts_with("request-rejected/") => self.receive_error(reason),
            _ => self.local_error(reason, sentence),
        }
    }

    /// A gap: some packet did not arrive, a later one did.
    fn packet_lost(&self) -> Conclusion {
        let symptoms = self.symptoms;
        if let Some((reason, sentence)) = &symptoms.dropped_by_peer
            && ["invalid-qp-state/init", "invalid-qp-state/reset"].contains(&reason.as_str())
        {
            return self.dropped_by_peer(reason, sentence, &self.recovery_text());
        }
        if symptoms.rnr_waits > 0 && symptoms.lost_request.is_none() && symptoms.corrupted.is_none() {
            return conclude(
                "rnr",
                format!(
                    "{} had no receive posted: it refused the request {} with an RNR NAK. After the last wait it sent more than one sequence NAK for the same packet. Linux rxe sends one after each RNR NAK, which is ignored; another means that the repeated packet was lost. {}",
                    self.peer_name(),
                    times(symptoms.rnr_waits),
                    self.recovery_text()
                ),
                "Post receives before the peer may send: without the RNR NAK there is nothing to repeat. With a peer that is not SoftHCA, recovery go-back-n sends lost packets again.",
            );
        }
        let (code, what) = match (&symptoms.lost_request, &symptoms.lost_response) {
            (Some((packet, who)), _) => {
                ("request-lost", format!("One packet did not arrive: {packet}, {who}."))
            }
            (None, Some((packet, who))) => {
                ("response-lost", format!("One answer did not arrive: {packet}, {who}."))
            }
            _ => match (&symptoms.corrupted, &symptoms.delayed) {
                (Some((packet, who)), _) => {
                    ("damaged", format!("One packet was not taken because it was damaged: {packet}, {who}."))
                }
                (_, Some((packet, who))) => {
                    ("reordered", format!("One packet came too late, others had passed it: {packet}, {who}."))
                }
                _ => (
                    "request-lost",
                    "One packet did not arrive; the log does not say where it was lost.".into(),
                ),
            },
        };
        let advice = match (code, self.recovery()) {
            ("reordered", recovery) => reordering_advice(recovery),
            ("damaged", _) => {
                "Nothing was lost: a receiver drops a packet whose ICRC is wrong. Look for the rule that corrupts, or for a cable, port or middlebox that changes packets, and see its error counters."
            }
            (_, "fatal") => {
                "Find out where packets are lost: in a scenario the rule named above, in a real network a full switch queue without PFC or ECN. To see the card send them again instead, set the device's recovery to go-back-n."
            }
            (_, "unknown") => {
                "Find out where packets are lost: the drop counters of switches and ports on the way, full switch queues without PFC or ECN first. A second capture at the other end shows where: `softhca trace A B` joins them."
            }
            _ => {
                "Find out where packets are lost. More tries (retry_cnt, at most 7) help only against rare losses."
            }
        };
        conclude(code, format!("{what} {}", self.recovery_text()).trim_end(), advice)
    }

    /// No answer in time.
    fn no_response(&self) -> Conclusion {
        let other = self.peer_name();
        let found = self.symptoms;
        let timer = self.timeout_text();
        if found.completion_reason.0 == "peer-unreachable" {
            let ended = format!("Then the port of {other} went away: its program or daemon ended.");
            if found.rnr_waits > 0 {
                return conclude(
                    "rnr",
                    format!(
                        "{other} had no receive posted: it refused the request {} with an RNR NAK. {ended}",
                        times(found.rnr_waits)
                    ),
                    "Post receives before the peer may send. With rnr_retry 7 the requester waits for ever; a smaller one makes the fault visible.",
                );
            }
            if found.responses > 0 {
                return conclude(
                    "peer-unreachable",
                    format!("{} {ended}", self.partial_answer()),
                    "See why the other side ended while requests to it were under way: its exit status and its own log.",
                );
            }
            return conclude(
                "peer-unreachable",
                format!(
                    "The port of {other} is gone: its program or daemon ended, or nothing listens on that address."
                ),
                "Start the other side first, and look at its end: `softhca status` lists the cards that run.",
            );
        }
        if found.link_down {
            return conclude(
                "link-down",
                format!("The link to {other} was down, so nothing arrived. {timer}"),
                "Bring the link up again, or give the connection more time: timeout and retry_cnt of the queue pair.",
            );
        }
        if let Some((reason, sentence)) = &found.dropped_by_peer {
            return self.dropped_by_peer(reason, sentence, &timer);
        }
        // Without any answer, a capture shows no more of a loss than that there is no answer.
        let is_ambiguous = self.log.is_capture && found.certainty == Some(Certainty::Ambiguous);
        let lost = found.lost_request.as_ref().filter(|_| !is_ambiguous);
        if let Some((packet, who)) = lost.or(found.corrupted.as_ref()) {
            let tail = format!(
                "{packet} did not arrive ({who}), and nothing came after it that would have shown {other} the gap. So no NAK was sent: only the timer of {} could detect the loss.",
                self.local_name()
            );
            return conclude(
                "request-lost",
                format!("{tail} {timer} {}", self.recovery_text()),
                "Find out where packets are lost. The last packet of a burst is the one whose loss costs a whole timeout.",
            );
        }
        if let Some((packet, who)) = &found.lost_response {
            return conclude(
                "response-lost",
                format!(
                    "{other} did what was asked, but its answer did not arrive: {packet}, {who}. {} cannot distinguish a lost answer from a lost request. {timer} {}",
                    self.local_name(),
                    self.recovery_text()
                ),
                "Mind that the operation may have been done although it failed here: the memory of the peer may have changed.",
            );
        }
        if found.damaged_answers > 0 {
            return conclude(
                "damaged",
                format!(
                    "The card of {} dropped {} a packet with a wrong ICRC while it waited: the answers of {other} may be among them. {timer}",
                    self.local_name(),
                    times(found.damaged_answers)
                ),
                "Look for a rule that corrupts, or for a middlebox that rewrites headers: an ICRC covers the IP and UDP headers too. A capture shows which packets are damaged.",
            );
        }
        if found.rnr_waits > 0 {
            return conclude(
                "rnr",
                format!(
                    "{other} had no receive posted: it refused the request {} with an RNR NAK, and did not answer after the last wait. {timer}",
                    times(found.rnr_waits)
                ),
                "Post receives before the peer may send, and see whether the peer is still alive.",
            );
        }
        if found.responses > 0 && !self.log.is_capture {
            return conclude(
                "no-response",
                format!("{} {timer}", self.partial_answer()),
                PARTIAL_ANSWER_ADVICE,
            );
        }
        if self.log.is_capture {
            let tries = match found.retransmissions {
                0 => String::new(),
                tries => format!(", although the request was sent {}", times(tries + 1)),
            };
            return conclude(
                "no-response",
                format!(
                    "No answer of {other} was captured{tries}. The capture does not show why: the requests did not arrive, the peer does not run or has no such queue pair, or its answers were lost before the capture point or take a path that is not captured."
                ),
                "See whether the peer runs and its queue pair is in RTR or RTS. A second capture at its end shows whether the requests arrive: `softhca trace A B` joins both.",
            );
        }
        if self.log.peer(self.work_request.queue_pair).is_none() {
            let (address, qp) = match self.log.peer_address(self.work_request.queue_pair) {
                Some((address, qp)) => (address.to_string(), format!("{qp:#x}")),
                None => ("the peer".into(), "of the peer".into()),
            };
            return conclude(
                "no-peer",
                format!(
                    "No answer came from {address}, and the log has no queue pair {qp} there: a wrong address, a wrong queue pair number, or a peer that is not running. {timer}"
                ),
                "Compare the address (GID) and the queue pair number that were exchanged with those of the peer, and see that it is in RTR before the first message is sent.",
            );
        }
        let heard = if found.reached_peer {
            "received it and did not answer in time"
        } else {
            "received nothing of it"
        };
        conclude(
            "no-response",
            format!("The card of {other} {heard}. {timer}"),
            "See whether the peer is alive, in RTR or RTS, and connected to this queue pair: `softhca trace` on a capture of both ends shows how far the packets came.",
        )
    }

    /// The peer answers, but not this.
    fn partial_answer(&self) -> String {
        let Symptoms { responses, last_response_ns, .. } = self.symptoms;
        format!(
            "{} is alive: it answered {}, the last time at {}, but not this request.",
            self.peer_name(),
            times(*responses),
            duration(*last_response_ns)
        )
    }

    fn timeout_text(&self) -> String {
        let Some(profile) = self.log.attributes(self.work_request.queue_pair) else { return String::new() };
        let Some(ack_timeout) = profile.ack_timeout else {
            return "timeout is 0: the requester would wait for ever.".into();
        };
        let one = duration(4096u64 << (profile.timeout & 0x1f));
        let tries = u32::from(profile.retry_cnt);
        match profile.recovery.as_ref() {
            "fatal" => format!(
                "timeout {} means {one} (4.096 µs times 2 to the {}); with retry_cnt {tries} and nothing sent again, the peer had {}.",
                profile.timeout,
                profile.timeout,
                duration(ack_timeout)
            ),
            _ => format!(
                "timeout {} means {one} (4.096 µs times 2 to the {}) for each of the {} tries that retry_cnt {tries} allows.",
                profile.timeout,
                profile.timeout,
                tries + 1
            ),
        }
    }

    /// The peer's card got the packets and threw them away without an answer.
    fn dropped_by_peer(&self, reason: &str, sentence: &str, timer: &str) -> Conclusion {
        let other = self.peer_name();
        let advice = match reason {
            "no-queue-pair" => {
                "The queue pair number is wrong, or the peer destroyed its queue pair: exchange numbers anew for every connection."
            }
            "pkey-mismatch" => "Both ends need a common P_Key: compare pkey_index and the tables.",
            "address-mismatch" => {
                "The peer connected its queue pair to another host: compare the GID that it was given (dlid is not used on RoCE)."
            }
            "bad-icrc" => {
                "The packet was damaged on the way; a card drops it without an answer. Look for a rule that corrupts, or for a middlebox that rewrites headers."
            }
            "beyond-window" => {
                "The two ends count from different PSNs: sq_psn here must be rq_psn there. Exchange the PSN with the queue pair number."
            }
            "wrong-service" => "One end is RC and the other UC or UD: create both with the same type.",
            "invalid-qp-state/error" => {
                "The peer's queue pair is in ERR: look for its first completion with an error, or for the call that took it there."
            }
            reason if reason.starts_with("invalid-qp-state") => {
                "The peer has to be in RTR before the first packet comes. Exchange a message of your own (over TCP, or the connection manager) when it is. Cards that retransmit hide this race: with recovery go-back-n the packet is sent again after the timeout."
            }
            _ => "See docs/reference/errors.md for what a card drops without an answer.",
        };
        conclude(
            "dropped-by-peer",
            format!(
                "The packets reached {other}, whose card dropped them without an answer: {sentence}. {timer}"
            ),
            advice,
        )
    }

    fn rnr_retry_exceeded(&self) -> Conclusion {
        let (waits, total) = (self.symptoms.rnr_waits, duration(self.symptoms.rnr_wait_ns));
        let retry = self.log.attributes(self.work_request.queue_pair).map_or(String::new(), |profile| {
            format!(
                " rnr_retry is {}: after as many waits the requester gives up (7 would mean for ever).",
                profile.rnr_retry
            )
        });
        conclude(
            "rnr",
            format!(
                "{} needs a receive at {}, and none was posted: it was refused {}, over {total} of waiting.{retry}",
                self.work_request.title(),
                self.peer_name(),
                times(waits + 1)
            ),
            "Post receives before the peer may send, and keep some posted: one for each message that can be under way. A larger min_rnr_timer at the receiver makes each wait longer, rnr_retry 7 hides the fault rather than curing it.",
        )
    }

    fn flushed(&self) -> Conclusion {
        let own = self.local_name();
        let Some((reason, sentence)) = &self.symptoms.error_transition else {
            return conclude(
                "flushed",
                format!(
                    "{own} was in an error state, where everything that is posted is flushed: it was never tried."
                ),
                "Look for the first completion of this queue pair that failed and was not flushed.",
            );
        };
        let peer = self.log.peer(self.work_request.queue_pair);
        let is_told = self.log.work_requests.iter().any(|work| {
            Some(work.queue_pair) == peer && work.failed() && work.status.as_deref() != Some("WR_FLUSH_ERR")
        });
        if let (false, Some(refusal)) = (is_told, reason.strip_prefix("request-rejected/")) {
            return self.request_refused(refusal, sentence);
        }
        match reason.as_str() {
            "requested" => conclude(
                "flushed",
                format!(
                    "The program itself took {own} to the error state. Everything that waited there was flushed, in order, and was never tried, or its end is unknown."
                ),
                "This is the regular way to get all buffers back before a queue pair is destroyed: poll until as many came back as were posted.",
            ),
            "completion-queue-overflow" => conclude(
                "cq-overflow",
                format!(
                    "The completion queue of {own} had no room for one more completion. That stops every queue pair that uses it, and everything that waited there was flushed."
                ),
                "Make the completion queue at least as large as all queues that complete to it, or poll it more often.",
            ),
            _ if self.work_request.is_receive() => conclude(
                "flushed",
                format!(
                    "{own} failed for another reason ({sentence}), and every receive that was posted there came back flushed: no message was put into it."
                ),
                "Look at the cause above. The connection has to be made anew: RESET, INIT, RTR, RTS.",
            ),
            _ => conclude(
                "flushed",
                format!(
                    "{own} failed for another reason ({sentence}), and everything that waited there was flushed. {} is not to blame, and may or may not have reached the peer.",
                    self.work_request.title()
                ),
                "Look at the cause above. The connection has to be made anew: RESET, INIT, RTR, RTS.",
            ),
        }
    }

    /// Both transmissions of a request were answered: the timer ran out before the answer came.
    fn is_answered_late(&self) -> bool {
        let found = self.symptoms;
        let is_lossless =
            found.lost_request.is_none() && found.lost_response.is_none() && found.corrupted.is_none();
        let ran_out = self.log.is_capture || found.timeouts > 0 && is_lossless;
        ran_out && found.delayed.is_some() && !found.is_reordered
    }

    /// It succeeded, but not at once.
    fn delayed(&self) -> Conclusion {
        let found = self.symptoms;
        let mut why = Vec::new();
        if found.rnr_waits > 0 {
            why.push(format!(
                "{} had no receive posted, {}: {} were spent waiting",
                self.peer_name(),
                times(found.rnr_waits),
                duration(found.rnr_wait_ns)
            ));
        }
        let lost = found.lost_request.as_ref().or(found.corrupted.as_ref());
        match (lost, &found.lost_response) {
            (Some((packet, who)), _) | (None, Some((packet, who))) if self.log.is_capture => {
                let arrived = match found.certainty {
                    Some(Certainty::Ambiguous) => "may not have arrived",
                    Some(Certainty::Inferred) => "probably did not arrive",
                    _ => "did not arrive",
                };
                why.push(format!("{packet} {arrived} ({who})"));
            }
            (Some((packet, who)), _) => {
                why.push(format!("{packet} did not arrive ({who}) and had to be sent again"));
            }
            (None, Some((packet, who))) => {
                why.push(format!("{packet} did not arrive ({who}), although the request had been executed"));
            }
            (None, None) => {}
        }
        if found.timeouts > 0 {
            why.push(format!(
                "the ack timer had to run out {} before anything was sent again",
                times(found.timeouts)
            ));
        }
        if let Some((packet, who)) = &found.delayed {
            let held =
                if found.timeouts > 0 && self.log.is_capture { "was answered late" } else { "was held up" };
            why.push(format!("{packet} {held} ({who})"));
        }
        if found.detection_ns > 0 && why.is_empty() {
            return conclude(
                "foreign-peer",
                format!(
                    "It took longer because the card waited {} before its first packet: it had to find out that {} is not SoftHCA.",
                    duration(found.detection_ns),
                    self.peer_name()
                ),
                "This happens once for each host. A peer that is not SoftHCA does not answer the question; later connections to it start at once.",
            );
        }
        if why.is_empty() {
            return conclude("none", "Nothing held it up.", "");
        }
        let advice = match () {
            () if found.rnr_waits > 0 => {
                "Post receives before the peer sends, as many as messages can be under way."
            }
            () if self.is_answered_late() => {
                "The timer is shorter than the peer and the network take for an answer: raise timeout, or find out what makes answers late."
            }
            () if self.log.is_capture && found.timeouts > 0 => {
                "Where a request and its copy were both answered, the timer is too short: raise timeout. Otherwise find out where packets are lost; a second capture at the other end shows it: `softhca trace A B` joins both."
            }
            () if found.timeouts > 0 => {
                "A timeout is far longer than a round trip. Losses in the middle of a burst are noticed at once by a NAK, those at its end only by the timer: lower timeout if the network is known, and find out where packets are lost."
            }
            () if found.lost_request.is_none()
                && found.lost_response.is_none()
                && found.delayed.is_some()
                && (found.is_reordered || found.retransmissions > 0) =>
            {
                reordering_advice(self.recovery())
            }
            () if found.retransmissions > 0 => {
                "Everything since the loss was sent again (go-back-n): losses cost bandwidth too. Find out where packets are lost."
            }
            () => "",
        };
        let code = match () {
            () if found.rnr_waits > 0 => "rnr",
            () if found.lost_request.is_some() => "request-lost",
            () if found.corrupted.is_some() => "damaged",
            () if found.lost_response.is_some() => "response-lost",
            () if self.is_answered_late() => "timeout",
            () if found.delayed.is_some() && !found.is_reordered && found.retransmissions == 0 => "delayed",
            () if found.delayed.is_some() => "reordered",
            () => "timeout",
        };
        conclude(code, format!("It took longer because {}.", why.join("; ")), advice)
    }

    fn incomplete(&self) -> Conclusion {
        let is_not_ready =
            self.symptoms.nak.as_ref().is_some_and(|(reason, _)| reason == "receiver-not-ready");
        if self.log.is_capture && is_not_ready {
            return conclude(
                "rnr",
                format!(
                    "{} had no receive posted: it refused the request {} with an RNR NAK. The capture ends after the last one: the requester waits, or gave up.",
                    self.peer_name(),
                    times(self.symptoms.rnr_waits + 1)
                ),
                "Post receives before the peer may send, and keep some posted: one for each message that can be under way.",
            );
        }
        let found = self.symptoms;
        if let Some(conclusion) = self.psn_mismatch() {
            return conclusion;
        }
        if self.log.is_capture
            && found.retransmissions > 0
            && found.lost_response.is_none()
            && found.certainty == Some(Certainty::Ambiguous)
        {
            return self.no_response();
        }
        if self.log.is_capture {
            return conclude(
                "incomplete",
                "The capture ends before an answer to it: the answer may follow, may be lost, or may not have been captured.",
                "Capture for longer.",
            );
        }
        let profile = self.log.attributes(self.work_request.queue_pair);
        if self.symptoms.rnr_waits > 0 && profile.is_some_and(|profile| profile.rnr_retry == 7) {
            return conclude(
                "rnr",
                format!(
                    "{} never posts a receive, and rnr_retry 7 means to try for ever: it will not end by itself.",
                    self.peer_name()
                ),
                "Post receives at the peer. A smaller rnr_retry makes the fault visible.",
            );
        }
        if profile.is_some_and(|profile| profile.ack_timeout.is_none()) {
            const FOR_EVER: &str = "A timeout of 0 means to wait for ever: it will not end by itself.";
            let found = self.symptoms;
            let cause = match (&found.dropped_by_peer, &found.lost_request) {
                (Some((reason, sentence)), _) if reason.starts_with("invalid-qp-state") => format!(
                    "{} does not answer: {sentence}, and a queue pair in that state drops requests silently, as the specification demands. {FOR_EVER}",
                    self.peer_name()
                ),
                (Some((_, sentence)), _) => {
                    format!("{} drops the request silently: {sentence}. {FOR_EVER}", self.peer_name())
                }
                (None, Some((packet, who))) => {
                    format!("{packet} did not arrive ({who}), and nothing after it shows the gap. {FOR_EVER}")
                }
                (None, None) if found.responses > 0 => format!("{} {FOR_EVER}", self.partial_answer()),
                (None, None) => format!("No answer came. {FOR_EVER}"),
            };
            return conclude(
                "no-response",
                cause,
                "Set timeout to something like 14 (67 ms) when going to RTS.",
            );
        }
        conclude("incomplete", "The log ends before it does.", "Write the log for longer.")
    }
}
