//! A host: an HCA and its memory.

use crate::{Direction, HostProcesses, LinkId};
use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec;
use core::net::IpAddr;
use softhca_engine::{ClientId, DeviceLimits, Hca, MemoryObjects, Settings};
use softhca_queue::{DoorbellProducer, doorbell_ring};
use softhca_wire::Gid;

/// A host of a world. The fields that every packet touches come first.
#[repr(C)]
pub struct Host {
    /// The next scheduled wakeup; `u64::MAX` if none.
    pub(crate) next_wakeup: u64,
    /// The host is stalled until this time.
    pub(crate) stalled_until: u64,
    /// An event for the free link is scheduled.
    pub(crate) waiting_for_link: bool,
    pub(crate) address: IpAddr,
    pub(crate) memory: MemoryObjects,
    pub(crate) hca: Hca,
    /// Later scheduled wakeups, earliest last.
    pub(crate) later_wakeups: alloc::vec::Vec<u64>,
    pub(crate) name: String,
    client: ClientId,
    doorbell: DoorbellProducer,
    /// The host's links and their egress directions.
    pub(crate) links: alloc::vec::Vec<(LinkId, Direction)>,
}

impl Host {
    pub(crate) fn new(name: &str, address: IpAddr, settings: Settings) -> Host {
        let mut hca = Hca::new(settings, Gid::table(address));
        hca.set_processes(Box::new(HostProcesses::default()));
        let (doorbell, ring) = doorbell_ring(DeviceLimits::HCA.max_qp);
        let client = hca.open_client(ring).expect("a new card has room for a client");
        Host {
            name: name.into(),
            address,
            hca,
            memory: MemoryObjects::default(),
            client,
            doorbell,
            links: vec::Vec::new(),
            next_wakeup: u64::MAX,
            later_wakeups: vec::Vec::new(),
            waiting_for_link: false,
            stalled_until: 0,
        }
    }

    /// Records a wakeup. Returns false if an earlier one is scheduled.
    pub(crate) fn schedule_wakeup(&mut self, at: u64) -> bool {
        if at >= self.next_wakeup {
            return false;
        }
        let later = core::mem::replace(&mut self.next_wakeup, at);
        if later != u64::MAX {
            self.later_wakeups.push(later);
        }
        true
    }

    /// Handles a due wakeup.
    pub(crate) fn on_wakeup(&mut self) {
        self.next_wakeup = self.later_wakeups.pop().unwrap_or(u64::MAX);
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The first client of the HCA: an application that does without the verbs API.
    pub fn client(&self) -> ClientId {
        self.client
    }

    /// The doorbell of [`Host::client`].
    pub fn doorbell(&self) -> &DoorbellProducer {
        &self.doorbell
    }

    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// The links and their egress directions.
    pub fn links(&self) -> &[(LinkId, Direction)] {
        &self.links
    }

    pub fn hca(&self) -> &Hca {
        &self.hca
    }
}
