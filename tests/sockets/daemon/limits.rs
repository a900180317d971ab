//! Resource limits of a client, the number of clients, and access control.

use super::data::ALL_ACCESS;
use super::process::{self, TestDaemon, send_line};
use softhca::{AddressVector, DaemonControl, Device, Error, QpType};
use softhca_control::{FramedMessage, Hello, MessageReader, Welcome, decode, encode, send_message};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;

#[test]
fn a_client_is_limited_to_the_device_attributes() {
    let daemon = TestDaemon::with(&[("TEST_QUEUE_PAIRS", "3"), ("TEST_KEYS", "2")]);
    let device = daemon.open("alice");
    let limits = device.attributes().limits;
    assert_eq!((limits.max_qp, limits.max_mr), (3, 2));
    let context = device.open();
    let domain = context.allocate_protection_domain().unwrap();
    let queue = context.create_completion_queue(16).unwrap();
    let make = || domain.create_queue_pair(QpType::Rc, &queue).build();
    let mut pairs: Vec<_> = (0..3).map(|_| make().unwrap()).collect();
    let error = make().err().expect("the fourth is too many");
    assert!(error.errno() == libc::ENOMEM && error.to_string().contains('3'), "{error}");
    let regions: Vec<_> = (0..2).map(|_| domain.allocate_region(4096, ALL_ACCESS).unwrap()).collect();
    assert_eq!(domain.allocate_region(4096, ALL_ACCESS).err().unwrap().errno(), libc::ENOMEM);
    // Another client has its own limits, and destroyed resources can be created again.
    let other = daemon.open("alice").open();
    let other_domain = other.allocate_protection_domain().unwrap();
    let other_queue = other.create_completion_queue(16).unwrap();
    other_domain.create_queue_pair(QpType::Rc, &other_queue).build().unwrap();
    pairs.pop();
    make().unwrap();
    drop(regions);
    domain.allocate_region(4096, ALL_ACCESS).unwrap();
}

/// Creates resources until an error: their number, and the error.
fn exhaust<T>(mut make: impl FnMut() -> Result<T, Error>) -> (Vec<T>, Error) {
    let mut made = Vec::new();
    loop {
        match make() {
            Ok(one) => made.push(one),
            Err(error) => return (made, error),
        }
        assert!(made.len() < 1000, "no limit was reached");
    }
}

#[test]
fn every_resource_is_limited_and_can_be_created_again() {
    let share = "max_cq = 3\nmax_srq = 2\nmax_pd = 4\n\
                 max_ah = 5\nmax_xrcd = 1\n";
    let daemon = TestDaemon::with(&[("TEST_LIMITS", share)]);
    let device = daemon.open("alice");
    let limits = device.attributes().limits;
    let attributes = [limits.max_cq, limits.max_srq, limits.max_pd, limits.max_ah, limits.max_xrcd];
    assert_eq!(attributes, [3, 2, 4, 5, 1]);
    let context = device.open();
    let domain = context.allocate_protection_domain().unwrap();
    let check = |what: &str, count: usize, limit: usize, error: Error| {
        assert_eq!((count, error.errno()), (limit, libc::ENOMEM), "{what}: {error}");
        assert!(error.to_string().contains(what), "{what}: {error}");
    };
    for _ in 0..2 {
        let (made, error) = exhaust(|| context.create_completion_queue(16));
        check("completion queue", made.len(), 3, error);
        let (made, error) = exhaust(|| domain.create_shared_receive_queue(16, 1));
        check("shared receive queue", made.len(), 2, error);
        let (made, error) = exhaust(|| context.allocate_protection_domain());
        check("protection domain", made.len(), 3, error);
        let vector = AddressVector::to(context.gid(0).unwrap());
        let (made, error) = exhaust(|| domain.create_address_handle(vector));
        check("address handle", made.len(), 5, error);
        let (made, error) = exhaust(|| context.open_xrc_domain());
        check("XRC domain", made.len(), 1, error);
    }
}

