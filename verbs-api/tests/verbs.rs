//! The verbs, each test on an embedded card and on a simulated one.

use softhca::{
    Access, AddressVector, AsyncEvent, BindWindow, Completion, CompletionFlags, CompletionOperation,
    CompletionQueue, Context, Device, Endpoint, Error, MemoryRegion, Modify, Notify, Operation, Path,
    ProtectionDomain, QpKind, QueueKey, QueuePair, ReceiveRequest, RemoteAddress, RemoteKey, SendFlags,
    SendRequest, State, Status, WindowKind, World,
};
use std::time::Duration;

/// Declares each test twice: once per backend.
macro_rules! on_both {
    ($($test:ident)*) => {
        mod embedded {
            $(#[test]
            fn $test() {
                super::$test([(); 2].map(|()| softhca::Device::embedded().unwrap()));
            })*
        }
        mod simulated {
            $(#[test]
            fn $test() {
                let mut world = super::World::new(11);
                super::$test(["alice", "bob"].map(|name| world.device(name)));
            })*
        }
    };
}

on_both! {
    a_message_arrives_with_its_immediate
    one_sided_operations_reach_the_peers_memory
    inline_data_and_gather_lists_are_joined
    a_batch_is_posted_whole_or_not_at_all
    datagrams_bring_a_header_and_their_sender
    a_shared_receive_queue_serves_two_pairs_and_tells_its_limit
    an_extended_connection_reaches_the_queue_that_the_sender_names
    a_channel_tells_which_queue_has_news
    a_window_opens_a_part_of_a_region
    a_forbidden_read_fails_at_both_ends
    modify_names_what_is_missing
    a_resized_queue_keeps_what_waits
    waiting_ends_when_the_time_is_over
    handles_may_be_dropped_in_any_order
}

const RIGHTS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::WINDOW_BIND);

/// What a program has on one host.
struct End {
    context: Context,
    domain: ProtectionDomain,
    queue: CompletionQueue,
    region: MemoryRegion,
    pair: QueuePair,
}

impl End {
    fn new(device: &Device, kind: QpKind) -> End {
        let context = device.open();
        let domain = context.allocate_domain().unwrap();
        let queue = context.create_completion_queue(64).unwrap();
        let region = domain.register(8192, RIGHTS).unwrap();
        let pair = domain.queue_pair(kind, &queue).create().unwrap();
        End { context, domain, queue, region, pair }
    }

    fn receive(&self, id: u64, offset: u64, length: u32) {
        let scatter = [self.region.entry(offset, length)];
        self.pair.post_receive(&ReceiveRequest { id, scatter: &scatter }).unwrap();
    }

    fn wait(&self) -> Completion {
        self.queue.wait_for(Duration::from_secs(20)).expect("a completion")
    }

    fn succeed(&self) -> Completion {
        let completion = self.wait();
        assert_eq!(completion.status, Status::Success);
        completion
    }
}

fn connected(devices: &[Device; 2]) -> [End; 2] {
    let ends = [0, 1].map(|index| End::new(&devices[index], QpKind::Rc));
    ends[0].pair.connect_both(&ends[1].pair, &Path::default()).unwrap();
    ends
}

fn a_message_arrives_with_its_immediate(devices: [Device; 2]) {
    let [a, b] = connected(&devices);
    b.receive(7, 100, 4096);
    a.region.write_at(0, &[42; 3000]);
    a.pair.post(&SendRequest::send_immediate(1, &[a.region.entry(0, 3000)], 0xfeed)).unwrap();
    assert_eq!(a.succeed().id, 1);
    let received = b.succeed();
    assert_eq!((received.id, received.bytes, received.immediate), (7, 3000, 0xfeed));
    assert!(received.flags.contains(CompletionFlags::IMMEDIATE));
    assert_eq!(received.operation, CompletionOperation::Receive);
    assert_eq!(b.region.read_at(100, 3000), [42; 3000]);
}

