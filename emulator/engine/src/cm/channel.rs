//! Event channels: queues of events for the application.

use super::{Channel, CmCall, ConnectionManager, MAX_CHANNELS_PER_CLIENT, api};
use crate::{ClientId, CmChannelId, CmId, Event, Resource, VerbsError, VerbsResult};
use alloc::collections::VecDeque;
use api::Reply;

impl ConnectionManager {
    pub(super) fn create_channel(&mut self, client: ClientId) -> VerbsResult<CmChannelId> {
        let limit = MAX_CHANNELS_PER_CLIENT;
        if self.channels.values().filter(|channel| channel.client == client).count() >= limit as usize {
            return Err(VerbsError::Exhausted { resource: Resource::CmChannel, limit });
        }
        let number = CmChannelId(self.next_channel);
        self.next_channel = self.next_channel.wrapping_add(1);
        self.channels.insert(number, Channel { client, events: VecDeque::new(), users: 0 });
        Ok(number)
    }

    pub(super) fn channel(&mut self, client: ClientId, channel: CmChannelId) -> VerbsResult<&mut Channel> {
        let found = self.channels.get_mut(&channel).filter(|channel| channel.client == client);
        found.ok_or(VerbsError::NotFound { resource: Resource::CmChannel, number: channel.0 })
    }

    pub(super) fn destroy_channel(&mut self, client: ClientId, number: CmChannelId) -> VerbsResult {
        if self.channel(client, number)?.users > 0 {
            let (resource, user) = (Resource::CmChannel, Resource::CmIdentifier);
            return Err(VerbsError::Busy { resource, number: number.0, user });
        }
        self.channels.remove(&number);
        Ok(())
    }

    pub(super) fn next_event(&mut self, client: ClientId, channel: CmChannelId) -> VerbsResult<Reply> {
        let channel = self.channel(client, channel)?;
        let event = channel.events.pop_front();
        let left = channel.events.len() as u32;
        Ok(Reply::Event(event, left))
    }
}

impl CmCall<'_, '_> {
    pub(super) fn migrate(&mut self, client: ClientId, id: CmId, channel: CmChannelId) -> VerbsResult {
        self.cm.channel(client, channel)?;
        let identifier = self.cm.identifier(client, id)?;
        let old = core::mem::replace(&mut identifier.channel, channel);
        if old == channel {
            return Ok(());
        }
        let mut moved = VecDeque::new();
        if let Some(old) = self.cm.channels.get_mut(&old) {
            old.users -= 1;
            let (of_id, rest) = old.events.drain(..).partition(|event| event.id == id);
            (moved, old.events) = (of_id, rest);
        }
        let new = self.cm.channel(client, channel)?;
        new.users += 1;
        for event in moved {
            let (kind, status) = (event.event_type, event.status);
            self.cm.channel(client, channel)?.events.push_back(event);
            self.ctx.emit(Event::CmEventRaised { client, channel, id, event: kind, status });
        }
        Ok(())
    }
}
