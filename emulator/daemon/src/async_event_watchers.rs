//! The sessions that receive every asynchronous event of every host.

use crate::notification_queue::NotificationQueue;
use parking_lot::Mutex;
use softhca_control::Notification;
use std::sync::Arc;

/// The sessions that receive every asynchronous event of every host.
#[derive(Default)]
pub(crate) struct AsyncEventWatchers {
    watchers: Mutex<Vec<Arc<NotificationQueue>>>,
}

impl AsyncEventWatchers {
    pub fn add(&self, queue: &Arc<NotificationQueue>) {
        self.watchers.lock().push(queue.clone());
    }

    pub fn is_empty(&self) -> bool {
        self.watchers.lock().is_empty()
    }

    pub fn publish(&self, event: &Notification) {
        self.watchers.lock().iter().for_each(|watcher| watcher.push(event.clone()));
    }

    pub fn remove(&self, queue: &Arc<NotificationQueue>) {
        self.watchers.lock().retain(|other| !Arc::ptr_eq(other, queue));
    }
}
