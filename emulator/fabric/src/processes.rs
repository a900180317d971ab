//! The processes of a host: their slots and faults, the listeners of peers, and records that outlive a process.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::IpAddr;
use core::sync::atomic::{AtomicBool, Ordering};
use softhca_engine::{ClientId, CmId, Instant, ObservedCall, Peer, Processes, Resource};
use softhca_queue::{AckPath, AckRecords, CmRecords, RecordedConnection};
use softhca_types::{
    FaultHit, FaultMatcher, FaultTrigger, InjectedEvent, ProgramAction, ProgramFaults, Verb,
};
use softhca_wire::cm::{CommunicationId, ServiceId};
use softhca_wire::{Psn, Qpn};

/// The most services of a host or of all hosts that are remembered.
const MAX_LISTENERS: usize = 1024;

/// The processes that share a device.
#[derive(Default)]
pub struct HostProcesses {
    slots: BTreeMap<ClientId, u16>,
    /// The communication ID of the last REP of each service: its high bits are the slot of the process, if the host has
    /// slots. Further requests to the service go to that process at once.
    listeners: BTreeMap<(IpAddr, ServiceId), CommunicationId>,
    acks: Option<AckRecords>,
    connections: Option<ConnectionRecords>,
    /// For callers that do not wait for the device.
    is_device_removed: Arc<AtomicBool>,
    /// The faults of each process.
    matchers: BTreeMap<u32, FaultMatcher>,
    /// The process of each client that has faults.
    processes: BTreeMap<ClientId, u32>,
    raised_event: Option<InjectedEvent>,
}

/// Entries for the connections whose peers wait for a message.
struct ConnectionRecords {
    records: CmRecords,
    entries: BTreeMap<CmId, u16>,
    /// Entries that were used and are free.
    free: Vec<u16>,
    /// The first entry that was never used.
    unused: usize,
}

impl HostProcesses {
    /// One process, whose last ACKs and connections are recorded in memory that outlives it.
    pub fn with_records(acks: AckRecords, connections: CmRecords) -> HostProcesses {
        let (records, entries) = (connections, BTreeMap::new());
        let connections = Some(ConnectionRecords { records, entries, free: Vec::new(), unused: 0 });
        HostProcesses { acks: Some(acks), connections, ..HostProcesses::default() }
    }

    /// Whether the device is removed, for callers that do not wait for it.
    pub fn removal_flag(&self) -> Arc<AtomicBool> {
        self.is_device_removed.clone()
    }

    fn matcher(&mut self, client: ClientId) -> Option<(u32, &mut FaultMatcher)> {
        let process = *self.processes.get(&client)?;
        self.matchers.get_mut(&process).map(|matcher| (process, matcher))
    }
}

impl Processes for HostProcesses {
    fn set_slot(&mut self, client: ClientId, slot: u16) {
        self.slots.insert(client, slot);
    }

    fn slot(&self, client: ClientId) -> Option<u16> {
        self.slots.get(&client).copied()
    }

    fn on_reply(&mut self, address: IpAddr, service: ServiceId, id: CommunicationId) {
        if self.listeners.len() >= MAX_LISTENERS && !self.listeners.contains_key(&(address, service)) {
            self.listeners.pop_first();
        }
        self.listeners.insert((address, service), id);
    }

    fn listener(&self, address: IpAddr, service: ServiceId) -> Option<CommunicationId> {
        self.listeners.get(&(address, service)).copied()
    }

    fn on_peer_gone(&mut self, peer: Peer) {
        self.listeners.retain(|(address, _), id| !peer.contains(*address, id.qpn()));
    }

    fn record_path(&self, path: &AckPath) {
        if let Some(records) = &self.acks {
            records.connect(path);
        }
    }

    #[inline]
    fn record_ack(&self, qpn: Qpn, psn: Psn, msn: u32) {
        if let Some(records) = &self.acks {
            records.record(qpn, psn, msn);
        }
    }

    fn clear_ack(&self, qpn: Qpn) {
        if let Some(records) = &self.acks {
            records.clear(qpn);
        }
    }

    fn record_connection(&mut self, connection: &RecordedConnection) {
        let Some(ConnectionRecords { records, entries, free, unused }) = &mut self.connections else {
            return;
        };
        let entry = entries.get(&connection.id).copied().or_else(|| free.pop()).or_else(|| {
            let entry = *unused;
            *unused += 1;
            (entry < CmRecords::ENTRIES).then_some(entry as u16)
        });
        if let Some(entry) = entry {
            entries.insert(connection.id, entry);
            records.record(entry.into(), connection);
        }
    }

    fn clear_connection(&mut self, id: CmId) {
        if let Some(ConnectionRecords { records, entries, free, .. }) = &mut self.connections
            && let Some(entry) = entries.remove(&id)
        {
            records.clear(entry.into());
            free.push(entry);
        }
    }

    fn set_device_removed(&mut self, is_removed: bool) {
        self.is_device_removed.store(is_removed, Ordering::Relaxed);
    }

    fn set_faults(&mut self, now: Instant, client: ClientId, faults: ProgramFaults) {
        let process = faults.process;
        self.processes.insert(client, process);
        self.matchers.entry(process).or_insert_with(|| FaultMatcher::new(faults, now.nanos()));
    }

    fn stop_faults(&mut self) {
        self.matchers.clear();
    }

    fn close_client(&mut self, client: ClientId) -> bool {
        self.slots.remove(&client);
        let Some(process) = self.processes.remove(&client) else { return false };
        if self.processes.values().any(|other| *other == process) {
            return false;
        }
        self.matchers.remove(&process);
        self.matchers.is_empty()
    }

    fn on_call(
        &mut self,
        now: Instant,
        client: ClientId,
        verb: Verb,
        object: Option<(Resource, u32)>,
    ) -> Option<ObservedCall> {
        let (process, matcher) = self.matcher(client)?;
        let (point, role) = (matcher.on_call(now.nanos(), verb, object), matcher.recorded_role());
        let target = point.hit.and_then(|hit| match hit.action {
            ProgramAction::Unmap(region) => {
                self.matchers.get(&process)?.number(Resource::MemoryRegion, region)
            }
            ProgramAction::Raise(event) => {
                let (kind, ordinal) = (event.object()?, hit.object.unwrap_or(1));
                self.matchers.values().find_map(|matcher| matcher.number(kind, ordinal))
            }
            _ => None,
        });
        Some(ObservedCall { process, role, point, target })
    }

    fn on_created(&mut self, client: ClientId, kind: Resource, number: u32) {
        if let Some((_, matcher)) = self.matcher(client) {
            matcher.on_created(kind, number);
        }
    }

    fn on_completion(&mut self, now: Instant, client: ClientId, qpn: Qpn) -> (Vec<FaultHit>, Option<u32>) {
        let Some((_, matcher)) = self.matcher(client) else { return Default::default() };
        let hits = matcher.on_completion(now.nanos(), qpn.value());
        (hits, matcher.ordinal(Resource::QueuePair, qpn.value()))
    }

    fn on_event_raised(&mut self, event: InjectedEvent) {
        self.raised_event = Some(event);
    }

    fn take_raised_event(&mut self) -> Option<InjectedEvent> {
        self.raised_event.take()
    }

    fn on_trigger(&mut self, trigger: &FaultTrigger) {
        self.matchers.values_mut().for_each(|matcher| matcher.on_trigger(trigger));
    }

    fn on_async_event(&mut self, name: &'static str) {
        self.matchers.values_mut().for_each(|matcher| matcher.on_async_event(name));
    }
}
