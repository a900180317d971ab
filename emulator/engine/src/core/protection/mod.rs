//! Memory protection: protection domains, memory regions, memory windows and their keys.
//!
//! A key is a table number and an 8-bit variant: `number << 8 | variant`. Regions and windows share one table,
//! because an rkey can name either.

mod access_error;
mod memory_window;

pub use access_error::AccessError;

use crate::core::memory::{MemoryFault, MemoryId};
use crate::core::table::Table;
use crate::{ClientId, DeviceLimits, MemoryWindowType, PdId, Resource, VerbsError, VerbsResult};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use softhca_types::{AccessFlags, Sge};
use softhca_wire::{LocalKey, Qpn, RemoteKey};

/// The translated address of an access that was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TranslatedAddress {
    pub memory: MemoryId,
    pub offset: u64,
    pub key: u32,
}

impl TranslatedAddress {
    pub fn to_access_error(self, _: MemoryFault) -> AccessError {
        AccessError::Unreachable { key: self.key }
    }
}

/// A registered memory region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRegion {
    /// The owner.
    pub client: ClientId,
    /// The protection pd.
    pub pd: PdId,
    /// The I/O virtual address of the first byte.
    pub iova: u64,
    /// The number of bytes.
    pub length: u64,
    /// The allowed accesses.
    pub access_flags: AccessFlags,
    /// The driver's identifier of the memory.
    pub memory: MemoryId,
}

#[derive(Clone, Copy, Debug)]
struct MwBinding {
    region: u32,
    address: u64,
    length: u64,
    access_flags: AccessFlags,
    qpn: Qpn,
}

enum KeyKind {
    MemoryRegion { region: MemoryRegion, bound_windows: u32 },
    MemoryWindow { client: ClientId, pd: PdId, kind: MemoryWindowType, binding: Option<MwBinding> },
}

struct KeyEntry {
    variant: u8,
    kind: KeyKind,
}

impl KeyEntry {
    fn check_variant(&self, key: u32) -> Result<(), AccessError> {
        if self.variant == key as u8 {
            return Ok(());
        }
        Err(AccessError::StaleKey { key, current: self.key(key) })
    }

    /// The present key of the entry that `key` names.
    fn key(&self, key: u32) -> u32 {
        key & !0xff | u32::from(self.variant)
    }
}

impl MemoryRegion {
    fn check_access(&self, key: u32, pd: PdId, required: AccessFlags) -> Result<(), AccessError> {
        if self.pd != pd {
            return Err(AccessError::PdMismatch { key });
        }
        check_flags(key, self.access_flags, required)
    }

    /// The offset of an address, if the range is inside the region.
    fn offset(&self, key: u32, address: u64, length: u64) -> Result<u64, AccessError> {
        check_bounds(key, self.iova, self.length, address, length)
    }
}

struct ProtectionDomain {
    client: ClientId,
    users: u32,
}

pub(crate) struct Protection {
    pds: Table<ProtectionDomain>,
    keys: Table<KeyEntry>,
    /// The memory of regions that a fault made inaccessible, by table number.
    revoked: BTreeMap<u32, MemoryId>,
}

/// The memory of a region that a fault made inaccessible: no driver has it.
const NO_MEMORY: MemoryId = MemoryId(u32::MAX);

impl Protection {
    pub fn new(limits: &DeviceLimits) -> Protection {
        Protection {
            pds: Table::new(limits.max_pd, 1),
            keys: Table::new(limits.max_mr, 1),
            revoked: BTreeMap::new(),
        }
    }

    /// Makes the numbers in keys start at an unpredictable one. No key exists yet.
    pub fn mask_keys(&mut self, mask: u64) {
        self.keys.set_seed(mask);
    }

    pub fn allocate_protection_domain(&mut self, client: ClientId) -> VerbsResult<PdId> {
        let number = self.pds.insert(0, |_| ProtectionDomain { client, users: 0 });
        let limit = DeviceLimits::HCA.max_pd;
        number.map(PdId).ok_or(VerbsError::Exhausted { resource: Resource::ProtectionDomain, limit })
    }

    pub fn free_protection_domain(&mut self, client: ClientId, pd: PdId) -> VerbsResult {
        if self.protection_domain(client, pd)?.users > 0 {
            let user = self.pd_user(pd);
            return Err(VerbsError::Busy { resource: Resource::ProtectionDomain, number: pd.0, user });
        }
        self.pds.remove(pd.0);
        Ok(())
    }

