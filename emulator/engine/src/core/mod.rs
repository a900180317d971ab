//! What every transport uses: objects and their protection, memory, completions, events, control verbs, timers.

pub(crate) mod addressing;
pub(crate) mod cm_event;
pub(crate) mod completion_queue;
pub(crate) mod congestion;
pub(crate) mod context;
pub(crate) mod control;
pub(crate) mod control_packets;
pub(crate) mod event;
pub(crate) mod hca;
pub(crate) mod hca_state;
pub(crate) mod infiniband;
pub(crate) mod injection;
pub(crate) mod memory;
pub(crate) mod packet_batch;
pub(crate) mod peer_window;
pub(crate) mod processes;
pub(crate) mod protection;
pub(crate) mod queue_pair;
pub(crate) mod random;
pub(crate) mod reason;
pub(crate) mod settings;
pub(crate) mod shared_receive_queue;
pub(crate) mod table;
pub(crate) mod time;
pub(crate) mod timers;
pub(crate) mod transition;
pub(crate) mod transport;

use context::Context;
use event::{Event, PacketSummary};
use packet_batch::{PacketBatch, TransmitGate};
use reason::{DropReason, LinkReject, Reason};
use settings::Settings;
use time::Instant;
