//! Memory windows: allocation, binding and invalidation.

use super::{KeyEntry, KeyKind, MwBinding, Protection};
use crate::{AccessError, ClientId, DeviceLimits, MemoryWindowType, PdId, Resource, VerbsError, VerbsResult};
use softhca_types::{AccessFlags, MemoryWindowBind};
use softhca_wire::{Qpn, RemoteKey};

impl Protection {
    pub fn allocate_memory_window(
        &mut self,
        client: ClientId,
        pd: PdId,
        kind: MemoryWindowType,
        [tag, variant]: [u8; 2],
    ) -> VerbsResult<RemoteKey> {
        self.acquire_pd(client, pd)?;
        let window = KeyKind::MemoryWindow { client, pd, kind, binding: None };
        match self.keys.insert(tag, |_| KeyEntry { variant, kind: window }) {
            Some(number) => Ok(RemoteKey(number << 8 | u32::from(variant))),
            None => {
                self.release_pd(pd);
                let limit = DeviceLimits::HCA.max_mr;
                Err(VerbsError::Exhausted { resource: Resource::MemoryWindow, limit })
            }
        }
    }

    pub fn free_memory_window(&mut self, client: ClientId, key: RemoteKey) -> VerbsResult {
        let entry = self.entry(client, key.0, Resource::MemoryWindow)?;
        let KeyKind::MemoryWindow { pd, binding, .. } = &mut entry.kind else {
            unreachable!("entry() returned a window")
        };
        let (pd, binding) = (*pd, binding.take());
        self.unbind(binding);
        self.keys.remove(key.0 >> 8);
        self.release_pd(pd);
        Ok(())
    }

    /// Invalidates every window that is bound to a region.
    pub fn invalidate_windows(&mut self, client: ClientId, region: RemoteKey) -> VerbsResult {
        if self.check_not_bound(client, region).is_ok() {
            return Ok(());
        }
        let number = region.0 >> 8;
        self.memory_region(client, region)?;
        self.invalidate_where(|_, binding| binding.region == number);
        Ok(())
    }

    /// Invalidates every type 2 window that is bound through a queue pair, which is destroyed.
    pub fn invalidate_windows_of(&mut self, qpn: Qpn) {
        self.invalidate_where(|kind, binding| kind == MemoryWindowType::Type2 && binding.qpn == qpn);
    }

    fn invalidate_where(&mut self, wanted: impl Fn(MemoryWindowType, &MwBinding) -> bool) {
        let is_wanted = |entry: &KeyEntry| match &entry.kind {
            KeyKind::MemoryWindow { kind, binding: Some(binding), .. } => wanted(*kind, binding),
            _ => false,
        };
        for window in self.keys.numbers(is_wanted) {
            if let Some(KeyEntry { kind: KeyKind::MemoryWindow { binding, .. }, .. }) =
                self.keys.get_mut(window)
            {
                let old = binding.take();
                self.unbind(old);
            }
        }
    }

    fn unbind(&mut self, binding: Option<MwBinding>) {
        if let Some(binding) = binding
            && let Some(KeyEntry { kind: KeyKind::MemoryRegion { bound_windows, .. }, .. }) =
                self.keys.get_mut(binding.region)
        {
            *bound_windows -= 1;
        }
    }

    /// Binds a window on behalf of a queue pair of `pd`. Returns the new rkey. A bind that fails changes nothing. The
    /// application computes the next key from the one that it last used, and may have posted more binds meanwhile. The
    /// window's number identifies it therefore, not its present key.
    pub fn bind_memory_window(
        &mut self,
        pd: PdId,
        qpn: Qpn,
        bind: &MemoryWindowBind,
    ) -> Result<RemoteKey, AccessError> {
        let window_key = bind.mw_rkey.0;
        let Some(entry) = self.keys.get(window_key >> 8) else {
            return Err(AccessError::UnknownKey { key: window_key });
        };
        let KeyKind::MemoryWindow { pd: window_pd, kind, binding, .. } = &entry.kind else {
            return Err(AccessError::UnknownKey { key: window_key });
        };
        let kind = *kind;
        if *window_pd != pd {
            return Err(AccessError::PdMismatch { key: window_key });
        }
        // A type 2 window can be bound only while it is invalid (IBA o10-37.2.44).
        if kind == MemoryWindowType::Type2 && binding.is_some() {
            return Err(AccessError::AlreadyBound { key: entry.key(window_key) });
        }
        let region_key = bind.mr_lkey.0;
        let binding = if bind.length == 0 && kind == MemoryWindowType::Type1 {
            None
        } else {
            let Some(entry) = self.keys.get(region_key >> 8) else {
                return Err(AccessError::UnknownKey { key: region_key });
            };
            let KeyKind::MemoryRegion { region, .. } = &entry.kind else {
                return Err(AccessError::UnknownKey { key: region_key });
            };
            entry.check_variant(region_key)?;
            let mut required = AccessFlags::MW_BIND;
            if bind.access.intersects(AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC) {
                required |= AccessFlags::LOCAL_WRITE;
            }
            region.check_access(region_key, pd, required)?;
            region.offset(region_key, bind.address, bind.length)?;
            Some(MwBinding {
                region: region_key >> 8,
                address: bind.address,
                length: bind.length,
                access_flags: bind.access,
                qpn,
            })
        };
        if let Some(binding) = &binding
            && let Some(KeyEntry { kind: KeyKind::MemoryRegion { bound_windows, .. }, .. }) =
                self.keys.get_mut(binding.region)
        {
            *bound_windows += 1;
        }
        let entry = self.keys.get_mut(window_key >> 8).expect("the window exists");
        entry.variant = bind.new_rkey.0 as u8;
        let key = RemoteKey(entry.key(window_key));
        let KeyKind::MemoryWindow { binding: slot, .. } = &mut entry.kind else {
            unreachable!("the key is a window")
        };
        let old = core::mem::replace(slot, binding);
        self.unbind(old);
        Ok(key)
    }

    /// Invalidates a type 2 window, on behalf of a queue pair of `pd` or of its peer.
    pub fn invalidate(&mut self, pd: PdId, qpn: Qpn, key: RemoteKey) -> Result<(), AccessError> {
        let key = key.0;
        let entry = self.keys.get_mut(key >> 8).ok_or(AccessError::UnknownKey { key })?;
        entry.check_variant(key)?;
        let KeyKind::MemoryWindow { pd: owner, kind: MemoryWindowType::Type2, binding, .. } = &mut entry.kind
        else {
            // Only keys that a work request can make valid again can be invalidated (IBA 10.6.7.2).
            return Err(AccessError::UnknownKey { key });
        };
        if *owner != pd {
            return Err(AccessError::PdMismatch { key });
        }
        match binding {
            None => return Err(AccessError::Invalidated { key }),
            Some(binding) if binding.qpn != qpn => return Err(AccessError::QpMismatch { key }),
            Some(_) => {}
        }
        let old = binding.take();
        self.unbind(old);
        Ok(())
    }
}