fn one_sided_operations_reach_the_peers_memory(devices: [Device; 2]) {
    let [a, b] = connected(&devices);
    a.region.write_at(0, b"over there");
    a.pair.post(&SendRequest::write(1, &[a.region.entry(0, 10)], b.region.remote(64))).unwrap();
    a.pair.post(&SendRequest::read(2, &[a.region.entry(512, 10)], b.region.remote(64))).unwrap();
    a.pair.post(&SendRequest::fetch_add(3, &[a.region.entry(1024, 8)], b.region.remote(0), 5)).unwrap();
    a.pair.post(&SendRequest::compare_swap(4, &[a.region.entry(1032, 8)], b.region.remote(0), 5, 9)).unwrap();
    assert_eq!([(); 4].map(|()| a.succeed().id), [1, 2, 3, 4]);
    assert_eq!(b.region.read_at(64, 10), b"over there");
    assert_eq!(a.region.read_at(512, 10), b"over there");
    assert_eq!([a.region.load(1024), a.region.load(1032), b.region.load(0)], [0, 5, 9]);
}

fn inline_data_and_gather_lists_are_joined(devices: [Device; 2]) {
    let [a, b] = connected(&devices);
    b.receive(1, 0, 64);
    b.receive(2, 64, 64);
    a.pair.post(&SendRequest::send(1, &[]).inline(b"in the request")).unwrap();
    a.region.write_at(0, b"abc");
    a.region.write_at(1000, b"def");
    let pieces = [a.region.entry(1000, 3), a.region.entry(0, 3)];
    a.pair.post(&SendRequest::send(2, &pieces)).unwrap();
    assert_eq!([b.succeed().bytes, b.succeed().bytes], [14, 6]);
    assert_eq!(b.region.read_at(0, 14), b"in the request");
    assert_eq!(b.region.read_at(64, 6), b"defabc");
}

fn a_batch_is_posted_whole_or_not_at_all(devices: [Device; 2]) {
    let [a, b] = connected(&devices);
    let entry = [a.region.entry(0, 8)];
    let remote = b.region.remote(0);
    let good: Vec<_> = (0..3).map(|id| SendRequest::write(id, &entry, remote)).collect();
    let too_long = [entry[0]; 33];
    let mut bad = good.clone();
    bad.push(SendRequest::write(9, &too_long, remote));
    assert!(matches!(a.pair.post_all(&bad), Err(Error::Post(_))));
    a.pair.post_all(&good).unwrap();
    assert_eq!([(); 3].map(|()| a.succeed().id), [0, 1, 2]);
    assert_eq!(a.queue.wait_for(Duration::from_millis(5)), None);
    // An unsignalled request completes in silence, also when a signalled one follows.
    let quiet = SendRequest::write(4, &entry, remote).flags(SendFlags::empty());
    a.pair.post_all(&[quiet, SendRequest::write(5, &entry, remote)]).unwrap();
    assert_eq!(a.succeed().id, 5);
}

fn datagrams_bring_a_header_and_their_sender(devices: [Device; 2]) {
    const KEY: QueueKey = QueueKey(0x1234);
    let [a, b] = [0, 1].map(|index| End::new(&devices[index], QpKind::Ud));
    a.pair.start_datagrams(KEY).unwrap();
    b.pair.start_datagrams(KEY).unwrap();
    b.receive(1, 0, 200);
    let handle = a.domain.create_address_handle(AddressVector::to(b.pair.endpoint().gid)).unwrap();
    a.region.write_at(0, b"datagram");
    let request = SendRequest::send(1, &[]).inline(b"datagram").to(&handle, b.pair.number(), KEY);
    a.pair.post(&request).unwrap();
    a.succeed();
    let received = b.succeed();
    assert_eq!((received.bytes, received.source), (40 + 8, a.pair.number()));
    assert!(received.flags.contains(CompletionFlags::GRH));
    assert_eq!(b.region.read_at(40, 8), b"datagram");
}

