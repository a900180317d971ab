//! A program's view of its device in `/sys/class` and `/dev`.

use crate::rig::{Rig, free_port, softhca};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Whether this machine allows mounts.
pub fn is_allowed() -> bool {
    static IS_ALLOWED: LazyLock<bool> = LazyLock::new(|| {
        let output = Command::new(softhca()).arg("doctor").output().expect("the command runs");
        let text = String::from_utf8_lossy(&output.stdout);
        text.contains("ok      view") && !text.contains("no mount namespace")
    });
    *IS_ALLOWED
}

/// The ways to show the view.
#[derive(Clone, Copy, Debug)]
pub enum Method {
    Mount,
    Preload,
    /// The kernel refuses namespaces, and `exec` chooses.
    Refused,
}

impl Method {
    /// The output of a shell script on a host.
    fn run_script(self, host: &str, script: &str) -> String {
        let mut rig = Rig::new();
        let words = ["sh", "-c", script];
        let seen = match self {
            Method::Mount => rig.exec(&["--view", "mount", "--host", host], &words),
            Method::Preload => rig.exec(&["--view", "preload", "--host", host], &words),
            Method::Refused => rig.run_without_namespaces(&["--host", host], &words),
        };
        assert!(seen.success, "{self:?}: {script}: {seen:?}");
        // `exec` says at the end that a shell uses no device.
        let lines: Vec<&str> = seen.text.lines().filter(|line| !line.starts_with("softhca exec: ")).collect();
        lines.join("\n").trim().into()
    }
}

pub fn the_device_is_visible_in_sys_and_dev(method: Method) {
    let script = "cd /sys/class/infiniband/softhca0 && \
        for file in hca_type node_type ports/1/state ports/1/link_layer ports/1/gid_attrs/types/0 \
            ports/1/gid_attrs/ndevs/0 ports/1/pkeys/0 device/numa_node ports/1/counters/symbol_error; do cat $file; done; \
        ls device/net ports/1/gids; cat /sys/class/infiniband_verbs/uverbs0/ibdev; \
        realpath /sys/class/infiniband/softhca0/device; grep SLOT /sys/class/infiniband/softhca0/../../uevent; \
        [ -c /dev/infiniband/uverbs0 ] && [ -c /dev/infiniband/rdma_cm ] && echo nodes";
    let lines: &[&str] = &["SoftHCA", "1: CA", "4: ACTIVE", "Ethernet", "RoCE v2", "lo", "0xffff", "-1", "0"];
    let others: &[&str] = &["device/net:", "lo", "", "ports/1/gids:", "0", "1", "softhca0"];
    let paths: &[&str] = &["/sys/devices/pci5fca:00/5fca:00:00.0", "PCI_SLOT_NAME=5fca:00:00.0", "nodes"];
    assert_eq!(method.run_script("alice", script), [lines, others, paths].concat().join("\n"));
    assert_eq!(
        method.run_script("bob", "cd /sys/class/infiniband && ls && ls /dev/infiniband"),
        "softhca1\nrdma_cm\nuverbs1"
    );
}

/// The C library's `glob` finds the device, with the paths that a program expects, whatever method shows it.
pub fn glob_finds_the_device(method: Method) {
    let script = r#"python3 -c '
import ctypes
found = (ctypes.c_char * 72)()
result = ctypes.CDLL(None).glob(b"/sys/class/infiniband/*/node_type", 0, None, found)
paths = ctypes.POINTER(ctypes.c_char_p).from_buffer(found, 8)
print(result, ctypes.c_size_t.from_buffer(found, 0).value, paths[0].decode())'"#;
    assert_eq!(method.run_script("alice", script), "0 1 /sys/class/infiniband/softhca0/node_type");
}

/// The C library's `nftw`, and `ftw` in its callback, visit the files of the device with the paths that a program expects.
pub fn nftw_visits_the_device(method: Method) {
    let script = r#"python3 -c '
import ctypes
library, number, text = ctypes.CDLL(None), ctypes.c_int, ctypes.c_char_p
def inner(path, status, kind):
    if path.endswith(b"/ibdev"): print(path.decode())
    return 0
inner = ctypes.CFUNCTYPE(number, text, ctypes.c_void_p, number)(inner)
def outer(path, status, kind, place):
    if path.endswith(b"/ports/1/state"):
        print(path.decode(), path[place[0]:].decode(), place[1])
        print(library.ftw(b"/sys/class/infiniband_verbs", inner, 5))
    return 7 * path.endswith(b"/ports/1/rate")
outer = ctypes.CFUNCTYPE(number, text, ctypes.c_void_p, number, ctypes.POINTER(number))(outer)
print(library.nftw(b"/sys/class/infiniband/softhca0/ports/1/state", outer, 5, 0))
print(library.nftw(b"/sys/class/infiniband/softhca0/ports", outer, 5, 0))
print(library.nftw(b"/sys/class/net/lo/mtu", outer, 5, 0))'"#;
    let state = "/sys/class/infiniband/softhca0/ports/1/state state";
    let verbs = "/sys/class/infiniband_verbs/uverbs0/ibdev\n0";
    let text = method.run_script("alice", script);
    assert!(text.starts_with(&format!("{state} 0\n{verbs}\n0\n")), "{text}");
    // The order of a folder's entries is not fixed: the walk may end before it visits `state`.
    assert!(text.ends_with("7\n0"), "{text}");
}

