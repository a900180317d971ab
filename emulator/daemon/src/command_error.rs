//! The error of a request.

use rustix::process::{Resource, getrlimit};
use softhca_control::Response;
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
        CommandError::new(errno, format!("daemon: {error}{}", limit_of(errno)))
    }
}

/// The limit of this process that is the likely reason of an error, with its remedy.
pub(crate) fn limit_of(errno: i32) -> String {
    let (resource, what, option) = match errno {
        libc::ENOMEM => (Resource::As, "bytes of address space", 'v'),
        libc::EMFILE => (Resource::Nofile, "open files", 'n'),
        _ => return String::new(),
    };
    let limit = getrlimit(resource).current;
    limit.map_or_else(String::new, |limit| {
        format!("; the limit of the daemon is {limit} {what}: start it with a larger `ulimit -{option}`")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_a_limit_causes_names_it() {
        let open_files = getrlimit(Resource::Nofile).current.expect("the system limits open files");
        let error = CommandError::from(io::Error::from_raw_os_error(libc::EMFILE)).to_string();
        assert!(
            error.contains(&format!("{open_files} open files")) && error.contains("ulimit -n"),
            "{error}"
        );
        let error = CommandError::from(io::Error::from_raw_os_error(libc::EIO)).to_string();
        assert!(!error.contains("ulimit"), "{error}");
    }
}
