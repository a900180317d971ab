//! Client memory that a daemon maps: whole pages are replaced by shared ones without a visible change for the program.
//! The program of each test is a single-threaded process, like typical C programs.

#![allow(unsafe_code)]

use libtest_mimic::Trial;
use softhca::{
    AccessFlags, CompletionQueue, ConnectOptions, Context, Device, MemoryRegion, ProtectionDomain, QpType,
    QueuePair, SendRequest,
};
use softhca_daemon::{Config, Daemon, HostConfig};
use softhca_tests::process::{self, Process, TEST_TIMEOUT, send_line};
use softhca_tests::tools;
use std::ops::Range;
use std::process::ExitCode;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;

/// A test program, and the maximum number of mappings of its daemon.
type Role = (&'static str, fn(), u32);

const DEFAULT_MAPPINGS: u32 = 1000;
const ROLES: [Role; 11] = [
    ("whole_pages_are_shared_while_they_are_registered", share_whole_pages, DEFAULT_MAPPINGS),
    ("a_program_with_threads_keeps_its_pages", keep_with_threads, DEFAULT_MAPPINGS),
    ("a_program_that_disables_sharing_keeps_its_pages", keep_when_disabled, DEFAULT_MAPPINGS),
    ("replaced_mappings_are_left_alone", leave_replaced_pages, DEFAULT_MAPPINGS),
    ("a_forked_child_has_private_pages", fork_with_own_pages, DEFAULT_MAPPINGS),
    ("a_program_deregisters_in_its_own_fork_handlers", deregister_in_fork_handlers, DEFAULT_MAPPINGS),
    ("untouched_pages_stay_unallocated", keep_holes, DEFAULT_MAPPINGS),
    ("an_overlapping_region_keeps_working_alone", register_twice, DEFAULT_MAPPINGS),
    (
        "a_program_that_registers_frequently_keeps_its_pages",
        stop_sharing_after_many_registrations,
        DEFAULT_MAPPINGS,
    ),
    ("a_daemon_without_free_mappings_accesses_client_memory", fall_back, 2),
    ("a_reregistered_region_leaves_private_pages", reregister, DEFAULT_MAPPINGS),
];

const ALL_ACCESS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC);
const PAGE: usize = 4096;
/// No page.
const NONE: [usize; 0] = [];
const NAME: &str = "softhca-in-place";

fn main() -> ExitCode {
    match process::role().as_deref() {
        None => tools::run(ROLES.iter().map(trial).collect()),
        Some("daemon") => {
            run_daemon();
            ExitCode::SUCCESS
        }
        Some(role) => {
            let (_, program, _) = ROLES.iter().find(|(name, ..)| *name == role).expect("a role of this test");
            program();
            send_line("done");
            ExitCode::SUCCESS
        }
    }
}

fn trial((name, _, mappings): &'static Role) -> Trial {
    Trial::test(*name, move || {
        let place = ROLES.iter().position(|(other, ..)| other == name);
        let daemon_name = format!("in-place-{}-{}", std::process::id(), place.unwrap());
        let start = |role: &str| {
            let mut command = process::command(&[], role);
            command.env("SOFTHCA_DAEMON", &daemon_name).env("TEST_MAPPINGS", mappings.to_string());
            Process::start(&mut command)
        };
        let mut daemon = start("daemon");
        assert_eq!(daemon.receive_line(), "ready");
        let mut program = start(name);
        assert_eq!(program.receive_line(), "done");
        program.finish();
        Ok(())
    })
}

fn run_daemon() {
    let config = Config {
        name: std::env::var("SOFTHCA_DAEMON").unwrap(),
        hosts: ["alice", "bob"].map(|name| HostConfig { name: name.into(), address: None }).into(),
        max_mappings: std::env::var("TEST_MAPPINGS").unwrap().parse().unwrap(),
        ..Config::default()
    };
    let mut daemon = Daemon::start(config).unwrap();
    send_line("ready");
    process::exit_with_parent();
    daemon.run(None).unwrap();
}

