//! What an event log says about a run, to judge statements about captures of it.

use softhca_trace::log::{CompletionData, EffectData, Entry, LogEvent};
use std::fmt::Write;

/// Where a capture was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// At the requester.
    Alice,
    /// Between the two.
    Switch,
    /// At the responder.
    Bob,
    /// Where each packet was sent: at both ends.
    Senders,
}

/// The effect of a fault on a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harm {
    Lost,
    Damaged,
    Late,
    Copied,
}

/// A packet that a fault changed.
#[derive(Clone, Copy, Debug)]
pub struct HarmedPacket {
    pub is_response: bool,
    pub psn: u32,
    pub harm: Harm,
    /// On the second link of its way.
    pub is_second_link: bool,
    pub time: u64,
}

impl HarmedPacket {
    /// The fault was behind the place of the capture: the packet had passed it.
    pub fn is_behind(&self, place: Place) -> bool {
        let passed = match place {
            Place::Senders => 0,
            Place::Switch => 1,
            Place::Alice if self.is_response => 2,
            Place::Bob if !self.is_response => 2,
            Place::Alice | Place::Bob => 0,
        };
        passed <= u8::from(self.is_second_link)
    }
}

/// A request that alice sent.
#[derive(Debug)]
pub struct SentRequest {
    pub psn: u32,
    pub time: u64,
    pub is_retransmission: bool,
    pub cause: String,
}

/// A work request of alice.
#[derive(Debug)]
pub struct Work {
    pub first_psn: u32,
    pub packets: u32,
    pub end: Option<(u64, String)>,
    wr_id: u64,
}

impl Work {
    pub fn has(&self, psn: u32) -> bool {
        (psn.wrapping_sub(self.first_psn) & 0xff_ffff) < self.packets
    }
}

/// The truth about a run in which alice sends requests to bob over a switch.
#[derive(Debug, Default)]
pub struct Truth {
    pub harmed: Vec<HarmedPacket>,
    pub requests: Vec<SentRequest>,
    pub works: Vec<Work>,
    /// PSN and time of each expiry of the ACK timer.
    pub timeouts: Vec<(u32, u64)>,
    pub rnr_waits: Vec<(u32, u64)>,
    pub duplicates: Vec<u32>,
    /// PSN and time of each answer that alice received.
    pub answers: Vec<(u32, u64)>,
}

fn is_response(opcode: &str) -> bool {
    ["RESPONSE", "ACKNOWLEDGE"].iter().any(|word| opcode.contains(word))
}

impl Truth {
    pub fn new(log: &[Entry]) -> Truth {
        let mut truth = Truth::default();
        log.iter().for_each(|entry| truth.add(entry));
        truth
    }

    fn end(&mut self, wr_id: u64, time: u64, status: &str) {
        let open = self.works.iter_mut().find(|work| work.wr_id == wr_id && work.end.is_none());
        open.into_iter().for_each(|work| work.end = Some((time, status.to_owned())));
    }

    fn add(&mut self, entry: &Entry) {
        let (time, is_alice) = (entry.time, entry.host == "alice");
        match &entry.event {
            LogEvent::Fault { effect, opcode: Some(opcode), psn: Some(psn), .. } => {
                let harm = match effect {
                    EffectData::Dropped { .. } => Harm::Lost,
                    EffectData::Corrupted { .. } => Harm::Damaged,
                    EffectData::Delayed { .. } | EffectData::Reordered { .. } => Harm::Late,
                    EffectData::Duplicated { .. } => Harm::Copied,
                    _ => return,
                };
                let is_second_link = entry.host != "alice" && entry.host != "bob";
                let is_response = is_response(opcode);
                self.harmed.push(HarmedPacket { is_response, psn: *psn, harm, is_second_link, time });
            }
            LogEvent::PacketSent { packet, retransmission, cause, .. } if is_alice => {
                self.requests.push(SentRequest {
                    psn: packet.psn,
                    time,
                    is_retransmission: *retransmission,
                    cause: cause.to_string(),
                });
            }
            LogEvent::PacketReceived { packet, .. } if is_alice => self.answers.push((packet.psn, time)),
            LogEvent::WqeFetched { wr_id, first_psn, packets, .. } if is_alice => {
                let (first_psn, packets, wr_id) = (*first_psn, *packets, *wr_id);
                self.works.push(Work { first_psn, packets, end: None, wr_id });
            }
            LogEvent::Completed { completion: CompletionData { wr_id, status, .. }, .. } if is_alice => {
                self.end(*wr_id, time, status);
            }
            LogEvent::UnsignaledCompleted { wr_id, .. } if is_alice => self.end(*wr_id, time, "SUCCESS"),
            LogEvent::AckTimedOut { oldest_psn, .. } if is_alice => self.timeouts.push((*oldest_psn, time)),
            LogEvent::RnrWaitStarted { psn, .. } if is_alice => self.rnr_waits.push((*psn, time)),
            LogEvent::DuplicateRequestHandled { psn, .. } => self.duplicates.push(*psn),
            _ => {}
        }
    }

    /// Packets with this PSN that one of these faults hit.
    pub fn harmed(&self, is_response: bool, psn: u32) -> impl Iterator<Item = &HarmedPacket> {
        self.harmed.iter().filter(move |packet| packet.is_response == is_response && packet.psn == psn)
    }

    /// The story, for a message of a failed test.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for harmed in &self.harmed {
            let _ = writeln!(text, "  {harmed:?}");
        }
        for (psn, time) in &self.timeouts {
            let _ = writeln!(text, "  timeout of {psn} at {time}");
        }
        for request in self.requests.iter().filter(|request| request.is_retransmission) {
            let _ = writeln!(text, "  {request:?}");
        }
        for work in &self.works {
            let _ = writeln!(text, "  {work:?}");
        }
        text
    }
}
