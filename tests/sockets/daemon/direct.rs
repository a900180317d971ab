//! The direct data path: each process executes the transport itself, on the sockets of its slot and in rings.

use super::data::{ALL_ACCESS, ConnectedHost, check_application_memory, connected, every_operation};
use super::multicast::{GroupMember, QUEUE_KEY};
use super::process::{self, TEST_TIMEOUT, TestDaemon, receive_line, send_line};
use softhca::{
    AsyncEvent, CompletionStatus, ConnectOptions, Device, Error, QpState, QpType, ReceiveRequest,
    SendRequest,
    fault::{Action, FlowId, InclusiveRange, PacketClass, PacketClasses, Repeat, Rule, RuleId, Selector},
};
use softhca_trace::{CaptureReader, EventLogReader};
use softhca_udp::{RoceSocket, SocketOptions};
use softhca_wire::{
    AddressHeaders, Bth, Deth, ICRC_LEN, Icrc, ImmOrInvalidate, Opcode, Operation, Position, Psn, Qpn,
    ROCE_PORT, TransportHeader,
};
use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::ptr::NonNull;

pub const DIRECT: [(&str, &str); 1] = [("TEST_CONFIG", "data_path = 'direct'")];
pub const DIRECT_SOCKETS: [(&str, &str); 1] = [("TEST_CONFIG", "data_path = 'direct'\nloopback = 'socket'")];

/// The slot in the QPN of an end.
fn slot(end: &ConnectedHost) -> u32 {
    end.pair.endpoint().qpn.value() >> 15
}

#[test]
fn processes_do_every_operation_over_sockets_and_in_rings() {
    for variables in [&DIRECT, &DIRECT_SOCKETS] {
        let daemon = TestDaemon::with(variables);
        for theirs in ["alice", "bob"] {
            every_operation(&daemon, "alice", theirs);
            check_application_memory(&daemon, "alice", theirs);
        }
        let status = daemon.control().status().unwrap();
        assert!(status.hosts.iter().all(|host| host.queue_pairs == 0), "the daemon has none: {status:?}");
    }
}

#[test]
fn the_queue_pairs_of_a_process_have_the_numbers_of_its_slot() {
    let daemon = TestDaemon::with(&DIRECT);
    let ends: Vec<_> = (0..3).map(|_| ConnectedHost::new(&daemon.open("alice"), 4096)).collect();
    let mut slots: Vec<u32> = ends.iter().map(slot).collect();
    slots.sort();
    slots.dedup();
    assert!(slots.len() == 3 && slots[0] > 0, "{slots:?}");
}

#[test]
fn a_killed_process_fails_its_connections_and_no_other() {
    for (variables, theirs) in [(&DIRECT, "alice"), (&DIRECT, "bob"), (&DIRECT_SOCKETS, "alice")] {
        let daemon = TestDaemon::with(variables);
        let (end, mut echo, remote) = connected(&daemon, "alice", theirs);
        let (other, _other_echo, other_remote) = connected(&daemon, "alice", theirs);
        end.pair.post_send(&SendRequest::rdma_write(0, &[end.region.sge(0, 100)], remote)).unwrap();
        end.finish();
        echo.kill();
        end.pair.post_send(&SendRequest::rdma_write(1, &[end.region.sge(0, 1 << 20)], remote)).unwrap();
        let completion = end.queue.wait_for(TEST_TIMEOUT).expect("the request completes");
        assert_eq!(completion.status, CompletionStatus::RetryExceededError, "{theirs}");
        assert_eq!(end.pair.state().unwrap(), QpState::Error);
        let entries = [other.region.sge(0, 100_000)];
        other.pair.post_send(&SendRequest::rdma_write(2, &entries, other_remote)).unwrap();
        other.finish();
        // The slot of the killed process serves another one.
        every_operation(&daemon, "alice", theirs);
    }
}

