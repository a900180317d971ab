//! A program's view of its device in `/sys/class` and `/dev`.

use crate::rig::{Rig, free_port, softhca};
use std::path::Path;
use std::process::Command;

/// Whether this machine allows it.
pub fn is_allowed() -> bool {
    let output = Command::new(softhca()).arg("doctor").output().expect("the command runs");
    String::from_utf8_lossy(&output.stdout).contains("ok      view")
}

/// The output of a shell script on a host.
fn run_script(host: &str, script: &str) -> String {
    let seen = Rig::new().run_on(host, &["sh", "-c", script]);
    assert!(seen.success, "{script}: {seen:?}");
    // `exec` says at the end that a shell uses no device.
    let lines: Vec<&str> = seen.text.lines().filter(|line| !line.starts_with("softhca: ")).collect();
    lines.join("\n").trim().into()
}

pub fn the_device_is_visible_in_sys_and_dev() {
    let script = "cd /sys/class/infiniband/softhca0 && \
        for file in hca_type node_type ports/1/state ports/1/link_layer ports/1/gid_attrs/types/0 \
            ports/1/gid_attrs/ndevs/0 ports/1/pkeys/0; do cat $file; done; \
        ls device/net ports/1/gids; cat /sys/class/infiniband_verbs/uverbs0/ibdev; \
        [ -c /dev/infiniband/uverbs0 ] && [ -c /dev/infiniband/rdma_cm ] && echo nodes";
    let lines: &[&str] = &["SoftHCA", "1: CA", "4: ACTIVE", "Ethernet", "RoCE v2", "lo", "0xffff"];
    let others: &[&str] = &["device/net:", "lo", "", "ports/1/gids:", "0", "1", "softhca0", "nodes"];
    assert_eq!(run_script("alice", script), [lines, others].concat().join("\n"));
    assert_eq!(
        run_script("bob", "cd /sys/class/infiniband && ls && ls /dev/infiniband"),
        "softhca1\nrdma_cm\nuverbs1"
    );
}

/// The attributes equal those of verbs: GUIDs and GIDs.
pub fn the_rest_of_sys_and_dev_is_unchanged() {
    let outside = std::fs::read_dir("/sys/class").expect("it is there").count();
    let had = Path::new("/sys/class/infiniband").exists();
    let script = "ls /sys/class | grep -v infiniband | wc -l; cat /sys/class/net/lo/mtu; \
        echo gone > /dev/null; head -c 4 /dev/zero | wc -c; ls /dev/infiniband /dev/shm > /dev/null && echo fine";
    let text = run_script("alice", script);
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
        let text = run_script("alice", script);
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
