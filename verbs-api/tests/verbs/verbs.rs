//! The verbs, each test on an embedded card and on a simulated one.
#![allow(unsafe_code, reason = "memory of the caller is registered")]

use softhca::{
    AccessFlags, AddressVector, AsyncEvent, Completion, CompletionFlags, CompletionOpcode, CompletionQueue,
    CompletionStatus, ConnectOptions, Context, CqNotify, Device, DeviceLimits, Endpoint, Error, MemoryRegion,
    MemoryWindow, MemoryWindowBind, MemoryWindowType, ModifyQp, Operation, ProtectionDomain, QpState, QpType,
    QueueKey, QueuePair, ReceiveRequest, RemoteAddress, RemoteKey, SendFlags, SendRequest, VerbsError,
    sim::World,
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
    a_region_with_bound_windows_is_gone_when_it_is_dropped
    requests_that_name_a_dropped_region_fail
    read_only_memory_is_served_and_never_written
    memory_of_the_caller_is_not_accessed_after_deregistration
    a_region_longer_than_max_mr_size_is_rejected
}

const RIGHTS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::MW_BIND);

/// What a program has on one host.
struct End {
    context: Context,
    domain: ProtectionDomain,
    queue: CompletionQueue,
    region: MemoryRegion,
    pair: QueuePair,
}

impl End {
    fn new(device: &Device, kind: QpType) -> End {
        let context = device.open();
        let domain = context.allocate_protection_domain().unwrap();
        let queue = context.create_completion_queue(64).unwrap();
        let region = domain.allocate_region(8192, RIGHTS).unwrap();
        let pair = domain.create_queue_pair(kind, &queue).build().unwrap();
        End { context, domain, queue, region, pair }
    }

    fn receive(&self, id: u64, offset: u64, length: u32) {
        let scatter = [self.region.sge(offset, length)];
        self.pair.post_recv(&ReceiveRequest { wr_id: id, sg_list: &scatter }).unwrap();
    }

    fn wait(&self) -> Completion {
        self.queue.wait_for(Duration::from_secs(20)).expect("a completion")
    }

    fn succeed(&self) -> Completion {
        let completion = self.wait();
        assert_eq!(completion.status, CompletionStatus::Success);
        completion
    }
}

fn connected(devices: &[Device; 2]) -> [End; 2] {
    let ends = [0, 1].map(|index| End::new(&devices[index], QpType::Rc));
    ends[0].pair.connect_both(&ends[1].pair, &ConnectOptions::default()).unwrap();
    ends
}

fn a_message_arrives_with_its_immediate(devices: [Device; 2]) {
    let [a, b] = connected(&devices);
    b.receive(7, 100, 4096);
    a.region.write_at(0, &[42; 3000]);
    a.pair.post_send(&SendRequest::send_with_imm(1, &[a.region.sge(0, 3000)], 0xfeed)).unwrap();
    assert_eq!(a.succeed().wr_id, 1);
    let received = b.succeed();
    assert_eq!((received.wr_id, received.byte_len, received.imm_data), (7, 3000, 0xfeed));
    assert!(received.flags.contains(CompletionFlags::IMMEDIATE));
    assert_eq!(received.opcode, CompletionOpcode::Receive);
    assert_eq!(b.region.read_at(100, 3000), [42; 3000]);
}

fn one_sided_operations_reach_the_peers_memory(devices: [Device; 2]) {
    let [a, b] = connected(&devices);
    a.region.write_at(0, b"over there");
    a.pair
        .post_send(&SendRequest::rdma_write(1, &[a.region.sge(0, 10)], b.region.remote_address(64)))
        .unwrap();
    a.pair
        .post_send(&SendRequest::rdma_read(2, &[a.region.sge(512, 10)], b.region.remote_address(64)))
        .unwrap();
    a.pair
        .post_send(&SendRequest::fetch_and_add(3, &[a.region.sge(1024, 8)], b.region.remote_address(0), 5))
        .unwrap();
    a.pair
        .post_send(&SendRequest::compare_and_swap(
            4,
            &[a.region.sge(1032, 8)],
            b.region.remote_address(0),
            5,
            9,
        ))
        .unwrap();
    assert_eq!([(); 4].map(|()| a.succeed().wr_id), [1, 2, 3, 4]);
    assert_eq!(b.region.read_at(64, 10), b"over there");
    assert_eq!(a.region.read_at(512, 10), b"over there");
    assert_eq!([a.region.load(1024), a.region.load(1032), b.region.load(0)], [0, 5, 9]);
}

