//! The recent events of a world, from which a failure is explained.

use crate::simulated::FabricSink;
use softhca_engine::{Event, Instant};
use softhca_fabric::{EventSink, HostId, OwnedEvent, World};
use softhca_trace::log::EntryBuilder;
use softhca_trace::why::{LogAnalyzer, Query};
use softhca_trace::{EventLog, Ladder, LadderBuilder, LadderStyle, NameTable};
use softhca_types::CompletionOpcode;
use softhca_wire::Qpn;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write;
use std::path::Path;

/// How many events are kept.
const MAX_RECENT: usize = 1 << 15;
/// How many steps of a ladder a failure shows.
const LADDER_STEPS: usize = 16;

/// The last events of a world, without its packets.
#[derive(Default)]
pub(crate) struct RecentEvents {
    events: VecDeque<(Instant, OwnedEvent)>,
}

impl RecentEvents {
    pub fn push(&mut self, now: Instant, event: OwnedEvent) {
        if self.events.len() == MAX_RECENT {
            self.events.pop_front();
        }
        self.events.push_back((now, event));
    }

    /// Explains the work requests that failed, and draws the last steps of the connection of the first, or else of that
    /// with the last event. Empty if nothing failed and nothing is outstanding.
    pub fn explain(&self, names: &NameTable, has_outstanding: bool) -> String {
        let mut entries = EntryBuilder::new(names.clone());
        let mut analyzer = LogAnalyzer::new(&entries.header("a World"));
        let mut ladders = LadderBuilder::new(names.clone());
        let mut failed = None;
        for (now, event) in &self.events {
            if let OwnedEvent::Hca { event: Event::Completed { completion, .. }, .. } = event
                && !completion.status.is_success()
            {
                failed.get_or_insert(completion.qpn);
            }
            entries.entry(*now, &event.as_event()).into_iter().for_each(|entry| analyzer.push(entry));
            ladders.on_event(*now, &event.as_event());
        }
        let mut text = String::new();
        if failed.is_some()
            && let Ok(diagnosis) = analyzer.diagnose(&Query::default())
        {
            let _ = write!(text, "\n\n{}", diagnosis.text(100));
        }
        // Messages of the connection manager explain nothing if there is another connection.
        let is_management = |ladder: &Ladder| ladder.qpns.contains(&Some(Qpn::GSI));
        let relevance = |ladder: &Ladder| {
            let has_failed = failed.is_some() && ladder.qpns.contains(&failed);
            (has_failed, !is_management(ladder), ladder.steps.last().map(|step| step.time_ns))
        };
        if (failed.is_some() || has_outstanding)
            && let Some(mut ladder) = ladders.ladders().into_iter().max_by_key(relevance)
        {
            let first = ladder.steps.len().saturating_sub(LADDER_STEPS);
            let from = ladder.steps.get(first).map_or(0, |step| step.time_ns);
            ladder.retain_range(from, i64::MAX);
            let drawing = ladder.draw(LadderStyle::default());
            let _ = write!(text, "\n\nThe last steps of the connection:\n{}", drawing.trim_end());
        }
        text
    }

    /// Writes the events as a log, which `softhca why` reads.
    pub fn write_log(&self, names: &NameTable, title: &str, path: &Path) -> std::io::Result<()> {
        let output = std::io::BufWriter::new(std::fs::File::create(path)?);
        let mut log = EventLog::new(output, title, names.clone());
        self.events.iter().for_each(|(now, event)| log.on_event(*now, &event.as_event()));
        log.finish()
    }

    /// Queue pairs with outstanding work requests, and what each waits for.
    pub fn describe_waits(&self, fabric: &World<FabricSink>) -> Vec<String> {
        let mut oldest: BTreeMap<(HostId, Qpn), VecDeque<(u64, CompletionOpcode)>> = BTreeMap::new();
        let mut rnr_waits: BTreeSet<(HostId, Qpn)> = BTreeSet::new();
        for (_, event) in &self.events {
            let OwnedEvent::Hca { host, event } = event else { continue };
            match *event {
                Event::WqeFetched { qp, wr_id, operation, .. } => {
                    oldest.entry((*host, qp)).or_default().push_back((wr_id, operation));
                }
                Event::Completed { completion, .. } if !completion.opcode.is_receive() => {
                    oldest.entry((*host, completion.qpn)).or_default().pop_front();
                    rnr_waits.remove(&(*host, completion.qpn));
                }
                Event::UnsignaledCompleted { qp, .. } => {
                    oldest.entry((*host, qp)).or_default().pop_front();
                    rnr_waits.remove(&(*host, qp));
                }
                Event::RnrWaitStarted { qp, .. } => {
                    rnr_waits.insert((*host, qp));
                }
                _ => {}
            }
        }
        let mut waits = Vec::new();
        for (id, host) in fabric.hosts() {
            for view in host.hca().queue_pairs().filter(|view| view.outstanding > 0) {
                let request = match oldest.get(&(id, view.qpn)).and_then(VecDeque::front) {
                    Some((wr_id, operation)) => format!("{operation} {wr_id}"),
                    None => "a work request".into(),
                };
                let what = match rnr_waits.contains(&(id, view.qpn)) {
                    true => "a receive of its peer (RNR): none is posted",
                    false if view.state.accepts_responses() => "an acknowledgement of its peer",
                    false => "RTS",
                };
                let (name, qpn, state, count) = (host.name(), view.qpn, view.state, view.outstanding);
                waits.push(format!(
                    "{name}'s queue pair {qpn} is in {state}: {request} waits for {what} ({count} outstanding)"
                ));
            }
        }
        waits
    }
}
