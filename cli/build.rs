//! Finds the commit for `softhca --version`: from `SOFTHCA_COMMIT`, from a packaged crate, or from git. Embeds the files
//! of the exercises.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=SOFTHCA_COMMIT");
    println!("cargo:rerun-if-changed=build.rs");
    let commit = std::env::var("SOFTHCA_COMMIT").ok().or_else(packaged).or_else(cloned).unwrap_or_default();
    let short: String = commit.trim().chars().take_while(char::is_ascii_hexdigit).take(12).collect();
    let text = if short.is_empty() { String::new() } else { format!(" ({short})") };
    println!("cargo:rustc-env=SOFTHCA_COMMIT={text}");
    embed_exercises();
}

/// Writes the table of the files in `exercises`: path and contents, in the order of the paths.
fn embed_exercises() {
    println!("cargo:rerun-if-changed=exercises");
    let root =
        PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("exercises");
    let mut table = String::from("&[\n");
    for path in files_below(&root) {
        let name = path.strip_prefix(&root).expect("a file below it");
        let _ = writeln!(table, "    ({name:?}, include_bytes!({path:?})),");
    }
    table.push_str("]\n");
    let output = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it")).join("exercises.rs");
    std::fs::write(output, table).expect("cargo's folder can be written");
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder of the crate");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    let below = |path: PathBuf| if path.is_dir() { files_below(&path) } else { vec![path] };
    paths.into_iter().flat_map(below).collect()
}

/// The commit from which `cargo package` made this crate.
fn packaged() -> Option<String> {
    let text = std::fs::read_to_string(".cargo_vcs_info.json").ok()?;
    Some(text.split_once("\"sha1\":")?.1.split('"').nth(1)?.to_owned())
}

/// The commit that is checked out. Cargo runs this again after the next commit or checkout.
fn cloned() -> Option<String> {
    let git = |words: &[&str]| {
        let output = Command::new("git").args(words).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    if Path::new(&log).exists() {
        println!("cargo:rerun-if-changed={log}");
    }
    // The repository around an unpacked tarball is another project's.
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    git(&["rev-parse", "HEAD"])
}
