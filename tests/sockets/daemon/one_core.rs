//! A program and the library's thread on one processor: a program that waits for memory to change, and never calls the
//! library meanwhile, leaves the processor to the thread that receives for it, and the reverse.

use super::data::ConnectedHost;
use super::process::{self, Process, TEST_TIMEOUT, TestDaemon, receive_line, send_line, use_one_processor};
use softhca::{Device, ReceiveRequest, RemoteAddress, SendRequest};

/// WRITEs of a stream, and how many are outstanding.
const WRITES: u64 = 4000;
const OUTSTANDING: u64 = 32;
const WRITE_BYTES: u32 = 1 << 16;
/// Streams, of which one must be shared.
const MAX_STREAMS: usize = 5;
/// Round trips, and messages that a program polls for.
const ROUNDS: u64 = 500;
/// The least share that the program and the thread give each other.
const LEAST_SHARE: f64 = 0.3;

/// Where the peer writes its counter, and where the program keeps the source of its own WRITEs.
const COUNTER: u64 = 0;
const SOURCE: u64 = 8;

/// How long a thread ran, and how long it waited for its processor, in nanoseconds.
#[derive(Clone, Copy, Default)]
struct ThreadTimes {
    ran: u64,
    waited: u64,
}

impl ThreadTimes {
    fn of(thread: &str) -> ThreadTimes {
        let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).unwrap();
        let mut fields = text.split(' ').map(|field| field.parse().unwrap());
        ThreadTimes { ran: fields.next().unwrap(), waited: fields.next().unwrap() }
    }

    fn since(self, before: ThreadTimes) -> ThreadTimes {
        ThreadTimes { ran: self.ran - before.ran, waited: self.waited - before.waited }
    }

    /// The part of the time in which the thread had work that it ran. Other processes lower it for all threads.
    fn served(self) -> f64 {
        self.ran as f64 / (self.ran + self.waited).max(1) as f64
    }
}

/// This thread, and the thread of the library that receives.
fn threads() -> [String; 2] {
    let own = rustix::thread::gettid().as_raw_nonzero().to_string();
    let receives = |thread: &String| {
        let name = std::fs::read_to_string(format!("/proc/self/task/{thread}/comm")).unwrap_or_default();
        name.starts_with("softhca 127.")
    };
    loop {
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let mut names = threads.map(|thread| thread.unwrap().file_name().into_string().unwrap());
        if let Some(found) = names.find(receives) {
            return [own, found];
        }
        // It has its name once it has run.
        std::thread::yield_now();
    }
}

/// The program: everything in its process runs on one processor.
pub fn run_one_core() {
    use_one_processor();
    let host = std::env::var("TEST_HOST").unwrap();
    let end = ConnectedHost::new(&Device::daemon_host(None, Some(&host)).unwrap(), 1 << 20);
    send_line(&end.open_device());
    let remote = end.connect(&receive_line().unwrap());
    let work = std::env::var("TEST_WORK").unwrap();
    if work == "poll" {
        (0..OUTSTANDING).for_each(|id| post_receive(&end, id));
    }
    let threads = threads();
    let times = || threads.each_ref().map(|thread| ThreadTimes::of(thread));
    let before = times();
    send_line("ready");
    match work.as_str() {
        "stream" => spin(&end, 1),
        "ping-pong" => (1..=ROUNDS).for_each(|round| {
            spin(&end, round);
            write_counter(&end, remote, round);
        }),
        _ => (0..ROUNDS).for_each(|id| {
            while end.queue.poll().is_none() {}
            post_receive(&end, OUTSTANDING + id);
        }),
    }
    let after = times();
    let fields = [0, 1].map(|index| {
        let ThreadTimes { ran, waited } = after[index].since(before[index]);
        format!("{ran} {waited}")
    });
    send_line(&fields.join(" "));
    while receive_line().is_some() {}
}

fn post_receive(end: &ConnectedHost, wr_id: u64) {
    end.pair.post_recv(&ReceiveRequest { wr_id, sg_list: &[end.region.sge(0, 64)] }).unwrap();
}

/// Waits for memory without a call to the library.
fn spin(end: &ConnectedHost, counter: u64) {
    while end.region.load(COUNTER) != counter {
        std::hint::spin_loop();
    }
}

