//! Records the events of a run: the event log, the input of the evaluation, the capture and the ladders.

use crate::plan::Plan;
use crate::record::RunRecord;
use crate::report::{Artifacts, Outcome};
use sha2::{Digest, Sha256};
use softhca_engine::{Event, Instant};
use softhca_fabric::{Endpoint, EventSink, Fault, Flow, HostId, NetworkEvent};
use softhca_trace::{CapturePoints, ComparableTrace, NameTable};
use softhca_types::FaultTrigger;
use softhca_wire::Psn;
use std::io::{self, Write};
use std::mem::take;
use std::net::IpAddr;

/// How much of a run is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recording {
    /// The digest of the event log.
    Digest,
    /// The event log itself, a capture and the ladders.
    Everything,
    /// `Everything`; the capture also has packets where they arrive and where they leave a switch.
    EveryLink,
}

/// Hashes what is written, or keeps it, or both.
#[derive(Default)]
struct HashingWriter {
    hash: Option<Sha256>,
    kept: Option<Vec<u8>>,
}

impl Write for HashingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(hash) = &mut self.hash {
            hash.update(bytes);
        }
        if let Some(kept) = &mut self.kept {
            kept.extend_from_slice(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Receives all events of a run.
pub struct Recorder {
    recording: softhca_trace::Recording<HashingWriter>,
    /// The input of the evaluation.
    pub record: RunRecord,
    /// Packets that faults changed or dropped, with their links.
    packet_faults: Vec<(usize, Fault)>,
    /// The events of the devices, if everything is kept.
    events: Option<Vec<(HostId, Event)>>,
    /// Queue pairs with new completions.
    ready_qps: Vec<usize>,
    /// Hosts with new connection events.
    ready_cm_hosts: Vec<usize>,
    /// The occurrences that faults may wait for, if some do.
    pub triggers: Vec<FaultTrigger>,
    keeps_triggers: bool,
}

/// The occurrence in an event of a device that faults may wait for.
pub fn trigger_of(event: &Event) -> Option<FaultTrigger> {
    match event {
        Event::FaultInjected { rule, .. } => Some(FaultTrigger::Fault(*rule)),
        Event::AsyncEventRaised { event, .. } => Some(FaultTrigger::Event(event.name().into())),
        _ => None,
    }
}

impl Recorder {
    /// Records the run of a plan on hosts with these addresses, with queue pairs at these endpoints.
    pub fn new(
        plan: &Plan,
        names: NameTable,
        addresses: impl Iterator<Item = IpAddr>,
        qps: impl Iterator<Item = (Endpoint, Psn)>,
        recording: Recording,
    ) -> io::Result<Recorder> {
        let mut record = RunRecord::new(plan);
        addresses.for_each(|address| record.add_host(address));
        qps.enumerate()
            .for_each(|(qp, (endpoint, first_psn))| record.add_queue_pair(qp, endpoint, first_psn));
        let points = match recording {
            Recording::EveryLink => CapturePoints::EveryLink,
            _ => CapturePoints::Senders,
        };
        let keeps_all = recording != Recording::Digest;
        let kept = || keeps_all.then(Vec::new);
        let log = HashingWriter { hash: Some(Sha256::new()), kept: kept() };
        let mut recording = softhca_trace::Recording::new(names).with_log(log, &plan.title);
        if keeps_all {
            let capture = HashingWriter { hash: None, kept: kept() };
            recording = recording.with_capture(capture, points)?;
            recording.start_ladders();
        }
        Ok(Recorder {
            recording,
            record,
            packet_faults: Vec::new(),
            events: keeps_all.then(Vec::new),
            ready_qps: Vec::new(),
            ready_cm_hosts: Vec::new(),
            triggers: Vec::new(),
            keeps_triggers: plan.has_waiting_faults(),
        })
    }

    /// Registers a queue pair that becomes ready to send during the run.
    pub fn add_flow(&mut self, qp: usize, flow: &Flow) {
        self.record.add_queue_pair(qp, flow.requester, flow.first_psn);
        self.recording.name(|names| names.add_flow(flow));
    }

    /// The queue pairs with new completions and the hosts with new connection events since the last call.
    pub fn take_ready(&mut self) -> (Vec<usize>, Vec<usize>) {
        (take(&mut self.ready_qps), take(&mut self.ready_cm_hosts))
    }

    /// Adds the digests and the files of the run to its outcome. Returns the packets that faults changed or dropped,
    /// with their links.
    pub fn add_to(self, outcome: &mut Outcome) -> Vec<(usize, Fault)> {
        let Recorder { mut recording, packet_faults, events, .. } = self;
        let ladders = recording.ladders();
        let finished = recording.finish();
        let order = events.map(|events| {
            let events = events.iter().map(|(host, event)| (*host, event));
            let faults = packet_faults.iter().map(|(_, fault)| fault);
            ComparableTrace::from_events(recording.names(), events, faults)
        });
        let [log, capture] = recording.into_outputs().map(Option::unwrap_or_default);
        outcome.trace_sha256 =
            log.hash.map(|hash| hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect());
        if let (Some(trace), Some(events)) = (order, log.kept) {
            outcome.order_sha256 = Some(trace.order_sha256());
            outcome.comparable_trace = Some(trace);
            let capture = finished.ok().and(capture.kept).unwrap_or_default();
            outcome.artifacts = Some(Artifacts { events, capture, ladders, outputs: Vec::new() });
        }
        packet_faults
    }
}

impl EventSink for Recorder {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        self.recording.on_event(now, event);
        match *event {
            NetworkEvent::Hca { host, event } => {
                let host_index = host.0 as usize;
                self.record.on_engine_event(now.nanos(), host_index, event);
                if self.keeps_triggers {
                    self.triggers.extend(trigger_of(event));
                }
                match event {
                    Event::Completed { completion, .. } => {
                        self.ready_qps.extend(self.record.qp_at(host_index, completion.qpn));
                    }
                    Event::CmEventRaised { .. } => self.ready_cm_hosts.push(host_index),
                    _ => {}
                }
                if let Some(events) = &mut self.events {
                    events.push((host, *event));
                }
            }
            NetworkEvent::Fabric(event) => self.record.on_fabric_event(&event),
            NetworkEvent::Fault { link, fault } => {
                let ends = self.recording.names().link_ends(link, fault.direction);
                let sender = ends.and_then(|[sender, _]| sender.host()).map(|host| host.0 as usize);
                self.record.on_packet_fault(now.nanos(), sender, fault);
                self.packet_faults.push((link.0 as usize, *fault));
            }
            _ => {}
        }
    }
}