#[test]
fn a_killed_daemon_flushes_the_work_of_its_processes() {
    let mut daemon = TestDaemon::with(&DIRECT);
    let (end, echo, _) = connected(&daemon, "alice", "bob");
    end.pair.post_recv(&ReceiveRequest { wr_id: 1, sg_list: &[end.region.sge(0, 100)] }).unwrap();
    daemon.process.kill();
    let completion = end.queue.wait_for(TEST_TIMEOUT).expect("the receive is flushed");
    assert_eq!((completion.wr_id, completion.status), (1, CompletionStatus::WrFlushError));
    let event = std::iter::from_fn(|| end.context.wait_async_event(TEST_TIMEOUT))
        .find(|event| *event == AsyncEvent::DeviceFatal);
    assert_eq!(event, Some(AsyncEvent::DeviceFatal));
    let error = end.context.allocate_protection_domain().err().expect("no device, no protection domain");
    assert!(matches!(error, Error::DeviceGone { .. }), "{error}");
    end.pair.post_send(&SendRequest::send(2, &[])).unwrap();
    assert_eq!(end.queue.wait_for(TEST_TIMEOUT).unwrap().status, CompletionStatus::WrFlushError);
    drop((end, echo));
    // A new daemon takes the addresses.
    let daemon = TestDaemon::named(daemon.name.clone(), &DIRECT);
    every_operation(&daemon, "alice", "bob");
}

#[test]
fn recordings_have_the_events_and_packets_of_all_processes_in_order() {
    let daemon = TestDaemon::with(&DIRECT);
    for theirs in ["alice", "bob"] {
        let folder = std::env::temp_dir().join(format!("softhca-direct-{}-{theirs}", daemon.name));
        let paths = ["pcapng", "jsonl"].map(|kind| folder.with_extension(kind));
        let [capture, log] = paths.each_ref().map(|path| File::create(path).unwrap());
        let (end, _echo, remote) = connected(&daemon, "alice", theirs);
        let mut control = daemon.control();
        control.start_recording(Some(capture.as_fd()), Some(log.as_fd())).unwrap();
        for id in 0..20 {
            end.pair.post_send(&SendRequest::rdma_write(id, &[end.region.sge(0, 10_000)], remote)).unwrap();
            end.finish();
        }
        control.stop_recording().unwrap();
        let [capture, log] = paths.each_ref().map(|path| std::fs::read(path).unwrap());
        let entries: Vec<_> = EventLogReader::new(&log[..]).unwrap().map(|entry| entry.unwrap()).collect();
        assert!(entries.is_sorted_by_key(|entry| entry.time));
        let count = |host: &str, name| {
            entries.iter().filter(|entry| entry.host == host && entry.event.name() == name).count()
        };
        // Ten packets of 1024 bytes each, or fewer larger ones; every one is sent once and arrives once.
        let sent = count("alice", "transport:packet_sent");
        let completed = count("alice", "work:completed");
        assert!(sent >= 60 && completed == 20, "{sent} sent, {completed} completed");
        if theirs == "bob" {
            assert_eq!(count("bob", "transport:packet_received"), sent);
        }
        let captured = CaptureReader::new(&capture[..]).unwrap().map(Result::unwrap).count();
        paths.iter().for_each(|path| std::fs::remove_file(path).unwrap());
        let acks = count(theirs, "transport:packet_sent") * usize::from(theirs == "bob");
        assert_eq!(captured, sent + acks);
    }
}

