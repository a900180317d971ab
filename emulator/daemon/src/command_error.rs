//! The error of a request.

use softhca_control::{Response, limit_of};
use softhca_types::VerbsError;
use std::os::fd::OwnedFd;
use std::{fmt, io};

/// The response to a request, and the descriptors that accompany it.
pub(crate) type RequestResult = Result<(Response, Vec<OwnedFd>), CommandError>;

/// The error of a request: an errno for C callers and a message.
#[derive(Debug)]
pub(crate) enum CommandError {
    /// The HCA or the client's quota rejects a control verb.
    Verb(VerbsError),
    /// The daemon itself fails.
    Daemon { errno: i32, message: String },
}

impl CommandError {
    pub fn new(errno: i32, message: impl Into<String>) -> CommandError {
        CommandError::Daemon { errno, message: message.into() }
    }

    pub fn into_response(self) -> Response {
        match self {
            CommandError::Verb(error) => Response::VerbFailed(error),
            CommandError::Daemon { errno, message } => Response::Error { errno, message },
        }
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CommandError::Verb(error) => error.fmt(f),
            CommandError::Daemon { message, .. } => f.write_str(message),
        }
    }
}

impl From<VerbsError> for CommandError {
    fn from(error: VerbsError) -> CommandError {
        CommandError::Verb(error)
    }
}

impl From<io::Error> for CommandError {
    fn from(error: io::Error) -> CommandError {
        let errno = error.raw_os_error().unwrap_or(libc::EINVAL);
        CommandError::new(errno, format!("daemon: {error}{}", limit_of(&error, "the daemon")))
    }
}