#[test]
fn rings_and_mappings_are_limited() {
    // A CQE takes 64 bytes: three rings of 1024 fit.
    let variables = [("TEST_LIMITS", "max_ring_bytes = 250000"), ("TEST_CONFIG", "data_path = 'daemon'")];
    let daemon = TestDaemon::with(&variables);
    let context = daemon.open("alice").open();
    for _ in 0..2 {
        let (made, error) = exhaust(|| context.create_completion_queue(1024));
        assert!(!made.is_empty() && made.len() < 10, "{}", made.len());
        assert!(error.errno() == libc::ENOMEM && error.to_string().contains("250000"), "{error}");
        // A resized ring counts once.
        made[0].resize(16).unwrap();
    }
}

/// A process that creates completion queues or regions until an error, and keeps them: prints their number and the error.
pub fn run_hoarder() {
    let context = Device::daemon_host(None, Some("alice")).unwrap().open();
    let domain = context.allocate_protection_domain().unwrap();
    if std::env::var("TEST_HOARD").is_ok_and(|what| what == "regions") {
        keep(exhaust(|| domain.allocate_region(4096, ALL_ACCESS)));
    } else {
        keep(exhaust(|| context.create_completion_queue(4)));
    }
}

fn keep<T>((made, error): (Vec<T>, Error)) {
    send_line(&format!("{} {error}", made.len()));
    while process::receive_line().is_some() {}
}

fn hoard(daemon: &TestDaemon, what: &str) -> (process::Process, usize, String) {
    let mut hoarder = process::spawn("hoarder", &daemon.name, &[("TEST_HOARD", what)]);
    let line = hoarder.receive_line();
    let (count, error) = line.split_once(' ').unwrap();
    (hoarder, count.parse().unwrap(), error.into())
}

#[test]
fn one_process_cannot_take_the_mappings_of_others() {
    // Each of 10 clients is guaranteed 20 mappings; a process may have half of the other 600 besides.
    let path = ("TEST_CONFIG", "data_path = 'daemon'");
    let daemon = TestDaemon::with(&[("TEST_MAPPINGS", "800"), ("TEST_CLIENTS", "10"), path]);
    let hoarders = [(); 3].map(|()| hoard(&daemon, "completion queues"));
    let [(first, count, error), (_, second, _), (third, third_count, third_error)] = hoarders;
    assert_eq!((count, second, third_count), (320, 320, 20));
    assert!(error.contains(&format!("process {}", first.id())) && error.contains("320 mappings"), "{error}");
    assert!(third_error.contains("800 mappings"), "{third_error}");
    // A process with several connections has one share.
    let contexts = [(); 4].map(|()| daemon.open("bob").open());
    let made: Vec<_> =
        contexts.iter().map(|context| exhaust(|| context.create_completion_queue(4)).0).collect();
    assert_eq!(made.iter().map(Vec::len).collect::<Vec<_>>(), [20, 0, 0, 0]);
    drop(made);
    // What a process that ends had is free for others.
    drop((first, third));
    daemon.wait_until("the end of two processes", |status| status.hosts[0].clients.len() == 1);
    assert_eq!(exhaust(|| contexts[0].create_completion_queue(4)).0.len(), 320);
}

/// The mappings of memory that a process has passed to the daemon.
fn passed_memory(daemon: &TestDaemon) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", daemon.process.id())).unwrap();
    maps.lines().filter(|line| line.contains("memfd:")).count()
}

#[test]
fn the_regions_of_ended_processes_are_given_back() {
    let path = ("TEST_CONFIG", "data_path = 'daemon'");
    let daemon = TestDaemon::with(&[("TEST_MAPPINGS", "400"), ("TEST_CLIENTS", "4"), path]);
    let before = passed_memory(&daemon);
    let counts: Vec<usize> = (0..4)
        .map(|round| {
            let (mut hoarder, count, error) = hoard(&daemon, "regions");
            assert!(error.contains("mappings"), "{error}");
            assert!(passed_memory(&daemon) >= before + count, "{count} regions");
            match round % 2 {
                0 => hoarder.kill(),
                _ => drop(hoarder),
            }
            daemon.wait_until("the end of the process", |status| status.hosts[0].clients.is_empty());
            count
        })
        .collect();
    assert!(counts[0] > 100 && counts.iter().all(|count| *count == counts[0]), "{counts:?}");
    assert_eq!(passed_memory(&daemon), before);
}

