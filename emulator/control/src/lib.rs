//! The control protocol between the processes of a host and a daemon: messages, their framing on a socket, and the
//! folder of the socket.

extern crate alloc;

mod device_change;
#[cfg(target_os = "linux")]
mod fault_variable;
#[cfg(target_os = "linux")]
mod framing;
mod handed_over;
#[cfg(target_os = "linux")]
mod limit;
#[cfg(target_os = "linux")]
mod lock_file;
#[cfg(target_os = "linux")]
mod messages;
#[cfg(target_os = "linux")]
mod runtime_dir;
mod subnet_messages;

pub use device_change::DeviceChange;
#[cfg(target_os = "linux")]
pub use fault_variable::{faults_from_text, faults_to_text};
#[cfg(target_os = "linux")]
pub use framing::{FramedMessage, MAX_DESCRIPTORS, MAX_MESSAGE, MessageReader, ProtocolError, send_message};
pub use handed_over::HandedOverPacket;
#[cfg(target_os = "linux")]
pub use limit::limit_of;
#[cfg(target_os = "linux")]
pub use lock_file::LockFile;
#[cfg(target_os = "linux")]
pub use messages::*;
#[cfg(target_os = "linux")]
pub use runtime_dir::{DEFAULT_NAME, NAME_VARIABLE, RuntimeDir};
pub use subnet_messages::{
    AgentRegistration, SubnetFault, SubnetHca, SubnetPort, SubnetPortCounter, SubnetRequest, SubnetResponse,
    SubnetSettings, SubnetStatus,
};