/// The attributes equal those of verbs: GUIDs and GIDs.
pub fn the_rest_of_sys_and_dev_is_unchanged(method: Method) {
    let outside = std::fs::read_dir("/sys/class").expect("it is there").count();
    let had = Path::new("/sys/class/infiniband").exists();
    let script = "ls /sys/class | grep -v infiniband | wc -l; ls -d /sys/class/net/lo/ > /dev/null; cat /sys/class/net/lo/mtu; \
        echo gone > /dev/null; head -c 4 /dev/zero | wc -c; ls /dev/infiniband /dev/shm > /dev/null && echo fine";
    let text = method.run_script("alice", script);
    let lines: Vec<&str> = text.lines().collect();
    let mtu = std::fs::read_to_string("/sys/class/net/lo/mtu").expect("loopback");
    if !had {
        assert_eq!(lines[0], outside.to_string(), "{text}");
    }
    assert_eq!(lines[1..], [mtu.trim(), "4", "fine"], "{text}");
    assert_eq!(Path::new("/sys/class/infiniband").exists(), had, "the view is not visible outside");
    let script = "ibv_devinfo -v | grep -E 'node_guid|GID\\[' | grep -oE '[0-9a-f:]{19,}|::ffff:[0-9.]+' | grep -v '^fe80'; \
        cat /sys/class/infiniband/softhca0/node_guid /sys/class/infiniband/softhca0/ports/1/gids/0";
    if softhca_tests::tools::is_installed("ibv_devinfo") {
        let text = method.run_script("alice", script);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], lines[2], "{text}");
        let address: std::net::Ipv4Addr = lines[1].trim_start_matches("::ffff:").parse().expect("an address");
        let [a, b, c, d] = address.octets();
        assert_eq!(
            lines[3],
            format!("0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"),
            "{text}"
        );
    }
}

pub fn no_view_hides_the_device() {
    if Path::new("/sys/class/infiniband").exists() {
        return;
    }
    let seen = Rig::new().exec(&["--no-view"], &["ls", "/sys/class/infiniband"]);
    assert!(!seen.success, "{seen:?}");
}

/// As an unprivileged user, in a user namespace through which the daemon accesses both ends' memory.
pub fn the_view_needs_no_privileges() {
    let is_root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n");
    if !is_root {
        // The other tests cover this case.
        return;
    }
    let port = free_port();
    let both = format!(
        "id -u; cat /sys/class/infiniband/softhca0/ports/1/state; [ -c /dev/infiniband/uverbs0 ] && echo node; \
         timeout 60 ibv_rc_pingpong -g 0 -n 50 -p {port} > /dev/null & \
         until grep -q \":{port:04X} .* 0A \" /proc/net/tcp /proc/net/tcp6; do sleep 0.1; kill -0 $! || exit 1; done; \
         timeout 60 ibv_rc_pingpong -g 0 -n 50 -p {port} localhost > /dev/null; code=$?; wait; exit $code"
    );
    let folder = std::env::temp_dir().join(format!("softhca-nobody-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the temporary folder can be written");
    let copies = folder.display().to_string();
    let command = softhca();
    let built = command.parent().expect("a folder").display().to_string();
    // The build folder may not be readable for other users. A test build has the library in `deps`.
    let script = format!(
        "library=$(ls -t {built}/libsofthca_verbs.so {built}/deps/libsofthca_verbs.so 2>/dev/null | head -n 1) && \
         cp {built}/softhca $library {copies}/ && chmod 755 {copies}/* && \
         mkdir -m 700 {copies}/run && chown 65534:65534 {copies}/run && chmod 755 {copies} && cd / && \
         XDG_RUNTIME_DIR={copies}/run setpriv --reuid 65534 --regid 65534 --clear-groups \
             {copies}/softhca exec -- sh -c '{both}'"
    );
    let output = Command::new("sh").args(["-c", &script]).output().expect("a shell");
    let _ = std::fs::remove_dir_all(&folder);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text.trim(), "65534\n4: ACTIVE\nnode", "{output:?}");
}

/// The folder of alice's view, which any program can be pointed at.
fn view_root(rig: &Rig) -> String {
    rig.file("softhca/default.view/alice")
}

