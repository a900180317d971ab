//! The transports: protocols between queue pairs.

pub(crate) mod ib;
#[cfg(test)]
mod stream;