fn inline_data_and_gather_lists_are_joined(devices: [Device; 2]) {
    let [a, b] = connected(&devices);
    b.receive(1, 0, 64);
    b.receive(2, 64, 64);
    a.pair.post_send(&SendRequest::send(1, &[]).inline_data(b"in the request")).unwrap();
    a.region.write_at(0, b"abc");
    a.region.write_at(1000, b"def");
    let pieces = [a.region.sge(1000, 3), a.region.sge(0, 3)];
    a.pair.post_send(&SendRequest::send(2, &pieces)).unwrap();
    assert_eq!([b.succeed().byte_len, b.succeed().byte_len], [14, 6]);
    assert_eq!(b.region.read_at(0, 14), b"in the request");
    assert_eq!(b.region.read_at(64, 6), b"defabc");
}

fn a_batch_is_posted_whole_or_not_at_all(devices: [Device; 2]) {
    let [a, b] = connected(&devices);
    let entry = [a.region.sge(0, 8)];
    let remote = b.region.remote_address(0);
    let good: Vec<_> = (0..3).map(|id| SendRequest::rdma_write(id, &entry, remote)).collect();
    let too_long = [entry[0]; 33];
    let mut bad = good.clone();
    bad.push(SendRequest::rdma_write(9, &too_long, remote));
    assert!(matches!(
        a.pair.post_send_list(&bad),
        Err(Error::Verbs(VerbsError::LimitExceeded { value: 33, limit: 4, .. }))
    ));
    a.pair.post_send_list(&good).unwrap();
    assert_eq!([(); 3].map(|()| a.succeed().wr_id), [0, 1, 2]);
    assert_eq!(a.queue.wait_for(Duration::from_millis(5)), None);
    // An unsignalled request completes in silence, also when a signalled one follows.
    let quiet = SendRequest::rdma_write(4, &entry, remote).flags(SendFlags::empty());
    a.pair.post_send_list(&[quiet, SendRequest::rdma_write(5, &entry, remote)]).unwrap();
    assert_eq!(a.succeed().wr_id, 5);
}

fn datagrams_bring_a_header_and_their_sender(devices: [Device; 2]) {
    const KEY: QueueKey = QueueKey(0x1234);
    let [a, b] = [0, 1].map(|index| End::new(&devices[index], QpType::Ud));
    a.pair.start_ud(KEY).unwrap();
    b.pair.start_ud(KEY).unwrap();
    b.receive(1, 0, 200);
    let handle = a.domain.create_address_handle(AddressVector::to(b.pair.endpoint().gid)).unwrap();
    a.region.write_at(0, b"datagram");
    let request = SendRequest::send(1, &[]).inline_data(b"datagram").ud_address(&handle, b.pair.qpn(), KEY);
    a.pair.post_send(&request).unwrap();
    a.succeed();
    let received = b.succeed();
    assert_eq!((received.byte_len, received.src_qp), (40 + 8, a.pair.qpn()));
    assert!(received.flags.contains(CompletionFlags::GRH));
    assert_eq!(b.region.read_at(40, 8), b"datagram");
}