    fn pd_user(&self, pd: PdId) -> Resource {
        let uses_pd = |kind: &KeyKind| match kind {
            KeyKind::MemoryRegion { region, .. } => (region.pd == pd).then_some(Resource::MemoryRegion),
            KeyKind::MemoryWindow { pd: own, .. } => (*own == pd).then_some(Resource::MemoryWindow),
        };
        self.keys.iter().find_map(|(_, entry)| uses_pd(&entry.kind)).unwrap_or(Resource::QueuePair)
    }

    fn protection_domain(&mut self, client: ClientId, pd: PdId) -> VerbsResult<&mut ProtectionDomain> {
        self.pds
            .get_mut(pd.0)
            .filter(|found| found.client == client)
            .ok_or(VerbsError::NotFound { resource: Resource::ProtectionDomain, number: pd.0 })
    }

    /// Counts a resource of `client` that uses the protection pd.
    pub fn acquire_pd(&mut self, client: ClientId, pd: PdId) -> VerbsResult {
        self.protection_domain(client, pd)?.users += 1;
        Ok(())
    }

    /// Releases a use of the protection pd.
    pub fn release_pd(&mut self, pd: PdId) {
        if let Some(found) = self.pds.get_mut(pd.0) {
            found.users -= 1;
        }
    }

    fn check_memory_region(region: &MemoryRegion) -> VerbsResult {
        let remote_write = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        if region.access_flags.intersects(remote_write)
            && !region.access_flags.contains(AccessFlags::LOCAL_WRITE)
        {
            let why = "REMOTE_WRITE and REMOTE_ATOMIC require LOCAL_WRITE";
            return Err(VerbsError::Invalid { what: "access flags", why });
        }
        if region.iova.checked_add(region.length).is_none() {
            return Err(VerbsError::Invalid { what: "memory region", why: "address and length wrap around" });
        }
        Ok(())
    }

    pub fn register_memory_region(
        &mut self,
        mut region: MemoryRegion,
        [tag, variant]: [u8; 2],
    ) -> VerbsResult<RemoteKey> {
        Self::check_memory_region(&region)?;
        if region.access_flags.contains(AccessFlags::ZERO_BASED) {
            region.iova = 0;
        }
        self.acquire_pd(region.client, region.pd)?;
        let kind = KeyKind::MemoryRegion { region, bound_windows: 0 };
        match self.keys.insert(tag, |_| KeyEntry { variant, kind }) {
            Some(number) => Ok(RemoteKey(number << 8 | u32::from(variant))),
            None => {
                self.release_pd(region.pd);
                let limit = DeviceLimits::HCA.max_mr;
                Err(VerbsError::Exhausted { resource: Resource::MemoryRegion, limit })
            }
        }
    }

    /// Registers a region with a given key, to replay captures.
    pub fn register_memory_region_with_key(&mut self, region: MemoryRegion, key: RemoteKey) -> VerbsResult {
        Self::check_memory_region(&region)?;
        self.acquire_pd(region.client, region.pd)?;
        let kind = KeyKind::MemoryRegion { region, bound_windows: 0 };
        let taken = VerbsError::Busy {
            resource: Resource::MemoryRegion,
            number: key.0,
            user: Resource::MemoryRegion,
        };
        let inserted = self.keys.insert_at(key.0 >> 8, |_| KeyEntry { variant: key.0 as u8, kind });
        if inserted.is_none() {
            self.release_pd(region.pd);
        }
        inserted.map(|_| ()).ok_or(taken)
    }

    fn entry(&mut self, client: ClientId, key: u32, resource: Resource) -> VerbsResult<&mut KeyEntry> {
        self.keys
            .get_mut(key >> 8)
            .filter(|entry| match &entry.kind {
                KeyKind::MemoryRegion { region, .. } => {
                    resource == Resource::MemoryRegion && region.client == client
                }
                KeyKind::MemoryWindow { client: owner, .. } => {
                    resource == Resource::MemoryWindow && *owner == client
                }
            })
            .ok_or(VerbsError::NotFound { resource, number: key })
    }

    /// The region of `key`, regardless of the variant.
    pub fn memory_region(&mut self, client: ClientId, key: RemoteKey) -> VerbsResult<MemoryRegion> {
        let revoked = self.revoked.get(&(key.0 >> 8)).copied();
        match self.entry(client, key.0, Resource::MemoryRegion)?.kind {
            KeyKind::MemoryRegion { region, .. } => {
                Ok(MemoryRegion { memory: revoked.unwrap_or(region.memory), ..region })
            }
            KeyKind::MemoryWindow { .. } => unreachable!("entry() returned a region"),
        }
    }

