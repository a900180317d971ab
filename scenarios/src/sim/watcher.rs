//! Sees everything in a world: the event log, the record for the judge, the capture and the ladders.

use crate::record::Record;
use sha2::{Digest, Sha256};
use softhca_engine::{CmChannelId, CqId, Event, Instant};
use softhca_fabric::{CableId, Direction, FabricEvent, Fault, Frame, HostId, Observer, Stage};
use softhca_trace::{Cast, EventLog, Ladders, Tap};
use softhca_wire::Pfc;
use std::io::{self, Write};

/// Hashes what is written, and keeps it if asked to.
pub(super) struct Hashed {
    pub hash: Sha256,
    pub kept: Option<Vec<u8>>,
}

impl Write for Hashed {
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
pub(super) struct Watcher {
    pub cast: Cast,
    pub log: EventLog<Hashed>,
    pub record: Record,
    /// The hosts at the two ends of each cable; none where a switch is.
    pub senders: Vec<[Option<usize>; 2]>,
    pub tap: Option<Tap<Vec<u8>>>,
    pub ladders: Option<Ladders>,
    /// Completion queues with something new in them.
    pub ready: Vec<(HostId, CqId)>,
    /// Channels of the connection manager with something new in them.
    pub news: Vec<(HostId, CmChannelId)>,
    /// Packets that rules hit.
    pub hits: Vec<(usize, Fault)>,
    /// Everything that cards told, if it is kept.
    pub events: Option<Vec<(HostId, Event)>>,
}

impl Observer for Watcher {
    fn card(&mut self, now: Instant, host: HostId, event: &Event) {
        self.log.card(now, host, event);
        self.record.card(now.nanos(), host.0 as usize, event);
        if let Event::Completed { cq, .. } = event {
            self.ready.push((host, *cq));
        }
        if let Event::CmRaised { channel, .. } = event {
            self.news.push((host, *channel));
        }
        if let Some(ladders) = &mut self.ladders {
            ladders.card(now, host, event);
        }
        if let Some(events) = &mut self.events {
            events.push((host, *event));
        }
    }

    fn frame(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, frame: &Frame) {
        if let Some(tap) = &mut self.tap {
            tap.frame(now, cable, direction, stage, frame);
        }
        if let Some(ladders) = &mut self.ladders {
            Observer::frame(ladders, now, cable, direction, stage, frame);
        }
    }

    fn pause(&mut self, now: Instant, cable: CableId, direction: Direction, stage: Stage, pause: &Pfc) {
        if let Some(tap) = &mut self.tap {
            tap.pause(now, cable, direction, stage, pause);
        }
    }

    fn fabric(&mut self, now: Instant, event: &FabricEvent) {
        self.log.fabric(now, event);
        self.record.fabric(event);
    }

    fn fault(&mut self, now: Instant, cable: CableId, fault: &Fault) {
        self.log.fault(now, cable, fault);
        let sender = self.senders[cable.0 as usize][fault.direction as usize];
        self.record.fault(now.nanos(), sender, fault);
        self.hits.push((cable.0 as usize, *fault));
        if let Some(tap) = &mut self.tap {
            tap.fault(now, cable, fault);
        }
        if let Some(ladders) = &mut self.ladders {
            Observer::fault(ladders, now, cable, fault);
        }
    }
}
