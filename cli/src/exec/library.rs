//! The shared library, and the folder in which programs find it under its sonames.

use softhca_queue::control::RuntimeDir;
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};

const LIBRARY_FILE: &str = "libsofthca_verbs.so";
/// One file serves all of these: the loader maps it once. NCCL opens the names without a version first, which exist
/// where the development packages are installed.
const SONAMES: [&str; 8] = [
    "libibverbs.so.1",
    "librdmacm.so.1",
    "libmlx5.so.1",
    "libefa.so.1",
    "libibverbs.so",
    "librdmacm.so",
    "libmlx5.so",
    "libefa.so",
];

/// Finds the library next to the executable or in `../lib/softhca`. In a cargo target folder it may also be in
/// `deps`: the newest wins.
fn find_library() -> Result<PathBuf, String> {
    let executable = std::env::current_exe()
        .map_err(|error| format!("cannot find the path of the executable: {error}"))?;
    let exe_folder = executable.parent().unwrap_or(Path::new("/"));
    let candidates = [exe_folder.join(LIBRARY_FILE), exe_folder.join("../lib/softhca").join(LIBRARY_FILE)];
    let modified = |path: &PathBuf| path.metadata().and_then(|found| found.modified()).ok();
    let built = [exe_folder.join("deps").join(LIBRARY_FILE), candidates[0].clone()];
    let newest = built.into_iter().filter(|path| path.is_file()).max_by_key(modified);
    if let Some(found) = newest.or_else(|| candidates.iter().find(|path| path.is_file()).cloned()) {
        return found.canonicalize().map_err(|error| format!("{}: {error}", found.display()));
    }
    let profile = if exe_folder.ends_with("release") { " --release" } else { "" };
    Err(format!(
        "the shared library was not found at {} or {}: build it with `cargo build{profile} -p softhca-c-abi`",
        candidates[0].display(),
        candidates[1].display()
    ))
}

/// Creates a folder with symlinks to the library under every soname.
pub fn library_folder() -> Result<PathBuf, String> {
    let library = find_library()?;
    let user = RuntimeDir::for_user();
    user.create().map_err(|error| error.to_string())?;
    let mut hasher = DefaultHasher::new();
    library.hash(&mut hasher);
    let folder = user.path().join(format!("lib-{:016x}", hasher.finish()));
    let failed = |error: io::Error| format!("{}: {error}", folder.display());
    std::fs::create_dir_all(&folder).map_err(failed)?;
    for name in SONAMES {
        symlink(&library, &folder.join(name)).map_err(failed)?;
    }
    Ok(folder)
}

/// Creates a symlink unless it already exists.
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    if std::fs::read_link(link).is_ok_and(|present| present == target) {
        return Ok(());
    }
    let new = link.with_extension(format!("new-{}", std::process::id()));
    let _ = std::fs::remove_file(&new);
    std::os::unix::fs::symlink(target, &new)?;
    std::fs::rename(&new, link)
}

/// The libraries to load before all others: SoftHCA's, then those that the user set.
pub fn preload_list(folder: &Path) -> OsString {
    let mut list = OsString::from(folder.join(SONAMES[0]));
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }
    list
}

/// The library search path of a program: `folder`, then the folders that the user set.
pub fn search_path(folder: &Path) -> OsString {
    let mut path = OsString::from(folder);
    if let Some(others) = std::env::var_os("LD_LIBRARY_PATH").filter(|others| !others.is_empty()) {
        path.push(":");
        path.push(others);
    }
    path
}
