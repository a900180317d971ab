//! Records the events of a run: the event log, the input of the evaluation, the capture and the ladders.

use crate::plan::Plan;
use crate::record::RunRecord;
use crate::report::{Artifacts, Outcome};
use sha2::{Digest, Sha256};
use softhca_engine::{Event, Instant};
use softhca_fabric::{Endpoint, EventSink, Fault, Flow, HostId, NetworkEvent};
use softhca_queue::FaultTrigger;
use softhca_trace::{CapturePoints, CaptureWriter, ComparableTrace, EventLog, LadderBuilder, NameTable, Tap};
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
}

/// Hashes what is written, and keeps it on request.
struct HashingWriter {
    hash: Sha256,
    kept: Option<Vec<u8>>,
}

impl Write for HashingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.hash.update(bytes);
        if let Some(kept) = &mut self.kept {
            kept.extend_from_slice(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What is kept of a run besides the digest.
struct KeptEvents {
    tap: Tap<Vec<u8>>,
    ladders: LadderBuilder,
    events: Vec<(HostId, Event)>,
}

/// Receives all events of a run.
pub struct Recorder {
    names: NameTable,
    log: EventLog<HashingWriter>,
    /// The input of the evaluation.
    pub record: RunRecord,
    /// Packets that faults changed or dropped, with their links.
    packet_faults: Vec<(usize, Fault)>,
    kept: Option<KeptEvents>,
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
        let kept = match recording {
            Recording::Digest => None,
            Recording::Everything => {
                let writer = CaptureWriter::new(Vec::new())?;
                let tap = Tap::new(writer, names.clone(), CapturePoints::Senders)?;
                Some(KeptEvents { tap, ladders: LadderBuilder::new(names.clone()), events: Vec::new() })
            }
        };
        let output = HashingWriter { hash: Sha256::new(), kept: kept.is_some().then(Vec::new) };
        Ok(Recorder {
            log: EventLog::new(output, &plan.title, names.clone()),
            names,
            record,
            packet_faults: Vec::new(),
            kept,
            ready_qps: Vec::new(),
            ready_cm_hosts: Vec::new(),
            triggers: Vec::new(),
            keeps_triggers: plan.has_waiting_faults(),
        })
    }

    /// Registers a queue pair that becomes ready to send during the run.
    pub fn add_flow(&mut self, qp: usize, flow: &Flow) {
        self.record.add_queue_pair(qp, flow.requester, flow.first_psn);
        self.names.add_flow(flow);
        self.log.names_mut().add_flow(flow);
        if let Some(kept) = &mut self.kept {
            kept.ladders.names_mut().add_flow(flow);
        }
    }

    /// The queue pairs with new completions and the hosts with new connection events since the last call.
    pub fn take_ready(&mut self) -> (Vec<usize>, Vec<usize>) {
        (take(&mut self.ready_qps), take(&mut self.ready_cm_hosts))
    }

    /// Adds the digests and the files of the run to its outcome. Returns the packets that faults changed or dropped,
    /// with their links.
    pub fn add_to(self, outcome: &mut Outcome) -> Vec<(usize, Fault)> {
        let Recorder { names, log, packet_faults, kept, .. } = self;
        let output = log.into_inner();
        outcome.trace_sha256 =
            Some(output.hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect());
        if let (Some(mut kept), Some(events)) = (kept, output.kept) {
            let trace = ComparableTrace::from_events(
                &names,
                kept.events.iter().map(|(host, event)| (*host, event)),
                packet_faults.iter().map(|(_, fault)| fault),
            );
            outcome.order_sha256 = Some(trace.order_sha256());
            outcome.comparable_trace = Some(trace);
            let capture = kept.tap.finish().map(|()| kept.tap.into_inner()).unwrap_or_default();
            outcome.artifacts = Some(Artifacts { events, capture, ladders: kept.ladders.ladders() });
        }
        packet_faults
    }
}

impl EventSink for Recorder {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        self.log.on_event(now, event);
        if let Some(kept) = &mut self.kept {
            kept.tap.on_event(now, event);
            kept.ladders.on_event(now, event);
        }
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
                if let Some(kept) = &mut self.kept {
                    kept.events.push((host, *event));
                }
            }
            NetworkEvent::Fabric(event) => self.record.on_fabric_event(&event),
            NetworkEvent::Fault { link, fault } => {
                let ends = self.names.link_ends(link, fault.direction);
                let sender = ends.and_then(|[sender, _]| sender.host()).map(|host| host.0 as usize);
                self.record.on_packet_fault(now.nanos(), sender, fault);
                self.packet_faults.push((link.0 as usize, *fault));
            }
            _ => {}
        }
    }
}
