//! Why a call was refused, as it travels.

use softhca_queue::control::Reply;
use std::io;

/// Why a call was refused.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub errno: i32,
    pub message: String,
}

impl Refusal {
    pub fn new(errno: i32, message: impl Into<String>) -> Refusal {
        Refusal { errno, message: message.into() }
    }

    pub fn reply(self) -> Reply {
        Reply::Refused { errno: self.errno, message: self.message }
    }
}

impl From<softhca_engine::Error> for Refusal {
    fn from(error: softhca_engine::Error) -> Refusal {
        Refusal::new(error.errno(), error.to_string())
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Refusal {
        let errno = error.raw_os_error().unwrap_or(libc::EINVAL);
        Refusal::new(errno, format!("the daemon: {error}"))
    }
}