    fn check_not_bound(&mut self, client: ClientId, key: RemoteKey) -> VerbsResult {
        match self.entry(client, key.0, Resource::MemoryRegion)?.kind {
            KeyKind::MemoryRegion { bound_windows, .. } if bound_windows > 0 => Err(VerbsError::Busy {
                resource: Resource::MemoryRegion,
                number: key.0,
                user: Resource::MemoryWindow,
            }),
            _ => Ok(()),
        }
    }

    /// Deregisters a region and returns it.
    pub fn deregister_memory_region(
        &mut self,
        client: ClientId,
        key: RemoteKey,
    ) -> VerbsResult<MemoryRegion> {
        self.check_not_bound(client, key)?;
        let region = self.memory_region(client, key)?;
        self.keys.remove(key.0 >> 8);
        self.revoked.remove(&(key.0 >> 8));
        self.release_pd(region.pd);
        Ok(region)
    }

    /// Makes the memory of a region inaccessible until it is registered again.
    pub fn revoke_memory(&mut self, key: u32) {
        if let Some(KeyEntry { kind: KeyKind::MemoryRegion { region, .. }, .. }) = self.keys.get_mut(key >> 8)
        {
            self.revoked.entry(key >> 8).or_insert(region.memory);
            region.memory = NO_MEMORY;
        }
    }

    /// Modifies a region in place. If its range changes, the key gets the next variant and the old key becomes stale.
    pub fn reregister_memory_region(
        &mut self,
        client: ClientId,
        key: RemoteKey,
        mut new: MemoryRegion,
    ) -> VerbsResult<RemoteKey> {
        Self::check_memory_region(&new)?;
        self.check_not_bound(client, key)?;
        let old = self.memory_region(client, key)?;
        if new.access_flags.contains(AccessFlags::ZERO_BASED) {
            new.iova = 0;
        }
        if new.pd != old.pd {
            self.acquire_pd(client, new.pd)?;
            self.release_pd(old.pd);
        }
        let has_moved = (new.iova, new.length, new.memory) != (old.iova, old.length, old.memory);
        self.revoked.remove(&(key.0 >> 8));
        let entry = self.entry(client, key.0, Resource::MemoryRegion)?;
        if has_moved {
            entry.variant = entry.variant.wrapping_add(1);
        }
        entry.kind = KeyKind::MemoryRegion { region: new, bound_windows: 0 };
        Ok(RemoteKey(key.0 & !0xff | u32::from(entry.variant)))
    }

    /// Translates `length` bytes of a scatter/gather entry, from `skip` on.
    #[inline]
    pub fn check_local_access(
        &self,
        pd: PdId,
        sge: &Sge,
        skip: u32,
        length: u32,
        required: AccessFlags,
    ) -> Result<TranslatedAddress, AccessError> {
        let LocalKey(key) = sge.lkey;
        let found = self.keys.get(key >> 8).ok_or(AccessError::UnknownKey { key })?;
        let KeyKind::MemoryRegion { region, .. } = &found.kind else {
            return Err(AccessError::NotAMemoryRegion { key });
        };
        found.check_variant(key)?;
        region.check_access(key, pd, required)?;
        let address = sge.address.wrapping_add(u64::from(skip));
        let offset = region.offset(key, address, u64::from(length))?;
        Ok(TranslatedAddress { memory: region.memory, offset, key })
    }

