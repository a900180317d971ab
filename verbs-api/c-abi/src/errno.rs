//! How calls fail. Every rejected call of a program becomes a [`Rejection`], the one place that sets errno and explains.

use crate::object::{Handle, ObjectKind};
use core::ffi::c_int;
use softhca::{Error, VerbsError};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::sync::{LazyLock, Mutex, PoisonError};

/// If set, every rejected call prints its reason to stderr; with the value `once`, each reason once.
const EXPLAIN_VARIABLE: &str = "SOFTHCA_EXPLAIN";

/// The most reasons that are printed with the value `once`.
const MAX_REASONS: usize = 32;

/// Which reasons are printed.
enum ExplainMode {
    None,
    Each,
    /// The hashes of those that were printed.
    Once(Mutex<BTreeSet<u64>>),
}

impl ExplainMode {
    fn from_environment() -> ExplainMode {
        match std::env::var_os(EXPLAIN_VARIABLE) {
            None => ExplainMode::None,
            Some(mode) if mode == "once" => ExplainMode::Once(Mutex::default()),
            Some(_) => ExplainMode::Each,
        }
    }

    fn print(&self, verb: &str, why: &dyn Display) {
        if let ExplainMode::None = self {
            return;
        }
        let text = format!("softhca: {verb}: {why}");
        if let ExplainMode::Once(printed) = self {
            let mut hasher = DefaultHasher::new();
            text.hash(&mut hasher);
            let mut printed = printed.lock().unwrap_or_else(PoisonError::into_inner);
            if printed.len() == MAX_REASONS || !printed.insert(hasher.finish()) {
                return;
            }
        }
        eprintln!("{text}");
    }
}

/// Why a call is rejected.
pub struct Rejection {
    errno: c_int,
    why: Reason,
}

enum Reason {
    Text(Cow<'static, str>),
    Error(Error),
}

impl From<Error> for Rejection {
    fn from(error: Error) -> Rejection {
        if let Error::Verbs(VerbsError::InjectedKill { .. }) = error {
            // SAFETY: the process ends here, as the user's fault rule says.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        Rejection { errno: error.errno(), why: Reason::Error(error) }
    }
}

impl Rejection {
    pub fn new(errno: c_int, why: impl Into<Cow<'static, str>>) -> Rejection {
        Rejection { errno, why: Reason::Text(why.into()) }
    }

    /// An argument that no card accepts.
    pub fn invalid(why: impl Into<Cow<'static, str>>) -> Rejection {
        Rejection::new(libc::EINVAL, why)
    }

    /// A request that this card does not support.
    pub fn unsupported(why: impl Into<Cow<'static, str>>) -> Rejection {
        Rejection::new(libc::EOPNOTSUPP, why)
    }

    /// An object that something else uses.
    pub fn busy(why: impl Into<Cow<'static, str>>) -> Rejection {
        Rejection::new(libc::EBUSY, why)
    }

    /// A failed system call.
    pub fn system(error: &io::Error, what: &'static str) -> Rejection {
        Rejection::new(error.raw_os_error().unwrap_or(libc::EIO), format!("{what}: {error}"))
    }

    /// A value above its limit.
    pub fn too_large(what: &str, value: impl Display, limit: impl Display) -> Rejection {
        Rejection::invalid(format!("{what} is {value}, the maximum is {limit}"))
    }

    /// Nothing was wrong: `O_NONBLOCK` is set, and no event is there yet.
    pub fn would_block() -> Rejection {
        Rejection::new(libc::EAGAIN, "")
    }

    /// Sets errno, and explains if that is requested.
    fn report(self, verb: &str) -> c_int {
        static MODE: LazyLock<ExplainMode> = LazyLock::new(ExplainMode::from_environment);
        if !matches!(self.errno, libc::EAGAIN | libc::EINPROGRESS) {
            match &self.why {
                Reason::Text(why) => MODE.print(verb, why),
                Reason::Error(error) => MODE.print(verb, error),
            }
        }
        set(self.errno);
        self.errno
    }

    /// The result of a call that returns an errno.
    #[cold]
    pub fn code(self, verb: &str) -> c_int {
        self.report(verb)
    }

    /// The result of a call that returns a negative errno.
    #[cold]
    pub fn negative(self, verb: &str) -> c_int {
        -self.report(verb)
    }

    /// The result of a call that returns −1.
    #[cold]
    pub fn minus_one(self, verb: &str) -> c_int {
        self.report(verb);
        -1
    }

    /// The result of a call that returns a pointer.
    #[cold]
    pub fn null<T>(self, verb: &str) -> *mut T {
        self.report(verb);
        core::ptr::null_mut()
    }
}

/// Executes a verb that returns an errno.
#[inline]
pub fn code(verb: &str, execute: impl FnOnce() -> Result<(), Rejection>) -> c_int {
    execute().map_or_else(|rejection| rejection.code(verb), |()| 0)
}

/// Executes a verb that returns zero, or −1 with errno set.
pub fn minus_one(verb: &str, execute: impl FnOnce() -> Result<(), Rejection>) -> c_int {
    number(verb, || execute().map(|()| 0))
}

/// Executes a verb that returns a number, or −1 with errno set.
pub fn number<T: From<i8>>(verb: &str, execute: impl FnOnce() -> Result<T, Rejection>) -> T {
    execute().unwrap_or_else(|rejection| {
        rejection.report(verb);
        T::from(-1)
    })
}

/// Executes a verb that returns a number or a negative errno.
#[inline]
pub fn negative(verb: &str, execute: impl FnOnce() -> Result<c_int, Rejection>) -> c_int {
    execute().unwrap_or_else(|rejection| rejection.negative(verb))
}

/// Executes a verb that returns a pointer.
pub fn pointer<T>(verb: &str, execute: impl FnOnce() -> Result<*mut T, Rejection>) -> *mut T {
    execute().unwrap_or_else(|rejection| rejection.null(verb))
}

/// Executes a verb that returns an object.
pub fn handle<K: ObjectKind>(
    verb: &str,
    execute: impl FnOnce() -> Result<Handle<K>, Rejection>,
) -> Handle<K> {
    execute().unwrap_or_else(|rejection| {
        rejection.report(verb);
        Handle::NULL
    })
}

fn set(errno: c_int) {
    // SAFETY: the location belongs to this thread.
    unsafe { *libc::__errno_location() = errno };
}