/// Private pages of the program.
struct Pages {
    at: *mut u8,
    length: usize,
}

impl Pages {
    fn new(count: usize) -> Pages {
        let length = count * PAGE;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), length, rights, kind, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        Pages { at: at.cast(), length }
    }

    /// Pages filled with a pattern.
    fn filled(count: usize, seed: u8) -> Pages {
        let pages = Pages::new(count);
        pages.write(0, &pattern(pages.length, seed));
        pages
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.length);
        // SAFETY: inside the pages, which are not borrowed.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at.add(offset), bytes.len()) };
    }

    fn read(&self, offset: usize, length: usize) -> Vec<u8> {
        assert!(offset + length <= self.length);
        let mut bytes = vec![0; length];
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(self.at.add(offset), bytes.as_mut_ptr(), length) };
        bytes
    }

    fn register(&self, domain: &ProtectionDomain, range: Range<usize>) -> MemoryRegion {
        assert!(range.end <= self.length);
        // SAFETY: inside the pages, which outlive the program.
        unsafe {
            let base = NonNull::new(self.at.add(range.start)).unwrap();
            domain.register_memory(base, range.len(), ALL_ACCESS).unwrap()
        }
    }

    /// The numbers of the pages that are shared.
    fn shared(&self) -> Vec<usize> {
        let start = self.at as usize;
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mut found = Vec::new();
        for line in maps.lines().filter(|line| line.contains(NAME) && line.contains(" rw-s ")) {
            let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            let [from, to] = [from, to].map(|text| usize::from_str_radix(text, 16).unwrap());
            let part = from.max(start)..to.min(start + self.length);
            found.extend(part.step_by(PAGE).map(|at| (at - start) / PAGE));
        }
        found
    }
}

fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|index| (index / PAGE * 31 + index * 7) as u8 ^ seed).collect()
}

/// Connected queue pairs of alice and bob.
struct Rig {
    _contexts: [Context; 2],
    alice: ProtectionDomain,
    bob: ProtectionDomain,
    queue: CompletionQueue,
    pair: QueuePair,
    _other: (CompletionQueue, QueuePair),
}

impl Rig {
    fn new() -> Rig {
        let open = |host| Device::daemon_host(None, Some(host)).unwrap().open();
        let contexts = [open("alice"), open("bob")];
        let [alice, bob] = [0, 1].map(|index: usize| contexts[index].allocate_protection_domain().unwrap());
        let [queue, other] = [0, 1].map(|index: usize| contexts[index].create_completion_queue(16).unwrap());
        let pair = alice.create_queue_pair(QpType::Rc, &queue).build().unwrap();
        let peer = bob.create_queue_pair(QpType::Rc, &other).build().unwrap();
        pair.connect(&peer.endpoint(), &ConnectOptions::default()).unwrap();
        peer.connect(&pair.endpoint(), &ConnectOptions::default()).unwrap();
        Rig { _contexts: contexts, alice, bob, queue, pair, _other: (other, peer) }
    }

    fn finish(&self) {
        let completion = self.queue.wait_for(TEST_TIMEOUT).expect("a completion");
        assert!(completion.status.is_success(), "{completion:?}");
    }

    /// Alice writes her region to bob's.
    fn write(&self, from: &MemoryRegion, to: &MemoryRegion) {
        let entry = [from.sge(0, from.len() as u32)];
        self.pair.post_send(&SendRequest::rdma_write(1, &entry, to.remote_address(0))).unwrap();
        self.finish();
    }

    /// Alice reads bob's region into hers.
    fn read(&self, into: &MemoryRegion, from: &MemoryRegion) {
        let entry = [into.sge(0, into.len() as u32)];
        self.pair.post_send(&SendRequest::rdma_read(1, &entry, from.remote_address(0))).unwrap();
        self.finish();
    }
}

