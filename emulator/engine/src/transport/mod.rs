//! The transports: protocols between queue pairs.

pub(crate) mod ib;