#[test]
fn the_daemon_knows_the_resources_and_counters_of_processes() {
    let daemon = TestDaemon::with(&DIRECT);
    let (end, mut echo, remote) = connected(&daemon, "alice", "bob");
    end.pair.post_send(&SendRequest::rdma_write(0, &[end.region.sge(0, 4096)], remote)).unwrap();
    end.finish();
    let mut control = daemon.control();
    let [own, other] = ["alice", "bob"].map(|host| control.queue_pairs(host).unwrap());
    assert_eq!((own[0].qpn, own[0].dest_qpn), (end.pair.endpoint().qpn, other[0].qpn));
    assert_eq!((own[0].pid, own[0].state), (Some(std::process::id()), QpState::ReadyToSend));
    let status = control.status().unwrap();
    let host = status.hosts.iter().find(|host| host.host.name == "alice").unwrap();
    assert!(host.queue_pairs == 1 && host.clients[0].is_direct, "{host:?}");
    assert!(host.clients[0].resources.contains(&("memory region".into(), 1)), "{host:?}");
    let mut received = || control.counters(Some("bob")).unwrap().rcvd_bytes;
    while received() < 4096 {
        std::thread::yield_now();
    }
    // Those of a process that is gone still count.
    echo.kill();
    while control.status().unwrap().hosts.iter().any(|host| host.host.name == "bob" && host.queue_pairs > 0) {
        std::thread::yield_now();
    }
    assert_eq!(control.counters(Some("bob")).unwrap().rcvd_bytes, 4096);
}

/// A rule that drops the second packet of a role, once.
fn second_is_lost(id: u32, role: u32) -> Rule {
    let psn = Some(InclusiveRange::exactly(1));
    let selector = Selector { flow_id: Some(FlowId(role)), psn, ..Selector::default() };
    Rule { id: RuleId(id), selector, repeat: Repeat::times(1), action: Action::Drop }
}

/// Connects two queue pairs.
fn connect(ends: &[ConnectedHost; 2]) {
    ends[0].pair.connect(&ends[1].pair.endpoint(), &ConnectOptions::default()).unwrap();
    ends[1].pair.connect(&ends[0].pair.endpoint(), &ConnectOptions::default()).unwrap();
}

/// The status of a WRITE of several packets.
fn write(ends: &[ConnectedHost; 2]) -> CompletionStatus {
    let gather = [ends[0].region.sge(0, 4000)];
    let remote = ends[1].region.remote_address(0);
    ends[0].pair.post_send(&SendRequest::rdma_write(1, &gather, remote)).unwrap();
    ends[0].queue.wait_for(TEST_TIMEOUT).expect("a completion").status
}

#[test]
fn fault_rules_act_on_processes_that_are_there_and_on_later_ones() {
    let daemon = TestDaemon::with(&DIRECT);
    let mut control = daemon.control();
    let ends = ["alice", "bob"].map(|host| ConnectedHost::new(&daemon.open(host), 8192));
    // The second packet of the first and of the third queue pair that alice connects.
    let roles = [1, 2, 3].map(|role| (QpType::Rc, FlowId(role)));
    control.assign_roles("alice", 1, &roles).unwrap();
    control.add_rules("alice", 1, &[(second_is_lost(7, 1), "lose the second")]).unwrap();
    control.add_rules("alice", 1, &[(second_is_lost(8, 3), "of the third")]).unwrap();
    connect(&ends);
    let mut watch = daemon.control();
    watch.subscribe_async_events().unwrap();
    assert_eq!(write(&ends), CompletionStatus::RetryExceededError);
    let observed = watch.next_async_event().unwrap();
    assert_eq!((observed.host.as_str(), observed.process), ("bob", Some(std::process::id())));
    assert_eq!(observed.event, AsyncEvent::QueuePairFatal(ends[1].pair.qpn()));
    let mut fired = || {
        let rules = control.rules("alice").unwrap();
        rules.into_iter().map(|(rule, counters)| (rule.id.0, counters.fired)).collect::<Vec<_>>()
    };
    assert_eq!(fired(), [(7, 1), (8, 0)]);
    // Rules, flows and roles reach the processes that come later.
    for (lost, expected) in [(0, CompletionStatus::Success), (1, CompletionStatus::RetryExceededError)] {
        let later = ["alice", "bob"].map(|host| ConnectedHost::new(&daemon.open(host), 8192));
        connect(&later);
        assert_eq!(write(&later), expected);
        assert_eq!(fired(), [(7, 1), (8, lost)]);
        let status = daemon.control().status().unwrap();
        let mut clients = status.hosts.iter().flat_map(|host| &host.clients);
        assert!(clients.all(|client| client.is_direct), "{status:?}");
        drop(later);
        assert_eq!(fired(), [(7, 1), (8, lost)], "the counters of a process that is gone still count");
    }
    control.clear_rules("alice").unwrap();
    assert!(control.rules("alice").unwrap().is_empty());
    let ends = ["alice", "bob"].map(|host| ConnectedHost::new(&daemon.open(host), 8192));
    connect(&ends);
    assert_eq!(write(&ends), CompletionStatus::Success);
}