fn a_shared_receive_queue_serves_two_pairs_and_tells_its_limit(devices: [Device; 2]) {
    let [a, b] = [0, 1].map(|index| End::new(&devices[index], QpKind::Rc));
    let shared = b.domain.create_shared_receive_queue(8, 1).unwrap();
    for id in 0..3 {
        shared.post(&ReceiveRequest { id, scatter: &[b.region.entry(id * 64, 64)] }).unwrap();
    }
    shared.arm(2).unwrap();
    let mut numbers = Vec::new();
    for _ in 0..2 {
        let from = a.domain.queue_pair(QpKind::Rc, &a.queue).create().unwrap();
        let to = b.domain.queue_pair(QpKind::Rc, &b.queue).shared_receive_queue(&shared).create().unwrap();
        from.connect_both(&to, &Path::default()).unwrap();
        from.post(&SendRequest::send(1, &[]).inline(b"shared")).unwrap();
        a.succeed();
        let received = b.succeed();
        assert_eq!((received.id, received.queue_pair), (numbers.len() as u64, to.number()));
        numbers.push((from, to));
    }
    let limit = b.context.wait_event(Duration::from_secs(20)).unwrap();
    assert!(matches!(limit, AsyncEvent::SharedReceiveQueueLimit(srq) if srq.0 == shared.number()));
}

fn an_extended_connection_reaches_the_queue_that_the_sender_names(devices: [Device; 2]) {
    let [a, b] = [End::new(&devices[0], QpKind::XrcInitiator), End::new(&devices[1], QpKind::Rc)];
    let xrc_domain = b.context.open_xrc_domain().unwrap();
    let target = xrc_domain.create_target().unwrap();
    let queues = [1, 2].map(|id| {
        let completions = b.context.create_completion_queue(8).unwrap();
        let shared = b.domain.create_xrc_shared_receive_queue(&xrc_domain, &completions, 8, 1).unwrap();
        shared.post(&ReceiveRequest { id, scatter: &[b.region.entry(id * 64, 64)] }).unwrap();
        (completions, shared)
    });
    a.pair.connect_both(&target, &Path::default()).unwrap();
    for (completions, shared) in queues.iter().rev() {
        let request = SendRequest::send(1, &[]).inline(b"to a queue");
        a.pair.post(&request.to_shared_receive_queue(shared.number())).unwrap();
        a.succeed();
        let received = completions.wait_for(Duration::from_secs(20)).unwrap();
        assert_eq!((received.status, received.bytes), (Status::Success, 10));
        assert_eq!(b.region.read_at(received.id * 64, 10), b"to a queue");
    }
    // One-sided operations name a queue too: its protection domain is what they may reach.
    let entry = [a.region.entry(0, 8)];
    let request = SendRequest::write(2, &entry, b.region.remote(0));
    a.pair.post(&request.to_shared_receive_queue(queues[0].1.number())).unwrap();
    a.succeed();
    drop((xrc_domain, b.domain));
    assert_eq!(target.state().unwrap(), State::ReadyToSend);
}

fn a_channel_tells_which_queue_has_news(devices: [Device; 2]) {
    let [a, b] = connected(&devices);
    let channel = b.context.create_completion_channel().unwrap();
    let queues = [(); 2].map(|()| b.context.create_completion_queue_on(8, &channel).unwrap());
    let senders = [0, 1].map(|index: usize| {
        let from = a.domain.queue_pair(QpKind::Rc, &a.queue).create().unwrap();
        let to = b.domain.queue_pair(QpKind::Rc, &queues[index]).create().unwrap();
        to.post_receive(&ReceiveRequest { id: 1, scatter: &[] }).unwrap();
        to.post_receive(&ReceiveRequest { id: 2, scatter: &[] }).unwrap();
        from.connect_both(&to, &Path::default()).unwrap();
        (from, to)
    });
    queues[0].request_notification(Notify::Next);
    queues[1].request_notification(Notify::Solicited);
    senders[1].0.post(&SendRequest::send(1, &[])).unwrap();
    a.succeed();
    senders[0].0.post(&SendRequest::send(1, &[])).unwrap();
    a.succeed();
    // The second queue wants to hear of solicited messages only.
    assert_eq!(channel.wait_for(Duration::from_secs(20)), Some(queues[0].clone()));
    assert_eq!(channel.poll(), None);
    let solicited = SendRequest::send(1, &[]).flags(SendFlags::SIGNALED | SendFlags::SOLICITED);
    senders[1].0.post(&solicited).unwrap();
    assert_eq!(channel.wait(), queues[1]);
    let ids: Vec<u64> = std::iter::from_fn(|| queues[1].poll()).map(|completion| completion.id).collect();
    assert_eq!(ids, [1, 2]);
}

