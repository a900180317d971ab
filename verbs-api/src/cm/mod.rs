//! Connection management, shaped like librdmacm.
//!
//! An [`Id`] is one end of a connection, or a listener. It belongs to an [`EventChannel`], which delivers its
//! [`Event`]s. The calls are librdmacm's without their prefix. `connect` sends a REQ, and the listener gets
//! [`EventType::ConnectRequest`]. After [`EventType::Established`] the queue pairs of both sides can send. Each call of
//! an identifier from [`Id::synchronous`] waits until it is done.
//!
//! [`Listener`], [`Connector`] and [`Connection`] are for async code, on every kind of device:
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
//! `127.0.0.1` and `::1` are the emulated host itself, whatever its address is. The hosts of a daemon and of a `World` have
//! addresses and names, and both can be used. Any other address is one of the network, where SoftHCA or rxe may run on
//! another machine. A real RDMA device is never used.

mod address;
mod connection;
mod endpoint;
mod event;
mod event_channel;
mod handles;
mod id;

pub use address::{AddressInfo, Hints, address_info, resolve};
pub use connection::{ConnectRequest, Connection, Connector, Listener};
pub use endpoint::{Endpoint, create_endpoint};
pub use event::Event;
pub use handles::{EventChannel, Id};

pub use softhca_types::cm::{
    CmOption, CmState, ConnectionParameters, EventParameters, EventType, IdSnapshot, MAX_REJ_PRIVATE_DATA,
    MAX_REP_PRIVATE_DATA, MAX_REQ_PRIVATE_DATA, MAX_SIDR_REP_PRIVATE_DATA, MAX_SIDR_REQ_PRIVATE_DATA,
    PeerParameters, PortSpace, RDMA_UDP_QKEY, RejectReason, UdParameters,
};
