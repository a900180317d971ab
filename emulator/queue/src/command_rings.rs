//! The ring memory that a command needs, and the rings in it.

use crate::{CompletionProducer, ReceiveConsumer, ReceiveProducer, SendConsumer, SendProducer, SharedWords};
use softhca_types::{Command, QpCapabilities, QpInitAttributes, VerbsError};

/// The words of ring memory that a command needs, after a check of the sizes that it asks for.
pub fn ring_words(command: &Command) -> Result<usize, VerbsError> {
    command.check_sizes()?;
    Ok(match command {
        Command::CreateCompletionQueue { cqe } | Command::ResizeCompletionQueue { cqe, .. } => {
            CompletionProducer::layout(*cqe).words()
        }
        Command::CreateSharedReceiveQueue { max_wr, max_sge, .. }
        | Command::ModifySharedReceiveQueue { max_wr: Some(max_wr), max_sge, .. } => {
            ReceiveProducer::layout(*max_wr, *max_sge as usize).words()
        }
        Command::CreateQueuePair { init, capabilities } => {
            QpRingLayout { init, capabilities }.words().iter().sum()
        }
        _ => 0,
    })
}

/// The rings of a queue pair within their memory: the send ring, then the receive ring.
#[derive(Clone, Copy, Debug)]
pub struct QpRingLayout<'a> {
    /// The attributes of the queue pair, which say which queues it has.
    pub init: &'a QpInitAttributes,
    /// The sizes of the queues.
    pub capabilities: &'a QpCapabilities,
}

impl QpRingLayout<'_> {
    /// The words of the send ring and of the receive ring.
    fn words(self) -> [usize; 2] {
        let QpCapabilities { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data } =
            *self.capabilities;
        let send = SendProducer::layout(max_send_wr, max_send_sge as usize, max_inline_data as usize).words();
        let recv = ReceiveProducer::layout(max_recv_wr, max_recv_sge as usize).words();
        [if self.init.has_send_queue() { send } else { 0 }, if self.init.has_recv_queue() { recv } else { 0 }]
    }

    fn split(self, words: &SharedWords) -> [Option<SharedWords>; 2] {
        let [send, recv] = self.words();
        [
            self.init.has_send_queue().then(|| words.part(0..send)),
            self.init.has_recv_queue().then(|| words.part(send..send + recv)),
        ]
    }

    /// The application's side of the rings of a new queue pair.
    pub fn producers(self, words: &SharedWords) -> (Option<SendProducer>, Option<ReceiveProducer>) {
        let [send, recv] = self.split(words);
        let QpCapabilities { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data } =
            *self.capabilities;
        let (send_sge, inline) = (max_send_sge as usize, max_inline_data as usize);
        (
            send.map(|words| SendProducer::new(words, max_send_wr, send_sge, inline)),
            recv.map(|words| ReceiveProducer::new(words, max_recv_wr, max_recv_sge as usize)),
        )
    }

    /// The HCA's side of the rings, new or resumed from the indices in them.
    pub fn consumers(
        self,
        words: &SharedWords,
        resume: bool,
    ) -> (Option<SendConsumer>, Option<ReceiveConsumer>) {
        let [send, recv] = self.split(words);
        let QpCapabilities { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data } =
            *self.capabilities;
        let (send_sge, recv_sge) = (max_send_sge as usize, max_recv_sge as usize);
        let new_send = if resume { SendConsumer::resume } else { SendConsumer::new };
        let new_recv = if resume { ReceiveConsumer::resume } else { ReceiveConsumer::new };
        (
            send.map(|words| new_send(words, max_send_wr, send_sge, max_inline_data as usize)),
            recv.map(|words| new_recv(words, max_recv_wr, recv_sge)),
        )
    }
}