    /// Translates the remote address of a peer's request.
    #[inline]
    pub fn check_remote_access(
        &self,
        pd: PdId,
        qpn: Qpn,
        RemoteKey(key): RemoteKey,
        address: u64,
        length: u32,
        required: AccessFlags,
    ) -> Result<TranslatedAddress, AccessError> {
        let found = self.keys.get(key >> 8).ok_or(AccessError::UnknownKey { key })?;
        found.check_variant(key)?;
        let length = u64::from(length);
        let mut region_address = address;
        let (owner, access, region) = match &found.kind {
            KeyKind::MemoryRegion { region, .. } => (region.pd, region.access_flags, region),
            KeyKind::MemoryWindow { pd: owner, kind, binding, .. } => {
                let Some(binding) = binding else { return Err(AccessError::Invalidated { key }) };
                if *kind == MemoryWindowType::Type2 && binding.qpn != qpn {
                    return Err(AccessError::QpMismatch { key });
                }
                let Some(KeyEntry { kind: KeyKind::MemoryRegion { region, .. }, .. }) =
                    self.keys.get(binding.region)
                else {
                    return Err(AccessError::Invalidated { key });
                };
                let is_zero_based = binding.access_flags.contains(AccessFlags::ZERO_BASED);
                let base = if is_zero_based { 0 } else { binding.address };
                let offset = check_bounds(key, base, binding.length, address, length)?;
                region_address = binding.address + offset;
                (*owner, binding.access_flags, region)
            }
        };
        if owner != pd {
            return Err(AccessError::PdMismatch { key });
        }
        check_flags(key, access, required)?;
        let offset = region.offset(key, region_address, length)?;
        Ok(TranslatedAddress { memory: region.memory, offset, key })
    }

    /// The regions and windows of `client`, by key.
    pub fn keys_of_client(&self, client: ClientId) -> (Vec<RemoteKey>, Vec<RemoteKey>) {
        let (mut regions, mut windows) = (Vec::new(), Vec::new());
        for (number, entry) in self.keys.iter() {
            let key = RemoteKey(number << 8 | u32::from(entry.variant));
            match &entry.kind {
                KeyKind::MemoryRegion { region, .. } if region.client == client => regions.push(key),
                KeyKind::MemoryWindow { client: owner, .. } if *owner == client => windows.push(key),
                _ => {}
            }
        }
        (regions, windows)
    }

    pub fn pds_of_client(&self, client: ClientId) -> Vec<PdId> {
        self.pds.numbers(|pd| pd.client == client).into_iter().map(PdId).collect()
    }
}

fn check_bounds(key: u32, base: u64, size: u64, address: u64, length: u64) -> Result<u64, AccessError> {
    let outside = AccessError::OutOfBounds { key, address, length, base, size };
    let offset = address.checked_sub(base).ok_or(outside)?;
    match offset.checked_add(length) {
        Some(end) if end <= size => Ok(offset),
        _ => Err(outside),
    }
}

