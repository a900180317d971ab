//! A host: a card, its memory, and the application's ends of the card's queues.

use crate::{CableId, Direction, Store};
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec;
use core::net::IpAddr;
use softhca_engine::{ClientId, CqId, Hca, Limits, Settings, SrqId};
use softhca_queue::{CompletionConsumer, DoorbellProducer, ReceiveProducer, SendProducer, doorbell};
use softhca_wire::{Gid, Qpn};

/// Names a host of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u32);

/// The application's ends of a queue pair's rings.
pub(crate) struct Queues {
    pub send: Option<SendProducer>,
    pub receive: Option<ReceiveProducer>,
}

/// A host of a world. What every packet touches stands together and first.
#[repr(C)]
pub struct Host {
    /// When it is woken next, of what the agenda holds; the end of time if it is not.
    pub(crate) wakes_at: u64,
    /// It stands still until this time.
    pub(crate) stalled_until: u64,
    /// The port will be looked at when the line is free.
    pub(crate) port_waits: bool,
    pub(crate) address: IpAddr,
    pub(crate) store: Store,
    pub(crate) hca: Hca,
    /// Later wake-ups that the agenda holds, the earliest last.
    pub(crate) wakes_later: alloc::vec::Vec<u64>,
    pub(crate) name: String,
    pub(crate) client: ClientId,
    pub(crate) doorbell: DoorbellProducer,
    pub(crate) queue_pairs: BTreeMap<Qpn, Queues>,
    pub(crate) completion_queues: BTreeMap<CqId, CompletionConsumer>,
    pub(crate) shared_receive_queues: BTreeMap<SrqId, ReceiveProducer>,
    /// Where the card's next region begins: regions have the same addresses in every run.
    pub(crate) next_address: u64,
    /// The cables that leave this host, and which way.
    pub(crate) cables: alloc::vec::Vec<(CableId, Direction)>,
}

impl Host {
    pub(crate) fn new(name: &str, address: IpAddr, settings: Settings) -> Host {
        let mut hca = Hca::new(settings, vec![Gid::from(address)]);
        let (doorbell, heard) = doorbell(Limits::CARD.queue_pairs as u32);
        let client = hca.open_client(heard).expect("a new card has room for a client");
        Host {
            name: name.into(),
            address,
            hca,
            store: Store::default(),
            client,
            doorbell,
            queue_pairs: BTreeMap::new(),
            completion_queues: BTreeMap::new(),
            shared_receive_queues: BTreeMap::new(),
            next_address: 0x1000_0000,
            cables: vec::Vec::new(),
            wakes_at: u64::MAX,
            wakes_later: vec::Vec::new(),
            port_waits: false,
            stalled_until: 0,
        }
    }

    /// Notes a wake-up. False if an earlier one will do.
    pub(crate) fn wake_at(&mut self, at: u64) -> bool {
        if at >= self.wakes_at {
            return false;
        }
        let later = core::mem::replace(&mut self.wakes_at, at);
        if later != u64::MAX {
            self.wakes_later.push(later);
        }
        true
    }

    /// The next wake-up has come.
    pub(crate) fn woken(&mut self) {
        self.wakes_at = self.wakes_later.pop().unwrap_or(u64::MAX);
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its address.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// The cables that leave it, and which way.
    pub fn cables(&self) -> &[(CableId, Direction)] {
        &self.cables
    }

    /// Its card.
    pub fn card(&self) -> &Hca {
        &self.hca
    }
}