fn share_whole_pages() {
    let rig = Rig::new();
    let (source, target) = (Pages::filled(600, 1), Pages::filled(600, 2));
    // From the middle of page 0 to the middle of page 599.
    let range = 100..599 * PAGE + 50;
    let (from, to) = (source.register(&rig.alice, range.clone()), target.register(&rig.bob, range.clone()));
    for pages in [&source, &target] {
        assert_eq!(pages.shared(), (1..599).collect::<Vec<_>>());
    }
    assert_eq!(source.read(0, source.length), pattern(source.length, 1));
    assert_eq!(target.read(0, target.length), pattern(target.length, 2));
    rig.write(&from, &to);
    let mut expected = pattern(target.length, 2);
    expected[range.clone()].copy_from_slice(&pattern(source.length, 1)[range.clone()]);
    assert!(target.read(0, target.length) == expected, "exactly the written bytes changed");
    // The device reads the bytes that the program writes.
    target.write(0, &pattern(target.length, 3));
    rig.read(&from, &to);
    assert!(source.read(range.start, range.len()) == pattern(source.length, 3)[range.clone()]);
    let counter = 8 * PAGE - range.start;
    target.write(8 * PAGE, &41u64.to_ne_bytes());
    let entry = [from.sge(0, 8)];
    rig.pair.post_send(&SendRequest::fetch_and_add(1, &entry, to.remote_address(counter as u64), 1)).unwrap();
    rig.finish();
    assert_eq!(target.read(8 * PAGE, 8), 42u64.to_ne_bytes());
    let before = target.read(0, target.length);
    to.deregister().unwrap();
    assert_eq!(target.shared(), NONE);
    assert!(target.read(0, target.length) == before);
    target.write(0, &pattern(target.length, 4));
    drop(from);
    assert_eq!(source.shared(), NONE);
    // A region of the same pages is shared again.
    let again = target.register(&rig.bob, 0..target.length);
    assert_eq!(target.shared().len(), 600);
    assert!(target.read(0, target.length) == pattern(target.length, 4));
    drop(again);
}

/// Checks that the region works without shared pages.
fn works_without(rig: &Rig) {
    let (source, target) = (Pages::filled(8, 1), Pages::filled(8, 2));
    let (from, to) = (source.register(&rig.alice, 0..8 * PAGE), target.register(&rig.bob, 0..8 * PAGE));
    assert_eq!((source.shared(), target.shared()), (vec![], vec![]));
    rig.write(&from, &to);
    assert!(target.read(0, target.length) == pattern(target.length, 1));
}

/// Starts a thread that waits until the sender is dropped.
fn start_thread() -> (Sender<()>, JoinHandle<bool>) {
    let (end, wait) = mpsc::channel();
    (end, std::thread::spawn(move || wait.recv().is_err()))
}

fn keep_with_threads() {
    let rig = Rig::new();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let alone = threads();
    let (end, thread) = start_thread();
    works_without(&rig);
    drop(end);
    assert!(thread.join().unwrap());
    // The kernel may list it for a moment longer.
    while threads() > alone {
        std::thread::yield_now();
    }
    let pages = Pages::filled(8, 5);
    let region = pages.register(&rig.alice, 0..8 * PAGE);
    assert_eq!(pages.shared().len(), 8);
    // Deregistered while another thread runs, the pages stay shared.
    let _other = start_thread();
    drop(region);
    assert_eq!(pages.shared().len(), 8);
    assert!(pages.read(0, pages.length) == pattern(pages.length, 5));
}

fn keep_when_disabled() {
    // SAFETY: the only thread.
    unsafe { std::env::set_var("SOFTHCA_SHARE", "off") };
    works_without(&Rig::new());
}

