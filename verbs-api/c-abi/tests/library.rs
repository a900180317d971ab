//! The library matches the one that programs are linked against: every symbol with its version, and every structure
//! with the layout of the headers. Both tests need external tools; a test whose tool is missing is ignored, and fails
//! with SOFTHCA_REQUIRE_TOOLS=1.

use libtest_mimic::{Arguments, Failed, Trial};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

fn main() -> ExitCode {
    if !cfg!(target_os = "linux") {
        return ExitCode::SUCCESS;
    }
    let has_nm = runs("nm", &["--version"]);
    let has_headers = Path::new("/usr/include/infiniband/verbs.h").is_file()
        && Path::new("/usr/include/rdma/rdma_cma.h").is_file()
        && runs("cc", &["--version"]);
    let tests = vec![
        needs(true, "", "the_exports_are_those_of_rdma_core", the_exports_are_those_of_rdma_core),
        needs(true, "", "every_rejected_call_can_be_explained", every_rejected_call_can_be_explained),
        needs(true, "", "the_docs_name_every_unsupported_call", the_docs_name_every_unsupported_call),
        needs(has_nm, "nm", "every_symbol_has_its_version", every_symbol_has_its_version),
        needs(
            has_headers && cfg!(target_arch = "x86_64"),
            "cc with libibverbs-dev and librdmacm-dev",
            "every_structure_is_that_of_the_headers",
            every_structure_is_that_of_the_headers,
        ),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit_code()
}

fn runs(program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn needs(is_there: bool, what: &str, name: &str, test: fn()) -> Trial {
    if is_there {
        return Trial::test(name, move || {
            test();
            Ok(())
        });
    }
    let reason = format!("{what} is not installed");
    if std::env::var_os("SOFTHCA_REQUIRE_TOOLS").is_some_and(|value| value == "1") {
        return Trial::test(name, || Err(Failed::from(reason)));
    }
    eprintln!("skipped: {reason}");
    Trial::test(name, || Ok(())).with_ignored_flag(true)
}

fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The library that was built for this test: in the folder that it runs from.
fn library() -> PathBuf {
    std::env::current_exe().expect("a test runs from a file").with_file_name("libsofthca_verbs.so")
}

/// The symbols of `exports.txt` in the format of nm.
fn promised() -> BTreeSet<String> {
    symbols(&std::fs::read_to_string(folder().join("exports.txt")).expect("exports.txt is here"))
}

/// The symbols of a list, in the format of nm.
fn symbols(text: &str) -> BTreeSet<String> {
    let mut node = "";
    let mut promised = BTreeSet::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            node = name;
            continue;
        }
        let symbol = line.split_whitespace().next().expect("a symbol");
        promised.insert(match symbol.strip_suffix('@') {
            Some(old) => format!("{old}@{node}"),
            None => format!("{symbol}@@{node}"),
        });
    }
    promised
}

fn every_symbol_has_its_version() {
    let library = library();
    assert!(library.is_file(), "{} is not there: cargo build -p softhca-c-abi", library.display());
    let output = Command::new("nm")
        .args(["-D", "--defined-only", "--with-symbol-versions"])
        .arg(&library)
        .output()
        .expect("nm runs");
    let text = String::from_utf8(output.stdout).expect("nm writes text");
    let exported: BTreeSet<String> = text
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let (_, kind, symbol) = (words.next()?, words.next()?, words.next()?);
            (kind == "T").then(|| symbol.into())
        })
        .collect();
    let promised = promised();
    let missing: Vec<_> = promised.difference(&exported).collect();
    let surplus: Vec<_> = exported.difference(&promised).collect();
    assert!(missing.is_empty() && surplus.is_empty(), "missing {missing:?}, besides {surplus:?}");
}

