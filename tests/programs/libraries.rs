//! Which library a program loads, and what `softhca exec` says if it is another one.

use crate::exec::{compile_with, compiler};
use crate::rig::Rig;
use libtest_mimic::Trial;
use softhca_tests::needs;
use std::path::Path;

/// The tests of this file.
pub fn trials() -> Vec<Trial> {
    vec![
        needs!("python3", libraries_are_found_without_a_version),
        needs!("python3", a_program_that_uses_no_device_is_reported),
        needs!(bundling_tools(), a_bundled_library_is_reported_and_can_be_replaced),
        needs!(perftest(), perftest_uses_both_interfaces),
    ]
}

fn perftest() -> &'static str {
    if compiler() == "cc" { "ib_write_bw" } else { "libibverbs-dev" }
}

const SYSTEM_LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/libibverbs.so.1";

fn bundling_tools() -> &'static str {
    if Path::new(SYSTEM_LIBRARY).exists() { compiler() } else { "libibverbs1" }
}

/// NCCL opens the names without a version first.
fn libraries_are_found_without_a_version() {
    let script = "import ctypes\n\
        for name in ['libibverbs.so', 'librdmacm.so', 'libmlx5.so', 'libefa.so', 'libibverbs.so.1']:\n\
        \x20   library = ctypes.CDLL(name)\n\
        \x20   count = ctypes.c_int(0)\n\
        \x20   library.ibv_get_device_list(ctypes.byref(count))\n\
        \x20   print(name, count.value)\n";
    let seen = Rig::new().run(&["python3", "-c", script]);
    for name in ["libibverbs.so", "librdmacm.so", "libmlx5.so", "libefa.so", "libibverbs.so.1"] {
        assert!(seen.text.contains(&format!("{name} 1")), "{name}: {seen:?}");
    }
    assert!(!seen.text.contains("did not use"), "{seen:?}");
}

fn a_program_that_uses_no_device_is_reported() {
    let mut rig = Rig::new();
    let seen = rig.run(&["true"]);
    assert!(seen.success, "{seen:?}");
    assert!(seen.text.contains("softhca exec: true did not use the emulated device"), "{seen:?}");
    let seen = rig.run(&["ibv_devices"]);
    assert!(!seen.text.contains("did not use"), "{seen:?}");
}

/// A program that is linked against a copy of libibverbs under another name, like the libraries of Python wheels.
fn a_bundled_library_is_reported_and_can_be_replaced() {
    let mut rig = Rig::new();
    let bytes = std::fs::read(SYSTEM_LIBRARY).expect("the system's library");
    // The names have the same length.
    let (name, bundled_name) = (b"libibverbs.so.1\0", b"libibverbs-1.so\0");
    let mut copy = bytes;
    let places: Vec<usize> =
        (0..copy.len() - name.len()).filter(|at| copy[*at..].starts_with(name)).collect();
    assert!(!places.is_empty(), "{SYSTEM_LIBRARY} has no name");
    for place in places {
        copy[place..place + name.len()].copy_from_slice(bundled_name);
    }
    let bundled = rig.file("libibverbs-1.so");
    std::fs::write(&bundled, copy).expect("the temporary folder can be written");
    let folder = Path::new(&bundled).parent().expect("a folder").display().to_string();
    let program = compile_with(&rig, "bundled", &[&bundled, &format!("-Wl,-rpath,{folder}")]);
    let seen = rig.run(&[&program]);
    assert!(seen.text.contains("no device"), "{seen:?}");
    assert!(
        seen.text.contains("did not use the emulated device: it loaded ") && seen.text.contains(&bundled),
        "{seen:?}"
    );
    assert!(seen.text.contains(&format!("softhca exec --preload -- {program}")), "{seen:?}");
    let seen = rig.exec(&["--preload"], &[&program]);
    assert!(seen.success && seen.text.contains("softhca0"), "{seen:?}");
    assert!(!seen.text.contains("did not use"), "{seen:?}");
}

/// perftest uses the ibv_wr interface for devices that it knows, and ibv_post_send for others.
fn perftest_uses_both_interfaces() {
    let mut rig = Rig::new();
    let shim = compile_with(&rig, "vendor", &["-shared", "-fPIC", "-ldl"]);
    for program in ["ib_write_bw", "ib_send_lat", "ib_read_bw", "ib_atomic_bw"] {
        for (preload, is_new) in [(format!("LD_PRELOAD={shim}"), true), ("NONE=1".into(), false)] {
            let words = ["env", &preload, program, "-n", "100"];
            let (mut server, mut client) = rig.start_pair(&words);
            for seen in [client.wait(), server.wait()] {
                assert!(seen.success, "{words:?}: {seen:?}");
                assert_eq!(seen.text.contains("the ibv_wr interface is used"), is_new, "{words:?}: {seen:?}");
            }
        }
    }
}