#[test]
fn the_rules_and_flows_of_a_host_are_bounded_and_all_reach_a_process() {
    let daemon = TestDaemon::with(&DIRECT);
    let mut control = daemon.control();
    // The longest rules that the limit on their bytes permits, then the shortest that the limit on their number does.
    let opcodes =
        vec![
            Opcode::new(QpType::Rc.service(), Operation::Send, Position::Only, ImmOrInvalidate::None)
                .unwrap();
            256
        ];
    let rule = |id, opcodes: &[Opcode]| {
        let selector = Selector { opcodes: opcodes.to_vec(), ..Selector::default() };
        Rule { id: RuleId(id), selector, repeat: Repeat::times(1), action: Action::Count }
    };
    for opcodes in [&opcodes[..], &[]] {
        let added =
            (0..).find(|id| control.add_rules("alice", 1, &[(rule(*id, opcodes), "")]).is_err()).unwrap();
        assert_eq!(control.rules("alice").unwrap().len() as u32, added);
        assert_eq!(added == 1024, opcodes.is_empty(), "{added}");
        let roles: Vec<_> = (0..1024).map(|role| (QpType::Ud, FlowId(role))).collect();
        control.assign_roles("alice", 1, &roles).unwrap();
        assert!(control.assign_roles("alice", 1, &roles[..1]).is_err());
        // A rule that a later process counts is the last one.
        let own = GroupMember::new(&daemon.open("alice"));
        let peer = own.pair.endpoint();
        own.send_to(peer.gid, peer.qpn, "counted");
        assert_eq!(own.receive(), "counted");
        if opcodes.is_empty() {
            let last = control.rules("alice").unwrap().pop().unwrap();
            assert!(last.1.fired == 1, "{last:?}");
        }
        control.clear_rules("alice").unwrap();
    }
}

/// A rule that drops the first packet of a class.
fn first_is_lost(classes: PacketClasses) -> Rule {
    let selector = Selector { classes: Some(classes), ..Selector::default() };
    Rule { id: RuleId(1), selector, repeat: Repeat::times(1), action: Action::Drop }
}

#[test]
fn the_processes_of_a_host_count_the_packets_of_a_rule_together() {
    let daemon = TestDaemon::with(&DIRECT);
    let mut control = daemon.control();
    control.add_rules("alice", 1, &[(first_is_lost(PacketClasses::Data), "")]).unwrap();
    let statuses = [(); 2].map(|()| {
        // Each device has a slot and a card of its own.
        let ends = ["alice", "bob"].map(|host| ConnectedHost::new(&daemon.open(host), 8192));
        connect(&ends);
        write(&ends)
    });
    assert_eq!(statuses, [CompletionStatus::RetryExceededError, CompletionStatus::Success]);
    assert_eq!(control.rules("alice").unwrap()[0].1.fired, 1);
}

/// A program that ends at once when it sees a message, before it can have acknowledged it.
#[allow(unsafe_code)]
pub fn run_suicide() {
    let host = std::env::var("TEST_HOST").unwrap();
    let end = ConnectedHost::new(&Device::daemon_host(None, Some(&host)).unwrap(), 4096);
    send_line(&end.open_device());
    end.connect(&receive_line().unwrap());
    end.pair.post_recv(&ReceiveRequest { wr_id: 0, sg_list: &[end.region.sge(0, 4096)] }).unwrap();
    send_line("ready");
    while end.queue.poll().is_none() {}
    // SAFETY: the process ends here.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
}

