//! Who may touch which bytes: protection domains, regions, windows and their keys.
//!
//! A key is a table number and a variant of eight bits: `number << 8 | variant`. Regions and windows share
//! one table, because a peer's request names either.

use crate::memory::{MemoryFault, MemoryId};
use crate::table::Table;
use crate::{ClientId, Error, Limits, PdId, Resource, WindowKind};
use softhca_queue::{Access, BindWindow, Sge};
use softhca_wire::{LocalKey, Qpn, RemoteKey};
use thiserror::Error;

/// Why memory may not be touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the fields are named in the messages")]
pub enum Denied {
    #[error("key {key:#x} names nothing")]
    UnknownKey { key: u32 },
    #[error("key {key:#x} is stale: the present one is {present:#x}")]
    StaleKey { key: u32, present: u32 },
    #[error("key {key:#x} was invalidated")]
    Invalidated { key: u32 },
    #[error("key {key:#x} belongs to another protection domain")]
    ProtectionDomain { key: u32 },
    #[error("window {key:#x} is bound to another queue pair")]
    QueuePair { key: u32 },
    #[error("{length} bytes at {address:#x} are outside of {base:#x}+{size} (key {key:#x})")]
    OutOfBounds { key: u32, address: u64, length: u64, base: u64, size: u64 },
    #[error("key {key:#x} allows {}, {} is needed", Rights(*has), Rights(*needs))]
    Right { key: u32, has: Access, needs: Access },
    #[error("key {key:#x} is a window: local access needs a region")]
    NotARegion { key: u32 },
    #[error("the memory behind key {key:#x} cannot be reached")]
    Unreachable { key: u32 },
}

/// Access rights by their names.
struct Rights(Access);

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

/// Bytes that were checked and may be touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Located {
    pub memory: MemoryId,
    pub offset: u64,
    pub key: u32,
}

impl Located {
    pub fn unreachable(self, _: MemoryFault) -> Denied {
        Denied::Unreachable { key: self.key }
    }
}

/// A registered region as its owner sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Whose it is.
    pub client: ClientId,
    /// Its protection domain.
    pub domain: PdId,
    /// The address of its first byte, in its own terms.
    pub base: u64,
    /// How many bytes.
    pub length: u64,
    /// What is allowed.
    pub access: Access,
    /// What the driver calls the memory.
    pub memory: MemoryId,
}

#[derive(Clone, Copy, Debug)]
struct Binding {
    region: u32,
    address: u64,
    length: u64,
    access: Access,
    queue_pair: Qpn,
}

enum Kind {
    Region { region: Region, windows: u32 },
    Window { client: ClientId, domain: PdId, kind: WindowKind, binding: Option<Binding> },
}

struct Entry {
    variant: u8,
    kind: Kind,
}

struct Domain {
    client: ClientId,
    users: u32,
}

pub(crate) struct Protection {
    domains: Table<Domain>,
    keys: Table<Entry>,
}

impl Protection {
    pub fn new(limits: &Limits) -> Protection {
        Protection { domains: Table::new(limits.protection_domains, 1), keys: Table::new(limits.keys, 1) }
    }

    pub fn allocate_domain(&mut self, client: ClientId) -> Result<PdId, Error> {
        let number = self.domains.insert(0, |_| Domain { client, users: 0 });
        let limit = Limits::CARD.protection_domains;
        number.map(PdId).ok_or(Error::Exhausted { resource: Resource::ProtectionDomain, limit })
    }

    pub fn free_domain(&mut self, client: ClientId, domain: PdId) -> Result<(), Error> {
        if self.domain(client, domain)?.users > 0 {
            let user = self.user_of(domain);
            return Err(Error::Busy { resource: Resource::ProtectionDomain, number: domain.0, user });
        }
        self.domains.remove(domain.0);
        Ok(())
    }

    fn user_of(&self, domain: PdId) -> Resource {
        let of_domain = |kind: &Kind| match kind {
            Kind::Region { region, .. } => (region.domain == domain).then_some(Resource::MemoryRegion),
            Kind::Window { domain: d, .. } => (*d == domain).then_some(Resource::MemoryWindow),
        };
        self.keys.iter().find_map(|(_, entry)| of_domain(&entry.kind)).unwrap_or(Resource::QueuePair)
    }

    fn domain(&mut self, client: ClientId, domain: PdId) -> Result<&mut Domain, Error> {
        self.domains
            .get_mut(domain.0)
            .filter(|d| d.client == client)
            .ok_or(Error::NotFound { resource: Resource::ProtectionDomain, number: domain.0 })
    }