fn fall_back() {
    let context = Device::daemon_host(None, Some("alice")).unwrap().open();
    let domain = context.allocate_protection_domain().unwrap();
    // The only mapping that the daemon allows a process.
    let first = Pages::filled(8, 1);
    let _first = first.register(&domain, 0..first.length);
    assert_eq!(first.shared().len(), 8);
    let pages = Pages::filled(8, 1);
    let region = pages.register(&domain, 0..pages.length);
    assert_eq!(pages.shared(), NONE);
    assert!(pages.read(0, pages.length) == pattern(pages.length, 1));
    region.deregister().unwrap();
}

fn leave_replaced_pages() {
    let rig = Rig::new();
    let pages = Pages::filled(16, 1);
    let region = pages.register(&rig.alice, 0..pages.length);
    assert_eq!(pages.shared().len(), 16);
    // The program unmaps half of them too early and maps something else there.
    // SAFETY: pages of this program.
    let mapped = unsafe {
        assert_eq!(libc::munmap(pages.at.cast(), 8 * PAGE), 0);
        let kind = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        libc::mmap(pages.at.cast(), 4 * PAGE, libc::PROT_READ | libc::PROT_WRITE, kind, -1, 0)
    };
    assert_eq!(mapped, pages.at.cast());
    pages.write(0, &pattern(4 * PAGE, 9));
    region.deregister().unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.starts_with(&format!("{:x}-", pages.at as usize))).unwrap();
    assert!(line.contains("rw-s") && line.contains("/dev/zero"), "{line}");
    assert!(pages.read(0, 4 * PAGE) == pattern(4 * PAGE, 9));
    assert_eq!(pages.shared(), NONE);
    assert!(pages.read(8 * PAGE, 8 * PAGE) == pattern(pages.length, 1)[8 * PAGE..]);
}

fn fork_with_own_pages() {
    let rig = Rig::new();
    let (source, target) = (Pages::filled(8, 1), Pages::filled(8, 2));
    let (from, to) = (source.register(&rig.alice, 0..8 * PAGE), target.register(&rig.bob, 0..8 * PAGE));
    assert_eq!(target.shared().len(), 8);
    // SAFETY: the child only accesses memory and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut seen = target.read(0, target.length) == pattern(target.length, 2);
        target.write(0, &pattern(target.length, 7));
        seen &= target.read(0, target.length) == pattern(target.length, 7);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!seen)) };
    }
    let mut status = -1;
    // SAFETY: `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child read and overwrote the bytes");
    assert!(target.read(0, target.length) == pattern(target.length, 2), "the child wrote into the parent");
    rig.write(&from, &to);
    assert!(target.read(0, target.length) == pattern(target.length, 1));
}

/// The registration cache of UCX does this. Its handlers are installed before those of the library, so that they run
/// between the library's: after `prepare`, and before `parent` and `child`.
fn deregister_in_fork_handlers() {
    static REGIONS: Mutex<Vec<MemoryRegion>> = Mutex::new(Vec::new());
    fn deregister_one() {
        if let Some(region) = REGIONS.lock().unwrap().pop() {
            // The child's verbs fail.
            let _ = region.deregister();
        }
    }
    extern "C" fn handler() {
        deregister_one();
    }
    // SAFETY: the function stays as long as the program.
    assert_eq!(unsafe { libc::pthread_atfork(Some(handler), Some(handler), Some(handler)) }, 0);
    let rig = Rig::new();
    let pages: Vec<Pages> = (0..3).map(|seed| Pages::filled(4, seed)).collect();
    let regions = pages.iter().map(|pages| pages.register(&rig.alice, 0..pages.length));
    REGIONS.lock().unwrap().extend(regions);
    assert!(pages.iter().all(|pages| pages.shared().len() == 4));
    // SAFETY: the child only accesses memory and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_own = pages.iter().all(|pages| pages.shared() == NONE);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!is_own)) };
    }
    let mut status = -1;
    // SAFETY: `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child has private pages");
    assert_eq!(REGIONS.lock().unwrap().len(), 1, "prepare and parent deregistered one each");
    assert_eq!(pages[0].shared().len(), 4, "its region is still registered");
    for (seed, pages) in pages.iter().enumerate() {
        assert!(pages.read(0, pages.length) == pattern(pages.length, seed as u8));
    }
    rig.write(&REGIONS.lock().unwrap()[0], &pages[1].register(&rig.bob, 0..4 * PAGE));
    assert!(pages[1].read(0, 4 * PAGE) == pattern(4 * PAGE, 0));
}

