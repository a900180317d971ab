//! Control verbs of address handles and multicast groups.

use crate::card::AddressHandle;
use crate::{AddressVector, AhId, ClientId, Error, Hca, PdId, Resource};
use softhca_wire::{Gid, Qpn};

impl Hca {
    pub(super) fn check_path(&self, path: &AddressVector) -> Result<(), Error> {
        if path.destination.is_unspecified() {
            let why = "RoCE needs a GRH: set the destination GID";
            return Err(Error::Invalid { what: "address vector", why });
        }
        if usize::from(path.source_index) >= self.card.gids.len() {
            let limit = self.card.gids.len().saturating_sub(1) as u64;
            return Err(Error::TooLarge { what: "source GID index", value: path.source_index.into(), limit });
        }
        let source = self.card.gid(path.source_index).ip();
        if source.is_ipv4() != path.destination.ip().is_ipv4() {
            let why = "source and destination GID are of different IP versions: choose the other GID index";
            return Err(Error::Invalid { what: "address vector", why });
        }
        Ok(())
    }

    /// Creates an address handle.
    pub fn create_address_handle(
        &mut self,
        client: ClientId,
        domain: PdId,
        vector: AddressVector,
    ) -> Result<AhId, Error> {
        self.check_path(&vector)?;
        let limit = self.limits.address_handles;
        if !self.card.address_handles.has_room() {
            return Err(Error::Exhausted { resource: Resource::AddressHandle, limit });
        }
        self.card.protection.hold(client, domain)?;
        let tag = self.tag();
        let number = self.card.address_handles.insert(tag, |_| AddressHandle { client, domain, vector });
        Ok(AhId(number.expect("there is room")))
    }

    /// Destroys an address handle.
    pub fn destroy_address_handle(&mut self, client: ClientId, handle: AhId) -> Result<(), Error> {
        let found = self.card.address_handles.get(handle.0).filter(|found| found.client == client);
        let domain =
            found.ok_or(Error::NotFound { resource: Resource::AddressHandle, number: handle.0 })?.domain;
        self.card.address_handles.remove(handle.0);
        self.card.protection.release(domain);
        Ok(())
    }

    /// Makes a datagram queue pair a member of a multicast group.
    pub fn attach_multicast(&mut self, client: ClientId, number: Qpn, group: Gid) -> Result<(), Error> {
        let (groups, members) = (self.limits.multicast_groups, self.limits.multicast_attachments);
        if !self.queue_pair(client, number)?.kind.is_datagram() {
            let why = "only UD queue pairs can be members";
            return Err(Error::Invalid { what: "multicast", why });
        }
        if !group.is_multicast() {
            return Err(Error::Invalid { what: "multicast", why: "the GID is not a multicast address" });
        }
        if !self.card.groups.contains_key(&group) && self.card.groups.len() >= groups {
            return Err(Error::Exhausted { resource: Resource::MulticastGroup, limit: groups });
        }
        let list = self.card.groups.entry(group).or_default();
        if !list.contains(&number) {
            if list.len() >= members {
                return Err(Error::Exhausted { resource: Resource::MulticastGroup, limit: members });
            }
            list.push(number);
        }
        Ok(())
    }

    /// Takes a queue pair out of a multicast group.
    pub fn detach_multicast(&mut self, client: ClientId, number: Qpn, group: Gid) -> Result<(), Error> {
        self.queue_pair(client, number)?;
        let not_member = Error::NotFound { resource: Resource::MulticastGroup, number: number.value() };
        let list = self.card.groups.get_mut(&group).ok_or(not_member)?;
        let place = list.iter().position(|member| *member == number).ok_or(not_member)?;
        list.remove(place);
        if list.is_empty() {
            self.card.groups.remove(&group);
        }
        Ok(())
    }

    /// The multicast groups with members here.
    pub fn multicast_groups(&self) -> impl Iterator<Item = Gid> {
        self.card.groups.keys().copied()
    }
}