    /// Notes that a resource of `client` uses the domain from now on.
    pub fn hold(&mut self, client: ClientId, domain: PdId) -> Result<(), Error> {
        self.domain(client, domain)?.users += 1;
        Ok(())
    }

    /// Notes that a resource no longer uses the domain.
    pub fn release(&mut self, domain: PdId) {
        if let Some(domain) = self.domains.get_mut(domain.0) {
            domain.users -= 1;
        }
    }

    fn check_region(region: &Region) -> Result<(), Error> {
        let remote_write = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        if region.access.intersects(remote_write) && !region.access.contains(Access::LOCAL_WRITE) {
            let why = "remote write and remote atomic need local write too";
            return Err(Error::Invalid { what: "access flags", why });
        }
        if region.base.checked_add(region.length).is_none() {
            return Err(Error::Invalid { what: "region", why: "address and length wrap around" });
        }
        Ok(())
    }

    pub fn register(&mut self, mut region: Region, tag: u8) -> Result<RemoteKey, Error> {
        Self::check_region(&region)?;
        if region.access.contains(Access::ZERO_BASED) {
            region.base = 0;
        }
        self.hold(region.client, region.domain)?;
        let kind = Kind::Region { region, windows: 0 };
        match self.keys.insert(tag, |_| Entry { variant: tag, kind }) {
            Some(number) => Ok(RemoteKey(number << 8 | u32::from(tag))),
            None => {
                self.release(region.domain);
                let limit = Limits::CARD.keys;
                Err(Error::Exhausted { resource: Resource::MemoryRegion, limit })
            }
        }
    }

    /// Registers under a key of the caller's choice; for replaying captures.
    pub fn register_as(&mut self, region: Region, key: RemoteKey) -> Result<(), Error> {
        Self::check_region(&region)?;
        self.hold(region.client, region.domain)?;
        let kind = Kind::Region { region, windows: 0 };
        let taken =
            Error::Busy { resource: Resource::MemoryRegion, number: key.0, user: Resource::MemoryRegion };
        self.keys.insert_at(key.0 >> 8, |_| Entry { variant: key.0 as u8, kind }).map(|_| ()).ok_or(taken)
    }

    fn entry(&mut self, client: ClientId, key: u32, resource: Resource) -> Result<&mut Entry, Error> {
        self.keys
            .get_mut(key >> 8)
            .filter(|entry| match &entry.kind {
                Kind::Region { region, .. } => resource == Resource::MemoryRegion && region.client == client,
                Kind::Window { client: owner, .. } => resource == Resource::MemoryWindow && *owner == client,
            })
            .ok_or(Error::NotFound { resource, number: key })
    }

    /// The region that `key` names, whatever its variant.
    pub fn region(&mut self, client: ClientId, key: RemoteKey) -> Result<Region, Error> {
        match self.entry(client, key.0, Resource::MemoryRegion)?.kind {
            Kind::Region { region, .. } => Ok(region),
            Kind::Window { .. } => unreachable!("entry() found a region"),
        }
    }

    fn unless_bound(&mut self, client: ClientId, key: RemoteKey) -> Result<(), Error> {
        match self.entry(client, key.0, Resource::MemoryRegion)?.kind {
            Kind::Region { windows, .. } if windows > 0 => Err(Error::Busy {
                resource: Resource::MemoryRegion,
                number: key.0,
                user: Resource::MemoryWindow,
            }),
            _ => Ok(()),
        }
    }

    /// Removes a region and returns what it was.
    pub fn deregister(&mut self, client: ClientId, key: RemoteKey) -> Result<Region, Error> {
        self.unless_bound(client, key)?;
        let region = self.region(client, key)?;
        self.keys.remove(key.0 >> 8);
        self.release(region.domain);
        Ok(region)
    }

    /// Changes a region in place; its key gets the next variant, so that old holders are refused.
    pub fn reregister(
        &mut self,
        client: ClientId,
        key: RemoteKey,
        mut new: Region,
    ) -> Result<RemoteKey, Error> {
        Self::check_region(&new)?;
        self.unless_bound(client, key)?;
        let old = self.region(client, key)?;
        if new.access.contains(Access::ZERO_BASED) {
            new.base = 0;
        }
        if new.domain != old.domain {
            self.hold(client, new.domain)?;
            self.release(old.domain);
        }
        let entry = self.entry(client, key.0, Resource::MemoryRegion)?;
        entry.variant = entry.variant.wrapping_add(1);
        entry.kind = Kind::Region { region: new, windows: 0 };
        Ok(RemoteKey(key.0 & !0xff | u32::from(entry.variant)))
    }

