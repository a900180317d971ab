//! The shared library, and the folder in which programs find it under its sonames.
//!
//! A package has the library in a file. A command that was installed alone contains it, and unpacks it in the user's
//! cache.

use super::own_path::own_path;
use softhca_control::RuntimeDir;
use std::ffi::{OsStr, OsString};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// The file of the library of verbs.
pub const LIBRARY_FILE: &str = "libsofthca_verbs.so";
/// Redirects the paths of RDMA devices in programs that preload it.
pub const SYSFS_LIBRARY: &str = "libsofthca_sysfs.so";
/// The libraries that the loader loads before those of the program.
pub const PRELOAD_VARIABLE: &str = "LD_PRELOAD";
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

/// The names of the library of management datagrams. Without a subnet, programs use the system's.
const SUBNET_SONAMES: [&str; 2] = ["libibumad.so.3", "libibumad.so"];

/// Finds a library next to the executable or in `../lib/softhca`. In a cargo target folder it may also be in
/// `deps`: the newest wins.
fn find_library(file: &str) -> Result<PathBuf, String> {
    let executable = own_path()?;
    let exe_folder = executable.parent().unwrap_or(Path::new("/"));
    let candidates = [exe_folder.join(file), exe_folder.join("../lib/softhca").join(file)];
    let modified = |path: &PathBuf| path.metadata().and_then(|found| found.modified()).ok();
    let built = [exe_folder.join("deps").join(file), candidates[0].clone()];
    let newest = built.into_iter().filter(|path| path.is_file()).max_by_key(modified);
    if let Some(found) = newest.or_else(|| candidates.iter().find(|path| path.is_file()).cloned()) {
        return found.canonicalize().map_err(|error| format!("{}: {error}", found.display()));
    }
    if let Some((_, contents)) = EMBEDDED.iter().find(|(name, _)| *name == file) {
        return unpack(file, contents);
    }
    let profile = if exe_folder.ends_with("release") { " --release" } else { "" };
    Err(format!(
        "the shared library was not found at {} or {}: build it with `cargo build{profile} -p softhca-c-abi`",
        candidates[0].display(),
        candidates[1].display()
    ))
}

/// The libraries that this command contains. A debug build always has its libraries beside it.
static EMBEDDED: LazyLock<Vec<(&str, &[u8])>> = LazyLock::new(|| {
    #[cfg(all(feature = "libraries", not(debug_assertions)))]
    let libraries = [
        (LIBRARY_FILE, softhca_embed::embed_library!(softhca_verbs)),
        (SYSFS_LIBRARY, softhca_embed::embed_library!(softhca_sysfs)),
    ];
    #[cfg(not(all(feature = "libraries", not(debug_assertions))))]
    let libraries: [(&str, Option<&[u8]>); 0] = [];
    libraries.into_iter().filter_map(|(file, contents)| Some((file, contents?))).collect()
});

/// Writes a library to the user's cache, unless it is there with the same contents. Where no cache can be written, as
/// in a container without a home, the runtime folder takes it.
fn unpack(file: &str, contents: &[u8]) -> Result<PathBuf, String> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    let cached = cache.map(|cache| unpack_below(&cache.join("softhca"), file, contents));
    if let Some(Ok(path)) = cached {
        return Ok(path);
    }
    let user = RuntimeDir::for_user();
    user.create().map_err(|error| error.to_string())?;
    unpack_below(user.path(), file, contents).map_err(|error| {
        format!("cannot unpack {file} in {} or the user's cache: {error}", user.path().display())
    })
}

fn unpack_below(folder: &Path, file: &str, contents: &[u8]) -> io::Result<PathBuf> {
    let mut hasher = DefaultHasher::new();
    contents.hash(&mut hasher);
    // Another build of this version keeps its own file.
    let folder = folder.join(env!("CARGO_PKG_VERSION")).join(format!("{:016x}", hasher.finish()));
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
    let path = folder.join(file);
    if std::fs::read(&path).is_ok_and(|present| present == contents) {
        return Ok(path);
    }
    // Programs that loaded a damaged file keep it; others never see a part of the new one.
    let new = folder.join(format!("{file}.new-{}", std::process::id()));
    std::fs::write(&new, contents)?;
    std::fs::rename(&new, &path)?;
    Ok(path)
}

/// Creates a folder with symlinks to the library under every soname of RDMA.
pub fn library_folder() -> Result<PathBuf, String> {
    create_folder("lib", &SONAMES)
}

/// As [`library_folder`], for programs on an InfiniBand subnet.
pub fn subnet_library_folder() -> Result<PathBuf, String> {
    create_folder("subnet-lib", &[&SONAMES[..], &SUBNET_SONAMES].concat())
}

fn create_folder(prefix: &str, names: &[&str]) -> Result<PathBuf, String> {
    let library = find_library(LIBRARY_FILE)?;
    let user = RuntimeDir::for_user();
    user.create().map_err(|error| error.to_string())?;
    let mut hasher = DefaultHasher::new();
    library.hash(&mut hasher);
    let folder = user.path().join(format!("{prefix}-{:016x}", hasher.finish()));
    let failed = |error: io::Error| format!("{}: {error}", folder.display());
    std::fs::create_dir_all(&folder).map_err(failed)?;
    for name in names {
        symlink(&library, &folder.join(name)).map_err(failed)?;
    }
    // Programs run without it, and may not find the device in /sys.
    if let Ok(sysfs) = find_library(SYSFS_LIBRARY) {
        symlink(&sysfs, &folder.join(SYSFS_LIBRARY)).map_err(failed)?;
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

/// The verbs library, to be preloaded.
pub fn preloaded_verbs(folder: &Path) -> (&'static str, OsString) {
    (PRELOAD_VARIABLE, folder.join(SONAMES[0]).into())
}

/// Makes one list of all libraries to preload: those of SoftHCA, then those that the user set.
pub fn join_preloads(variables: &mut Vec<(&'static str, OsString)>) {
    let mut libraries: Vec<OsString> =
        variables.extract_if(.., |(name, _)| *name == PRELOAD_VARIABLE).map(|(_, library)| library).collect();
    if libraries.is_empty() {
        return;
    }
    libraries.extend(std::env::var_os(PRELOAD_VARIABLE).filter(|others| !others.is_empty()));
    variables.push((PRELOAD_VARIABLE, libraries.join(OsStr::new(":"))));
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_damaged_library_is_replaced_and_a_good_one_is_kept() {
        let place = std::env::temp_dir().join(format!("softhca-unpack-{}", std::process::id()));
        let unpack = || unpack_below(&place, "library.so", b"contents").unwrap();
        let path = unpack();
        assert_eq!(std::fs::read(&path).unwrap(), b"contents");
        let mode = path.parent().unwrap().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700, "only the user can replace a library that programs load");
        let written = path.metadata().unwrap().modified().unwrap();
        assert_eq!((unpack(), path.metadata().unwrap().modified().unwrap()), (path.clone(), written));
        std::fs::write(&path, b"cont").unwrap();
        assert_eq!(std::fs::read(unpack()).unwrap(), b"contents");
        let other = unpack_below(&place, "library.so", b"other").unwrap();
        assert_ne!(other, path, "another build has a file of its own");
        assert_eq!(
            std::fs::read_dir(path.parent().unwrap()).unwrap().count(),
            1,
            "no temporary file is left"
        );
        std::fs::remove_dir_all(&place).unwrap();
    }
}
