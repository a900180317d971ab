//! Plans in real time: embedded devices on loopback addresses, with the rules on their links.

use crate::Recording;
use crate::evaluate::{self, RunResults};
use crate::executor::Executor;
use crate::hosts::Hosts;
use crate::plan::{Node, Plan};
use crate::recorder::{Recorder, trigger_of};
use crate::report::{Outcome, Verdict};
use softhca::trace::{EventSink, NetworkEvent};
use softhca::{Device, EmbeddedOptions, Settings};
use softhca_engine::Instant;
use softhca_fabric::{Direction, HostId, IdOffsets, LinkId, OwnedEvent, Seed};
use softhca_types::FaultTrigger;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant as Clock};

/// A run ends when nothing has happened for this long and no work is outstanding.
const IDLE_TIME: Duration = Duration::from_millis(150);
/// A run in which nothing happens for this long is stuck.
const STUCK_TIMEOUT: Duration = Duration::from_secs(120);
/// The maximum size of the captured packets. Later packets are not captured.
const MAX_CAPTURED_BYTES: usize = 64 << 20;

/// Executes a plan on real sockets and evaluates it. Expectations about time are skipped.
pub fn run(plan: &Plan, recording: Recording) -> Outcome {
    run_plan(plan, recording).unwrap_or_else(Outcome::failed_to_run)
}

fn run_plan(plan: &Plan, recording: Recording) -> Result<Outcome, String> {
    if !plan.commands.is_empty() {
        return Err("the file starts programs, which only the command `softhca run` can".into());
    }
    plan.check_has_queue_pairs()?;
    if let Some(why) = plan.unsupported_on_udp() {
        return Err(format!("not possible on real sockets: {why}"));
    }
    let journal = Arc::new(Mutex::new(Journal::new()));
    let mut devices = Vec::new();
    for (index, host) in plan.hosts.iter().enumerate() {
        let mut options = EmbeddedOptions::default();
        let min_ack_timeout = options.settings.min_ack_timeout;
        let seed = Seed(plan.seed).draw(&[0x686f_7374, index as u64]) | 1;
        options.settings = Settings { min_ack_timeout, seed, ..host.settings };
        options.event_sink = Box::new(JournalSink { host: index, journal: journal.clone() });
        devices.push(Device::embedded_with(options).map_err(|error| format!("{}: {error}", host.name))?);
    }
    let mut hosts = Hosts::new(plan, devices, None)?;
    let mut executor = Executor::new(plan);
    let timed_out = run_programs(plan, &mut hosts, &mut executor, &journal);
    let journal = std::mem::replace(&mut *lock(&journal), Journal::new());
    let end = hosts.final_state(journal.last.duration_since(journal.start).as_nanos() as u64, timed_out);
    let recorder = journal.replay(plan, &mut hosts).map_err(|error| error.to_string())?;
    let results = RunResults { record: &recorder.record, log: &executor.log, end: &end };
    let mut outcome =
        evaluate::evaluate(plan, &results, &|qp, offset, length| hosts.read_memory(qp, offset, length));
    recorder.add_to(&mut outcome);
    // Times differ between real runs.
    outcome.trace_sha256 = None;
    // A real run cannot be repeated exactly, so a failed one is kept in any case.
    if recording == Recording::Digest && outcome.verdict == Verdict::Pass {
        outcome.artifacts = None;
    }
    Ok(outcome)
}

