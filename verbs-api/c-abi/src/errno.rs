//! How calls fail. Every rejected call of a program becomes a [`Rejection`], the one place that sets errno and explains.

use core::ffi::c_int;
use softhca::{Error, VerbsError};
use std::borrow::Cow;
use std::fmt::Display;
use std::sync::LazyLock;

/// If set, every rejected call prints its reason to stderr.
const EXPLAIN_VARIABLE: &str = "SOFTHCA_EXPLAIN";

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
    pub fn system(errno: c_int, what: &'static str) -> Rejection {
        Rejection::new(errno, format!("{what}: {}", std::io::Error::from_raw_os_error(errno)))
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
        static EXPLAINED: LazyLock<bool> = LazyLock::new(|| std::env::var_os(EXPLAIN_VARIABLE).is_some());
        if *EXPLAINED && !matches!(self.errno, libc::EAGAIN | libc::EINPROGRESS) {
            match self.why {
                Reason::Text(why) => eprintln!("softhca: {verb}: {why}"),
                Reason::Error(error) => eprintln!("softhca: {verb}: {error}"),
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

/// The value of a result. A rejection ends the function: it returns the rejection in the given form.
macro_rules! check {
    ($verb:expr, $form:ident, $result:expr) => {
        match $result {
            Ok(value) => value,
            Err(rejection) => return $crate::errno::Rejection::from(rejection).$form($verb),
        }
    };
}
pub(crate) use check;

fn set(errno: c_int) {
    // SAFETY: the location belongs to this thread.
    unsafe { *libc::__errno_location() = errno };
}

/// The return value of a verb that returns an errno.
pub fn from_result(verb: &str, result: Result<(), Error>) -> c_int {
    result.map_or_else(|error| Rejection::from(error).code(verb), |()| 0)
}

/// Keeps errno while `act` cleans up after a failed call.
pub fn keep(act: impl FnOnce()) {
    let kept = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
    act();
    set(kept);
}
