//! The applications that use an HCA.

use crate::core::hca::{Client, Hca};
use crate::core::transport::Transport;
use crate::{AhId, ClientId, Context, CqId, MemoryRegion, Resource, SrqId, VerbsError, VerbsResult, XrcdId};
use softhca_queue::DoorbellConsumer;
use softhca_wire::Qpn;

/// The address of the first region of a client that leaves the choice to the HCA.
pub(super) const FIRST_IOVA: u64 = 0x1000_0000;

impl<T: Transport> Hca<T> {
    /// A tag for a number: different for each seed and each resource.
    pub(super) fn next_tag(&mut self) -> u8 {
        self.state.objects.random.draw() as u8
    }

    /// Adds an application, which owns everything that it creates.
    pub fn open_client(&mut self, doorbell: DoorbellConsumer) -> VerbsResult<ClientId> {
        if self.is_removed() {
            return Err(VerbsError::DeviceRemoved);
        }
        let limit = self.limits.max_clients;
        if self.clients.len() >= limit as usize {
            return Err(VerbsError::Exhausted { resource: Resource::Client, limit });
        }
        let client = ClientId(self.next_client);
        self.next_client += 1;
        self.clients.insert(client, Client { doorbell, next_iova: FIRST_IOVA, has_lost_device: false });
        Ok(client)
    }

    /// Destroys everything that `client` owns. Its peers receive no more responses, as from a dead host, except to
    /// packets that arrived before. Returns its regions, whose memory the driver can release.
    pub fn close_client(&mut self, ctx: &mut Context<'_>, client: ClientId) -> alloc::vec::Vec<MemoryRegion> {
        T::on_client_closed(self, ctx, client);
        for number in self.queue_pairs.numbers(|qp| qp.client == client) {
            let destroyed = self.destroy_queue_pair(ctx, client, Qpn::new(number));
            debug_assert_eq!(destroyed, Ok(()));
        }
        for number in self.state.objects.shared_receive_queues.numbers(|queue| queue.client == client) {
            let _ = self.destroy_shared_receive_queue(client, SrqId(number));
        }
        for number in self.state.objects.completion_queues.numbers(|queue| queue.client == client) {
            let _ = self.destroy_completion_queue(client, CqId(number));
        }
        for number in self.state.objects.address_handles.numbers(|handle| handle.client == client) {
            let _ = self.destroy_address_handle(client, AhId(number));
        }
        for number in self.state.objects.xrc_domains.numbers(|domain| domain.client == client) {
            // A domain that another client uses stays.
            if self.close_xrc_domain(client, XrcdId(number)).is_err()
                && let Some(domain) = self.state.objects.xrc_domains.get_mut(number)
            {
                domain.orphaned = true;
            }
        }
        let (regions, windows) = self.state.objects.protection.keys_of_client(client);
        for key in windows {
            let _ = self.state.objects.protection.free_memory_window(client, key);
        }
        let regions = regions
            .into_iter()
            .filter_map(|key| self.state.objects.protection.deregister_memory_region(client, key).ok())
            .collect();
        for domain in self.state.objects.protection.pds_of_client(client) {
            let _ = self.state.objects.protection.free_protection_domain(client, domain);
        }
        self.clients.remove(&client);
        self.state.objects.call_sites.retain(|(of, _), _| *of != client);
        self.forget_process(ctx, client);
        // A device that failed is reset when nothing uses it any more.
        self.state.health.device_failed &= !self.clients.is_empty();
        regions
    }

    pub(crate) fn check_client(&self, client: ClientId) -> VerbsResult {
        let found = self.clients.contains_key(&client);
        found.then_some(()).ok_or(VerbsError::NotFound { resource: Resource::Client, number: client.0 })
    }
}
