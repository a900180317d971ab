//! Control verbs of address handles and multicast groups.

use crate::core::hca::Hca;
use crate::core::hca_state::AddressHandle;
use crate::core::transport::Transport;
use crate::{AddressVector, AhId, ClientId, ModifyQp, PdId, Resource, VerbsError, VerbsResult};
use softhca_types::InfiniBandPort;
use softhca_wire::smp::Lid;
use softhca_wire::{Gid, Qpn};

impl<T: Transport> Hca<T> {
    pub(super) fn check_address_vector(&self, path: &AddressVector) -> VerbsResult {
        if let Some(port) = &self.state.infiniband {
            return check_local_route(port, path);
        }
        if path.dgid.is_unspecified() {
            let why = "RoCE needs a GRH: set the destination GID";
            return Err(VerbsError::Invalid { what: "address vector", why });
        }
        if usize::from(path.sgid_index) >= self.state.gids.len() {
            let limit = self.state.gids.len().saturating_sub(1) as u64;
            return Err(VerbsError::LimitExceeded {
                what: "source GID index",
                value: path.sgid_index.into(),
                limit,
            });
        }
        let source = self.state.gid(path.sgid_index).ip();
        if source.is_ipv4() != path.dgid.ip().is_ipv4() {
            let why = "source and destination GID are of different IP versions: choose the other GID index";
            return Err(VerbsError::Invalid { what: "address vector", why });
        }
        Ok(())
    }

    /// Checks the index of the P_Key that packets will have.
    pub(super) fn check_p_key_index(&self, modify: &ModifyQp) -> VerbsResult {
        let (entries, why) = match &self.state.infiniband {
            Some(port) => (port.p_keys.len(), "it is beyond the P_Key table of the port"),
            None => (1, "the table has one entry, index 0"),
        };
        match modify.pkey_index {
            Some(index) if usize::from(index) >= entries => {
                Err(VerbsError::Invalid { what: "P_Key index", why })
            }
            _ => Ok(()),
        }
    }

    /// Creates an address handle.
    pub fn create_address_handle(
        &mut self,
        client: ClientId,
        domain: PdId,
        vector: AddressVector,
    ) -> VerbsResult<AhId> {
        self.check_address_vector(&vector)?;
        let limit = self.limits.max_ah;
        if !self.state.objects.address_handles.has_room() {
            return Err(VerbsError::Exhausted { resource: Resource::AddressHandle, limit });
        }
        self.state.objects.protection.acquire_pd(client, domain)?;
        let tag = self.next_tag();
        let number =
            self.state.objects.address_handles.insert(tag, |_| AddressHandle { client, pd: domain, vector });
        Ok(AhId(number.expect("there is room")))
    }

    /// Destroys an address handle.
    pub fn destroy_address_handle(&mut self, client: ClientId, handle: AhId) -> VerbsResult {
        let found = self.state.objects.address_handles.get(handle.0).filter(|found| found.client == client);
        let domain =
            found.ok_or(VerbsError::NotFound { resource: Resource::AddressHandle, number: handle.0 })?.pd;
        self.state.objects.address_handles.remove(handle.0);
        self.state.objects.protection.release_pd(domain);
        Ok(())
    }

    /// Makes a datagram queue pair a member of a multicast group.
    pub fn attach_multicast(&mut self, client: ClientId, number: Qpn, group: Gid) -> VerbsResult {
        let (groups, members) = (self.limits.max_mcast_grp, self.limits.max_mcast_qp_attach);
        if !self.queue_pair(client, number)?.kind.is_datagram() {
            let why = "only UD queue pairs can be members";
            return Err(VerbsError::Invalid { what: "multicast", why });
        }
        if !group.is_multicast() {
            return Err(VerbsError::Invalid { what: "multicast", why: "the GID is not a multicast address" });
        }
        if !self.state.objects.multicast_groups.contains_key(&group)
            && self.state.objects.multicast_groups.len() >= groups as usize
        {
            return Err(VerbsError::Exhausted { resource: Resource::MulticastGroup, limit: groups });
        }
        let list = self.state.objects.multicast_groups.entry(group).or_default();
        if !list.contains(&number) {
            if list.len() >= members as usize {
                return Err(VerbsError::Exhausted { resource: Resource::MulticastGroup, limit: members });
            }
            list.push(number);
        }
        Ok(())
    }

    /// Takes a queue pair out of a multicast group.
    pub fn detach_multicast(&mut self, client: ClientId, number: Qpn, group: Gid) -> VerbsResult {
        self.queue_pair(client, number)?;
        let not_member = VerbsError::NotFound { resource: Resource::MulticastGroup, number: number.value() };
        let list = self.state.objects.multicast_groups.get_mut(&group).ok_or(not_member)?;
        let place = list.iter().position(|member| *member == number).ok_or(not_member)?;
        list.remove(place);
        if list.is_empty() {
            self.state.objects.multicast_groups.remove(&group);
        }
        Ok(())
    }

    /// The multicast groups with members here.
    pub fn multicast_groups(&self) -> impl Iterator<Item = Gid> {
        self.state.objects.multicast_groups.keys().copied()
    }
}

/// Checks an address vector of an InfiniBand port.
fn check_local_route(port: &InfiniBandPort, path: &AddressVector) -> VerbsResult {
    let invalid = |why| Err(VerbsError::Invalid { what: "address vector", why });
    let (dlid, has_grh) = (Lid(path.dlid), !path.dgid.is_unspecified());
    if dlid.is_unicast() {
        if path.dgid.is_multicast() {
            return invalid("the GID is a multicast group, and the LID is not");
        }
    } else if dlid == Lid(0) || dlid == Lid::PERMISSIVE {
        return invalid("InfiniBand needs the LID of the destination: set dlid");
    } else if !path.dgid.is_multicast() {
        return invalid("a multicast LID needs a GRH with the GID of the group");
    }
    if has_grh && usize::from(path.sgid_index) >= port.gids.len() {
        let limit = port.gids.len().saturating_sub(1) as u64;
        return Err(VerbsError::LimitExceeded {
            what: "source GID index",
            value: path.sgid_index.into(),
            limit,
        });
    }
    if path.service_level > 15 {
        return Err(VerbsError::LimitExceeded {
            what: "service level",
            value: path.service_level.into(),
            limit: 15,
        });
    }
    Ok(())
}
