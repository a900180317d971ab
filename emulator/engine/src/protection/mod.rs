//! Memory protection: protection domains, memory regions, memory windows and their keys.
//!
//! A key is a table number and an 8-bit variant: `number << 8 | variant`. Regions and windows share one table,
//! because an rkey can name either.

use crate::memory::{MemoryFault, MemoryId};
use crate::table::Table;
use crate::{ClientId, DeviceLimits, MemoryWindowType, PdId, Resource, VerbsError};
use softhca_queue::{AccessFlags, MemoryWindowBind, Sge};
use softhca_wire::{LocalKey, Qpn, RemoteKey};
use thiserror::Error;

/// The reason for denying access to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum AccessError {
    #[error("key {key:#x} names nothing")]
    UnknownKey { key: u32 },
    #[error("key {key:#x} is stale: the present one is {present:#x}")]
    StaleKey { key: u32, present: u32 },
    #[error("key {key:#x} was invalidated")]
    Invalidated { key: u32 },
    #[error("key {key:#x} belongs to another protection domain")]
    PdMismatch { key: u32 },
    #[error("window {key:#x} is bound to another queue pair")]
    QpMismatch { key: u32 },
    #[error("{length} bytes at {address:#x} are outside of {base:#x}+{size} (key {key:#x})")]
    OutOfBounds { key: u32, address: u64, length: u64, base: u64, size: u64 },
    #[error("key {key:#x} allows {}, {} is needed", Rights(*has), Rights(*needs))]
    InsufficientAccess { key: u32, has: AccessFlags, needs: AccessFlags },
    #[error("key {key:#x} is a window: local access needs a region")]
    NotAMemoryRegion { key: u32 },
    #[error("the memory behind key {key:#x} cannot be reached")]
    Unreachable { key: u32 },
}

/// Formats access flags by name.
struct Rights(AccessFlags);

impl core::fmt::Display for Rights {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        if self.0.is_empty() {
            return f.write_str("nothing");
        }
        for (index, (name, _)) in self.0.iter_names().enumerate() {
            write!(f, "{}{name}", if index == 0 { "" } else { " and " })?;
        }
        Ok(())
    }
}

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
    /// The protection domain.
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

struct ProtectionDomain {
    client: ClientId,
    users: u32,
}

pub(crate) struct Protection {
    pds: Table<ProtectionDomain>,
    keys: Table<KeyEntry>,
}

impl Protection {
    pub fn new(limits: &DeviceLimits) -> Protection {
        Protection { pds: Table::new(limits.max_pd, 1), keys: Table::new(limits.max_mr, 1) }
    }

    pub fn allocate_protection_domain(&mut self, client: ClientId) -> Result<PdId, VerbsError> {
        let number = self.pds.insert(0, |_| ProtectionDomain { client, users: 0 });
        let limit = DeviceLimits::HCA.max_pd;
        number.map(PdId).ok_or(VerbsError::Exhausted { resource: Resource::ProtectionDomain, limit })
    }

    pub fn free_protection_domain(&mut self, client: ClientId, domain: PdId) -> Result<(), VerbsError> {
        if self.protection_domain(client, domain)?.users > 0 {
            let user = self.pd_user(domain);
            return Err(VerbsError::Busy { resource: Resource::ProtectionDomain, number: domain.0, user });
        }
        self.pds.remove(domain.0);
        Ok(())
    }

    fn pd_user(&self, domain: PdId) -> Resource {
        let of_domain = |kind: &KeyKind| match kind {
            KeyKind::MemoryRegion { region, .. } => (region.pd == domain).then_some(Resource::MemoryRegion),
            KeyKind::MemoryWindow { pd: d, .. } => (*d == domain).then_some(Resource::MemoryWindow),
        };
        self.keys.iter().find_map(|(_, entry)| of_domain(&entry.kind)).unwrap_or(Resource::QueuePair)
    }

    fn protection_domain(
        &mut self,
        client: ClientId,
        domain: PdId,
    ) -> Result<&mut ProtectionDomain, VerbsError> {
        self.pds
            .get_mut(domain.0)
            .filter(|d| d.client == client)
            .ok_or(VerbsError::NotFound { resource: Resource::ProtectionDomain, number: domain.0 })
    }

    /// Counts a resource of `client` that uses the protection domain.
    pub fn acquire_pd(&mut self, client: ClientId, domain: PdId) -> Result<(), VerbsError> {
        self.protection_domain(client, domain)?.users += 1;
        Ok(())
    }