/// `rdma-core.txt` holds the symbols of the newest release.
fn the_exports_are_those_of_rdma_core() {
    let text = std::fs::read_to_string(folder().join("rdma-core.txt")).expect("rdma-core.txt is here");
    let upstream = symbols(&text);
    assert!(upstream.len() > 350, "only {} symbols: is rdma-core.txt whole?", upstream.len());
    let without_default = |symbol: &String| symbol.replace("@@", "@");
    let exported: BTreeSet<String> = promised().iter().map(without_default).collect();
    let upstream: BTreeSet<String> = upstream.iter().map(without_default).collect();
    let missing: Vec<_> = upstream.difference(&exported).collect();
    // ibv_devinfo and pyverbs use one private symbol, whose node differs between releases.
    let surplus: Vec<_> =
        exported.difference(&upstream).filter(|symbol| !symbol.contains("@IBVERBS_PRIVATE_")).collect();
    assert!(missing.is_empty() && surplus.is_empty(), "missing {missing:?}, besides {surplus:?}");
}

/// No function returns an errno on its own: each rejected call passes through `Rejection`, which can explain it.
fn every_rejected_call_can_be_explained() {
    let mut files = vec![folder().join("src")];
    let mut found = Vec::new();
    let mut read = 0;
    while let Some(path) = files.pop() {
        if path.is_dir() {
            files.extend(
                std::fs::read_dir(&path).expect("sources").map(|entry| entry.expect("a file").path()),
            );
            continue;
        }
        if path.ends_with("errno.rs") {
            continue;
        }
        read += 1;
        let text = std::fs::read_to_string(&path).expect("a source file");
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().expect("a line");
            let returned = code.contains("return libc::E") || code.contains("return -libc::E");
            // The errno of a CM event is a value there.
            let is_arm = code.contains("=> libc::E") && !path.ends_with("event.rs");
            let code = code.trim();
            let is_value =
                code.starts_with("libc::E") && !code.ends_with(',') || code.contains("} else { libc::E");
            if returned || is_arm || is_value || code.contains("__errno_location") {
                found.push(format!("{}:{}: {}", path.display(), number + 1, line.trim()));
            }
        }
    }
    assert!(read > 20 && found.is_empty(), "{read} files: {found:#?}");
}

/// The table has one row for all functions of libmlx5 and libefa, and one for the versions of 2006.
fn the_docs_name_every_unsupported_call() {
    let docs =
        std::fs::read_to_string(folder().join("../../docs/reference/c-programs.md")).expect("the page");
    let exports = std::fs::read_to_string(folder().join("exports.txt")).expect("exports.txt is here");
    let is_listed = |symbol: &&str| {
        let has_own_row = symbol.contains("mlx5dv_") || symbol.starts_with("efadv_") || symbol.ends_with('@');
        // Conversions for another interface of the kernel, which do nothing.
        has_own_row
            || symbol.contains("_from_kern")
            || symbol.contains("_to_kern")
            || docs.contains(&format!("`{}`", symbol.trim_start_matches('_')))
    };
    let missing: Vec<&str> = exports
        .lines()
        .filter_map(|line| Some(line.split_once(" unsupported::")?.0))
        .filter(|symbol| !is_listed(symbol))
        .collect();
    assert!(missing.is_empty(), "not in the table of unsupported calls: {missing:?}");
}

fn every_structure_is_that_of_the_headers() {
    let layout = std::fs::read_to_string(folder().join("layout.txt")).expect("layout.txt is here");
    let mut program = String::from(
        "#include <stddef.h>\n#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n\
         #define HERE(what, is) _Static_assert((what) == (is), #what)\n",
    );
    let mut checks = 0;
    for line in layout.lines() {
        let (place, value) = line.split_once(' ').expect("a place and a number");
        match place.split_once('.') {
            None => program.push_str(&format!("HERE(sizeof(struct {place}), {value});\n")),
            Some((structure, field)) => {
                program.push_str(&format!("HERE(offsetof(struct {structure}, {field}), {value});\n"));
            }
        }
        checks += 1;
    }
    assert!(checks > 400, "only {checks} checks: is layout.txt whole?");
    let place = std::env::temp_dir().join(format!("softhca-layout-{}.c", std::process::id()));
    std::fs::write(&place, program).expect("the temporary folder can be written");
    let output = Command::new("cc").args(["-fsyntax-only", "-x", "c"]).arg(&place).output().expect("cc runs");
    let _ = std::fs::remove_file(&place);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