    pub fn allocate_window(
        &mut self,
        client: ClientId,
        domain: PdId,
        kind: WindowKind,
        tag: u8,
    ) -> Result<RemoteKey, Error> {
        self.hold(client, domain)?;
        let window = Kind::Window { client, domain, kind, binding: None };
        match self.keys.insert(tag, |_| Entry { variant: tag, kind: window }) {
            Some(number) => Ok(RemoteKey(number << 8 | u32::from(tag))),
            None => {
                self.release(domain);
                let limit = Limits::CARD.keys;
                Err(Error::Exhausted { resource: Resource::MemoryWindow, limit })
            }
        }
    }

    pub fn free_window(&mut self, client: ClientId, key: RemoteKey) -> Result<(), Error> {
        let entry = self.entry(client, key.0, Resource::MemoryWindow)?;
        let Kind::Window { domain, binding, .. } = &mut entry.kind else {
            unreachable!("entry() found a window")
        };
        let (domain, binding) = (*domain, binding.take());
        self.unbind(binding);
        self.keys.remove(key.0 >> 8);
        self.release(domain);
        Ok(())
    }

    fn unbind(&mut self, binding: Option<Binding>) {
        if let Some(binding) = binding
            && let Some(Entry { kind: Kind::Region { windows, .. }, .. }) = self.keys.get_mut(binding.region)
        {
            *windows -= 1;
        }
    }

