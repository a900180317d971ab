//! A process that forks while its device is busy: the child gets errors, the parent is not affected.

use super::data::{ALL_ACCESS, ConnectedHost};
use super::process::{Process, TEST_TIMEOUT, TestDaemon, send_line, spawn};
use softhca::{ConnectOptions, Device, Error, QpType, ReceiveRequest, SendRequest};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

const CHILDREN: u64 = 12;

fn open(host: &str) -> Device {
    match std::env::var("TEST_CARD").as_deref() {
        Ok("embedded") => Device::embedded().unwrap(),
        _ => Device::daemon_host(None, Some(host)).unwrap(),
    }
}

fn connect(here: &ConnectedHost, there: &ConnectedHost) {
    here.pair.connect(&there.pair.endpoint(), &ConnectOptions::default()).unwrap();
    there.pair.connect(&here.pair.endpoint(), &ConnectOptions::default()).unwrap();
}

/// Writes `value` over the connection, reads it back and checks both.
fn write_and_read(here: &ConnectedHost, there: &ConnectedHost, value: u64) {
    here.region.write_at(0, &value.to_ne_bytes());
    let entry = [here.region.sge(0, 8)];
    here.pair.post_send(&SendRequest::rdma_write(value, &entry, there.region.remote_address(64))).unwrap();
    here.finish();
    assert_eq!(there.region.load(64), value);
    let entry = [here.region.sge(128, 8)];
    here.pair.post_send(&SendRequest::rdma_read(value, &entry, there.region.remote_address(64))).unwrap();
    here.finish();
    assert_eq!(here.region.load(128), value);
}

/// The calls of a child; returns the name of the first one with an unexpected result.
fn try_everything(busy: &ConnectedHost, spare: Option<(Device, ConnectedHost)>) -> Result<(), &'static str> {
    fn expect_error<T>(result: Result<T, Error>, what: &'static str) -> Result<(), &'static str> {
        let parent = std::os::unix::process::parent_id();
        match result {
            Err(error @ Error::Forked { parent: named }) if named == parent => {
                let text = error.to_string();
                if text.contains("fork") && text.contains(&parent.to_string()) { Ok(()) } else { Err(what) }
            }
            _ => Err(what),
        }
    }
    let (spare_device, spare) = spare.ok_or("the spare end")?;
    for end in [busy, &spare] {
        let entry = [end.region.sge(0, 8)];
        expect_error(end.pair.post_send(&SendRequest::send(1, &entry)), "post")?;
        expect_error(end.pair.post_recv(&ReceiveRequest { wr_id: 1, sg_list: &entry }), "post_receive")?;
        expect_error(end.pair.query(), "query")?;
        expect_error(end.queue.wait(), "wait")?;
        expect_error(end.queue.resize(64), "resize")?;
        expect_error(end.context.check_process(), "check_process")?;
        expect_error(end.context.allocate_protection_domain().map(drop), "allocate_domain")?;
        expect_error(end.context.create_completion_queue(4).map(drop), "create_completion_queue")?;
        expect_error(end.domain.allocate_region(64, ALL_ACCESS).map(drop), "register")?;
        expect_error(end.region.change_access(ALL_ACCESS), "change_access")?;
        expect_error(end.domain.create_queue_pair(QpType::Rc, &end.queue).build().map(drop), "create")?;
        catch_unwind(AssertUnwindSafe(|| end.queue.poll())).err().ok_or("poll")?;
        catch_unwind(AssertUnwindSafe(|| end.context.poll_async_event())).err().ok_or("poll_event")?;
    }
    // Dropping the copied handles must not affect the parent.
    drop(spare);
    drop(spare_device);
    // A new device of the child works.
    let device = Device::embedded().map_err(|_| "a card of its own")?;
    let ends = [ConnectedHost::new(&device, 4096), ConnectedHost::new(&device, 4096)];
    connect(&ends[0], &ends[1]);
    write_and_read(&ends[0], &ends[1], 7);
    Ok(())
}

/// The process that forks.
#[allow(unsafe_code)]
pub fn run_forker() {
    let [alice, bob] = ["alice", "bob"].map(open);
    let (here, there) = (ConnectedHost::new(&alice, 4096), ConnectedHost::new(&bob, 4096));
    connect(&here, &there);
    let spare_device = open("alice");
    let mut spare = Some((spare_device.clone(), ConnectedHost::new(&spare_device, 4096)));
    drop(spare_device);
    let done = AtomicBool::new(false);
    let rounds = std::thread::scope(|scope| {
        let traffic = scope.spawn(|| {
            let mut round = 0;
            while !done.load(Ordering::Relaxed) {
                round += 1;
                write_and_read(&here, &there, round);
            }
            round
        });
        for _ in 0..CHILDREN {
            // SAFETY: the child uses copies of this process's memory and exits without running exit handlers.
            let child = unsafe { libc::fork() };
            assert!(child >= 0, "fork");
            if child == 0 {
                // SAFETY: ends the child if it hangs, without running exit handlers.
                unsafe { libc::alarm(TEST_TIMEOUT.as_secs() as u32) };
                std::panic::set_hook(Box::new(|_| {}));
                let result = catch_unwind(AssertUnwindSafe(|| try_everything(&here, spare.take())));
                if let Ok(Err(what)) = &result {
                    eprintln!("in the child: {what}");
                }
                // SAFETY: as above.
                unsafe { libc::_exit(if matches!(result, Ok(Ok(()))) { 0 } else { 1 }) };
            }
            let mut status = -1;
            // SAFETY: `status` outlives the call.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0, "the child failed");
        }
        done.store(true, Ordering::Relaxed);
        traffic.join().unwrap()
    });
    assert!(rounds > 0);
    // The parent still has everything that the children dropped.
    let (_, spare) = spare.expect("only children took it");
    let last = ConnectedHost::new(&bob, 4096);
    connect(&spare, &last);
    write_and_read(&spare, &last, 4711);
    send_line("unharmed");
}

#[test]
fn a_forked_child_gets_errors_and_its_parents_embedded_devices_keep_working() {
    let mut forker: Process = spawn("forker", "none", &[("TEST_CARD", "embedded")]);
    assert_eq!(forker.receive_line(), "unharmed");
}

#[test]
fn a_forked_child_gets_errors_and_its_parents_daemon_device_keeps_working() {
    let daemon = TestDaemon::start();
    let mut forker = spawn("forker", &daemon.name, &[]);
    assert_eq!(forker.receive_line(), "unharmed");
}
