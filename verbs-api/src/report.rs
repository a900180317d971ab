//! The results of a world: the record while it runs, and the report or the failure at its end.

use crate::executor::WaitReason;
use crate::explanation::RecentEvents;
use softhca_engine::{Event, Instant};
use softhca_fabric::{
    Direction, EventSink, Fault, FrameCounters, HostId, NetworkEvent, OwnedEvent, RuleCounters, RuleId,
};
use softhca_trace::fault_effect;
use softhca_trace::log::event_text;
use std::error::Error;
use std::fmt::{self, Write};
use std::sync::Arc;
use std::time::Duration;

/// Keeps a digest of the events of a world, and a log on request.
#[derive(Default)]
pub(crate) struct RunRecorder {
    pub host_names: Vec<Arc<str>>,
    /// The hosts at the ends of each link.
    pub link_ends: Vec<[HostId; 2]>,
    pub log: Option<Vec<LogEntry>>,
    pub forward_to: Option<Box<dyn EventSink + Send>>,
    pub digest: Digest,
    pub recent: RecentEvents,
}

impl RunRecorder {
    fn record_entry(&mut self, at: Instant, host: HostId, what: LogEntryKind) {
        let _ = write!(self.digest, "{at:?} {} {what:?}", host.0);
        if let Some(record) = &mut self.log {
            record.push(LogEntry { at, host: self.host_names[host.0 as usize].clone(), kind: what });
        }
    }
}

impl EventSink for RunRecorder {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        match *event {
            NetworkEvent::Hca { host, event } => {
                self.recent.push(now, OwnedEvent::Hca { host, event: *event });
                self.record_entry(now, host, LogEntryKind::Event(*event));
            }
            NetworkEvent::Fault { link, fault } => {
                self.recent.push(now, OwnedEvent::Fault { link, fault: *fault });
                let [first, second] = self.link_ends[link.0 as usize];
                let from = if fault.direction == Direction::Forward { first } else { second };
                self.record_entry(now, from, LogEntryKind::Fault(*fault));
            }
            NetworkEvent::Fabric(event) => {
                let _ = write!(self.digest, "{now:?} {event:?}");
            }
            _ => {}
        }
        if let Some(next) = &mut self.forward_to {
            next.on_event(now, event);
        }
    }
}

/// A hash of all events: FNV-1a of the text of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Digest(pub u64);

impl Default for Digest {
    fn default() -> Digest {
        Digest(0xcbf2_9ce4_8422_2325)
    }
}

impl Write for Digest {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0 =
            text.bytes().fold(self.0, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        Ok(())
    }
}

/// An event of a run. It prints as one line.
#[derive(Clone, Debug, PartialEq)]
pub struct LogEntry {
    /// The virtual time.
    pub at: Instant,
    /// The host of the event, or the sender of the packet.
    pub host: Arc<str>,
    /// The event or fault.
    pub kind: LogEntryKind,
}

/// The kinds of log entries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LogEntryKind {
    /// An event of the host's card.
    Event(Event),
    /// A fault that changed a packet of the host.
    Fault(Fault),
}

impl fmt::Display for LogEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let microseconds = self.at.nanos() as f64 / 1000.0;
        write!(f, "{microseconds:>12.3} µs  {:<10} ", self.host)?;
        match &self.kind {
            LogEntryKind::Event(event) => f.write_str(&event_text(self.at, event)),
            LogEntryKind::Fault(fault) => match fault.packet.relative_psn {
                Some(psn) => write!(f, "packet {psn:+} {}", fault_effect(fault)),
                None => write!(f, "a packet {}", fault_effect(fault)),
            },
        }
    }
}

/// The result of a run that succeeded.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The seed of the world.
    pub seed: u64,
    /// When the last host's code ended.
    pub ended_at: Instant,
    /// A hash of all events: the same for every run with the same seed and code.
    pub digest: u64,
    /// How many frames were sent, delivered and dropped.
    pub frame_counters: FrameCounters,
    /// All events, if [`World::record_log`](crate::sim::World::record_log) was called; otherwise empty.
    pub log: Vec<LogEntry>,
    pub(crate) rule_counters: Vec<(RuleId, RuleCounters)>,
}