    /// Releases a use of the protection domain.
    pub fn release_pd(&mut self, domain: PdId) {
        if let Some(domain) = self.pds.get_mut(domain.0) {
            domain.users -= 1;
        }
    }

    fn check_memory_region(region: &MemoryRegion) -> Result<(), VerbsError> {
        let remote_write = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        if region.access_flags.intersects(remote_write)
            && !region.access_flags.contains(AccessFlags::LOCAL_WRITE)
        {
            let why = "remote write and remote atomic need local write too";
            return Err(VerbsError::Invalid { what: "access flags", why });
        }
        if region.iova.checked_add(region.length).is_none() {
            return Err(VerbsError::Invalid { what: "region", why: "address and length wrap around" });
        }
        Ok(())
    }

    pub fn register_memory_region(
        &mut self,
        mut region: MemoryRegion,
        tag: u8,
    ) -> Result<RemoteKey, VerbsError> {
        Self::check_memory_region(&region)?;
        if region.access_flags.contains(AccessFlags::ZERO_BASED) {
            region.iova = 0;
        }
        self.acquire_pd(region.client, region.pd)?;
        let kind = KeyKind::MemoryRegion { region, bound_windows: 0 };
        match self.keys.insert(tag, |_| KeyEntry { variant: tag, kind }) {
            Some(number) => Ok(RemoteKey(number << 8 | u32::from(tag))),
            None => {
                self.release_pd(region.pd);
                let limit = DeviceLimits::HCA.max_mr;
                Err(VerbsError::Exhausted { resource: Resource::MemoryRegion, limit })
            }
        }
    }

    /// Registers a region with a given key, to replay captures.
    pub fn register_memory_region_with_key(
        &mut self,
        region: MemoryRegion,
        key: RemoteKey,
    ) -> Result<(), VerbsError> {
        Self::check_memory_region(&region)?;
        self.acquire_pd(region.client, region.pd)?;
        let kind = KeyKind::MemoryRegion { region, bound_windows: 0 };
        let taken = VerbsError::Busy {
            resource: Resource::MemoryRegion,
            number: key.0,
            user: Resource::MemoryRegion,
        };
        self.keys.insert_at(key.0 >> 8, |_| KeyEntry { variant: key.0 as u8, kind }).map(|_| ()).ok_or(taken)
    }

