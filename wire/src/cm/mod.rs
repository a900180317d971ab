//! The connection manager's messages (IBA volume 1, chapter 12), each as a plain value.
//!
//! The layouts are lists in the files of their families; numbers that a peer may choose freely stay numbers,
//! so that what was read can be written again. Which message follows which is the engine's business.

mod address;
mod alternate_path;
mod codes;
mod connect;
mod disconnect;
mod message;
mod sidr;

pub use address::{PortSpace, RdmaCmHeader, ServiceId};
pub use alternate_path::{Apr, Lap};
pub use codes::{AlternatePathStatus, CommunicationId, MessageType, PrivateData, RejectReason, SidrStatus};
pub use connect::{Mra, Path, Rej, Rep, Req, Rtu};
pub use disconnect::{Drep, Dreq};
pub use message::{Datagram, Message};
pub use sidr::{SidrRep, SidrReq};