fn a_window_opens_a_part_of_a_region(devices: [Device; 2]) {
    let [a, b] = connected(&devices);
    let window = b.domain.allocate_window(WindowKind::Type2).unwrap();
    // The peer of a type 2 window uses the low byte of the key that the owner chose.
    let new_key = RemoteKey(window.key().0 & !0xff | 0x5a);
    let bind = BindWindow {
        window: window.key(),
        new_key,
        region: b.region.local_key(),
        address: b.region.address() + 128,
        length: 64,
        access: Access::REMOTE_WRITE,
    };
    b.pair.post(&SendRequest::new(1, Operation::BindWindow(bind), &[])).unwrap();
    b.succeed();
    let inside = RemoteAddress { address: b.region.address() + 128, key: new_key };
    a.region.write_at(0, &[3; 64]);
    a.pair.post(&SendRequest::write(1, &[a.region.entry(0, 64)], inside)).unwrap();
    a.succeed();
    assert_eq!(b.region.read_at(128, 64), [3; 64]);
    let outside = RemoteAddress { address: b.region.address() + 129, key: new_key };
    a.pair.post(&SendRequest::write(2, &[a.region.entry(0, 64)], outside)).unwrap();
    assert_eq!(a.wait().status, Status::RemoteAccess);
}

fn a_forbidden_read_fails_at_both_ends(devices: [Device; 2]) {
    let [a, b] = connected(&devices);
    let private = b.domain.register(64, Access::LOCAL_WRITE).unwrap();
    a.pair.post(&SendRequest::read(1, &[a.region.entry(0, 8)], private.remote(0))).unwrap();
    assert_eq!(a.wait().status, Status::RemoteAccess);
    assert_eq!(a.pair.state().unwrap(), State::Error);
    let event = b.context.wait_event(Duration::from_secs(20)).unwrap();
    assert_eq!(event, AsyncEvent::QueuePairAccessError(b.pair.number()));
    assert_eq!(b.pair.state().unwrap(), State::Error);
}

fn modify_names_what_is_missing(devices: [Device; 2]) {
    let a = End::new(&devices[0], QpKind::Rc);
    let error = a.pair.modify(&Modify::default().state(State::Init).port(1)).unwrap_err().to_string();
    assert!(error.contains("PKEY_INDEX") && error.contains("ACCESS_FLAGS"), "{error}");
    let error = a.pair.modify(&Modify::default().state(State::ReadyToSend)).unwrap_err();
    assert_eq!(error.errno(), 22, "{error}");
    let text = a.pair.endpoint().to_string();
    assert_eq!(text.parse::<Endpoint>().unwrap(), a.pair.endpoint());
    assert!("nonsense".parse::<Endpoint>().is_err());
}

fn a_resized_queue_keeps_what_waits(devices: [Device; 2]) {
    let [a, b] = connected(&devices);
    for id in 0..3 {
        a.pair.post(&SendRequest::write(id, &[a.region.entry(0, 8)], b.region.remote(0))).unwrap();
    }
    assert_eq!(a.succeed().id, 0);
    a.queue.resize(128).unwrap();
    assert_eq!([a.succeed().id, a.succeed().id], [1, 2]);
}

fn waiting_ends_when_the_time_is_over(devices: [Device; 2]) {
    let [a, _] = connected(&devices);
    assert_eq!(a.queue.wait_for(Duration::from_millis(20)), None);
    assert_eq!(a.context.wait_event(Duration::from_millis(20)), None);
    let channel = a.context.create_completion_channel().unwrap();
    assert_eq!(channel.wait_for(Duration::from_millis(20)), None);
}

fn handles_may_be_dropped_in_any_order(devices: [Device; 2]) {
    let End { context, domain, queue, region, pair } = End::new(&devices[0], QpKind::Rc);
    drop(context);
    drop(domain);
    drop(queue);
    drop(devices);
    assert_eq!(pair.state().unwrap(), State::Reset);
    drop(pair);
    region.write_at(0, b"still there");
    assert_eq!(region.read_at(0, 11), b"still there");
}
