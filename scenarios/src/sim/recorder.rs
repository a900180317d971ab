//! Sees everything in a world: the event log, the record for the judge, the capture and the ladders.

use crate::record::RunRecord;
use sha2::{Digest, Sha256};
use softhca_engine::{CmChannelId, CqId, Event, Instant};
use softhca_fabric::{Direction, FabricEvent, FabricSink, Fault, Frame, HostId, LinkId, Stage};
use softhca_trace::{EventLog, LadderBuilder, NameTable, Tap};
use softhca_wire::Pfc;
use std::io::{self, Write};

/// Hashes what is written, and keeps it if asked to.
pub(super) struct HashingWriter {
    pub hash: Sha256,
    pub kept: Option<Vec<u8>>,
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

/// Sees everything in the world.
pub(super) struct SimulationRecorder {
    pub cast: NameTable,
    pub log: EventLog<HashingWriter>,
    pub record: RunRecord,
    /// The hosts at the two ends of each cable; none where a switch is.
    pub senders: Vec<[Option<usize>; 2]>,
    pub tap: Option<Tap<Vec<u8>>>,
    pub ladders: Option<LadderBuilder>,
    /// Completion queues with something new in them.
    pub ready_cqs: Vec<(HostId, CqId)>,
    /// Channels of the connection manager with something new in them.
    pub ready_cm_channels: Vec<(HostId, CmChannelId)>,
    /// Packets that rules hit.
    pub packet_faults: Vec<(usize, Fault)>,
    /// Everything that cards told, if it is kept.
    pub events: Option<Vec<(HostId, Event)>>,
}

impl FabricSink for SimulationRecorder {
    fn on_hca_event(&mut self, now: Instant, host: HostId, event: &Event) {
        self.log.record_event(now, host, event);
        self.record.on_engine_event(now.nanos(), host.0 as usize, event);
        if let Event::Completed { cq, .. } = event {
            self.ready_cqs.push((host, *cq));
        }
        if let Event::CmEventRaised { channel, .. } = event {
            self.ready_cm_channels.push((host, *channel));
        }
        if let Some(ladders) = &mut self.ladders {
            ladders.record_event(now, host, event);
        }
        if let Some(events) = &mut self.events {
            events.push((host, *event));
        }
    }

    fn on_frame(&mut self, now: Instant, cable: LinkId, direction: Direction, stage: Stage, frame: &Frame) {
        if let Some(tap) = &mut self.tap {
            tap.on_frame(now, cable, direction, stage, frame);
        }
        if let Some(ladders) = &mut self.ladders {
            FabricSink::on_frame(ladders, now, cable, direction, stage, frame);
        }
    }

    fn on_pause_frame(
        &mut self,
        now: Instant,
        cable: LinkId,
        direction: Direction,
        stage: Stage,
        pause: &Pfc,
    ) {
        if let Some(tap) = &mut self.tap {
            tap.on_pause_frame(now, cable, direction, stage, pause);
        }
    }

    fn on_fabric_event(&mut self, now: Instant, event: &FabricEvent) {
        self.log.record_fabric_event(now, event);
        self.record.on_fabric_event(event);
    }

    fn on_fault(&mut self, now: Instant, cable: LinkId, fault: &Fault) {
        self.log.record_fault(now, cable, fault);
        let sender = self.senders[cable.0 as usize][fault.direction as usize];
        self.record.on_packet_fault(now.nanos(), sender, fault);
        self.packet_faults.push((cable.0 as usize, *fault));
        if let Some(tap) = &mut self.tap {
            tap.on_fault(now, cable, fault);
        }
        if let Some(ladders) = &mut self.ladders {
            FabricSink::on_fault(ladders, now, cable, fault);
        }
    }
}
