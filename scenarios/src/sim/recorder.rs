//! Sees everything in a world: the event log, the record for the judge, the capture and the ladders.

use crate::record::RunRecord;
use sha2::{Digest, Sha256};
use softhca_engine::{CmChannelId, CqId, Event, Instant};
use softhca_fabric::{EventSink, Fault, HostId, NetworkEvent};
use softhca_trace::{EventLog, LadderBuilder, NameTable, Tap};
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

impl EventSink for SimulationRecorder {
    fn on_event(&mut self, now: Instant, event: &NetworkEvent<'_>) {
        self.log.on_event(now, event);
        if let Some(tap) = &mut self.tap {
            tap.on_event(now, event);
        }
        if let Some(ladders) = &mut self.ladders {
            ladders.on_event(now, event);
        }
        match *event {
            NetworkEvent::Hca { host, event } => {
                self.record.on_engine_event(now.nanos(), host.0 as usize, event);
                if let Event::Completed { cq, .. } = event {
                    self.ready_cqs.push((host, *cq));
                }
                if let Event::CmEventRaised { channel, .. } = event {
                    self.ready_cm_channels.push((host, *channel));
                }
                if let Some(events) = &mut self.events {
                    events.push((host, *event));
                }
            }
            NetworkEvent::Fabric(event) => self.record.on_fabric_event(&event),
            NetworkEvent::Fault { link, fault } => {
                let sender = self.senders[link.0 as usize][fault.direction as usize];
                self.record.on_packet_fault(now.nanos(), sender, fault);
                self.packet_faults.push((link.0 as usize, *fault));
            }
            _ => {}
        }
    }
}
