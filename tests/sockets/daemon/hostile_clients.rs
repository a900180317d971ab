//! Broken and malicious clients. The daemon and all other clients keep working.

use super::data::{ALL_ACCESS, ConnectedHost, connected};
use super::process::{TEST_TIMEOUT, TestDaemon, receive_line, send_line, spawn};
use softhca::{CompletionStatus, ReceiveRequest, SendRequest};
use softhca_control::{
    FramedMessage, Hello, Message, MessageReader, Notification, RegionBacking, Request, Response, RuntimeDir,
    Welcome, decode, encode, send_message,
};
use softhca_queue::{DoorbellProducer, MapMode, SharedMemory, SharedWords};
use softhca_tests::bare::{reliable, steps};
use softhca_types::{
    AccessFlags, AhId, AsyncEvent, Command, CqId, ModifyQp, PdId, QpCapabilities, QpInitAttributes, QpState,
    Reply, SrqId, XrcdId,
};
use softhca_wire::{Gid, Psn, Qpn, RemoteKey};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A client that sends arbitrary messages.
pub struct RawClient {
    pub stream: UnixStream,
    reader: MessageReader,
    /// The event socket of an open device.
    news: Option<UnixStream>,
}

impl RawClient {
    pub fn connect(daemon: &str) -> RawClient {
        let stream = UnixStream::connect(RuntimeDir::for_user().socket(daemon)).unwrap();
        stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        RawClient { stream, reader: MessageReader::default(), news: None }
    }

    pub fn handshaken(daemon: &TestDaemon) -> RawClient {
        RawClient::handshaken_with(&daemon.name)
    }

    fn handshaken_with(daemon: &str) -> RawClient {
        let mut raw = RawClient::connect(daemon);
        raw.send(&encode(&Hello::current()), &[]);
        let answer: Result<Welcome, String> = decode(&raw.frame().unwrap().bytes).unwrap();
        answer.unwrap();
        raw
    }

    pub fn send(&mut self, message: &[u8], passed: &[BorrowedFd<'_>]) {
        let frame = FramedMessage::frame(message, passed.len());
        assert_eq!(send_message(self.stream.as_fd(), &frame, 0, passed).unwrap(), frame.len());
    }

    /// The next frame; `None` if the daemon closed the connection.
    pub fn frame(&mut self) -> Option<FramedMessage> {
        match self.reader.read(self.stream.as_fd()) {
            Ok(frame) => frame,
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
                None
            }
        }
    }

