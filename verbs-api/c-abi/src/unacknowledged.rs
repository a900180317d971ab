//! Events that programs have to acknowledge.

use parking_lot::{Condvar, Mutex};

/// Events that the program has read and not yet acknowledged. The object of an event is not destroyed before that.
#[derive(Default)]
pub struct Unacknowledged {
    count: Mutex<u32>,
    changed: Condvar,
}

impl Unacknowledged {
    pub fn add(&self) {
        *self.count.lock() += 1;
    }

    pub fn acknowledge(&self, events: u32) {
        let mut count = self.count.lock();
        *count = count.saturating_sub(events);
        self.changed.notify_all();
    }

    /// Waits until all events are acknowledged.
    pub fn wait(&self) {
        let mut count = self.count.lock();
        while *count > 0 {
            self.changed.wait(&mut count);
        }
    }
}