#[test]
fn a_message_that_a_killed_process_has_seen_is_acknowledged() {
    for (variables, theirs) in [(&DIRECT, "alice"), (&DIRECT, "bob"), (&DIRECT_SOCKETS, "alice")] {
        let daemon = TestDaemon::with(variables);
        for round in 0..5 {
            let end = ConnectedHost::new(&daemon.open("alice"), 4096);
            let mut program = process::spawn("suicide", &daemon.name, &[("TEST_HOST", theirs)]);
            end.connect(&program.receive_line());
            program.send_line(&end.open_device());
            assert_eq!(program.receive_line(), "ready");
            end.pair.post_send(&SendRequest::send(round, &[end.region.sge(0, 100)])).unwrap();
            let completion = end.queue.wait_for(TEST_TIMEOUT).expect("the send completes");
            assert_eq!(completion.status, CompletionStatus::Success, "{variables:?} {theirs} {round}");
        }
    }
}

#[test]
fn an_ack_that_a_rule_drops_stays_lost_when_its_process_ends() {
    let daemon = TestDaemon::with(&DIRECT);
    let rule = first_is_lost(PacketClasses::Only(PacketClass::Ack));
    let mut control = daemon.control();
    control.add_rules("bob", 1, &[(rule, "")]).unwrap();
    let end = ConnectedHost::new(&daemon.open("alice"), 4096);
    let mut program = process::spawn("suicide", &daemon.name, &[("TEST_HOST", "bob")]);
    end.connect(&program.receive_line());
    program.send_line(&end.open_device());
    assert_eq!(program.receive_line(), "ready");
    end.pair.post_send(&SendRequest::send(1, &[end.region.sge(0, 100)])).unwrap();
    let completion = end.queue.wait_for(TEST_TIMEOUT).expect("the send completes");
    assert_eq!(completion.status, CompletionStatus::RetryExceededError);
    assert_eq!(control.rules("bob").unwrap()[0].1.fired, 1);
}

#[test]
fn packets_to_a_process_that_is_gone_are_counted_and_explained() {
    for (variables, theirs) in [(&DIRECT, "alice"), (&DIRECT, "bob"), (&DIRECT_SOCKETS, "alice")] {
        let daemon = TestDaemon::with(variables);
        let (sender, gone) =
            (GroupMember::new(&daemon.open("alice")), GroupMember::new(&daemon.open(theirs)));
        let peer = gone.pair.endpoint();
        sender.send_to(peer.gid, peer.qpn, "seen");
        assert_eq!(gone.receive(), "seen");
        drop(gone);
        daemon.wait_until("the end of the receiver", |status| {
            status.hosts.iter().map(|host| host.clients.len()).sum::<usize>() == 1
        });
        let path = std::env::temp_dir().join(format!("softhca-gone-{}-{theirs}", daemon.name));
        let log = File::create(&path).unwrap();
        let mut control = daemon.control();
        control.start_recording(None, Some(log.as_fd())).unwrap();
        let before = control.counters(Some(theirs)).unwrap().rx_dropped;
        sender.send_to(peer.gid, peer.qpn, "lost");
        while control.counters(Some(theirs)).unwrap().rx_dropped == before {
            std::thread::yield_now();
        }
        control.stop_recording().unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let dropped: Vec<_> = text.lines().filter(|line| line.contains("packet_dropped")).collect();
        assert!(dropped.iter().any(|line| line.contains("no-queue-pair")), "{theirs}: {dropped:?}");
    }
}

/// A datagram to a queue pair, from the BTH to the ICRC.
pub fn datagram(from: SocketAddr, to: IpAddr, qpn: Qpn, text: &str) -> Vec<u8> {
    let service = QpType::Ud.service();
    let opcode = Opcode::new(service, Operation::Send, Position::Only, ImmOrInvalidate::None).unwrap();
    let mut header = TransportHeader::new(Bth::new(opcode, qpn, Psn::new(7)));
    header.deth = Some(Deth { qkey: QUEUE_KEY, source_qp: Qpn::new(0x11) });
    let mut bytes = vec![0; 256];
    let at = header.emit(&mut bytes);
    bytes[at..at + text.len()].copy_from_slice(text.as_bytes());
    bytes.truncate(at + text.len() + ICRC_LEN);
    let addressing = AddressHeaders { source_port: from.port(), ..AddressHeaders::between(from.ip(), to) };
    Icrc::write(&addressing, &mut bytes);
    bytes
}

