//! The cards of the process send their last ACKs and write their last events when it exits.
//!
//! `exit` does not drop devices, and a program can read a completion before the thread that delivered it has written the
//! event.

use parking_lot::Mutex;
use softhca_udp::{SharedDriver, at_exit};
use std::sync::{Arc, Once, Weak};

static CARDS: Mutex<Vec<Weak<SharedDriver>>> = Mutex::new(Vec::new());

/// Flushes this card when the process exits.
pub(crate) fn add(card: &Arc<SharedDriver>) {
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(|| at_exit(flush));
    let mut cards = CARDS.lock();
    cards.retain(|card| card.strong_count() > 0);
    cards.push(Arc::downgrade(card));
}

extern "C" fn flush() {
    // Another thread may be suspended with the lock.
    let cards = CARDS.try_lock().map(|mut cards| std::mem::take(&mut *cards));
    cards.iter().flatten().filter_map(Weak::upgrade).for_each(|card| card.flush_at_exit());
}
