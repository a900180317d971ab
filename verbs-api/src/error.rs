//! What can go wrong, by whose fault.

use softhca_queue::BadRequest;
use thiserror::Error as ThisError;

/// Why a call was refused. A completion status is data, not an error.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// The card refused a control verb.
    #[error(transparent)]
    Verb(#[from] softhca_engine::Error),
    /// A work request could not be posted.
    #[error(transparent)]
    Post(#[from] BadRequest),
    /// The host's sockets could not be had.
    #[error(transparent)]
    Bind(#[from] softhca_udp::BindError),
    /// The system failed.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The queue pair has no such queue.
    #[error("the queue pair has no {0} queue")]
    NoQueue(&'static str),
    /// Text that does not name an endpoint.
    #[error("{0:?} is not an endpoint: GID/queue pair/PSN in hexadecimal")]
    NotAnEndpoint(String),
    /// A range outside of a region.
    #[error("{length} bytes at {offset} are outside of a region of {size}")]
    Range {
        /// Where the range begins.
        offset: u64,
        /// How many bytes.
        length: u64,
        /// The size of the region.
        size: u64,
    },
}

impl Error {
    /// The errno that C callers get.
    pub fn errno(&self) -> i32 {
        const ENOMEM: i32 = 12;
        const EINVAL: i32 = 22;
        const EADDRINUSE: i32 = 98;
        match self {
            Error::Verb(error) => error.errno(),
            Error::Post(BadRequest::Full(_)) => ENOMEM,
            Error::Post(_) | Error::NoQueue(_) | Error::NotAnEndpoint(_) | Error::Range { .. } => EINVAL,
            Error::Bind(_) => EADDRINUSE,
            Error::System { source, .. } => source.raw_os_error().unwrap_or(EINVAL),
        }
    }
}