fn a_shared_receive_queue_serves_two_pairs_and_tells_its_limit(devices: [Device; 2]) {
    let [a, b] = [0, 1].map(|index| End::new(&devices[index], QpType::Rc));
    let shared = b.domain.create_shared_receive_queue(8, 1).unwrap();
    for id in 0..3 {
        shared.post_recv(&ReceiveRequest { wr_id: id, sg_list: &[b.region.sge(id * 64, 64)] }).unwrap();
    }
    shared.set_limit(2).unwrap();
    let mut numbers = Vec::new();
    for _ in 0..2 {
        let from = a.domain.create_queue_pair(QpType::Rc, &a.queue).build().unwrap();
        let to =
            b.domain.create_queue_pair(QpType::Rc, &b.queue).shared_receive_queue(&shared).build().unwrap();
        from.connect_both(&to, &ConnectOptions::default()).unwrap();
        from.post_send(&SendRequest::send(1, &[]).inline_data(b"shared")).unwrap();
        a.succeed();
        let received = b.succeed();
        assert_eq!((received.wr_id, received.qpn), (numbers.len() as u64, to.qpn()));
        numbers.push((from, to));
    }
    let limit = b.context.wait_async_event(Duration::from_secs(20)).unwrap();
    assert!(matches!(limit, AsyncEvent::SharedReceiveQueueLimit(srq) if srq.0 == shared.srqn()));
}

fn an_extended_connection_reaches_the_queue_that_the_sender_names(devices: [Device; 2]) {
    let [a, b] = [End::new(&devices[0], QpType::XrcInitiator), End::new(&devices[1], QpType::Rc)];
    let xrc_domain = b.context.open_xrc_domain().unwrap();
    let target = xrc_domain.create_target_queue_pair().unwrap();
    let queues = [1, 2].map(|id| {
        let completions = b.context.create_completion_queue(8).unwrap();
        let shared = b.domain.create_xrc_shared_receive_queue(&xrc_domain, &completions, 8, 1).unwrap();
        shared.post_recv(&ReceiveRequest { wr_id: id, sg_list: &[b.region.sge(id * 64, 64)] }).unwrap();
        (completions, shared)
    });
    a.pair.connect_both(&target, &ConnectOptions::default()).unwrap();
    for (completions, shared) in queues.iter().rev() {
        let request = SendRequest::send(1, &[]).inline_data(b"to a queue");
        a.pair.post_send(&request.xrc_srqn(shared.srqn())).unwrap();
        a.succeed();
        let received = completions.wait_for(Duration::from_secs(20)).unwrap();
        assert_eq!((received.status, received.byte_len), (CompletionStatus::Success, 10));
        assert_eq!(b.region.read_at(received.wr_id * 64, 10), b"to a queue");
    }
    // One-sided operations name a queue too: its protection domain is what they may reach.
    let entry = [a.region.sge(0, 8)];
    let request = SendRequest::rdma_write(2, &entry, b.region.remote_address(0));
    a.pair.post_send(&request.xrc_srqn(queues[0].1.srqn())).unwrap();
    a.succeed();
    drop((xrc_domain, b.domain));
    assert_eq!(target.state().unwrap(), QpState::ReadyToSend);
}

fn a_channel_tells_which_queue_has_news(devices: [Device; 2]) {
    let [a, b] = connected(&devices);
    let channel = b.context.create_completion_channel().unwrap();
    let queues = [(); 2].map(|()| b.context.create_completion_queue_with_channel(8, &channel).unwrap());
    let senders = [0, 1].map(|index: usize| {
        let from = a.domain.create_queue_pair(QpType::Rc, &a.queue).build().unwrap();
        let to = b.domain.create_queue_pair(QpType::Rc, &queues[index]).build().unwrap();
        to.init(&ConnectOptions::default()).unwrap();
        to.post_recv(&ReceiveRequest { wr_id: 1, sg_list: &[] }).unwrap();
        to.post_recv(&ReceiveRequest { wr_id: 2, sg_list: &[] }).unwrap();
        from.connect_both(&to, &ConnectOptions::default()).unwrap();
        (from, to)
    });
    queues[0].request_notification(CqNotify::NextCompletion);
    queues[1].request_notification(CqNotify::SolicitedOnly);
    senders[1].0.post_send(&SendRequest::send(1, &[])).unwrap();
    a.succeed();
    senders[0].0.post_send(&SendRequest::send(1, &[])).unwrap();
    a.succeed();
    // The second queue requests notification of solicited messages only.
    assert_eq!(channel.wait_for(Duration::from_secs(20)), Some(queues[0].clone()));
    assert_eq!(channel.poll(), None);
    let solicited = SendRequest::send(1, &[]).flags(SendFlags::SIGNALED | SendFlags::SOLICITED);
    senders[1].0.post_send(&solicited).unwrap();
    assert_eq!(channel.wait(), queues[1]);
    let ids: Vec<u64> = std::iter::from_fn(|| queues[1].poll()).map(|completion| completion.wr_id).collect();
    assert_eq!(ids, [1, 2]);
}

