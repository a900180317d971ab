//! The addresses of hosts.

use crate::HostId;
use alloc::collections::BTreeMap;
use core::net::{IpAddr, Ipv4Addr};

/// Host addresses.
#[derive(Default)]
pub(crate) struct AddressTable {
    all: BTreeMap<IpAddr, HostId>,
    /// If host `n` has the first host's address plus `n`, the lookup needs no search.
    first: Option<Ipv4Addr>,
    contiguous: u32,
}

impl AddressTable {
    pub fn insert(&mut self, address: IpAddr, host: HostId) {
        self.all.insert(address, host);
        if let (IpAddr::V4(address), 0) = (address, host.0) {
            self.first = Some(address);
        }
        let expected = self.first.map(|first| Ipv4Addr::from(first.to_bits().wrapping_add(host.0)));
        if self.contiguous == host.0 && expected.map(IpAddr::V4) == Some(address) {
            self.contiguous += 1;
        }
    }

    #[inline]
    pub fn find(&self, address: IpAddr) -> Option<HostId> {
        if let (IpAddr::V4(address), Some(first)) = (address, self.first) {
            let index = address.to_bits().wrapping_sub(first.to_bits());
            if index < self.contiguous {
                return Some(HostId(index));
            }
        }
        self.all.get(&address).copied()
    }
}