    pub fn call(&mut self, call: &Request, passed: &[BorrowedFd<'_>]) -> (Response, Vec<OwnedFd>) {
        self.send(&encode(call), passed);
        let frame = self.frame().expect("an answer");
        match decode(&frame.bytes).unwrap() {
            Message::Response(reply) => (reply, frame.descriptors),
            news => panic!("{news:?} between replies"),
        }
    }

    /// The next asynchronous event.
    fn event(&mut self) -> AsyncEvent {
        let news = self.news.as_ref().expect("a device is open");
        news.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        let mut reader = MessageReader::default();
        loop {
            let frame = reader.read(news.as_fd()).unwrap().expect("an event");
            if let Message::Notification(Notification::AsyncEventRaised(event)) =
                decode(&frame.bytes).unwrap()
            {
                return event;
            }
        }
    }

    fn open(&mut self, host: &str) -> (SharedWords, DoorbellProducer, std::fs::File) {
        let (reply, descriptors) =
            self.call(&Request::Open { host: Some(host.into()), can_be_direct: false }, &[]);
        let Response::Opened { doorbell_slots: doorbells, .. } = reply else { panic!("{reply:?}") };
        let [notifications, waker, _asleep, page] = <[OwnedFd; 4]>::try_from(descriptors).unwrap();
        let words = DoorbellProducer::words(doorbells);
        let page = Arc::new(SharedMemory::adopt(page, words * 8, MapMode::ReadWrite).unwrap());
        let rung = page.words(0, words);
        self.news = Some(notifications.into());
        (rung.clone(), DoorbellProducer::new(rung, doorbells), waker.into())
    }

    fn expect_error(&mut self, call: &Request, passed: &[BorrowedFd<'_>]) -> (i32, String) {
        match self.call(call, passed).0 {
            Response::Error { errno, message } => (errno, message),
            Response::VerbFailed(error) => (error.errno(), error.to_string()),
            other => panic!("{call:?} was answered with {other:?}"),
        }
    }
}

fn verb(command: Command) -> Request {
    Request::Execute { command, backing: None, call_site: None }
}

/// Checks that a connected pair of other processes works before and after.
fn assert_others_unaffected(attack: impl FnOnce(&TestDaemon)) {
    let daemon = TestDaemon::start();
    let (end, mut echo, _) = connected(&daemon, "alice", "bob");
    echo.send_line("2");
    let round = |id| {
        let receive = ReceiveRequest { wr_id: id, sg_list: &[end.region.sge(0, 100)] };
        end.pair.post_recv(&receive).unwrap();
        end.pair.post_send(&SendRequest::send(id, &[end.region.sge(200, 10)])).unwrap();
        end.finish();
        end.finish();
    };
    round(1);
    attack(&daemon);
    round(2);
    assert_eq!(end.context.poll_async_event(), None);
}

#[test]
fn garbage_on_the_socket_closes_that_connection_only() {
    assert_others_unaffected(|daemon| {
        for garbage in [&[0xff; 64][..], b"GET / HTTP/1.1\r\n\r\n", &[3, 0, 0, 0, 0, 1, 2, 3], &[0; 5]] {
            let mut raw = RawClient::connect(&daemon.name);
            raw.stream.write_all(garbage).unwrap();
            raw.stream.shutdown(std::net::Shutdown::Write).unwrap();
            assert!(raw.frame().is_none(), "{garbage:?}");
        }
        let mut raw = RawClient::handshaken(daemon);
        raw.send(&[0xff; 100], &[]);
        assert!(raw.frame().is_none());
        // A frame that announces descriptors and has none.
        let mut raw = RawClient::handshaken(daemon);
        raw.stream.write_all(&[1, 0, 0, 0, 3, 1]).unwrap();
        assert!(raw.frame().is_none());
    });
}

#[test]
fn a_client_of_another_version_gets_an_error() {
    let daemon = TestDaemon::start();
    let mut raw = RawClient::connect(&daemon.name);
    let hello = encode(&Hello { protocol: 999, version: "9.9.9".into(), ..Hello::current() });
    // The library requests a device before it has the answer.
    let open = encode(&Request::Open { host: None, can_be_direct: true });
    let frames = [hello, open].map(|message| FramedMessage::frame(&message, 0)).concat();
    raw.stream.write_all(&frames).unwrap();
    let answer: Result<Welcome, String> = decode(&raw.frame().unwrap().bytes).unwrap();
    let why = answer.unwrap_err();
    assert!(why.contains("999") && why.contains("9.9.9") && why.contains("softhca stop"), "{why}");
    assert!(raw.frame().is_none());
}

#[test]
fn random_frames_are_answered_or_close_the_connection() {
    assert_others_unaffected(|daemon| {
        let mut seed = 0x9e37_79b9_7f4a_7c15u64;
        let mut random = move || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        let stop = encode(&Request::Stop)[0];
        let execute = encode(&verb(Command::AllocateProtectionDomain))[0];
        for _ in 0..200 {
            let mut raw = RawClient::handshaken(daemon);
            raw.open("bob");
            for _ in 0..20 {
                // Usually a valid call kind, then random bytes.
                let length = random() as usize % 40;
                let mut bytes: Vec<u8> = (0..length).map(|_| random() as u8).collect();
                if let [first, second, ..] = &mut bytes[..] {
                    // A control verb or another request, but not Stop, which would end the daemon.
                    *first = if *first % 4 == 0 { stop + 1 + *first % 9 } else { execute };
                    *second %= 28;
                }
                let frame = FramedMessage::frame(&bytes, 0);
                if send_message(raw.stream.as_fd(), &frame, 0, &[]).is_err() || raw.frame().is_none() {
                    break;
                }
            }
        }
    });
}

/// A queue pair of a raw client and its rings.
fn queue_pair(raw: &mut RawClient) -> (Qpn, SharedWords) {
    let (reply, _) = raw.call(&verb(Command::AllocateProtectionDomain), &[]);
    let Response::Executed(Reply::ProtectionDomain(domain)) = reply else { panic!("{reply:?}") };
    let (reply, _) = raw.call(&verb(Command::CreateCompletionQueue { cqe: 16 }), &[]);
    let Response::Executed(Reply::CompletionQueue(cq)) = reply else { panic!("{reply:?}") };
    let init = QpInitAttributes { sq_sig_all: true, ..reliable(domain, cq) };
    let sizes = QpCapabilities {
        max_send_wr: 4,
        max_recv_wr: 4,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    };
    let (reply, mut descriptors) =
        raw.call(&verb(Command::CreateQueuePair { init, capabilities: sizes }), &[]);
    let Response::Executed(Reply::QueuePair(number)) = reply else { panic!("{reply:?}") };
    let memory = SharedMemory::adopt(descriptors.pop().unwrap(), 24 * 8, MapMode::ReadWrite).unwrap();
    (number, Arc::new(memory).words(0, 24))
}

fn ready_to_send(raw: &mut RawClient, number: Qpn) {
    let peer = (Gid::from(std::net::IpAddr::from([127, 0, 0, 1])), number);
    for modify in steps(peer, softhca::Mtu::B1024, Psn::new(0)) {
        let (reply, _) = raw.call(&verb(Command::ModifyQueuePair { qpn: number, modify }), &[]);
        assert!(matches!(reply, Response::Executed(Reply::QpState(_))), "{reply:?}");
    }
}

#[test]
pub fn invalid_ring_indices_stop_that_queue_pair_only() {
    assert_others_unaffected(|daemon| {
        for index in [5, 1 << 40, u64::MAX] {
            let mut raw = RawClient::handshaken(daemon);
            let (_, doorbell, waker) = raw.open("bob");
            let (number, ring) = queue_pair(&mut raw);
            ready_to_send(&mut raw, number);
            ring[0].store(index, Ordering::SeqCst);
            doorbell.ring(number, &ring[16]);
            (&waker).write_all(&1u64.to_ne_bytes()).unwrap();
            assert_eq!(raw.event(), AsyncEvent::QueuePairFatal(number));
            // Continue with the index at the end of its range.
            let modify = ModifyQp::default().state(QpState::Reset);
            let (reply, _) = raw.call(&verb(Command::ModifyQueuePair { qpn: number, modify }), &[]);
            assert_eq!(reply, Response::Executed(Reply::QpState(QpState::Reset)));
        }
    });
}

#[test]
pub fn random_doorbells_and_changing_requests_are_survived() {
    assert_others_unaffected(|daemon| {
        let mut raw = RawClient::handshaken(daemon);
        let (rung, doorbell, waker) = raw.open("bob");
        let (number, ring) = queue_pair(&mut raw);
        ready_to_send(&mut raw, number);
        let mut noise = 1u64;
        for round in 0..20_000u64 {
            noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            rung[(noise >> 33) as usize % rung.len()].store(noise, Ordering::Relaxed);
            rung[8].store(round % 2, Ordering::Relaxed);
            for word in ring.iter().take(24) {
                word.store(noise.rotate_left(round as u32), Ordering::Relaxed);
            }
            doorbell.ring(number, &ring[16]);
            if round % 64 == 0 {
                let _ = (&waker).write(&1u64.to_ne_bytes());
            }
        }
        let (reply, _) = raw.call(&verb(Command::QueryQueuePair(number)), &[]);
        assert!(matches!(reply, Response::Executed(Reply::QpSnapshot(_))), "{reply:?}");
    });
}

#[test]
pub fn handles_and_keys_of_other_clients_are_invalid() {
    let daemon = TestDaemon::start();
    let (end, _echo, _) = connected(&daemon, "alice", "bob");
    let mut raw = RawClient::handshaken(&daemon);
    raw.open("alice");
    let pair = end.pair.qpn();
    let key = end.region.rkey();
    let init = reliable(PdId(1), CqId(0));
    let sizes = QpCapabilities {
        max_send_wr: 1,
        max_recv_wr: 1,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    };
    let calls = [
        Command::QueryQueuePair(pair),
        Command::DestroyQueuePair(pair),
        Command::ModifyQueuePair { qpn: pair, modify: ModifyQp::default().state(QpState::Error) },
        Command::DeregisterMemoryRegion { rkey: key, invalidate_windows: false },
        Command::DeregisterMemoryRegion { rkey: key, invalidate_windows: true },
        Command::ReregisterMemoryRegion {
            rkey: key,
            pd: None,
            mapping: None,
            access: Some(AccessFlags::all()),
        },
        Command::DeallocateMemoryWindow(RemoteKey(key.0 + 1)),
        Command::DeallocateProtectionDomain(PdId(1)),
        Command::DestroyCompletionQueue(CqId(0)),
        Command::ResizeCompletionQueue { cq: CqId(0), cqe: 1 },
        Command::DestroySharedReceiveQueue(SrqId(0)),
        Command::ModifySharedReceiveQueue { srq: SrqId(0), max_wr: Some(1), max_sge: 1, srq_limit: None },
        Command::DestroyAddressHandle(AhId(0)),
        Command::CloseXrcDomain(XrcdId(0)),
        Command::CreateQueuePair { init, capabilities: sizes },
    ];
    for call in calls.map(verb) {
        assert_eq!(raw.expect_error(&call, &[]).0, libc::ENOENT, "{call:?}");
    }
    assert_eq!(raw.expect_error(&Request::Open { host: None, can_be_direct: false }, &[]).0, libc::EBUSY);
    assert_eq!(end.pair.state().unwrap(), QpState::ReadyToSend);
    // Without a device no call is accepted.
    let mut raw = RawClient::handshaken(&daemon);
    assert_eq!(raw.expect_error(&verb(Command::AllocateProtectionDomain), &[]).0, libc::ENODEV);
    assert_eq!(
        raw.expect_error(&Request::Open { host: Some("carol".into()), can_be_direct: false }, &[]).0,
        libc::ENODEV
    );
}

#[test]
fn untrusted_memory_is_not_registered() {
    let daemon = TestDaemon::start();
    let mut raw = RawClient::handshaken(&daemon);
    raw.open("alice");
    let (reply, _) = raw.call(&verb(Command::AllocateProtectionDomain), &[]);
    let Response::Executed(Reply::ProtectionDomain(domain)) = reply else { panic!("{reply:?}") };
    let register = |length, backing| Request::Execute {
        command: Command::RegisterMemoryRegion { pd: domain, iova: None, length, access: ALL_ACCESS },
        backing: Some(backing),
        call_site: None,
    };
    let shared = |length| register(length, RegionBacking::MemoryFile);
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
    let loose = rustix::fs::memfd_create("loose", flags).unwrap();
    rustix::fs::ftruncate(&loose, 4096).unwrap();
    let (errno, why) = raw.expect_error(&shared(4096), &[loose.as_fd()]);
    assert!(errno == libc::EINVAL && why.contains("F_SEAL_SHRINK"), "{why}");
    let short = SharedMemory::create("short", 4096, MapMode::ReadWrite).unwrap().take_descriptor().unwrap();
    let (_, why) = raw.expect_error(&shared(1 << 20), &[short.as_fd()]);
    assert!(why.contains("shorter"), "{why}");
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    raw.expect_error(&shared(4096), &[file.as_fd()]);
    raw.expect_error(&shared(4096), &[]);
    raw.expect_error(&shared(u64::MAX), &[short.as_fd()]);
    for (address, length) in [(4096, 4096), (u64::MAX - 10, 100), (0, 1)] {
        raw.expect_error(&register(length, RegionBacking::ProcessMemory { address }), &[]);
    }
    // Constants can be sent from, but not written to.
    static CONSTANT: [u8; 64] = [1; 64];
    let address = CONSTANT.as_ptr() as u64;
    let (_, why) = raw.expect_error(&register(64, RegionBacking::ProcessMemory { address }), &[]);
    assert!(why.contains("read-only"), "{why}");
    let access = AccessFlags::REMOTE_READ;
    let command = Command::RegisterMemoryRegion { pd: domain, iova: None, length: 64, access };
    let backing = Some(RegionBacking::ProcessMemory { address });
    let (reply, _) = raw.call(&Request::Execute { command, backing, call_site: None }, &[]);
    let Response::Executed(Reply::MemoryRegion { rkey, .. }) = reply else { panic!("{reply:?}") };
    let command = Command::ReregisterMemoryRegion { rkey, pd: None, mapping: None, access: Some(ALL_ACCESS) };
    let (_, why) = raw.expect_error(&verb(command), &[]);
    assert!(why.contains("read-only"), "{why}");
}

const TIB: u64 = 1 << 40;

/// A sealed memfd of which no page exists.
fn sparse_memory(bytes: u64) -> OwnedFd {
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING | rustix::fs::MemfdFlags::CLOEXEC;
    let memory = rustix::fs::memfd_create("sparse", flags).unwrap();
    rustix::fs::ftruncate(&memory, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&memory, rustix::fs::SealFlags::SHRINK).unwrap();
    memory
}

/// Registers sparse memory on several connections until each is refused. Returns the TiB and the last error.
fn map_sparse_memory(daemon: &str) -> (Vec<RawClient>, u64, (i32, String)) {
    let mut connections = Vec::new();
    let (mut mapped, mut refused) = (0, (0, String::new()));
    for _ in 0..4 {
        let mut raw = RawClient::handshaken_with(daemon);
        raw.open("bob");
        let (reply, _) = raw.call(&verb(Command::AllocateProtectionDomain), &[]);
        let Response::Executed(Reply::ProtectionDomain(pd)) = reply else { panic!("{reply:?}") };
        let command =
            Command::RegisterMemoryRegion { pd, iova: None, length: 2 * TIB, access: AccessFlags::empty() };
        let call = Request::Execute { command, backing: Some(RegionBacking::MemoryFile), call_site: None };
        loop {
            match raw.call(&call, &[sparse_memory(2 * TIB).as_fd()]).0 {
                Response::Executed(_) => mapped += 2,
                Response::Error { errno, message } => break refused = (errno, message),
                other => panic!("{other:?}"),
            }
            assert!(mapped < 128, "the address space has 128 TiB");
        }
        connections.push(raw);
    }
    (connections, mapped, refused)
}

/// A process that maps as much as it can, and keeps it.
pub fn run_mapper() {
    let (_connections, mapped, (errno, message)) =
        map_sparse_memory(&std::env::var("SOFTHCA_DAEMON").unwrap());
    send_line(&format!("{mapped} {errno} {message}"));
    while receive_line().is_some() {}
}

#[test]
fn sparse_memory_of_many_terabytes_leaves_room_for_others() {
    assert_others_unaffected(|daemon| {
        let mut mappers: Vec<_> = (0..3).map(|_| spawn("mapper", &daemon.name, &[])).collect();
        let mapped: Vec<u64> = mappers
            .iter_mut()
            .map(|mapper| {
                let line = mapper.receive_line();
                let words: Vec<&str> = line.splitn(3, ' ').collect();
                assert_eq!(words[1], libc::ENOMEM.to_string(), "{line}");
                assert!(words[2].contains(" bytes") && words[2].contains("limit of"), "{line}");
                words[0].parse().unwrap()
            })
            .collect();
        // At most half of the address space, and no process all of that.
        let all: u64 = mapped.iter().sum();
        assert!((16..=64).contains(&all) && mapped.iter().all(|one| *one <= 26), "{mapped:?}");
        // Others get new rings and regions.
        ConnectedHost::new(&daemon.open("alice"), 1 << 20);
    });
}

#[test]
fn memory_that_cannot_be_mapped_is_a_rejected_call() {
    assert_others_unaffected(|daemon| {
        let mut raw = RawClient::handshaken(daemon);
        raw.open("bob");
        let (reply, _) = raw.call(&verb(Command::AllocateProtectionDomain), &[]);
        let Response::Executed(Reply::ProtectionDomain(pd)) = reply else { panic!("{reply:?}") };
        // The daemon may map 1 GiB more than it has now.
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", daemon.process.id())).unwrap();
        let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
        let limit = Some(pages * 4096 + (1 << 30));
        let process = rustix::process::Pid::from_raw(daemon.process.id() as i32);
        let limit = rustix::process::Rlimit { current: limit, maximum: None };
        rustix::process::prlimit(process, rustix::process::Resource::As, limit).unwrap();
        let command =
            Command::RegisterMemoryRegion { pd, iova: None, length: TIB, access: AccessFlags::empty() };
        let call = Request::Execute { command, backing: Some(RegionBacking::MemoryFile), call_site: None };
        let (errno, why) = raw.expect_error(&call, &[sparse_memory(TIB).as_fd()]);
        assert!(errno == libc::ENOMEM && why.contains("cannot map"), "{errno} {why}");
    });
}

#[test]
#[allow(unsafe_code)]
fn memory_that_is_unmapped_later_is_a_protection_error() {
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
    let daemon = TestDaemon::start();
    let (end, _echo, remote) = connected(&daemon, "alice", "bob");
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new mapping without references.
    let base = unsafe { mmap_anonymous(std::ptr::null_mut(), 8192, protection, flags) }.unwrap();
    let base = NonNull::new(base.cast()).unwrap();
    // SAFETY: it is unmapped below against the contract, which is the test. This process does not access it.
    let region = unsafe { end.domain.register_memory(base, 8192, ALL_ACCESS) }.unwrap();
    end.pair.post_send(&SendRequest::rdma_write(1, &[region.sge(0, 8192)], remote)).unwrap();
    end.finish();
    // Keep the address range reserved: another thread of this process could map something there.
    // SAFETY: the mapping from above.
    unsafe { mprotect(base.as_ptr().cast(), 8192, MprotectFlags::empty()) }.unwrap();
    end.pair.post_send(&SendRequest::rdma_write(2, &[region.sge(0, 8192)], remote)).unwrap();
    assert_eq!(end.queue.wait_for(TEST_TIMEOUT).unwrap().status, CompletionStatus::LocalProtectionError);
    let other = ConnectedHost::new(&daemon.open("alice"), 4096);
    assert_eq!(other.pair.state().unwrap(), QpState::Reset);
}

/// A client with a page that is never provided: any access blocks until the process exits.
#[allow(unsafe_code)]
pub fn run_blocker() {
    const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
    const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    let end = ConnectedHost::new(&softhca::Device::daemon_host(None, Some("bob")).unwrap(), 64);
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, which stays until the process ends.
    let base = unsafe { mmap_anonymous(std::ptr::null_mut(), 8192, protection, MapFlags::PRIVATE) }.unwrap();
    // SAFETY: as above, and no reference to it exists.
    let region =
        unsafe { end.domain.register_memory(std::ptr::NonNull::new(base.cast()).unwrap(), 8192, ALL_ACCESS) };
    let region = region.unwrap();
    let mut api = [0xaa_u64, 0, 0];
    let mut range = [base as u64, 8192, 1, 0];
    // SAFETY: the arguments of each call have the layout and the size that the kernel expects, and outlive it.
    let done = unsafe {
        let descriptor = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) as i32;
        assert!(descriptor >= 0, "userfaultfd: {}", std::io::Error::last_os_error());
        libc::ioctl(descriptor, UFFDIO_API as _, &mut api) == 0
            && libc::ioctl(descriptor, UFFDIO_REGISTER as _, &mut range) == 0
    };
    assert!(done, "userfaultfd: {}", std::io::Error::last_os_error());
    send_line(&end.open_device());
    end.connect(&receive_line().unwrap());
    send_line(&format!("{} {}", region.address(), region.rkey().0));
    while receive_line().is_some() {}
}

#[test]
#[ignore = "needs a userfaultfd that sees the kernel's accesses: root, or vm.unprivileged_userfaultfd = 1"]
pub fn a_client_whose_memory_blocks_is_killed_and_others_keep_working() {
    let daemon = TestDaemon::with(&[("TEST_KILL_AFTER", "1")]);
    let end = ConnectedHost::new(&daemon.open("alice"), 4096);
    let mut blocker = spawn("blocker", &daemon.name, &[]);
    let card = blocker.receive_line();
    end.connect(&card);
    blocker.send_line(&end.open_device());
    let place: Vec<u64> = blocker.receive_line().split(' ').map(|number| number.parse().unwrap()).collect();
    let remote = softhca::RemoteAddress { address: place[0], rkey: softhca::RemoteKey(place[1] as u32) };
    end.pair.post_send(&SendRequest::rdma_write(1, &[end.region.sge(0, 64)], remote)).unwrap();
    // The engine thread of the other host is blocked until the blocker is killed.
    let stat = format!("/proc/{}/stat", blocker.id());
    let deadline = std::time::Instant::now() + TEST_TIMEOUT;
    while !std::fs::read_to_string(&stat).unwrap().contains(") Z ") {
        assert!(std::time::Instant::now() < deadline, "the blocker was not killed");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let other =
        [ConnectedHost::new(&daemon.open("alice"), 4096), ConnectedHost::new(&daemon.open("bob"), 4096)];
    other[0].pair.connect_both(&other[1].pair, &softhca::ConnectOptions::default()).unwrap();
    let entry = [other[0].region.sge(0, 64)];
    other[0].pair.post_send(&SendRequest::rdma_write(1, &entry, other[1].region.remote_address(0))).unwrap();
    other[0].finish();
}