fn a_window_opens_a_part_of_a_region(devices: [Device; 2]) {
    let [a, b] = connected(&devices);
    let window = b.domain.allocate_memory_window(MemoryWindowType::Type2).unwrap();
    // The peer of a type 2 window uses the low byte of the key that the owner chose.
    let new_key = RemoteKey(window.rkey().0 & !0xff | 0x5a);
    let bind = MemoryWindowBind {
        mw_rkey: window.rkey(),
        new_rkey: new_key,
        mr_lkey: b.region.lkey(),
        address: b.region.address() + 128,
        length: 64,
        access: AccessFlags::REMOTE_WRITE,
    };
    b.pair.post_send(&SendRequest::new(1, Operation::BindMemoryWindow(bind), &[])).unwrap();
    b.succeed();
    let inside = RemoteAddress { address: b.region.address() + 128, rkey: new_key };
    a.region.write_at(0, &[3; 64]);
    a.pair.post_send(&SendRequest::rdma_write(1, &[a.region.sge(0, 64)], inside)).unwrap();
    a.succeed();
    assert_eq!(b.region.read_at(128, 64), [3; 64]);
    let outside = RemoteAddress { address: b.region.address() + 129, rkey: new_key };
    a.pair.post_send(&SendRequest::rdma_write(2, &[a.region.sge(0, 64)], outside)).unwrap();
    assert_eq!(a.wait().status, CompletionStatus::RemoteAccessError);
}

fn a_forbidden_read_fails_at_both_ends(devices: [Device; 2]) {
    let [a, b] = connected(&devices);
    let private = b.domain.allocate_region(64, AccessFlags::LOCAL_WRITE).unwrap();
    a.pair.post_send(&SendRequest::rdma_read(1, &[a.region.sge(0, 8)], private.remote_address(0))).unwrap();
    assert_eq!(a.wait().status, CompletionStatus::RemoteAccessError);
    assert_eq!(a.pair.state().unwrap(), QpState::Error);
    let event = b.context.wait_async_event(Duration::from_secs(20)).unwrap();
    assert_eq!(event, AsyncEvent::QueuePairAccessError(b.pair.qpn()));
    assert_eq!(b.pair.state().unwrap(), QpState::Error);
}

fn modify_names_what_is_missing(devices: [Device; 2]) {
    let a = End::new(&devices[0], QpType::Rc);
    let error = a.pair.modify(&ModifyQp::default().state(QpState::Init).port(1)).unwrap_err().to_string();
    assert!(error.contains("PKEY_INDEX") && error.contains("ACCESS_FLAGS"), "{error}");
    let error = a.pair.modify(&ModifyQp::default().state(QpState::ReadyToSend)).unwrap_err();
    assert_eq!(error.errno(), 22, "{error}");
    let text = a.pair.endpoint().to_string();
    assert_eq!(text.parse::<Endpoint>().unwrap(), a.pair.endpoint());
    assert!("nonsense".parse::<Endpoint>().is_err());
}

