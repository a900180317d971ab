//! Compiles the C program of the target `verbs`, and declares the symbol versions of the C library.

use std::path::PathBuf;
use std::{env, fs};

const PROGRAM: &str = "../tests/programs/sequences.c";
const EXPORTS: &str = "../verbs-api/c-abi/exports.txt";

fn main() {
    println!("cargo:rerun-if-changed={PROGRAM}");
    println!("cargo:rerun-if-changed={EXPORTS}");
    println!("cargo:rustc-check-cfg=cfg(has_verbs_header)");
    // Debian's libibverbs-dev.
    if !PathBuf::from("/usr/include/infiniband/verbs.h").exists() {
        println!("cargo:warning=infiniband/verbs.h is not installed: the target verbs does nothing");
        return;
    }
    println!("cargo:rustc-cfg=has_verbs_header");
    cc::Build::new().file(PROGRAM).define("FUZZ", None).compile("sequences");
    let exports = fs::read_to_string(EXPORTS).expect("exports.txt of the C library");
    let nodes = exports.lines().filter_map(|line| line.strip_prefix('[')?.strip_suffix(']'));
    let versions: String = nodes.map(|node| format!("{node} {{ }};\n")).collect();
    let script = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("versions");
    fs::write(&script, versions).expect("a writable folder");
    println!("cargo:rustc-link-arg-bin=verbs=-Wl,--version-script={}", script.display());
}