/// The value of a counter of alice's port, once it is at least `least`.
fn await_counter(rig: &Rig, file: &str, least: u64) -> u64 {
    let path = format!("{}/sys/class/infiniband/softhca0/ports/1/{file}", view_root(rig));
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let value: u64 = text.trim().parse().unwrap_or_else(|_| panic!("{path} has {text:?}"));
        if value >= least {
            return value;
        }
        assert!(Instant::now() < until, "{path} is still {value}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A program that keeps the daemon running, and has used the device.
fn with_traffic(test: impl FnOnce(&mut Rig)) {
    let mut rig = Rig::new();
    let watcher = rig.start(&["ibv_asyncwatch"]);
    let (mut server, mut client) = rig.start_pair(&["ibv_rc_pingpong", "-g", "0", "-n", "50"]);
    let seen = [client.wait(), server.wait()];
    assert!(seen.iter().all(|seen| seen.success), "{seen:?}");
    test(&mut rig);
    watcher.kill();
}

/// The packets that alice's device has sent.
fn packets_sent(rig: &Rig) -> u64 {
    metric(&rig.softhca(&["metrics"]).text, "softhca_sent_pkts_total")
}

pub fn counters_are_live_files() {
    with_traffic(|rig| {
        // Each of 50 messages in each direction has 4096 bytes, counted in words, and the last one is acknowledged.
        assert_eq!(await_counter(rig, "counters/port_rcv_data", 2 * 50 * 4096 / 4), 2 * 50 * 4096 / 4);
        let sent = packets_sent(rig);
        assert_eq!(await_counter(rig, "counters/port_xmit_packets", sent), sent);
        assert_eq!(await_counter(rig, "hw_counters/sent_pkts", sent), sent);
        assert_eq!(await_counter(rig, "hw_counters/out_of_seq_request", 0), 0);
        assert!(rig.softhca(&["link", "softhca0", "down"]).success);
        await_counter(rig, "counters/link_downed", 1);
        let state = format!("{}/sys/class/infiniband/softhca0/ports/1/state", view_root(rig));
        assert_eq!(std::fs::read_to_string(state).expect("a file"), "1: DOWN\n");
        let seen = rig.softhca(&["link"]);
        assert!(
            seen.text.contains("link softhca0/1 state DOWN physical_state DISABLED netdev lo"),
            "{seen:?}"
        );
        assert!(seen.text.contains("link softhca1/1 state ACTIVE"), "{seen:?}");
        assert!(rig.softhca(&["link", "softhca0", "up"]).success);
        let seen = rig.softhca(&["resource"]);
        assert!(seen.text.contains("softhca0: pd 0 cq 0 qp 0 cm_id 0 mr 0 srq 0 ctx 1"), "{seen:?}");
    });
}

/// Fetches a page, once the server listens.
fn fetch(port: u16, path: &str) -> String {
    crate::rig::await_listener(port);
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").expect("a request");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    assert!(text.contains(" 200 OK"), "{text}");
    text
}

/// The value of a metric of alice's device.
fn metric(text: &str, name: &str) -> u64 {
    let line = text.lines().find(|line| line.starts_with(name) && line.contains("device=\"softhca0\""));
    let line = line.unwrap_or_else(|| panic!("no {name} in {text}"));
    let value: f64 = line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number");
    value as u64
}

pub fn node_exporter_exports_the_counters() {
    with_traffic(|rig| {
        let sent = packets_sent(rig);
        assert!(sent >= 102, "50 messages in each direction, and ACKs: {sent}");
        await_counter(rig, "counters/port_xmit_packets", sent);
        await_counter(rig, "counters/port_rcv_data", 2 * 50 * 4096 / 4);
        let (port, own) = (free_port(), free_port());
        let exporter = Command::new("prometheus-node-exporter")
            .args(["--collector.disable-defaults", "--collector.infiniband"])
            .arg(format!("--path.sysfs={}/sys", view_root(rig)))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stderr(Stdio::null())
            .spawn();
        let mut exporter = exporter.expect("it is installed");
        let exported = fetch(port, "/metrics");
        let _ = exporter.kill();
        let _ = exporter.wait();
        let mut server = rig.spawn_softhca(
            &["metrics", "--listen", &format!("127.0.0.1:{own}")],
            &rig.file("metrics"),
            &rig.file("errors"),
        );
        let served = fetch(own, "/metrics");
        let _ = server.kill();
        let _ = server.wait();
        for name in [
            "node_infiniband_port_packets_transmitted_total",
            "node_infiniband_port_data_received_bytes_total",
            "node_infiniband_link_downed_total",
            "node_infiniband_state_id",
        ] {
            assert_eq!(metric(&exported, name), metric(&served, name), "{name}");
        }
        assert_eq!(metric(&exported, "node_infiniband_port_packets_transmitted_total"), sent);
    });
}

/// `softhca env`: variables alone show the view.
pub fn a_shell_with_the_environment_sees_the_device() {
    let rig = Rig::new();
    let seen = rig.softhca(&["env"]);
    assert!(seen.success, "{seen:?}");
    let script = format!("{}\ncat /sys/class/infiniband/softhca0/node_type", seen.text);
    let output = Command::new("sh").args(["-c", &script]).output().expect("a shell");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "1: CA\n", "{output:?}");
}