    fn entry(&mut self, client: ClientId, key: u32, resource: Resource) -> Result<&mut KeyEntry, VerbsError> {
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
    pub fn memory_region(&mut self, client: ClientId, key: RemoteKey) -> Result<MemoryRegion, VerbsError> {
        match self.entry(client, key.0, Resource::MemoryRegion)?.kind {
            KeyKind::MemoryRegion { region, .. } => Ok(region),
            KeyKind::MemoryWindow { .. } => unreachable!("entry() found a region"),
        }
    }

    fn check_not_bound(&mut self, client: ClientId, key: RemoteKey) -> Result<(), VerbsError> {
        match self.entry(client, key.0, Resource::MemoryRegion)?.kind {
            KeyKind::MemoryRegion { bound_windows: windows, .. } if windows > 0 => Err(VerbsError::Busy {
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
    ) -> Result<MemoryRegion, VerbsError> {
        self.check_not_bound(client, key)?;
        let region = self.memory_region(client, key)?;
        self.keys.remove(key.0 >> 8);
        self.release_pd(region.pd);
        Ok(region)
    }

    /// Modifies a region in place. If its range changes, the key gets the next variant and the old key becomes stale.
    pub fn reregister_memory_region(
        &mut self,
        client: ClientId,
        key: RemoteKey,
        mut new: MemoryRegion,
    ) -> Result<RemoteKey, VerbsError> {
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
        let entry = self.entry(client, key.0, Resource::MemoryRegion)?;
        if has_moved {
            entry.variant = entry.variant.wrapping_add(1);
        }
        entry.kind = KeyKind::MemoryRegion { region: new, bound_windows: 0 };
        Ok(RemoteKey(key.0 & !0xff | u32::from(entry.variant)))
    }

    pub fn allocate_memory_window(
        &mut self,
        client: ClientId,
        domain: PdId,
        kind: MemoryWindowType,
        tag: u8,
    ) -> Result<RemoteKey, VerbsError> {
        self.acquire_pd(client, domain)?;
        let window = KeyKind::MemoryWindow { client, pd: domain, kind, binding: None };
        match self.keys.insert(tag, |_| KeyEntry { variant: tag, kind: window }) {
            Some(number) => Ok(RemoteKey(number << 8 | u32::from(tag))),
            None => {
                self.release_pd(domain);
                let limit = DeviceLimits::HCA.max_mr;
                Err(VerbsError::Exhausted { resource: Resource::MemoryWindow, limit })
            }
        }
    }

    pub fn free_memory_window(&mut self, client: ClientId, key: RemoteKey) -> Result<(), VerbsError> {
        let entry = self.entry(client, key.0, Resource::MemoryWindow)?;
        let KeyKind::MemoryWindow { pd: domain, binding, .. } = &mut entry.kind else {
            unreachable!("entry() found a window")
        };
        let (domain, binding) = (*domain, binding.take());
        self.unbind(binding);
        self.keys.remove(key.0 >> 8);
        self.release_pd(domain);
        Ok(())
    }

    fn unbind(&mut self, binding: Option<MwBinding>) {
        if let Some(binding) = binding
            && let Some(KeyEntry { kind: KeyKind::MemoryRegion { bound_windows: windows, .. }, .. }) =
                self.keys.get_mut(binding.region)
        {
            *windows -= 1;
        }
    }

    /// Binds a window on behalf of a queue pair of `domain`. Returns the new rkey.
    pub fn bind_memory_window(
        &mut self,
        domain: PdId,
        queue_pair: Qpn,
        bind: &MemoryWindowBind,
    ) -> Result<RemoteKey, AccessError> {
        let window_key = bind.mw_rkey.0;
        let (window_domain, kind, bound) = match self.keys.get(window_key >> 8) {
            Some(KeyEntry { variant, kind: KeyKind::MemoryWindow { pd: domain, kind, binding, .. } }) => {
                if *variant != window_key as u8 {
                    let present = window_key & !0xff | u32::from(*variant);
                    return Err(AccessError::StaleKey { key: window_key, present });
                }
                (*domain, *kind, binding.is_some())
            }
            _ => return Err(AccessError::UnknownKey { key: window_key }),
        };
        if window_domain != domain {
            return Err(AccessError::PdMismatch { key: window_key });
        }
        // A type 2 window can be bound only while it is invalid, with a key of the same number.
        if kind == MemoryWindowType::Type2 && (bound || bind.new_rkey.0 >> 8 != window_key >> 8) {
            return Err(AccessError::StaleKey { key: bind.new_rkey.0, present: window_key });
        }
        let region_key = bind.mr_lkey.0;
        let binding = if bind.length == 0 && kind == MemoryWindowType::Type1 {
            None
        } else {
            let Some(KeyEntry { variant, kind: KeyKind::MemoryRegion { region, .. } }) =
                self.keys.get(region_key >> 8)
            else {
                return Err(AccessError::UnknownKey { key: region_key });
            };
            if *variant != region_key as u8 {
                let present = region_key & !0xff | u32::from(*variant);
                return Err(AccessError::StaleKey { key: region_key, present });
            }
            if region.pd != domain {
                return Err(AccessError::PdMismatch { key: region_key });
            }
            let mut needs = AccessFlags::MW_BIND;
            if bind.access.intersects(AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC) {
                needs |= AccessFlags::LOCAL_WRITE;
            }
            if !region.access_flags.contains(needs) {
                return Err(AccessError::InsufficientAccess {
                    key: region_key,
                    has: region.access_flags,
                    needs,
                });
            }
            check_region_bounds(region_key, region, bind.address, bind.length)?;
            Some(MwBinding {
                region: region_key >> 8,
                address: bind.address,
                length: bind.length,
                access_flags: bind.access,
                qpn: queue_pair,
            })
        };
        if let Some(binding) = &binding
            && let Some(KeyEntry { kind: KeyKind::MemoryRegion { bound_windows: windows, .. }, .. }) =
                self.keys.get_mut(binding.region)
        {
            *windows += 1;
        }
        let entry = self.keys.get_mut(window_key >> 8).expect("the window was found above");
        entry.variant = match kind {
            MemoryWindowType::Type1 => entry.variant.wrapping_add(1),
            MemoryWindowType::Type2 => bind.new_rkey.0 as u8,
        };
        let key = RemoteKey(window_key & !0xff | u32::from(entry.variant));
        let KeyKind::MemoryWindow { binding: slot, .. } = &mut entry.kind else {
            unreachable!("found a window")
        };
        let old = core::mem::replace(slot, binding);
        self.unbind(old);
        Ok(key)
    }

    /// Invalidates a type 2 window, on behalf of a queue pair of `domain` or of its peer.
    pub fn invalidate(&mut self, domain: PdId, queue_pair: Qpn, key: RemoteKey) -> Result<(), AccessError> {
        let key = key.0;
        let Some(entry) = self.keys.get_mut(key >> 8) else { return Err(AccessError::UnknownKey { key }) };
        if entry.variant != key as u8 {
            return Err(AccessError::StaleKey { key, present: key & !0xff | u32::from(entry.variant) });
        }
        let KeyKind::MemoryWindow { pd: owner, kind: MemoryWindowType::Type2, binding, .. } = &mut entry.kind
        else {
            // Only keys that a work request can make valid again can be invalidated (IBA 10.6.7.2).
            return Err(AccessError::UnknownKey { key });
        };
        if *owner != domain {
            return Err(AccessError::PdMismatch { key });
        }
        match binding {
            None => return Err(AccessError::Invalidated { key }),
            Some(binding) if binding.qpn != queue_pair => return Err(AccessError::QpMismatch { key }),
            Some(_) => {}
        }
        let old = binding.take();
        self.unbind(old);
        Ok(())
    }

    /// Translates `length` bytes of a scatter/gather entry, from `skip` on.
    #[inline]
    pub fn check_local_access(
        &self,
        domain: PdId,
        entry: &Sge,
        skip: u32,
        length: u32,
        needs: AccessFlags,
    ) -> Result<TranslatedAddress, AccessError> {
        let LocalKey(key) = entry.lkey;
        let Some(found) = self.keys.get(key >> 8) else { return Err(AccessError::UnknownKey { key }) };
        let KeyKind::MemoryRegion { region, .. } = &found.kind else {
            return Err(AccessError::NotAMemoryRegion { key });
        };
        if found.variant != key as u8 {
            return Err(AccessError::StaleKey { key, present: key & !0xff | u32::from(found.variant) });
        }
        if region.pd != domain {
            return Err(AccessError::PdMismatch { key });
        }
        if !region.access_flags.contains(needs) {
            return Err(AccessError::InsufficientAccess { key, has: region.access_flags, needs });
        }
        let address = entry.address.wrapping_add(u64::from(skip));
        let offset = check_region_bounds(key, region, address, u64::from(length))?;
        Ok(TranslatedAddress { memory: region.memory, offset, key })
    }

    /// Translates the remote address of a peer's request.
    #[inline]
    pub fn check_remote_access(
        &self,
        domain: PdId,
        queue_pair: Qpn,
        RemoteKey(key): RemoteKey,
        address: u64,
        length: u32,
        needs: AccessFlags,
    ) -> Result<TranslatedAddress, AccessError> {
        let Some(found) = self.keys.get(key >> 8) else { return Err(AccessError::UnknownKey { key }) };
        if found.variant != key as u8 {
            return Err(AccessError::StaleKey { key, present: key & !0xff | u32::from(found.variant) });
        }
        let length = u64::from(length);
        let (owner, access, region) = match &found.kind {
            KeyKind::MemoryRegion { region, .. } => (region.pd, region.access_flags, region),
            KeyKind::MemoryWindow { pd: domain, kind, binding, .. } => {
                let Some(binding) = binding else { return Err(AccessError::Invalidated { key }) };
                if *kind == MemoryWindowType::Type2 && binding.qpn != queue_pair {
                    return Err(AccessError::QpMismatch { key });
                }
                let Some(KeyEntry { kind: KeyKind::MemoryRegion { region, .. }, .. }) =
                    self.keys.get(binding.region)
                else {
                    return Err(AccessError::Invalidated { key });
                };
                check_bounds(key, binding.address, binding.length, address, length)?;
                (*domain, binding.access_flags, region)
            }
        };
        if owner != domain {
            return Err(AccessError::PdMismatch { key });
        }
        if !access.contains(needs) {
            return Err(AccessError::InsufficientAccess { key, has: access, needs });
        }
        let offset = check_region_bounds(key, region, address, length)?;
        Ok(TranslatedAddress { memory: region.memory, offset, key })
    }

    /// The regions and windows of `client`, by key.
    pub fn keys_of_client(
        &self,
        client: ClientId,
    ) -> (alloc::vec::Vec<RemoteKey>, alloc::vec::Vec<RemoteKey>) {
        let (mut regions, mut windows) = (alloc::vec::Vec::new(), alloc::vec::Vec::new());
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

    pub fn pds_of_client(&self, client: ClientId) -> alloc::vec::Vec<PdId> {
        self.pds.numbers(|d| d.client == client).into_iter().map(PdId).collect()
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

fn check_region_bounds(
    key: u32,
    region: &MemoryRegion,
    address: u64,
    length: u64,
) -> Result<u64, AccessError> {
    check_bounds(key, region.iova, region.length, address, length)
}
