//! Connection manager (CM) messages (IBA volume 1, chapter 12) as plain values.
//!
//! Fields with reserved or unknown values keep their number, so that `emit` reproduces the parsed bytes. The
//! engine implements the protocol.

mod address;
mod alternate_path;
mod codes;
mod connect;
mod disconnect;
mod message;
mod sidr;
mod target;

pub use address::{PortSpace, RdmaCmHeader, ServiceId};
pub use alternate_path::{Apr, Lap};
pub use codes::{AlternatePathStatus, CommunicationId, MessageType, PrivateData, RejectReason, SidrStatus};
pub use connect::{Mra, Path, Rej, Rep, Req, Rtu};
pub use disconnect::{Drep, Dreq};
pub use message::{Datagram, Message, MessageKind};
pub use sidr::{SidrRep, SidrReq};
pub use target::PacketTarget;
