//! The place where parties of one process or one world meet before they are connected.

use crate::executor::{Executor, WaitReason};
use crate::notifier::Notifier;
use parking_lot::Mutex;
use std::any::{Any, type_name};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::Arc;

type Value = Arc<dyn Any + Send + Sync>;

/// Values under names, to exchange endpoints and keys without sockets.
///
/// Every clone has the same values. The hosts of a `World` share one exchange, the embedded devices of a process another:
/// [`Device::endpoint_exchange`](crate::Device::endpoint_exchange).
///
/// ```
/// let exchange = softhca::EndpointExchange::new();
/// exchange.publish("port", 7);
/// assert_eq!(exchange.lookup_blocking::<i32>("port"), 7);
/// ```
#[derive(Clone, Default)]
pub struct EndpointExchange {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    values: Mutex<BTreeMap<String, Value>>,
    /// The first side of each exchange, by name.
    exchange_counts: Mutex<BTreeMap<String, u64>>,
    notifier: Notifier,
}

impl EndpointExchange {
    /// Creates an exchange without values.
    pub fn new() -> EndpointExchange {
        EndpointExchange::default()
    }

    /// The exchange of all embedded devices of this process.
    #[cfg(feature = "sockets")]
    pub(crate) fn process_wide() -> EndpointExchange {
        static EXCHANGE: std::sync::LazyLock<EndpointExchange> =
            std::sync::LazyLock::new(EndpointExchange::new);
        EXCHANGE.clone()
    }

    /// Sets the value of a name and wakes those that wait for it.
    pub fn publish<T: Clone + Send + Sync + 'static>(&self, name: &str, value: T) {
        self.inner.values.lock().insert(name.into(), Arc::new(value));
        self.inner.notifier.notify();
    }

    /// The value of a name, if it has one.
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

    /// Waits for the value of a name.
    ///
    /// # Panics
    /// If it is of another type.
    pub async fn lookup<T: Clone + Send + Sync + 'static>(&self, name: &str) -> T {
        let reason = || WaitReason::PublishedValue(name.into());
        poll_fn(|context| self.inner.notifier.poll_take(context, reason, || self.try_lookup(name))).await
    }

    /// Waits for the value of a name in code that is not async: the thread sleeps.
    ///
    /// # Panics
    /// If it is of another type, and in the code of a `World`: `lookup` is for that.
    pub fn lookup_blocking<T: Clone + Send + Sync + 'static>(&self, name: &str) -> T {
        assert_may_block("EndpointExchange::lookup_blocking", "lookup(name).await");
        loop {
            let seen = self.inner.notifier.count();
            if let Some(value) = self.try_lookup(name) {
                return value;
            }
            self.inner.notifier.wait(seen, None);
        }
    }

    /// Swaps values with the one other party that uses the same name. The third and fourth party swap with each other, and
    /// so on.
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

/// Blocking calls have no place in the code of a world: its one thread would never continue.
pub(crate) fn assert_may_block(call: &str, instead: &str) {
    if Executor::current().is_some_and(|executor| executor.is_virtual()) {
        panic!("{call} blocks, and in a World the clock would wait for it for ever: use `{instead}`");
    }
}
