//! Connection management, shaped like librdmacm.
//!
//! An [`Id`] is one end of a connection, or a listener; it belongs to an [`EventChannel`], where its [`Event`]s
//! are taken. The calls are those of librdmacm without their prefix, and so is what they do: `connect` sends a
//! REQ, the peer's listener hears [`EventType::ConnectRequest`], and when both sides have taken
//! [`EventType::Established`] their queue pairs can send. An identifier that was made with [`Id::synchronous`]
//! waits in each call until it is done.
//!
//! [`Listener`], [`Connector`] and [`Connection`] say the same in async code, on every kind of card:
//!
//! ```
//! use softhca::cm::{Connector, Listener};
//! use softhca::{QpType, sim::World};
//!
//! let mut world = World::new(7);
//! world.host("server", |device| async move {
//!     let context = device.open();
//!     let listener = Listener::bind(&context, "0.0.0.0:7174")?;
//!     let request = listener.accept().await?;
//!     assert_eq!(&request.private_data()[..5], b"hello");
//!     let queue = context.create_completion_queue(16)?;
//!     let pair = context.allocate_protection_domain()?.create_queue_pair(QpType::Rc, &queue).build()?;
//!     let connection = request.accept(&pair).await?;
//!     connection.wait_disconnected().await
//! });
//! world.host("client", |device| async move {
//!     let context = device.open();
//!     let queue = context.create_completion_queue(16)?;
//!     let pair = context.allocate_protection_domain()?.create_queue_pair(QpType::Rc, &queue).build()?;
//!     let connector = Connector::new(&context).private_data(b"hello");
//!     let connection = connector.connect(&pair, "server:7174").await?;
//!     connection.disconnect().await
//! });
//! world.run().unwrap();
//! ```
//!
//! # Addresses
//! `127.0.0.1` and `::1` are the emulated host itself, whatever its address is. The hosts of a daemon and of a
//! `World` are reached by their addresses and by their names; any other address is one of the network, where
//! another machine's SoftHCA or rxe may be. A real RDMA device is never used.

mod address;
mod connection;
mod endpoint;
mod event;
mod event_channel;
mod id;

pub use address::{AddressInfo, Hints, address_info, resolve};
pub use connection::{ConnectRequest, Connection, Connector, Listener};
pub use endpoint::{Endpoint, create_endpoint};
pub use event::Event;
pub use event_channel::EventChannel;
pub use id::Id;

pub use softhca_queue::cm::{
    CmOption, CmState, ConnectionParameters, EventParameters, EventType, IdSnapshot, MAX_REJ_PRIVATE_DATA,
    MAX_REP_PRIVATE_DATA, MAX_REQ_PRIVATE_DATA, MAX_SIDR_REP_PRIVATE_DATA, MAX_SIDR_REQ_PRIVATE_DATA,
    PeerParameters, PortSpace, RDMA_UDP_QKEY, RejectReason, UdParameters,
};