/// The kernel gives a batch of a foreign sender to the slot of its first packet as a whole.
#[test]
fn packets_for_other_slots_in_a_batch_are_handed_over() {
    let daemon = TestDaemon::with(&DIRECT);
    let members: Vec<_> = (0..3).map(|_| GroupMember::new(&daemon.open("alice"))).collect();
    let gone = GroupMember::new(&daemon.open("alice"));
    let gone_qpn = gone.pair.endpoint().qpn;
    drop(gone);
    daemon.wait_until("the end of one", |status| status.hosts[0].clients.len() == 3);
    let to = daemon.control().hosts()[0].address;
    let [.., high, low] = std::process::id().to_be_bytes();
    let own = IpAddr::from([127, 200 | high & 15, low, 77]);
    let mut socket = RoceSocket::bind(SocketAddr::new(own, 0), SocketOptions::default()).unwrap();
    let qpns: Vec<Qpn> = members.iter().map(|member| member.pair.endpoint().qpn).collect();
    // The first packet is for one of them, for no process any more, and for the daemon, which drops it.
    for (round, first) in [qpns[0], qpns[2], gone_qpn, Qpn::new(0x123)].into_iter().enumerate() {
        let texts: Vec<String> = (0..9).map(|number| format!("{round}.{number}.")).collect();
        let packets = texts.iter().zip(qpns.iter().cycle());
        let mut batch = datagram(socket.local_address(), to, first, "x.x.");
        let segment_size = batch.len();
        for (text, qpn) in packets {
            batch.extend(datagram(socket.local_address(), to, *qpn, text));
        }
        assert_eq!(
            socket.send_batch_to(SocketAddr::new(to, ROCE_PORT), 0, segment_size, &batch).unwrap(),
            10
        );
        for (index, member) in members.iter().enumerate() {
            if qpns[index] == first {
                assert_eq!(member.receive(), "x.x.");
            }
            for text in texts.iter().skip(index).step_by(3) {
                assert_eq!(&member.receive(), text, "slot {}", qpns[index].value() >> 15);
            }
        }
    }
}

#[test]
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[allow(unsafe_code)]
fn memory_that_the_program_unmaps_fails_the_work_request() {
    const LENGTH: usize = 1 << 16;
    /// Far from where the kernel puts mappings of other threads: after munmap, none of them takes the place.
    const PLACE: usize = 0x0a00_0000_0000;
    let daemon = TestDaemon::with(&DIRECT);
    let (end, _echo, remote) = connected(&daemon, "alice", "alice");
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: new memory. The kernel takes the address if it is free, and chooses another one if it is not.
    let base = unsafe { libc::mmap(PLACE as *mut libc::c_void, LENGTH, protection, flags, -1, 0) };
    let base = NonNull::new(base.cast::<u8>()).unwrap();
    // SAFETY: the library recovers from accesses to the memory once it is unmapped.
    let own = unsafe { end.domain.register_memory(base, LENGTH, ALL_ACCESS) }.unwrap();
    end.pair.post_send(&SendRequest::rdma_write(1, &[own.sge(0, 100)], remote)).unwrap();
    end.finish();
    // SAFETY: only the region refers to the memory.
    assert_eq!(unsafe { libc::munmap(base.as_ptr().cast(), LENGTH) }, 0);
    end.pair.post_send(&SendRequest::rdma_write(2, &[own.sge(0, 100)], remote)).unwrap();
    let completion = end.queue.wait_for(TEST_TIMEOUT).expect("the request completes");
    assert_eq!(completion.status, CompletionStatus::LocalProtectionError);
}
