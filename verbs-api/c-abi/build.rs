//! Generates trampolines and a version script from `exports.txt`, and assertions from `layout.txt`.
//!
//! rustc passes an anonymous version script for a shared library to the linker. Of the two linkers, lld accepts a
//! second script and GNU ld does not. A wrapper under a name that only GNU ld uses removes rustc's script. Either way
//! the symbols get the versions that programs are linked against.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    for file in ["build.rs", "exports.txt", "layout.txt"] {
        println!("cargo:rerun-if-changed={file}");
    }
    if env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let exports = Exports::read(&fs::read_to_string("exports.txt").expect("exports.txt is here"));
    let script = out.join("exports.map");
    fs::write(out.join("exports.rs"), exports.trampolines()).expect("writable");
    fs::write(&script, exports.version_script()).expect("writable");
    fs::write(
        out.join("layout.rs"),
        assertions(&fs::read_to_string("layout.txt").expect("layout.txt is here")),
    )
    .expect("writable");

    let wrapper = out.join("linker");
    fs::create_dir_all(&wrapper).expect("writable");
    write_wrapper(&wrapper);
    for argument in [
        format!("-Wl,--version-script={}", script.display()),
        "-Wl,-soname,libibverbs.so.1".into(),
        // A program may unload the library, but its threads and descriptors remain until the process ends.
        "-Wl,-z,nodelete".into(),
        format!("-B{}/", wrapper.display()),
    ] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
}

/// One line of `exports.txt`.
struct Export {
    node: String,
    symbol: String,
    function: String,
    /// Not the default version that new programs are linked against.
    is_old: bool,
}

struct Exports(Vec<Export>);

impl Exports {
    fn read(text: &str) -> Exports {
        let mut node = String::new();
        let mut exports = Vec::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
                node = name.into();
                continue;
            }
            let mut words = line.split_whitespace();
            let (Some(symbol), Some(function), None) = (words.next(), words.next(), words.next()) else {
                panic!("exports.txt: {line:?} is not a symbol and a function");
            };
            exports.push(Export {
                node: node.clone(),
                symbol: symbol.trim_end_matches('@').into(),
                function: function.into(),
                is_old: symbol.ends_with('@'),
            });
        }
        Exports(exports)
    }

    fn trampolines(&self) -> String {
        let jump = match env::var("CARGO_CFG_TARGET_ARCH").as_deref() {
            Ok("x86_64") => "jmp",
            Ok("aarch64") => "b",
            other => panic!("no trampoline for {other:?}: x86_64 and aarch64 are known"),
        };
        let mut text = String::new();
        for (index, Export { node, symbol, function, is_old }) in self.0.iter().enumerate() {
            let function = match function.strip_prefix("unsupported::") {
                // A function of its own, which can name the call.
                Some(form) if form != "nothing" => {
                    let result = if form == "null" { "*mut core::ffi::c_void" } else { "core::ffi::c_int" };
                    let _ = writeln!(
                        text,
                        "unsafe extern \"C\" fn unsupported_{index}() -> {result} {{ {function}(\"{symbol}\") }}"
                    );
                    &format!("unsupported_{index}")
                }
                _ => function,
            };
            let name = if *is_old { format!("softhca_old_{index}") } else { symbol.clone() };
            let _ = write!(
                text,
                "core::arch::global_asm!(\".globl {name}\", \".type {name}, @function\", \"{name}: {jump} {{f}}\","
            );
            if *is_old {
                let _ = write!(text, " \".symver {name}, {symbol}@{node}\",");
            }
            let _ = writeln!(text, " f = sym {function});");
        }
        text
    }

    fn version_script(&self) -> String {
        let mut nodes: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for Export { node, symbol, is_old, .. } in &self.0 {
            let symbols = nodes.entry(node).or_default();
            if !is_old {
                symbols.push(symbol);
            }
        }
        let mut text = String::new();
        for (index, (node, symbols)) in nodes.iter().enumerate() {
            let _ = write!(text, "{node} {{");
            if !symbols.is_empty() {
                let _ = write!(text, " global: {};", symbols.join("; "));
            }
            if index == 0 {
                text.push_str(" local: *;");
            }
            text.push_str(" };\n");
        }
        text
    }
}

fn assertions(layout: &str) -> String {
    let mut text = String::new();
    for line in layout.lines() {
        let (place, value) = line.split_once(' ').expect("a place and a number");
        let _ = match place.split_once('.') {
            None => writeln!(text, "const _: () = assert!(size_of::<{place}>() == {value});"),
            Some((structure, field)) => {
                let field = if field == "type" { "r#type" } else { field };
                writeln!(
                    text,
                    "const _: () = assert!(core::mem::offset_of!({structure}, {field}) == {value});"
                )
            }
        };
    }
    text
}

/// Writes a linker wrapper, under the name by which only GNU ld is called, that removes rustc's version script.
fn write_wrapper(folder: &Path) {
    let compiler = env::var("RUSTC_LINKER").unwrap_or_else(|_| "cc".into());
    let found = Command::new(&compiler).arg("-print-prog-name=ld").output().ok();
    let name = found.and_then(|output| String::from_utf8(output.stdout).ok()).unwrap_or_default();
    let linker = if name.trim().is_empty() { "ld" } else { name.trim() };
    let script = format!(
        "#!/bin/sh\n\
         # The version script that rustc writes has no names; ours is given beside it.\n\
         for argument do\n\
         \x20   shift\n\
         \x20   case $argument in\n\
         \x20       --version-script=*/exports.map) set -- \"$@\" \"$argument\" ;;\n\
         \x20       --version-script=*) ;;\n\
         \x20       *) set -- \"$@\" \"$argument\" ;;\n\
         \x20   esac\n\
         done\n\
         exec {linker} \"$@\"\n"
    );
    let path = folder.join("ld");
    fs::write(&path, script).expect("writable");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("ours");
    }
}