/// Writes a counter into the memory of the peer, and polls for the completion.
fn write_counter(end: &ConnectedHost, remote: RemoteAddress, counter: u64) {
    end.region.write_at(SOURCE, &counter.to_ne_bytes());
    end.pair.post_send(&SendRequest::rdma_write(counter, &[end.region.sge(SOURCE, 8)], remote)).unwrap();
    let completion = std::iter::repeat_with(|| end.queue.poll()).flatten().next().unwrap();
    assert!(completion.status.is_success(), "{completion:?}");
}

/// Starts the program on `theirs`, connected to an end on alice.
fn start(daemon: &TestDaemon, theirs: &str, work: &str) -> (ConnectedHost, Process, RemoteAddress) {
    let end = ConnectedHost::new(&daemon.open("alice"), 1 << 20);
    let variables = [("TEST_HOST", theirs), ("TEST_WORK", work)];
    let mut program = process::spawn("one-core", &daemon.name, &variables);
    let remote = end.connect(&program.receive_line());
    program.send_line(&end.open_device());
    assert_eq!(program.receive_line(), "ready");
    (end, program, remote)
}

/// What the program measured: its own thread, and the library's.
fn measured(program: &mut Process) -> [ThreadTimes; 2] {
    let line = program.receive_line();
    let fields: Vec<u64> = line.split(' ').map(|field| field.parse().unwrap()).collect();
    [0, 2].map(|at| ThreadTimes { ran: fields[at], waited: fields[at + 1] })
}

fn print(work: &str, theirs: &str, [program, thread]: [ThreadTimes; 2]) {
    let all = (program.ran + thread.ran).max(1) as f64;
    println!(
        "{work}, alice to {theirs}: the program had {:.2} of the CPU time and ran in {:.2} of the time that it could, \
         the library's thread {:.2} and {:.2}",
        program.ran as f64 / all,
        program.served(),
        thread.ran as f64 / all,
        thread.served(),
    );
}

/// Both have work all the time: the program spins, and a stream of WRITEs arrives that it does not poll for. Returns the
/// shares of both in the time in which they had work.
fn shares_in_a_stream(daemon: &TestDaemon, theirs: &str) -> [f64; 2] {
    let (end, mut program, remote) = start(daemon, theirs, "stream");
    for id in 0..WRITES + OUTSTANDING {
        if id >= OUTSTANDING {
            end.finish();
        }
        if id < WRITES {
            let to = RemoteAddress { address: remote.address + 4096, ..remote };
            let entries = [end.region.sge(4096, WRITE_BYTES)];
            end.pair.post_send(&SendRequest::rdma_write(id, &entries, to)).unwrap();
        }
    }
    write_counter(&end, remote, 1);
    let times = measured(&mut program);
    print("a stream of WRITEs", theirs, times);
    let [program, thread] = times.map(ThreadTimes::served);
    [program, thread].map(|served| served / (program + thread))
}

/// Other processes disturb a stream, but a thread that starves the other does so in all of them.
#[test]
fn a_program_that_spins_on_memory_and_the_librarys_thread_share_one_processor() {
    let daemon = TestDaemon::with(&super::direct::DIRECT);
    for theirs in ["alice", "bob"] {
        let mut streams = (0..MAX_STREAMS).map(|_| shares_in_a_stream(&daemon, theirs));
        let shared = streams.any(|shares| shares.iter().all(|share| *share >= LEAST_SHARE));
        assert!(shared, "alice to {theirs}: one of them had less than {LEAST_SHARE} while both had work");
    }
}

/// One of them has work at a time: the program waits for the packet, and then answers it.
#[test]
fn a_program_that_spins_on_memory_answers_on_one_processor() {
    let daemon = TestDaemon::with(&super::direct::DIRECT);
    for theirs in ["alice", "bob"] {
        let (end, mut program, remote) = start(&daemon, theirs, "ping-pong");
        for round in 1..=ROUNDS {
            write_counter(&end, remote, round);
            spin(&end, round);
        }
        print("round trips", theirs, measured(&mut program));
    }
}

#[test]
fn a_program_that_polls_receives_on_one_processor() {
    let daemon = TestDaemon::with(&super::direct::DIRECT);
    for theirs in ["alice", "bob"] {
        let (end, mut program, _) = start(&daemon, theirs, "poll");
        for id in 0..ROUNDS {
            end.pair.post_send(&SendRequest::send(id, &[end.region.sge(0, 64)])).unwrap();
            let completion = end.queue.wait_for(TEST_TIMEOUT).expect("a completion");
            assert!(completion.status.is_success(), "{completion:?}");
        }
        print("messages", theirs, measured(&mut program));
    }
}
