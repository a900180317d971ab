//! Notifications for a session, from any thread.
//!
//! The thread that has a notification sends it itself, which saves waking the session. It queues the notification
//! instead if others are queued already or the socket is full; the session then sends the queue.

use parking_lot::Mutex;
use softhca_control::{FramedMessage, Message, Notification, encode, send_message};
use std::collections::VecDeque;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use tokio::sync::Notify;

/// The most notifications that wait for a client that does not read.
const MAX_PENDING: usize = 8192;
/// The most bytes of the data in them, and of that of packets alone.
const MAX_PENDING_BYTES: usize = 16 << 20;
const MAX_PENDING_PACKET_BYTES: usize = 1 << 20;

/// Longer notifications, such as those with many packets, are left to the session.
const MAX_SENT_AT_ONCE: usize = 2048;

/// The bytes of the data in a notification that a peer or another client may choose.
fn data_bytes(notification: &Notification) -> usize {
    match notification {
        Notification::PacketsHandedOver { packets } => {
            packets.iter().map(|packet| size_of_val(packet) + packet.bytes.len()).sum()
        }
        Notification::FaultRulesAdded { rules: bytes, .. }
        | Notification::FlowsAdded { flows: bytes, .. } => bytes.len(),
        _ => 0,
    }
}

/// The notifications of a session.
#[derive(Default)]
pub(crate) struct NotificationQueue {
    pending: Mutex<Pending>,
    queued: Notify,
    /// The socket that notifications leave over, once a device is open.
    socket: OnceLock<UnixStream>,
}

#[derive(Default)]
struct Pending {
    notifications: VecDeque<Notification>,
    /// The bytes of their data.
    bytes: usize,
    /// The session has notifications that it has not sent yet.
    draining: bool,
    overflowed: bool,
}

impl NotificationQueue {
    /// Sends notifications over this non-blocking socket from now on.
    pub fn attach_socket(&self, stream: UnixStream) {
        let _ = self.socket.set(stream);
    }

    /// Sends or queues a notification. Never blocks.
    pub fn push(&self, notification: Notification) {
        self.push_with(notification, &[]);
    }

    /// Adds a notification with descriptors. The session finds the descriptors of a queued notification.
    pub fn push_with(&self, notification: Notification, descriptors: &[BorrowedFd<'_>]) {
        let mut pending = self.pending.lock();
        let was_empty = pending.notifications.is_empty();
        if was_empty && !pending.draining && self.try_send(&notification, descriptors) {
            return;
        }
        let bytes = data_bytes(&notification);
        // The client answers one that it has not been sent yet with what it has then.
        if notification == Notification::ReportRequested && pending.notifications.contains(&notification) {
            return;
        }
        if pending.notifications.len() >= MAX_PENDING || pending.bytes + bytes > MAX_PENDING_BYTES {
            pending.overflowed = true;
        } else {
            pending.bytes += bytes;
            pending.notifications.push_back(notification);
        }
        drop(pending);
        if was_empty {
            self.queued.notify_one();
        }
    }

    /// Whether a client that does not read has room for more than what must not be lost.
    pub fn has_room(&self) -> bool {
        let pending = self.pending.lock();
        pending.notifications.len() < MAX_PENDING / 2 && pending.bytes < MAX_PENDING_PACKET_BYTES
    }

    /// Whether the socket accepted the message. A message this short is sent completely or not at all; after a partial
    /// send the rest could not follow, so that ends the connection.
    fn try_send(&self, notification: &Notification, descriptors: &[BorrowedFd<'_>]) -> bool {
        // The session dequeues CM events from the HCA when it sends them.
        let is_complete = match notification {
            Notification::CmEventsRaised { .. } => false,
            Notification::RingsOpened { .. } => !descriptors.is_empty(),
            _ => true,
        };
        let Some(socket) = self.socket.get().filter(|_| is_complete) else { return false };
        let message = encode(&Message::Notification(notification.clone()));
        if message.len() > MAX_SENT_AT_ONCE {
            return false;
        }
        let frame = FramedMessage::frame(&message, descriptors.len());
        match send_message(socket.as_fd(), &frame, 0, descriptors) {
            Ok(count) if count < frame.len() => socket.shutdown(Shutdown::Both).is_ok(),
            result => result.is_ok(),
        }
    }

    /// Waits until a notification is queued.
    pub async fn queued(&self) {
        self.queued.notified().await;
    }

    /// Removes all queued notifications, oldest first. `None` if the queue overflowed.
    pub fn drain(&self) -> Option<VecDeque<Notification>> {
        let mut pending = self.pending.lock();
        pending.draining |= !pending.notifications.is_empty();
        pending.bytes = 0;
        (!pending.overflowed).then(|| std::mem::take(&mut pending.notifications))
    }

    /// The session has sent everything that it drained.
    pub fn finish_drain(&self) {
        self.pending.lock().draining = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use softhca_control::HandedOverPacket;
    use std::net::{IpAddr, Ipv4Addr};

    #[test]
    fn a_client_that_does_not_read_has_one_request_for_a_report_waiting() {
        let queue = NotificationQueue::default();
        (0..=MAX_PENDING).for_each(|_| queue.push(Notification::ReportRequested));
        assert_eq!(queue.drain(), Some(VecDeque::from([Notification::ReportRequested])));
        queue.push(Notification::ReportRequested);
        assert_eq!(queue.drain().map(|queued| queued.len()), Some(1));
    }

    #[test]
    fn a_client_that_does_not_read_has_a_bounded_number_of_bytes_waiting() {
        let queue = NotificationQueue::default();
        let destination = IpAddr::from(Ipv4Addr::LOCALHOST);
        let packet = HandedOverPacket {
            slot: 1,
            source: (destination, 7).into(),
            destination,
            traffic_class: 0,
            bytes: vec![0; HandedOverPacket::MAX_BYTES],
        };
        let packets = vec![packet; HandedOverPacket::MAX_IN_MESSAGE];
        while queue.has_room() {
            queue.push(Notification::PacketsHandedOver { packets: packets.clone() });
        }
        let waiting = |queue: &NotificationQueue| queue.pending.lock().bytes;
        assert!(waiting(&queue) < 2 * MAX_PENDING_PACKET_BYTES, "{}", waiting(&queue));
        // Notifications that must not be lost still have room, up to the limit.
        queue.push(Notification::ReportRequested);
        let rules = Notification::FaultRulesAdded { seed: 0, rules: vec![0; MAX_PENDING_BYTES / 4] };
        (0..3).for_each(|_| queue.push(rules.clone()));
        assert!(!queue.pending.lock().overflowed);
        assert!(queue.drain().is_some() && queue.has_room());
        (0..5).for_each(|_| queue.push(rules.clone()));
        assert!(queue.drain().is_none());
    }
}