fn a_resized_queue_keeps_what_waits(devices: [Device; 2]) {
    let [a, b] = connected(&devices);
    for id in 0..3 {
        a.pair
            .post_send(&SendRequest::rdma_write(id, &[a.region.sge(0, 8)], b.region.remote_address(0)))
            .unwrap();
    }
    assert_eq!(a.succeed().wr_id, 0);
    a.queue.resize(128).unwrap();
    assert_eq!([a.succeed().wr_id, a.succeed().wr_id], [1, 2]);
}

fn waiting_ends_when_the_time_is_over(devices: [Device; 2]) {
    let [a, _] = connected(&devices);
    assert_eq!(a.queue.wait_for(Duration::from_millis(20)), None);
    assert_eq!(a.context.wait_async_event(Duration::from_millis(20)), None);
    let channel = a.context.create_completion_channel().unwrap();
    assert_eq!(channel.wait_for(Duration::from_millis(20)), None);
}

fn handles_may_be_dropped_in_any_order(devices: [Device; 2]) {
    let End { context, domain, queue, region, pair } = End::new(&devices[0], QpType::Rc);
    drop(context);
    drop(domain);
    drop(queue);
    drop(devices);
    assert_eq!(pair.state().unwrap(), QpState::Reset);
    drop(pair);
    region.write_at(0, b"still there");
    assert_eq!(region.read_at(0, 11), b"still there");
}

/// Binds a type 2 window to the first bytes of a region and returns its key.
fn bind(end: &End, region: &MemoryRegion, length: u64, access: AccessFlags) -> (MemoryWindow, RemoteKey) {
    let window = end.domain.allocate_memory_window(MemoryWindowType::Type2).unwrap();
    let new_rkey = RemoteKey(window.rkey().0 & !0xff | 0x5a);
    let (mr_lkey, address) = (region.lkey(), region.address());
    let bind = MemoryWindowBind { mw_rkey: window.rkey(), new_rkey, mr_lkey, address, length, access };
    end.pair.post_send(&SendRequest::new(99, Operation::BindMemoryWindow(bind), &[])).unwrap();
    end.succeed();
    (window, new_rkey)
}

fn a_region_with_bound_windows_is_gone_when_it_is_dropped(devices: [Device; 2]) {
    let [a, b] = connected(&devices);
    let memory = std::alloc::Layout::from_size_align(4096, 4096).unwrap();
    // SAFETY: the layout has a size; the memory is freed at the end, when the region is gone.
    let base = std::ptr::NonNull::new(unsafe { std::alloc::alloc_zeroed(memory) }).unwrap();
    // SAFETY: nothing else refers to the memory.
    let region = unsafe { b.domain.register_memory(base, 4096, RIGHTS) }.unwrap();
    let (window, rkey) = bind(&b, &region, 64, AccessFlags::REMOTE_WRITE);
    let remote = RemoteAddress { address: region.address(), rkey };
    assert!(region.deregister().unwrap_err().to_string().contains("is still used by a memory window"));
    drop(region);
    a.region.write_at(0, &[3; 64]);
    a.pair.post_send(&SendRequest::rdma_write(1, &[a.region.sge(0, 64)], remote)).unwrap();
    assert_eq!(a.wait().status, CompletionStatus::RemoteAccessError);
    // SAFETY: the card no longer knows the memory.
    unsafe {
        assert_eq!(*base.as_ptr(), 0, "the peer wrote to memory that was released");
        std::alloc::dealloc(base.as_ptr(), memory);
    }
    // The window can be bound again, to another region.
    let reset = ModifyQp::default().state(QpState::Reset);
    for end in [&a, &b] {
        end.pair.modify(&reset).unwrap();
    }
    a.pair.connect_both(&b.pair, &ConnectOptions::default()).unwrap();
    let bind = MemoryWindowBind {
        mw_rkey: rkey,
        new_rkey: RemoteKey(rkey.0 + 1),
        mr_lkey: b.region.lkey(),
        address: b.region.address(),
        length: 64,
        access: AccessFlags::REMOTE_WRITE,
    };
    b.pair.post_send(&SendRequest::new(98, Operation::BindMemoryWindow(bind), &[])).unwrap();
    b.succeed();
    drop(window);
}

