//! Where parties of one process or one world meet before they are connected.

use crate::executor::{Executor, WaitReason, record_wait_reason};
use crate::notifier::Notifier;
use parking_lot::Mutex;
use std::any::{Any, type_name};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

type Value = Arc<dyn Any + Send + Sync>;

/// A board of names and values, to exchange endpoints and keys without sockets.
///
/// Every clone is the same board. The hosts of a `World` share one, the embedded cards of a process another:
/// [`Device::endpoint_exchange`](crate::Device::endpoint_exchange).
///
/// ```
/// let board = softhca::EndpointExchange::new();
/// board.publish("port", 7);
/// assert_eq!(board.lookup_blocking::<i32>("port"), 7);
/// ```
#[derive(Clone, Default)]
pub struct EndpointExchange {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    values: Mutex<BTreeMap<String, Value>>,
    /// Who came first to an exchange, by name.
    exchange_counts: Mutex<BTreeMap<String, u64>>,
    notifier: Notifier,
}

impl EndpointExchange {
    /// An empty board.
    pub fn new() -> EndpointExchange {
        EndpointExchange::default()
    }

    /// The board of all embedded cards of this process.
    #[cfg(feature = "sockets")]
    pub(crate) fn process_wide() -> EndpointExchange {
        static EXCHANGE: std::sync::LazyLock<EndpointExchange> =
            std::sync::LazyLock::new(EndpointExchange::new);
        EXCHANGE.clone()
    }

    /// Puts a value up under a name, in place of the one before.
    pub fn publish<T: Clone + Send + Sync + 'static>(&self, name: &str, value: T) {
        self.inner.values.lock().insert(name.into(), Arc::new(value));
        self.inner.notifier.notify();
    }

    /// The value under a name, if it is up.
    ///
    /// # Panics
    /// If it is of another type.
    pub fn try_lookup<T: Clone + Send + Sync + 'static>(&self, name: &str) -> Option<T> {
        let value = self.inner.values.lock().get(name).cloned()?;
        let value = value.downcast::<T>();
        let value =
            value.unwrap_or_else(|_| panic!("{name:?} was published, but not as {}", type_name::<T>()));
        Some((*value).clone())
    }

    /// The value under a name, as soon as it is up.
    ///
    /// # Panics
    /// If it is of another type.
    pub async fn lookup<T: Clone + Send + Sync + 'static>(&self, name: &str) -> T {
        poll_fn(|context| {
            let seen = self.inner.notifier.count();
            match self.try_lookup(name) {
                Some(value) => Poll::Ready(value),
                None => {
                    if !self.inner.notifier.register_waker(seen, context.waker()) {
                        context.waker().wake_by_ref();
                    }
                    record_wait_reason(|| WaitReason::PublishedValue(name.into()));
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// The value under a name; sleeps until it is up.
    ///
    /// # Panics
    /// If it is of another type, and in the code of a `World`: `lookup` is for that.
    pub fn lookup_blocking<T: Clone + Send + Sync + 'static>(&self, name: &str) -> T {
        assert_may_block("Rendezvous::wait", "lookup(name).await");
        loop {
            let seen = self.inner.notifier.count();
            if let Some(value) = self.try_lookup(name) {
                return value;
            }
            self.inner.notifier.wait(seen, None);
        }
    }

    /// Swaps values with the one other party that uses the same name. The third and fourth party meet each
    /// other, and so on.
    ///
    /// # Panics
    /// If the other's value is of another type.
    pub async fn exchange<T: Clone + Send + Sync + 'static>(&self, name: &str, mine: T) -> T {
        let turn = {
            let mut offers = self.inner.exchange_counts.lock();
            let count = offers.entry(name.into()).or_default();
            *count += 1;
            *count - 1
        };
        self.publish(&format!("{name} #{turn}"), mine);
        self.lookup(&format!("{name} #{}", turn ^ 1)).await
    }
}

/// Blocking calls have no place in the code of a world: its one thread would never go on.
pub(crate) fn assert_may_block(call: &str, instead: &str) {
    if Executor::current().is_some_and(|executor| executor.is_virtual()) {
        panic!("{call} blocks, and in a World the clock would wait for it for ever: use `{instead}`");
    }
}