fn check_flags(key: u32, granted: AccessFlags, required: AccessFlags) -> Result<(), AccessError> {
    match granted.contains(required) {
        true => Ok(()),
        false => Err(AccessError::InsufficientAccess { key, granted, required }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca_types::MemoryWindowBind;

    const CLIENT: ClientId = ClientId(0);
    const QPN: Qpn = Qpn::new(2);
    const BASE: u64 = 0x1000;
    const ALL: AccessFlags = AccessFlags::LOCAL_WRITE
        .union(AccessFlags::REMOTE_WRITE)
        .union(AccessFlags::REMOTE_READ)
        .union(AccessFlags::MW_BIND);

    /// A protection domain with a region of 4096 bytes.
    fn region(access_flags: AccessFlags) -> (Protection, PdId, RemoteKey) {
        let mut protection = Protection::new(&DeviceLimits::HCA);
        let pd = protection.allocate_protection_domain(CLIENT).unwrap();
        let memory = MemoryId(7);
        let region = MemoryRegion { client: CLIENT, pd, iova: BASE, length: 4096, access_flags, memory };
        let key = protection.register_memory_region(region, [0x5a; 2]).unwrap();
        (protection, pd, key)
    }

    fn remote_read(
        protection: &Protection,
        pd: PdId,
        key: RemoteKey,
        address: u64,
        length: u32,
    ) -> Result<u64, AccessError> {
        let required = AccessFlags::REMOTE_READ;
        protection.check_remote_access(pd, QPN, key, address, length, required).map(|found| found.offset)
    }

    fn bind(window: RemoteKey, region: RemoteKey, new: u32) -> MemoryWindowBind {
        MemoryWindowBind {
            mw_rkey: window,
            mr_lkey: LocalKey(region.0),
            new_rkey: RemoteKey(new),
            address: BASE + 1024,
            length: 1024,
            access: AccessFlags::REMOTE_READ,
        }
    }

    #[test]
    fn an_access_must_be_inside_the_region() {
        let (protection, pd, key) = region(ALL);
        assert_eq!(remote_read(&protection, pd, key, BASE, 4096), Ok(0));
        assert_eq!(remote_read(&protection, pd, key, BASE + 4095, 1), Ok(4095));
        for (address, length) in [(BASE - 1, 1), (BASE, 4097), (BASE + 4096, 1), (u64::MAX, 2)] {
            let error = remote_read(&protection, pd, key, address, length);
            assert!(
                matches!(error, Err(AccessError::OutOfBounds { .. })),
                "{address:#x}+{length}: {error:?}"
            );
        }
    }

    #[test]
    fn an_access_needs_the_flag_the_domain_and_the_current_key() {
        let (mut protection, pd, key) = region(AccessFlags::LOCAL_WRITE);
        let error = remote_read(&protection, pd, key, BASE, 1).unwrap_err();
        assert!(matches!(error, AccessError::InsufficientAccess { .. }));
        let other = protection.allocate_protection_domain(CLIENT).unwrap();
        assert_eq!(
            remote_read(&protection, other, key, BASE, 1),
            Err(AccessError::PdMismatch { key: key.0 })
        );
        let stale = RemoteKey(key.0 ^ 1);
        let error = AccessError::StaleKey { key: stale.0, current: key.0 };
        assert_eq!(remote_read(&protection, pd, stale, BASE, 1), Err(error));
        protection.deregister_memory_region(CLIENT, key).unwrap();
        assert_eq!(remote_read(&protection, pd, key, BASE, 1), Err(AccessError::UnknownKey { key: key.0 }));
    }

    #[test]
    fn a_reregistered_range_has_a_new_key() {
        let (mut protection, pd, key) = region(ALL);
        let region = protection.memory_region(CLIENT, key).unwrap();
        assert_eq!(protection.reregister_memory_region(CLIENT, key, region), Ok(key));
        let moved = MemoryRegion { iova: 0, ..region };
        let new = protection.reregister_memory_region(CLIENT, key, moved).unwrap();
        assert_ne!(new, key);
        assert_eq!(remote_read(&protection, pd, new, 0, 1), Ok(0));
        assert!(matches!(remote_read(&protection, pd, key, 0, 1), Err(AccessError::StaleKey { .. })));
    }

    #[test]
    fn a_window_limits_the_range_of_its_region_until_it_is_invalidated() {
        let (mut protection, pd, key) = region(ALL);
        let window = protection.allocate_memory_window(CLIENT, pd, MemoryWindowType::Type2, [1; 2]).unwrap();
        let invalid = Err(AccessError::Invalidated { key: window.0 });
        assert_eq!(remote_read(&protection, pd, window, BASE + 1024, 1), invalid);
        let bound = protection.bind_memory_window(pd, QPN, &bind(window, key, window.0 + 1)).unwrap();
        assert_eq!(remote_read(&protection, pd, bound, BASE + 1024, 1024), Ok(1024));
        let outside = remote_read(&protection, pd, bound, BASE, 1);
        assert!(matches!(outside, Err(AccessError::OutOfBounds { .. })));
        assert!(protection.deregister_memory_region(CLIENT, key).is_err());
        let other = protection.invalidate(pd, Qpn::new(3), bound);
        assert_eq!(other, Err(AccessError::QpMismatch { key: bound.0 }));
        protection.invalidate(pd, QPN, bound).unwrap();
        assert_eq!(
            remote_read(&protection, pd, bound, BASE + 1024, 1),
            Err(AccessError::Invalidated { key: bound.0 })
        );
        assert!(protection.deregister_memory_region(CLIENT, key).is_ok());
    }

    #[test]
    fn a_protection_domain_in_use_cannot_be_freed() {
        let (mut protection, pd, key) = region(ALL);
        let (resource, user) = (Resource::ProtectionDomain, Resource::MemoryRegion);
        let busy = VerbsError::Busy { resource, number: pd.0, user };
        assert_eq!(protection.free_protection_domain(CLIENT, pd), Err(busy));
        protection.deregister_memory_region(CLIENT, key).unwrap();
        assert_eq!(protection.free_protection_domain(CLIENT, pd), Ok(()));
    }

    #[test]
    fn remote_write_access_requires_local_write_access() {
        let mut protection = Protection::new(&DeviceLimits::HCA);
        let pd = protection.allocate_protection_domain(CLIENT).unwrap();
        let (access_flags, memory) = (AccessFlags::REMOTE_WRITE, MemoryId(7));
        let region = MemoryRegion { client: CLIENT, pd, iova: 0, length: 1, access_flags, memory };
        assert!(protection.register_memory_region(region, [0; 2]).is_err());
    }
}
