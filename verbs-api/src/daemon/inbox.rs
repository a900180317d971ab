//! Events of connection management that the daemon brought, until the application takes them.

use crate::notifier::Notifier;
use parking_lot::Mutex;
use softhca_engine::{CmChannelId, CmId};
use softhca_queue::cm::{Event, EventKind};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// What waits, by channel.
#[derive(Default)]
pub(super) struct Inbox {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    channels: BTreeMap<CmChannelId, Waiting>,
    /// Identifiers that moved to another channel: what was on its way to the old one follows them.
    moved: BTreeMap<CmId, CmChannelId>,
}

struct Waiting {
    news: Arc<Notifier>,
    events: VecDeque<Event>,
}

impl Inbox {
    pub fn add_channel(&self, channel: CmChannelId, news: Arc<Notifier>) {
        self.state.lock().channels.insert(channel, Waiting { news, events: VecDeque::new() });
    }

    /// Forgets a channel. Returns the requests that nobody took: nobody will answer them.
    pub fn remove_channel(&self, channel: CmChannelId) -> Vec<CmId> {
        let removed = self.state.lock().channels.remove(&channel);
        removed.map(|waiting| requests(waiting.events.iter())).unwrap_or_default()
    }

    /// Takes in what the daemon brought.
    pub fn put(&self, channel: CmChannelId, events: Vec<Event>) {
        let mut state = self.state.lock();
        let mut told = Vec::new();
        for event in events {
            let channel = state.moved.get(&event.id).copied().unwrap_or(channel);
            if let Some(waiting) = state.channels.get_mut(&channel) {
                waiting.events.push_back(event);
                told.push(waiting.news.clone());
            }
        }
        drop(state);
        told.dedup_by(|one, other| Arc::ptr_eq(one, other));
        told.iter().for_each(|news| news.notify());
    }

    /// The oldest event of a channel, and how many are left.
    pub fn take(&self, channel: CmChannelId) -> (Option<Event>, u32) {
        let mut state = self.state.lock();
        let Some(waiting) = state.channels.get_mut(&channel) else { return (None, 0) };
        let event = waiting.events.pop_front();
        (event, waiting.events.len() as u32)
    }

    /// An identifier moves to another channel, and its events with it.
    pub fn move_to(&self, id: CmId, channel: CmChannelId) {
        let mut state = self.state.lock();
        state.moved.insert(id, channel);
        let mut events = VecDeque::new();
        for (other, waiting) in &mut state.channels {
            if *other != channel {
                let (own, rest) = waiting.events.drain(..).partition(|event: &Event| event.id == id);
                waiting.events = rest;
                events = if events.is_empty() { own } else { events };
            }
        }
        let news = state.channels.get_mut(&channel).map(|waiting| {
            waiting.events.append(&mut events);
            waiting.news.clone()
        });
        drop(state);
        if let Some(news) = news {
            news.notify();
        }
    }

    /// An identifier is gone, and its events with it. Returns the requests to it that nobody took.
    pub fn forget(&self, id: CmId) -> Vec<CmId> {
        let mut state = self.state.lock();
        state.moved.remove(&id);
        let mut orphans = Vec::new();
        for waiting in state.channels.values_mut() {
            orphans.extend(requests(waiting.events.iter().filter(|event| event.listener == Some(id))));
            waiting.events.retain(|event| event.id != id && event.listener != Some(id));
        }
        orphans
    }

    /// Everybody who waits is to look again.
    pub fn wake_all(&self) {
        let all: Vec<_> = self.state.lock().channels.values().map(|waiting| waiting.news.clone()).collect();
        all.iter().for_each(|news| news.notify());
    }
}

/// The identifiers of the requests among these events.
fn requests<'a>(events: impl Iterator<Item = &'a Event>) -> Vec<CmId> {
    events.filter(|event| event.kind == EventKind::ConnectRequest).map(|event| event.id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca_queue::cm::Detail;

    const HERE: CmChannelId = CmChannelId(1);
    const THERE: CmChannelId = CmChannelId(2);

    fn event(id: u32, kind: EventKind, listener: Option<u32>) -> Event {
        let (id, listener) = (CmId(id), listener.map(CmId));
        Event { id, listener, kind, status: 0, private_data: Vec::new(), detail: Detail::None }
    }

    fn inbox() -> Inbox {
        let inbox = Inbox::default();
        inbox.add_channel(HERE, Arc::default());
        inbox.add_channel(THERE, Arc::default());
        inbox
    }

    #[test]
    fn events_follow_an_identifier_to_its_new_channel_in_order() {
        let inbox = inbox();
        inbox.put(HERE, vec![event(7, EventKind::Established, None), event(8, EventKind::Established, None)]);
        inbox.move_to(CmId(7), THERE);
        // It was on its way when the identifier moved.
        inbox.put(HERE, vec![event(7, EventKind::Disconnected, None)]);
        inbox.put(THERE, vec![event(7, EventKind::TimewaitExit, None)]);
        let kinds: Vec<_> = std::iter::from_fn(|| inbox.take(THERE).0).map(|event| event.kind).collect();
        assert_eq!(kinds, [EventKind::Established, EventKind::Disconnected, EventKind::TimewaitExit]);
        assert_eq!(inbox.take(HERE), (Some(event(8, EventKind::Established, None)), 0));
        assert_eq!(inbox.take(HERE), (None, 0));
    }

    #[test]
    fn requests_that_nobody_took_are_told_when_their_listener_or_channel_goes() {
        let inbox = inbox();
        let request = |id, listener| event(id, EventKind::ConnectRequest, Some(listener));
        inbox.put(HERE, vec![request(10, 1), request(11, 2), event(1, EventKind::AddressChange, None)]);
        assert_eq!(inbox.forget(CmId(1)), [CmId(10)]);
        assert_eq!(inbox.remove_channel(HERE), [CmId(11)]);
        assert_eq!(inbox.take(HERE), (None, 0));
    }
}