fn requests_that_name_a_dropped_region_fail(devices: [Device; 2]) {
    let [a, b] = connected(&devices);
    let region = b.domain.allocate_region(64, RIGHTS).unwrap();
    b.pair.post_recv(&ReceiveRequest { wr_id: 5, sg_list: &[region.sge(0, 64)] }).unwrap();
    drop(region);
    a.pair.post_send(&SendRequest::send(1, &[a.region.sge(0, 8)])).unwrap();
    assert_eq!(a.wait().status, CompletionStatus::RemoteOperationError);
    let received = b.wait();
    assert_eq!((received.wr_id, received.status), (5, CompletionStatus::LocalProtectionError));
    let source = a.domain.allocate_region(64, RIGHTS).unwrap();
    let entry = source.sge(0, 64);
    drop(source);
    let pair = a.domain.create_queue_pair(QpType::Rc, &a.queue).build().unwrap();
    let peer = b.domain.create_queue_pair(QpType::Rc, &b.queue).build().unwrap();
    pair.connect_both(&peer, &ConnectOptions::default()).unwrap();
    pair.post_send(&SendRequest::rdma_write(2, &[entry], b.region.remote_address(0))).unwrap();
    assert_eq!(a.wait().status, CompletionStatus::LocalProtectionError);
}

fn read_only_memory_is_served_and_never_written(devices: [Device; 2]) {
    static BYTES: [u64; 8] = [7; 8];
    let [a, b] = connected(&devices);
    let base = std::ptr::NonNull::from(&BYTES).cast();
    // SAFETY: the memory is static, and without LOCAL_WRITE nothing writes it.
    let region = unsafe { b.domain.register_memory(base, 64, AccessFlags::REMOTE_READ) }.unwrap();
    assert_eq!((region.load(0), region.read_at(8, 8)), (7, BYTES[1].to_ne_bytes().to_vec()));
    a.pair.post_send(&SendRequest::rdma_read(1, &[a.region.sge(0, 64)], region.remote_address(0))).unwrap();
    a.succeed();
    assert_eq!(a.region.load(56), 7);
    let error = region.change_access(AccessFlags::LOCAL_WRITE).unwrap_err().to_string();
    assert!(error.contains("read-only"), "{error}");
    let write = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| region.write_at(0, &[1])));
    assert!(write.is_err());
    assert_eq!(BYTES, [7; 8]);
}

fn memory_of_the_caller_is_not_accessed_after_deregistration(devices: [Device; 2]) {
    let end = End::new(&devices[0], QpType::Rc);
    let mut bytes = Box::new([7u64; 8]);
    let base = std::ptr::NonNull::from(&mut *bytes).cast();
    // SAFETY: the memory lives until the region is deregistered.
    let region = unsafe { end.domain.register_memory(base, 64, AccessFlags::LOCAL_WRITE) }.unwrap();
    region.write_at(0, &[1]);
    region.deregister().unwrap();
    drop(bytes);
    let accesses: [&dyn Fn(); 3] =
        [&|| drop(region.read_at(0, 1)), &|| region.write_at(0, &[1]), &|| _ = region.load(0)];
    for access in accesses {
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(access)).is_err());
    }
}

fn a_region_longer_than_max_mr_size_is_rejected(devices: [Device; 2]) {
    let domain = devices[0].open().allocate_protection_domain().unwrap();
    for length in [u64::MAX, DeviceLimits::MAX_MR_SIZE + 1] {
        for result in [domain.allocate_region(length, RIGHTS), domain.allocate_private_region(length, RIGHTS)]
        {
            let Err(Error::Verbs(VerbsError::LimitExceeded { value, limit, .. })) = result else {
                panic!("{length} bytes were allocated")
            };
            assert_eq!((value, limit), (length, DeviceLimits::MAX_MR_SIZE));
        }
    }
}