impl Report {
    /// How often a fault rule matched and fired.
    pub fn rule_counters(&self, rule: RuleId) -> RuleCounters {
        let found = self.rule_counters.iter().find(|(id, _)| *id == rule);
        found.map(|(_, counters)| *counters).unwrap_or_default()
    }
}

/// Why a run failed. Its text has the time, the cause, the seed that repeats it, and the explanation.
#[derive(Clone, PartialEq)]
pub struct Failure {
    /// The seed of the world.
    pub seed: u64,
    /// The virtual time of the failure.
    pub at: Instant,
    /// The cause.
    pub cause: FailureCause,
    /// Why work requests failed, and the last steps of the connection concerned, as text; empty if none failed and none
    /// is outstanding. Behind them, what readers saw that a device in order would not have shown.
    pub explanation: String,
}

/// The cause of a failed run.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum FailureCause {
    /// The code of a host returned an error.
    Error {
        /// Which host.
        host: String,
        /// The error.
        message: String,
    },
    /// The code of a host panicked.
    Panic {
        /// Which host.
        host: String,
        /// The panic's message.
        message: String,
    },
    /// A check of [`World::check`](crate::sim::World::check) failed.
    Check {
        /// Its error.
        message: String,
    },
    /// Hosts wait, and no event is scheduled that could wake them.
    Deadlock {
        /// Which hosts, and for what.
        waiting: Vec<(String, Vec<WaitReason>)>,
        /// Queue pairs with outstanding work requests, and what they wait for.
        queue_pairs: Vec<String>,
    },
    /// The run took longer than the world's limit.
    TimeLimit {
        /// The limit.
        limit: Duration,
        /// Which hosts had not ended, and what they waited for.
        waiting: Vec<(String, Vec<WaitReason>)>,
        /// Queue pairs with outstanding work requests, and what they wait for.
        queue_pairs: Vec<String>,
    },
    /// Code runs without an await that lets time pass.
    Livelock {
        /// The host whose code ran last.
        host: String,
    },
    /// A link or a fault names a host that does not exist.
    UnknownHost {
        /// The name.
        name: String,
        /// The names that exist.
        known: Vec<String>,
    },
}

fn write_waiting(f: &mut fmt::Formatter<'_>, waiting: &[(String, Vec<WaitReason>)]) -> fmt::Result {
    for (host, waits) in waiting {
        let waits: Vec<String> = waits.iter().map(WaitReason::to_string).collect();
        match waits.is_empty() {
            true => write!(f, "\n  {host} waits for something outside of the world")?,
            false => write!(f, "\n  {host} waits for {}", waits.join(" and "))?,
        }
    }
    Ok(())
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let microseconds = self.at.nanos() as f64 / 1000.0;
        match &self.cause {
            FailureCause::Error { host, message } => {
                write!(f, "host {host:?} failed at {microseconds} µs: {message}")?
            }
            FailureCause::Panic { host, message } => {
                write!(f, "host {host:?} panicked at {microseconds} µs: {message}")?;
            }
            FailureCause::Check { message } => write!(f, "{message}")?,
            FailureCause::Deadlock { waiting, queue_pairs } => {
                write!(f, "deadlock at {microseconds} µs: no event is scheduled, and")?;
                write_waiting(f, waiting)?;
                for queue_pair in queue_pairs {
                    write!(f, "\n  {queue_pair}")?;
                }
            }
            FailureCause::TimeLimit { limit, waiting, queue_pairs } => {
                write!(f, "the run did not end within {limit:?} of virtual time:")?;
                write_waiting(f, waiting)?;
                for queue_pair in queue_pairs {
                    write!(f, "\n  {queue_pair}")?;
                }
            }
            FailureCause::Livelock { host } => {
                write!(f, "host {host:?} runs at {microseconds} µs without letting time pass")?;
            }
            FailureCause::UnknownHost { name, known } => {
                write!(f, "the world has no host {name:?}, only {}", known.join(", "))?;
            }
        }
        write!(f, "\n  to see it again: World::new({}){}", self.seed, self.explanation)
    }
}

/// As its display, so that `unwrap` shows sentences.
impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error for Failure {}