    /// Binds a window on behalf of a queue pair of `domain`. Returns the window's new key.
    pub fn bind(&mut self, domain: PdId, queue_pair: Qpn, bind: &BindWindow) -> Result<RemoteKey, Denied> {
        let window_key = bind.window.0;
        let (window_domain, kind, bound) = match self.keys.get(window_key >> 8) {
            Some(Entry { variant, kind: Kind::Window { domain, kind, binding, .. } }) => {
                if *variant != window_key as u8 {
                    let present = window_key & !0xff | u32::from(*variant);
                    return Err(Denied::StaleKey { key: window_key, present });
                }
                (*domain, *kind, binding.is_some())
            }
            _ => return Err(Denied::UnknownKey { key: window_key }),
        };
        if window_domain != domain {
            return Err(Denied::ProtectionDomain { key: window_key });
        }
        // A type 2 window is bound again only after it was invalidated, under a key with the same number.
        if kind == WindowKind::Type2 && (bound || bind.new_key.0 >> 8 != window_key >> 8) {
            return Err(Denied::StaleKey { key: bind.new_key.0, present: window_key });
        }
        let region_key = bind.region.0;
        let binding = if bind.length == 0 && kind == WindowKind::Type1 {
            None
        } else {
            let Some(Entry { variant, kind: Kind::Region { region, .. } }) = self.keys.get(region_key >> 8)
            else {
                return Err(Denied::UnknownKey { key: region_key });
            };
            if *variant != region_key as u8 {
                let present = region_key & !0xff | u32::from(*variant);
                return Err(Denied::StaleKey { key: region_key, present });
            }
            if region.domain != domain {
                return Err(Denied::ProtectionDomain { key: region_key });
            }
            let mut needs = Access::WINDOW_BIND;
            if bind.access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC) {
                needs |= Access::LOCAL_WRITE;
            }
            if !region.access.contains(needs) {
                return Err(Denied::Right { key: region_key, has: region.access, needs });
            }
            within(region_key, region, bind.address, bind.length)?;
            Some(Binding {
                region: region_key >> 8,
                address: bind.address,
                length: bind.length,
                access: bind.access,
                queue_pair,
            })
        };
        if let Some(binding) = &binding
            && let Some(Entry { kind: Kind::Region { windows, .. }, .. }) = self.keys.get_mut(binding.region)
        {
            *windows += 1;
        }
        let entry = self.keys.get_mut(window_key >> 8).expect("the window was found above");
        entry.variant = match kind {
            WindowKind::Type1 => entry.variant.wrapping_add(1),
            WindowKind::Type2 => bind.new_key.0 as u8,
        };
        let key = RemoteKey(window_key & !0xff | u32::from(entry.variant));
        let Kind::Window { binding: slot, .. } = &mut entry.kind else { unreachable!("found a window") };
        let old = core::mem::replace(slot, binding);
        self.unbind(old);
        Ok(key)
    }

    /// Takes the binding of a type 2 window away, on behalf of a queue pair of `domain` or of its peer.
    pub fn invalidate(&mut self, domain: PdId, queue_pair: Qpn, key: RemoteKey) -> Result<(), Denied> {
        let key = key.0;
        let Some(entry) = self.keys.get_mut(key >> 8) else { return Err(Denied::UnknownKey { key }) };
        if entry.variant != key as u8 {
            return Err(Denied::StaleKey { key, present: key & !0xff | u32::from(entry.variant) });
        }
        let Kind::Window { domain: owner, kind: WindowKind::Type2, binding, .. } = &mut entry.kind else {
            // Only what can be made valid again by a work request can be invalidated (IBA 10.6.7.2).
            return Err(Denied::UnknownKey { key });
        };
        if *owner != domain {
            return Err(Denied::ProtectionDomain { key });
        }
        match binding {
            None => return Err(Denied::Invalidated { key }),
            Some(binding) if binding.queue_pair != queue_pair => return Err(Denied::QueuePair { key }),
            Some(_) => {}
        }
        let old = binding.take();
        self.unbind(old);
        Ok(())
    }

    /// Finds the bytes of a local scatter/gather entry, from `skip` on, `length` of them.
    #[inline]
    pub fn local(
        &self,
        domain: PdId,
        entry: &Sge,
        skip: u32,
        length: u32,
        needs: Access,
    ) -> Result<Located, Denied> {
        let LocalKey(key) = entry.key;
        let Some(found) = self.keys.get(key >> 8) else { return Err(Denied::UnknownKey { key }) };
        let Kind::Region { region, .. } = &found.kind else { return Err(Denied::NotARegion { key }) };
        if found.variant != key as u8 {
            return Err(Denied::StaleKey { key, present: key & !0xff | u32::from(found.variant) });
        }
        if region.domain != domain {
            return Err(Denied::ProtectionDomain { key });
        }
        if !region.access.contains(needs) {
            return Err(Denied::Right { key, has: region.access, needs });
        }
        let address = entry.address.wrapping_add(u64::from(skip));
        let offset = within(key, region, address, u64::from(length))?;
        Ok(Located { memory: region.memory, offset, key })
    }

    /// Finds the bytes that a peer's request names.
    #[inline]
    pub fn remote(
        &self,
        domain: PdId,
        queue_pair: Qpn,
        RemoteKey(key): RemoteKey,
        address: u64,
        length: u32,
        needs: Access,
    ) -> Result<Located, Denied> {
        let Some(found) = self.keys.get(key >> 8) else { return Err(Denied::UnknownKey { key }) };
        if found.variant != key as u8 {
            return Err(Denied::StaleKey { key, present: key & !0xff | u32::from(found.variant) });
        }
        let length = u64::from(length);
        let (owner, access, region) = match &found.kind {
            Kind::Region { region, .. } => (region.domain, region.access, region),
            Kind::Window { domain, kind, binding, .. } => {
                let Some(binding) = binding else { return Err(Denied::Invalidated { key }) };
                if *kind == WindowKind::Type2 && binding.queue_pair != queue_pair {
                    return Err(Denied::QueuePair { key });
                }
                let Some(Entry { kind: Kind::Region { region, .. }, .. }) = self.keys.get(binding.region)
                else {
                    return Err(Denied::Invalidated { key });
                };
                span(key, binding.address, binding.length, address, length)?;
                (*domain, binding.access, region)
            }
        };
        if owner != domain {
            return Err(Denied::ProtectionDomain { key });
        }
        if !access.contains(needs) {
            return Err(Denied::Right { key, has: access, needs });
        }
        let offset = within(key, region, address, length)?;
        Ok(Located { memory: region.memory, offset, key })
    }

    /// What `client` owns, by key: regions first, then windows.
    pub fn owned(&self, client: ClientId) -> (alloc::vec::Vec<RemoteKey>, alloc::vec::Vec<RemoteKey>) {
        let (mut regions, mut windows) = (alloc::vec::Vec::new(), alloc::vec::Vec::new());
        for (number, entry) in self.keys.iter() {
            let key = RemoteKey(number << 8 | u32::from(entry.variant));
            match &entry.kind {
                Kind::Region { region, .. } if region.client == client => regions.push(key),
                Kind::Window { client: owner, .. } if *owner == client => windows.push(key),
                _ => {}
            }
        }
        (regions, windows)
    }

    pub fn domains_of(&self, client: ClientId) -> alloc::vec::Vec<PdId> {
        self.domains.numbers(|d| d.client == client).into_iter().map(PdId).collect()
    }
}

fn span(key: u32, base: u64, size: u64, address: u64, length: u64) -> Result<u64, Denied> {
    let outside = Denied::OutOfBounds { key, address, length, base, size };
    let offset = address.checked_sub(base).ok_or(outside)?;
    match offset.checked_add(length) {
        Some(end) if end <= size => Ok(offset),
        _ => Err(outside),
    }
}

fn within(key: u32, region: &Region, address: u64, length: u64) -> Result<u64, Denied> {
    span(key, region.base, region.length, address, length)
}