#[test]
fn sizes_beyond_the_device_limits_are_rejected_before_allocation() {
    let daemon = TestDaemon::start();
    let context = daemon.open("alice").open();
    let domain = context.allocate_protection_domain().unwrap();
    let queue = context.create_completion_queue(16).unwrap();
    for slots in [0, 1 << 22, u32::MAX] {
        assert_eq!(context.create_completion_queue(slots).err().unwrap().errno(), libc::EINVAL);
    }
    let pair = || domain.create_queue_pair(QpType::Rc, &queue);
    for builder in [
        pair().max_send_wr(16_385),
        pair().max_recv_wr(16_385),
        pair().max_send_sge(33),
        pair().max_inline_data(1025),
    ] {
        assert_eq!(builder.build().err().unwrap().errno(), libc::EINVAL);
    }
}

#[test]
fn a_full_daemon_says_which_limit_is_reached_and_still_answers_commands() {
    let daemon = TestDaemon::with(&[("TEST_CLIENTS", "4"), ("TEST_LIMITS", "max_cq = 3")]);
    let own = [daemon.open("alice"), daemon.open("bob")];
    let open = || Device::daemon_host(Some(&daemon.name), None).err().expect("too many");
    let error = open();
    assert!(error.errno() == libc::EMFILE && error.to_string().contains("limit of a process"), "{error}");
    let _others = [hoard(&daemon, "completion queues"), hoard(&daemon, "completion queues")];
    drop(own);
    daemon.wait_until("the end of two clients", |status| {
        status.hosts.iter().map(|host| host.clients.len()).sum::<usize>() == 2
    });
    let _own = [daemon.open("alice"), daemon.open("bob")];
    let error = open();
    assert!(error.to_string().contains("4 clients, which is its limit (max_clients)"), "{error}");
    // The connections of a process are limited as well.
    let (controls, error) = exhaust(|| DaemonControl::connect(Some(&daemon.name)));
    assert!(matches!(error, Error::DaemonRefused { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("10 connections") && !text.contains("start one"), "{text}");
    // Connections that ended a moment ago may still count.
    assert!((1..=8).contains(&controls.len()), "{}", controls.len());
    drop(controls);
    // The daemon ends the connections soon.
    let deadline = std::time::Instant::now() + process::TEST_TIMEOUT;
    let mut control = loop {
        match DaemonControl::connect(Some(&daemon.name)) {
            Ok(control) => break control,
            Err(error) => assert!(std::time::Instant::now() < deadline, "{error}"),
        }
    };
    control.status().unwrap();
}

/// A process of another user that tries to open a device, or files.
pub fn run_unprivileged() {
    if let Ok(paths) = std::env::var("TEST_PATHS") {
        let opened: Vec<&str> = paths.split(':').filter(|path| can_open(path)).collect();
        return send_line(&format!("opened {opened:?}"));
    }
    if let Some(path) = std::env::var_os("TEST_SOCKET") {
        // Without the library, directly to the socket.
        let stream = UnixStream::connect(path).unwrap();
        let hello = FramedMessage::frame(&encode(&Hello::current()), 0);
        send_message(stream.as_fd(), &hello, 0, &[]).unwrap();
        let frame = MessageReader::default().read(stream.as_fd()).unwrap().unwrap();
        let answer: Result<Welcome, String> = decode(&frame.bytes).unwrap();
        return send_line(&answer.map_or_else(|why| format!("rejected: {why}"), |_| "accepted".into()));
    }
    match Device::daemon() {
        Err(error @ (Error::NoDaemon { .. } | Error::DaemonRefused { .. })) => {
            send_line(&format!("rejected: {error}"))
        }
        Err(error) => send_line(&format!("another error: {error}")),
        Ok(_) => send_line("accepted"),
    }
}

#[test]
fn another_user_cannot_open_the_folder() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can switch to another user");
        return;
    }
    let daemon = TestDaemon::start();
    let folder = softhca_control::RuntimeDir::for_user();
    // The other user needs access to the folder to reach the credentials check.
    let runtime = folder.path().parent().unwrap().display().to_string();
    let variables = match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(_) => vec![("XDG_RUNTIME_DIR", runtime.as_str())],
        None => vec![],
    };
    let mut stranger = process::spawn_as("stranger", &daemon.name, &variables, Some(65_534));
    let answer = stranger.receive_line();
    assert!(answer.starts_with("rejected"), "{answer}");
}

