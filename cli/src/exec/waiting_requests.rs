//! Requesters that wait for ever: their timeout is 0, and nothing acknowledges their work requests.

use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};

/// The most queue pairs that are reported.
const MAX_REPORTED: usize = 4;

/// The outstanding work requests of queue pairs with timeout 0.
#[derive(Default)]
pub struct WaitingRequests {
    /// By host and number. Queue pairs with a timeout are absent.
    queue_pairs: BTreeMap<(String, u64), VecDeque<Outstanding>>,
}

struct Outstanding {
    wr_id: u64,
    operation: String,
    since: u64,
}

impl WaitingRequests {
    /// Processes a line of the log.
    pub fn push(&mut self, name: &str, line: &str) {
        let is_configured = name == "qp:configured";
        let is_work = matches!(name, "work:fetched" | "work:completed" | "work:unsignaled_completed");
        if !is_configured && (!is_work || self.queue_pairs.is_empty()) {
            return;
        }
        let Ok(line) = serde_json::from_str::<Value>(line) else { return };
        let (host, data) = (line["host"].as_str().unwrap_or_default(), &line["data"]);
        let key = (host.to_owned(), data["qp"].as_u64().unwrap_or_default());
        let text = |field: &str| data[field].as_str().unwrap_or_default();
        if is_configured {
            let is_requester = matches!(text("qp_type"), "rc" | "xrc-initiator");
            if is_requester && data["ack_timeout"].is_null() {
                self.queue_pairs.entry(key).or_default();
            } else {
                self.queue_pairs.remove(&key);
            }
            return;
        }
        let Some(outstanding) = self.queue_pairs.get_mut(&key) else { return };
        let wr_id = data["wr_id"].as_u64().unwrap_or_default();
        if name == "work:fetched" {
            outstanding.push_back(Outstanding {
                wr_id,
                operation: text("operation").into(),
                since: line["time"].as_u64().unwrap_or_default(),
            });
        } else if !text("operation").starts_with("rec") {
            // Work requests of a queue complete in order.
            if let Some(position) = outstanding.iter().position(|request| request.wr_id == wr_id) {
                outstanding.drain(..=position);
            }
        }
    }

    /// A sentence for each queue pair that still waits.
    pub fn findings(&self) -> Vec<String> {
        let waiting = self.queue_pairs.iter().filter_map(|((host, qp), requests)| {
            let first = requests.front()?;
            let seconds = first.since as f64 / 1e9;
            let count = match requests.len() {
                1 => "a work request is".into(),
                count => format!("{count} work requests are"),
            };
            Some(format!(
                "{host} QP {qp:#x}: {count} not acknowledged, since {seconds:.3} s ({}, wr_id {:#x}). The queue pair has timeout 0, so it waits for ever: a peer that is gone or in \
                 ERR does not answer. Set timeout to something like 14 (67 ms).",
                first.operation, first.wr_id
            ))
        });
        waiting.take(MAX_REPORTED).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::WaitingRequests;

    fn push(waiting: &mut WaitingRequests, name: &str, data: &str) {
        waiting
            .push(name, &format!(r#"{{"time":2000000000,"host":"bob","name":"{name}","data":{{{data}}}}}"#));
    }

    #[test]
    fn only_unacknowledged_requests_of_queue_pairs_without_a_timeout_are_reported() {
        let mut waiting = WaitingRequests::default();
        push(&mut waiting, "qp:configured", r#""qp":17,"qp_type":"rc","timeout":14,"ack_timeout":67000000"#);
        push(&mut waiting, "qp:configured", r#""qp":18,"qp_type":"rc","timeout":0"#);
        for qp in [17, 18] {
            push(&mut waiting, "work:fetched", &format!(r#""qp":{qp},"wr_id":1,"operation":"write""#));
            push(&mut waiting, "work:fetched", &format!(r#""qp":{qp},"wr_id":2,"operation":"send""#));
        }
        push(&mut waiting, "work:completed", r#""qp":18,"wr_id":2,"operation":"receive""#);
        push(&mut waiting, "work:unsignaled_completed", r#""qp":18,"wr_id":1"#);
        let findings = waiting.findings();
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert!(
            findings[0].starts_with("bob QP 0x12: a work request is not acknowledged, since 2.000 s"),
            "{findings:?}"
        );
        assert!(findings[0].contains("(send, wr_id 0x2)"), "{findings:?}");
        push(&mut waiting, "work:completed", r#""qp":18,"wr_id":2,"operation":"send""#);
        assert!(waiting.findings().is_empty());
    }
}
