//! Events of connection management that the daemon brought, until the application takes them.

use crate::Error;
use crate::backend::Result;
use crate::notifier::Notifier;
use parking_lot::Mutex;
use softhca_engine::{CmChannelId, CmId, Reply};
use softhca_types::cm::{self, Event, EventType};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// The events that wait, by channel.
#[derive(Default)]
pub(crate) struct CmEventQueue {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    channels: BTreeMap<CmChannelId, ChannelQueue>,
    /// Identifiers that moved to another channel: what was on its way to the old one follows them.
    migrated: BTreeMap<CmId, CmChannelId>,
}

struct ChannelQueue {
    notifier: Arc<Notifier>,
    events: VecDeque<Event>,
}

impl CmEventQueue {
    /// Executes a call to the connection manager of the daemon by `request`. The daemon sends events as they occur, so
    /// that taking one needs no request.
    pub fn execute(
        &self,
        command: cm::Command,
        is_alive: bool,
        request: impl Fn(cm::Command) -> Result<Reply>,
    ) -> Result<Reply> {
        let mut orphaned = Vec::new();
        match &command {
            cm::Command::GetEvent(channel) => {
                let (event, left) = self.pop(*channel);
                if event.is_none() && !is_alive {
                    return Err(Error::DeviceGone { why: "it closed the connection".into() });
                }
                return Ok(Reply::Cm(cm::Reply::Event(event, left)));
            }
            cm::Command::MigrateId { id, channel } => self.migrate_id(*id, *channel),
            cm::Command::DestroyId(id) => orphaned = self.remove_id(*id),
            cm::Command::DestroyEventChannel(channel) => orphaned = self.remove_channel(*channel),
            _ => {}
        }
        let is_channel = matches!(command, cm::Command::DestroyEventChannel(_));
        let reject = |ids: Vec<CmId>| {
            // Connect requests that the application has not taken and nobody will answer.
            ids.into_iter().for_each(|id| drop(request(cm::Command::DestroyId(id))));
        };
        if is_channel {
            reject(std::mem::take(&mut orphaned));
        }
        let result = request(command);
        reject(orphaned);
        result
    }

    pub fn add_channel(&self, channel: CmChannelId, notifier: Arc<Notifier>) {
        self.state.lock().channels.insert(channel, ChannelQueue { notifier, events: VecDeque::new() });
    }

    /// Forgets a channel. Returns the requests that nobody took: nobody will answer them.
    pub fn remove_channel(&self, channel: CmChannelId) -> Vec<CmId> {
        let removed = self.state.lock().channels.remove(&channel);
        removed.map(|waiting| connect_requests(waiting.events.iter())).unwrap_or_default()
    }

    /// Takes in what the daemon brought.
    pub fn push(&self, channel: CmChannelId, events: Vec<Event>) {
        let mut state = self.state.lock();
        let mut notifiers = Vec::new();
        for event in events {
            let channel = state.migrated.get(&event.id).copied().unwrap_or(channel);
            if let Some(waiting) = state.channels.get_mut(&channel) {
                waiting.events.push_back(event);
                notifiers.push(waiting.notifier.clone());
            }
        }
        drop(state);
        notifiers.dedup_by(|one, other| Arc::ptr_eq(one, other));
        notifiers.iter().for_each(|notifier| notifier.notify());
    }

    /// The oldest event of a channel, and how many are left.
    pub fn pop(&self, channel: CmChannelId) -> (Option<Event>, u32) {
        let mut state = self.state.lock();
        let Some(waiting) = state.channels.get_mut(&channel) else { return (None, 0) };
        let event = waiting.events.pop_front();
        (event, waiting.events.len() as u32)
    }

    /// An identifier moves to another channel, and its events with it.
    pub fn migrate_id(&self, id: CmId, channel: CmChannelId) {
        let mut state = self.state.lock();
        state.migrated.insert(id, channel);
        let mut events = VecDeque::new();
        for (other, waiting) in &mut state.channels {
            if *other != channel {
                let (own, rest) = waiting.events.drain(..).partition(|event: &Event| event.id == id);
                waiting.events = rest;
                events = if events.is_empty() { own } else { events };
            }
        }
        let notifier = state.channels.get_mut(&channel).map(|waiting| {
            waiting.events.append(&mut events);
            waiting.notifier.clone()
        });
        drop(state);
        if let Some(notifier) = notifier {
            notifier.notify();
        }
    }

    /// An identifier is gone, and its events with it. Returns the requests to it that nobody took.
    pub fn remove_id(&self, id: CmId) -> Vec<CmId> {
        let mut state = self.state.lock();
        state.migrated.remove(&id);
        let mut orphans = Vec::new();
        for waiting in state.channels.values_mut() {
            orphans
                .extend(connect_requests(waiting.events.iter().filter(|event| event.listener == Some(id))));
            waiting.events.retain(|event| event.id != id && event.listener != Some(id));
        }
        orphans
    }

    /// Every waiting thread is to look again.
    pub fn wake_all(&self) {
        let all: Vec<_> =
            self.state.lock().channels.values().map(|waiting| waiting.notifier.clone()).collect();
        all.iter().for_each(|notifier| notifier.notify());
    }
}

/// The identifiers of the requests among these events.
fn connect_requests<'a>(events: impl Iterator<Item = &'a Event>) -> Vec<CmId> {
    events.filter(|event| event.event_type == EventType::ConnectRequest).map(|event| event.id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca_types::cm::EventParameters;

    const HERE: CmChannelId = CmChannelId(1);
    const THERE: CmChannelId = CmChannelId(2);

    fn event(id: u32, kind: EventType, listener: Option<u32>) -> Event {
        let (id, listener) = (CmId(id), listener.map(CmId));
        Event {
            id,
            listener,
            event_type: kind,
            status: 0,
            private_data: Vec::new(),
            parameters: EventParameters::None,
        }
    }

    fn inbox() -> CmEventQueue {
        let inbox = CmEventQueue::default();
        inbox.add_channel(HERE, Arc::default());
        inbox.add_channel(THERE, Arc::default());
        inbox
    }

    #[test]
    fn events_follow_an_identifier_to_its_new_channel_in_order() {
        let inbox = inbox();
        inbox
            .push(HERE, vec![event(7, EventType::Established, None), event(8, EventType::Established, None)]);
        inbox.migrate_id(CmId(7), THERE);
        // It was on its way when the identifier moved.
        inbox.push(HERE, vec![event(7, EventType::Disconnected, None)]);
        inbox.push(THERE, vec![event(7, EventType::TimewaitExit, None)]);
        let kinds: Vec<_> = std::iter::from_fn(|| inbox.pop(THERE).0).map(|event| event.event_type).collect();
        assert_eq!(kinds, [EventType::Established, EventType::Disconnected, EventType::TimewaitExit]);
        assert_eq!(inbox.pop(HERE), (Some(event(8, EventType::Established, None)), 0));
        assert_eq!(inbox.pop(HERE), (None, 0));
    }

    #[test]
    fn unread_requests_are_returned_when_their_listener_or_channel_goes() {
        let inbox = inbox();
        let request = |id, listener| event(id, EventType::ConnectRequest, Some(listener));
        inbox.push(HERE, vec![request(10, 1), request(11, 2), event(1, EventType::AddressChange, None)]);
        assert_eq!(inbox.remove_id(CmId(1)), [CmId(10)]);
        assert_eq!(inbox.remove_channel(HERE), [CmId(11)]);
        assert_eq!(inbox.pop(HERE), (None, 0));
    }
}