#[test]
fn another_user_who_reaches_the_socket_is_rejected_by_its_credentials() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can switch to another user");
        return;
    }
    let folder = std::env::temp_dir().join(format!("softhca-open-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let daemon = TestDaemon::with(&[("XDG_RUNTIME_DIR", folder.to_str().unwrap())]);
    let socket = folder.join("softhca").join(format!("{}.sock", daemon.name));
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    for path in [&folder, &folder.join("softhca"), &socket] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    }
    let variables = [("TEST_SOCKET", socket.to_str().unwrap())];
    let mut stranger = process::spawn_as("stranger", &daemon.name, &variables, Some(65_534));
    let answer = stranger.receive_line();
    assert!(answer.starts_with("rejected") && answer.contains("65534"), "{answer}");
    drop(daemon);
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Whether this process can open a file, or list a folder.
fn can_open(path: &str) -> bool {
    std::fs::File::open(path).is_ok() || std::fs::read_dir(path).is_ok()
}

#[test]
fn another_user_cannot_open_rings_regions_sockets_or_recordings() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can switch to another user");
        return;
    }
    let daemon = TestDaemon::start();
    let (end, echo, _) = super::data::connected(&daemon, "alice", "bob");
    let folder = softhca_control::RuntimeDir::for_user();
    let mut paths = vec![folder.path().display().to_string()];
    paths.extend(
        [folder.socket(&daemon.name), folder.lock(&daemon.name)].map(|path| path.display().to_string()),
    );
    // Rings and regions are memfds, which have no name: a process reaches them through the descriptors and the memory
    // of the processes that map them.
    for pid in [daemon.process.id(), echo.id(), std::process::id()] {
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        paths.extend(descriptors.map(|entry| entry.unwrap().path().display().to_string()));
        paths.extend([format!("/proc/{pid}/mem"), format!("/proc/{pid}/map_files")]);
    }
    assert!(paths.iter().filter(|path| can_open(path)).count() > 10, "root can open many of {paths:?}");
    let variables = [("TEST_PATHS", paths.join(":"))];
    let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let mut stranger = process::spawn_as("stranger", &daemon.name, &variables, Some(65_534));
    assert_eq!(stranger.receive_line(), "opened []");
    drop(end);
}

#[test]
fn control_calls_are_answered_while_the_device_is_busy() {
    let daemon = TestDaemon::start();
    let (end, _echo, remote) = super::data::connected(&daemon, "alice", "bob");
    let entries = [end.region.sge(0, 1 << 20)];
    let mut posted = 0;
    let mut fill = || {
        for _ in 0..8 {
            end.pair.post_send(&softhca::SendRequest::rdma_write(posted, &entries, remote)).unwrap();
            posted += 1;
        }
    };
    fill();
    for _ in 0..20 {
        fill();
        // Each call needs the lock that the engine thread takes for every poll.
        let domain = end.context.allocate_protection_domain().unwrap();
        drop(domain.allocate_region(4096, ALL_ACCESS).unwrap());
        daemon.control().status().unwrap();
        for _ in 0..8 {
            end.finish();
        }
    }
}

/// MPI and UCX jobs open a device in each process, and in each worker.
#[test]
fn two_hundred_clients_are_served_at_once() {
    let most = softhca_daemon::Config::default().max_clients;
    assert!(most >= 1024, "{most}");
    let daemon = TestDaemon::with(&[("TEST_CLIENTS", &most.to_string())]);
    let clients: Vec<_> = (0..200).map(|index| daemon.open(["alice", "bob"][index % 2])).collect();
    for client in &clients {
        client.open().create_completion_queue(16).unwrap();
    }
}