/// Runs until nothing is left to do. Returns whether the run is stuck.
fn run_programs(
    plan: &Plan,
    hosts: &mut Hosts<'_>,
    executor: &mut Executor<'_>,
    journal: &Mutex<Journal>,
) -> bool {
    let start = Clock::now();
    let now_ns = || start.elapsed().as_nanos() as u64;
    {
        let mut journal = lock(journal);
        (journal.start, journal.last, journal.started) = (start, start, true);
    }
    let limit = plan.duration_ns.map(|duration| Duration::from_nanos(duration) + IDLE_TIME);
    loop {
        let now = start.elapsed();
        // Checked before the queues are polled: the next round polls what completes after this.
        let is_idle = executor.next_due().is_none() && !hosts.is_outstanding();
        let quiet = lock(journal).last.elapsed();
        // Before the steps that follow a completion: a fault of its packets precedes it.
        hosts.triggers.append(&mut lock(journal).triggers);
        executor.deliver_triggers(now.as_nanos() as u64, hosts);
        executor.run_due(now.as_nanos() as u64, hosts);
        let any = executor.deliver_events(now_ns, hosts);
        if executor.log.error.is_some() || limit.is_some_and(|limit| now > limit) {
            return false;
        }
        if is_idle && !any && quiet > IDLE_TIME {
            return false;
        }
        if quiet > STUCK_TIMEOUT {
            return true;
        }
        if !any {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

/// The events of all devices. They are processed after the run, so that they do not slow it down.
struct Journal {
    start: Clock,
    last: Clock,
    /// With their times since the start, each of the host with this index.
    entries: Vec<(Instant, usize, OwnedEvent)>,
    /// What faults may wait for.
    triggers: Vec<FaultTrigger>,
    captured_bytes: usize,
    /// Events before the run, while queue pairs are connected, are not recorded.
    started: bool,
}

fn lock(journal: &Mutex<Journal>) -> MutexGuard<'_, Journal> {
    journal.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Journal {
    fn new() -> Journal {
        let now = Clock::now();
        let (entries, triggers) = (Vec::new(), Vec::new());
        Journal { start: now, last: now, entries, triggers, captured_bytes: 0, started: false }
    }

    /// Adds an event of a device, with a time of its clock.
    fn append(&mut self, host: usize, at: Instant, mut event: OwnedEvent) {
        if !self.started {
            return;
        }
        match &event {
            OwnedEvent::Frame { packet, .. } => {
                self.captured_bytes += packet.len();
                if self.captured_bytes > MAX_CAPTURED_BYTES {
                    return;
                }
            }
            OwnedEvent::Hca { event, .. } => self.triggers.extend(trigger_of(event)),
            _ => {}
        }
        self.last = Clock::now();
        let now = Instant::from_nanos(self.start.elapsed().as_nanos() as u64);
        event.move_to(IdOffsets::of_card(HostId(host as u32)), at, now);
        self.entries.push((now, host, event));
    }

    /// Records the run as if its network were that of the plan.
    fn replay(self, plan: &Plan, hosts: &mut Hosts<'_>) -> std::io::Result<Recorder> {
        let links: Vec<(LinkId, Direction)> = (0..plan.hosts.len())
            .map(|host| {
                let ends =
                    plan.links.iter().map(|link| link.ends.iter().position(|end| *end == Node::Host(host)));
                let mut found = ends.enumerate().filter_map(|(link, end)| Some((link, end?)));
                match found.next() {
                    Some((link, 0)) => (LinkId(link as u32), Direction::Forward),
                    Some((link, _)) => (LinkId(link as u32), Direction::Backward),
                    // The packets of a host without a link go to itself.
                    None => {
                        let loopback = LinkId((plan.links.len() + host) as u32);
                        hosts.names.add_link(loopback, [HostId(host as u32); 2]);
                        (loopback, Direction::Forward)
                    }
                }
            })
            .collect();
        let mut recorder = hosts.recorder(Recording::Everything)?;
        for (now, host, mut event) in self.entries {
            let (link, direction) = links[host];
            match &mut event {
                OwnedEvent::Frame { link: at, direction: way, .. }
                | OwnedEvent::PauseFrame { link: at, direction: way, .. } => (*at, *way) = (link, direction),
                OwnedEvent::Fault { link: at, fault } => (*at, fault.direction) = (link, direction),
                OwnedEvent::Fabric(event) => *event.link_mut() = link,
                OwnedEvent::Hca { .. } => {}
            }
            recorder.on_event(now, &event.as_event());
        }
        Ok(recorder)
    }
}

/// Writes the events of a device to the journal.
struct JournalSink {
    host: usize,
    journal: Arc<Mutex<Journal>>,
}

impl EventSink for JournalSink {
    fn on_event(&mut self, at: Instant, event: &NetworkEvent<'_>) {
        if let Some(event) = OwnedEvent::new(event) {
            lock(&self.journal).append(self.host, at, event);
        }
    }
}
