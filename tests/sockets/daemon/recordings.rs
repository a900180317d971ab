//! Captures and event logs whose reader does not read, and their limits. The daemon never waits for a reader.

use super::data::{ConnectedHost, connected};
use super::process::{TEST_TIMEOUT, TestDaemon};
use softhca::fault::{Action, Repeat, Rule, RuleId, Selector};
use softhca::{RemoteAddress, SendRequest};
use softhca_trace::StreamItem;
use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;

/// More than a thousand packets and several thousand events.
const MEBIBYTE: u32 = 1 << 20;

fn write(end: &ConnectedHost, remote: RemoteAddress, bytes: u32) {
    end.pair.post_send(&SendRequest::rdma_write(1, &[end.region.sge(0, bytes)], remote)).unwrap();
    end.finish();
}

fn temporary_file(name: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("softhca-recordings-{name}-{}", std::process::id()))
}

#[test]
fn an_unread_recording_ends_and_loses_nothing_of_others() {
    let messages = temporary_file("messages");
    let daemon = TestDaemon::with(&[("TEST_STDERR", messages.to_str().unwrap())]);
    let (end, _echo, remote) = connected(&daemon, "alice", "bob");
    let mut unread = daemon.control();
    let (mut reader, writer) = std::io::pipe().unwrap();
    unread.start_recording(Some(writer.as_fd()), None).unwrap();
    drop(writer);
    let mut kept = daemon.control();
    let file = temporary_file("log");
    let log = File::options().create_new(true).read(true).write(true).open(&file).unwrap();
    kept.start_recording(None, Some(log.as_fd())).unwrap();
    // More packets than the buffer holds: without a limit, the daemon would wait for the reader at some write.
    let writes = 24;
    (0..writes).for_each(|_| write(&end, remote, MEBIBYTE));
    // The client learns the reason, and the daemon reports it.
    let error = unread.stop_recording().expect_err("the reader has read nothing").to_string();
    assert!(error.contains("does not keep up") && error.contains("16777216"), "{error}");
    let deadline = std::time::Instant::now() + TEST_TIMEOUT;
    while !std::fs::read_to_string(&messages).unwrap().contains("the recording of a capture ends early") {
        assert!(std::time::Instant::now() < deadline, "the daemon reports nothing");
        std::thread::yield_now();
    }
    // The reader gets what is in the pipe, and its end.
    let mut rest = Vec::new();
    reader.read_to_end(&mut rest).unwrap();
    assert!(!rest.is_empty());
    // The file is complete: each write has its completion.
    kept.stop_recording().unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    let completed = text.lines().filter(|line| line.contains("work:completed")).count();
    assert_eq!(completed, writes, "{} lines", text.lines().count());
    std::fs::remove_file(&file).unwrap();
    std::fs::remove_file(&messages).unwrap();
}

#[test]
fn a_reader_of_events_that_did_not_read_learns_how_many_are_missing() {
    let daemon = TestDaemon::start();
    let (end, _echo, remote) = connected(&daemon, "alice", "bob");
    let mut controls = [(); 2].map(|()| daemon.control());
    let mut streams = controls.each_mut().map(|control| control.start_recording_events(None, None).unwrap());
    // More names and events than the buffer of a stream holds. One of two readers reads.
    let (mut expected, mut received, mut missed) = (0, 0, 0);
    let (id, selector) = (RuleId(1), Selector::default());
    let rule = Rule { id, selector, repeat: Repeat::default(), action: Action::Count };
    let name = "x".repeat(200_000);
    for _ in 0..30 {
        controls[0].add_rules("alice", 1, &[(rule.clone(), &name)]).unwrap();
        write(&end, remote, 64 << 10);
        while let Some(item) = streams[0].next_item().unwrap() {
            expected += u64::from(matches!(item, StreamItem::Event(..)));
        }
    }
    let deadline = std::time::Instant::now() + TEST_TIMEOUT;
    while missed == 0 {
        match streams[1].next_item().unwrap() {
            Some(StreamItem::Event(..)) => received += 1,
            Some(StreamItem::Missed(events)) => missed += events,
            Some(StreamItem::Names(_)) => {}
            None => assert!(std::time::Instant::now() < deadline, "nothing is missing"),
        }
    }
    // It keeps up from now on.
    write(&end, remote, MEBIBYTE);
    for (control, stream) in controls.iter_mut().zip(&mut streams) {
        control.stop_recording_events(stream).unwrap();
    }
    while let Some(item) = streams[0].next_item().unwrap() {
        expected += u64::from(matches!(item, StreamItem::Event(..)));
    }
    while let Some(item) = streams[1].next_item().unwrap() {
        received += u64::from(matches!(item, StreamItem::Event(..)));
    }
    assert!(streams.iter().all(softhca::EventStream::is_complete));
    assert_eq!(received + missed, expected, "{missed} are missing");
}

#[test]
fn a_daemon_with_an_unread_recording_stops() {
    let daemon = TestDaemon::start();
    let (end, _echo, remote) = connected(&daemon, "alice", "bob");
    let mut unread = daemon.control();
    // Both ends stay open, as those of a stopped `softhca explore`.
    let (_reader, writer) = std::io::pipe().unwrap();
    unread.start_recording(None, Some(writer.as_fd())).unwrap();
    write(&end, remote, MEBIBYTE);
    drop(end);
    daemon.control().stop().unwrap();
}

#[test]
fn the_recordings_of_a_process_are_limited() {
    let daemon = TestDaemon::start();
    let null = File::options().write(true).open("/dev/null").unwrap();
    // Several connections, one process.
    let mut controls = [(); 2].map(|()| daemon.control());
    for control in &mut controls {
        (0..2).for_each(|_| control.start_recording(None, Some(null.as_fd())).unwrap());
    }
    let error = controls[0].start_recording(None, Some(null.as_fd())).expect_err("the fifth is too many");
    assert!(error.errno() == libc::EMFILE && error.to_string().contains("4 recordings"), "{error}");
    controls[1].stop_recording().unwrap();
    // The files of ended recordings are closed soon.
    let deadline = std::time::Instant::now() + TEST_TIMEOUT;
    while let Err(error) = controls[0].start_recording(None, Some(null.as_fd())) {
        assert!(std::time::Instant::now() < deadline, "{error}");
    }
}
