//! Messages of the daemon on standard error. A reader that does not read them does not stop the daemon.

use std::fmt;
use std::io::{self, Write};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, SyncSender, sync_channel};
use std::time::Duration;

/// The most messages that wait to be printed.
const MAX_WAITING: usize = 256;
/// How long the daemon waits at its end until its messages are printed.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

enum Message {
    Text(String),
    Flush(Sender<()>),
}

static LOST: AtomicU64 = AtomicU64::new(0);

static PRINTER: LazyLock<Option<SyncSender<Message>>> = LazyLock::new(|| {
    let (sender, messages) = sync_channel(MAX_WAITING);
    let thread = std::thread::Builder::new().name("messages".into()).spawn(move || {
        for message in messages {
            let lost = LOST.swap(0, Ordering::Relaxed);
            if lost > 0 {
                let _ = writeln!(io::stderr(), "softhca: {lost} messages were not printed");
            }
            match message {
                Message::Text(text) => drop(writeln!(io::stderr(), "softhca: {text}")),
                Message::Flush(done) => drop(done.send(())),
            }
        }
    });
    thread.is_ok().then_some(sender)
});

/// Prints a message, as `format!` formats it.
macro_rules! report {
    ($($text:tt)*) => {
        $crate::messages::print(format_args!($($text)*))
    };
}
pub(crate) use report;

/// The function behind [`report`]. Never waits: a message that finds no room is counted instead.
pub(crate) fn print(text: fmt::Arguments<'_>) {
    let text = printable(&text.to_string());
    if PRINTER.as_ref().is_none_or(|printer| printer.try_send(Message::Text(text)).is_err()) {
        LOST.fetch_add(1, Ordering::Relaxed);
    }
}

/// Waits until the messages so far are printed, but not for a reader that does not read them.
pub(crate) fn flush() {
    let (done, printed) = std::sync::mpsc::channel();
    if PRINTER.as_ref().is_some_and(|printer| printer.try_send(Message::Flush(done)).is_ok()) {
        let _ = printed.recv_timeout(FLUSH_TIMEOUT);
    }
}

/// The text with control characters escaped: a process chooses its own name.
pub(crate) fn printable(text: &str) -> String {
    let escape = |c: char| match c.is_control() {
        true => c.escape_unicode().to_string(),
        false => c.to_string(),
    };
    text.chars().map(escape).collect()
}
