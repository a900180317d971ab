//! librdmacm: connections by IP address, over the HCA's connection manager.

mod call;
mod connection;
mod devices;
mod endpoint;
mod event;
mod identifier;
mod lookup;
mod multicast;
pub mod rsocket;

pub use call::*;
pub use connection::*;
pub use devices::*;
pub use endpoint::*;
pub use event::*;
pub use identifier::*;
pub use lookup::*;
pub use multicast::*;
