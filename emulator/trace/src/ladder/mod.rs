//! The text ladder: two sides, and between them the packets that they exchanged.
//!
//! [`Ladders`] gathers the events of cards, links and captures. It yields one [`Ladder`] per connection: a list of
//! [`Step`]s with all words in place, which can be drawn for any width.

mod builder;
mod draw;
mod event_text;
mod flow;
mod label;
mod live;
mod messages;
mod step;

pub(crate) use flow::Flows;

pub use crate::log::Emphasis;
pub use builder::LadderBuilder;
pub use draw::{ColorMode, LadderStyle};
pub use live::LiveLadder;
pub use step::{Delivery, Ladder, Side, Step, StepContent};
