//! Where the shared library is, and the folder that programs find it in under its names.

use softhca_queue::control::RuntimeDir;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};

const LIBRARY_FILE: &str = "libsofthca_verbs.so";
/// One file carries all of these: the loader maps it once.
const SONAMES: [&str; 4] = ["libibverbs.so.1", "librdmacm.so.1", "libmlx5.so.1", "libefa.so.1"];

/// The library beside the executable, or in `../lib/softhca`. Where cargo builds, it may also be in `deps`: the
/// newest counts.
fn find_library() -> Result<PathBuf, String> {
    let own = std::env::current_exe().map_err(|error| format!("cannot find myself: {error}"))?;
    let beside = own.parent().unwrap_or(Path::new("/"));
    let places = [beside.join(LIBRARY_FILE), beside.join("../lib/softhca").join(LIBRARY_FILE)];
    let age = |place: &PathBuf| place.metadata().and_then(|found| found.modified()).ok();
    let built = [beside.join("deps").join(LIBRARY_FILE), places[0].clone()];
    let newest = built.into_iter().filter(|place| place.is_file()).max_by_key(age);
    if let Some(found) = newest.or_else(|| places.iter().find(|place| place.is_file()).cloned()) {
        return found.canonicalize().map_err(|error| format!("{}: {error}", found.display()));
    }
    let profile = if beside.ends_with("release") { " --release" } else { "" };
    Err(format!(
        "the shared library is neither {} nor {}: build it with `cargo build{profile} -p softhca-c-abi`",
        places[0].display(),
        places[1].display()
    ))
}

/// A folder that has the library under every name, and nothing else.
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

/// Makes a symbolic link, or leaves it if it is there already.
fn symlink(target: &Path, place: &Path) -> io::Result<()> {
    if std::fs::read_link(place).is_ok_and(|present| present == target) {
        return Ok(());
    }
    let new = place.with_extension(format!("new-{}", std::process::id()));
    let _ = std::fs::remove_file(&new);
    std::os::unix::fs::symlink(target, &new)?;
    std::fs::rename(&new, place)
}