/// Kilobytes of this process, by the name in /proc/self/status.
fn kilobytes(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn keep_holes() {
    let rig = Rig::new();
    const COUNT: usize = 1 << 16;
    let pages = Pages::new(COUNT);
    let places = [0, 5 * PAGE + 3, COUNT / 2 * PAGE, (COUNT - 1) * PAGE];
    places.iter().for_each(|place| pages.write(*place, b"here"));
    let region = pages.register(&rig.alice, 0..pages.length);
    assert_eq!(pages.shared().len(), COUNT);
    let shared = kilobytes("RssShmem");
    assert!(shared < 16 << 10, "{shared} KiB of 256 MiB with four pages");
    places.iter().for_each(|place| assert_eq!(pages.read(*place, 4), b"here"));
    assert_eq!(pages.read(7 * PAGE, 4), [0; 4]);
    region.deregister().unwrap();
    assert_eq!(pages.shared(), NONE);
    let own = kilobytes("RssAnon");
    assert!(own < 64 << 10, "{own} KiB of 256 MiB with four pages");
    places.iter().for_each(|place| assert_eq!(pages.read(*place, 4), b"here"));
    // More pages would take too long.
    let more = Pages::new(COUNT + 1);
    let _region = more.register(&rig.alice, 0..more.length);
    assert_eq!(more.shared(), NONE);
}

fn register_twice() {
    let rig = Rig::new();
    let (source, target) = (Pages::filled(8, 1), Pages::filled(8, 2));
    let from = source.register(&rig.alice, 0..4 * PAGE);
    let first = target.register(&rig.bob, 0..6 * PAGE);
    let second = target.register(&rig.bob, 4 * PAGE..8 * PAGE);
    assert_eq!(target.shared(), (0..6).collect::<Vec<_>>());
    // The second region covers some of the pages: these stay shared.
    first.deregister().unwrap();
    rig.write(&from, &second);
    assert!(target.read(0, 4 * PAGE) == pattern(target.length, 2)[..4 * PAGE]);
    assert!(target.read(4 * PAGE, 4 * PAGE) == pattern(4 * PAGE, 1));
    second.deregister().unwrap();
    assert!(target.read(4 * PAGE, 4 * PAGE) == pattern(4 * PAGE, 1));
}

fn stop_sharing_after_many_registrations() {
    let rig = Rig::new();
    let pages = Pages::filled(8, 1);
    let shared = (0..20).filter(|_| {
        let region = pages.register(&rig.alice, 0..pages.length);
        let is_shared = !pages.shared().is_empty();
        drop(region);
        assert_eq!(pages.shared(), NONE);
        is_shared
    });
    assert_eq!(shared.count(), 8);
    works_without(&rig);
}

fn reregister() {
    let rig = Rig::new();
    let (one, two, source) = (Pages::filled(8, 1), Pages::filled(8, 2), Pages::filled(8, 3));
    let from = source.register(&rig.alice, 0..8 * PAGE);
    let to = one.register(&rig.bob, 0..8 * PAGE);
    let base = NonNull::new(two.at).unwrap();
    // SAFETY: the pages outlive the program.
    unsafe { to.reregister_memory(None, Some((base, two.length, two.at as u64)), None).unwrap() };
    assert_eq!((one.shared().len(), two.shared().len()), (0, 8));
    rig.write(&from, &to);
    assert!(one.read(0, one.length) == pattern(one.length, 1));
    assert!(two.read(0, two.length) == pattern(two.length, 3));
}
