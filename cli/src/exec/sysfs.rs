//! A program's view of its devices in `/sys` and `/dev`.
//!
//! The daemon keeps the files in a folder of the user. A program sees them at the usual places by mounts that are private
//! to it, or by a preloaded library that redirects its lookups. The verbs libraries do not need them. Some programs look
//! there themselves: UCX for a device node, pyverbs for the network interface of a device.

use super::library;
use softhca_control::RuntimeDir;
use softhca_daemon::{MountNamespace, PCI_ROOT};
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The folders in which the kernel lists devices, and those of RDMA devices in them.
const FOLDERS: [(&str, &[&str]); 3] = [
    ("/sys/class", &["infiniband", "infiniband_verbs", "infiniband_mad"]),
    ("/sys/devices", &[PCI_ROOT]),
    ("/dev", &["infiniband"]),
];
/// The prefix of entries in these folders that are hidden: those of real devices.
const HIDDEN: &str = "infiniband";
/// The variable with the folder that lookups are redirected to.
const VARIABLE: &str = "SOFTHCA_SYSFS";

/// How a program sees its devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ViewMethod {
    /// Mounts that only the program sees.
    Mount,
    /// A preloaded library, for dynamically linked programs.
    Preload,
}

/// Parses the name of a method.
pub fn parse_method(text: &str) -> Result<ViewMethod, String> {
    match text {
        "mount" => Ok(ViewMethod::Mount),
        "preload" => Ok(ViewMethod::Preload),
        _ => Err("expected mount or preload".into()),
    }
}

/// The environment with which a program sees its devices.
#[derive(Clone, Default)]
pub struct View {
    pub mounts: Option<MountNamespace>,
    pub variables: Vec<(&'static str, OsString)>,
}

impl View {
    /// The ways to show the folder of a host, the best one first.
    pub fn choices(root: &Path, method: Option<ViewMethod>, libraries: &Path) -> Vec<View> {
        let mut choices = Vec::new();
        if method != Some(ViewMethod::Preload)
            && let Ok(mounts) = build_mounts(root)
        {
            choices.push(View { mounts: Some(mounts), variables: Vec::new() });
        }
        if method != Some(ViewMethod::Mount) {
            choices.push(View { mounts: None, variables: preload_variables(root, libraries) });
        }
        choices
    }
}

/// The variables that make a program preload the library. Without the library, none.
pub fn preload_variables(root: &Path, libraries: &Path) -> Vec<(&'static str, OsString)> {
    let library = libraries.join(library::SYSFS_LIBRARY);
    if !library.is_file() {
        return Vec::new();
    }
    vec![(library::PRELOAD_VARIABLE, library.into()), (VARIABLE, root.into())]
}

/// The mounts that show the folder of a host. Everything that is not an RDMA device stays as it is.
fn build_mounts(root: &Path) -> io::Result<MountNamespace> {
    let assembled = view_folder()?;
    let mut mounts = MountNamespace::new();
    mounts.tmpfs(&assembled);
    for (folder, devices) in FOLDERS {
        let at = assembled.join(folder.trim_start_matches('/').replace('/', "-"));
        mirror_folder(&mut mounts, Path::new(folder), &at)?;
        for device in devices {
            let (from, to) = (root.join(folder.trim_start_matches('/')).join(device), at.join(device));
            // Only an InfiniBand subnet has `infiniband_mad`, and only a RoCE device a place on a bus.
            if from.is_dir() {
                mounts.mkdir(&to);
                mounts.bind(&from, &to);
            }
        }
    }
    for (folder, _) in FOLDERS {
        mounts.bind(&assembled.join(folder.trim_start_matches('/').replace('/', "-")), Path::new(folder));
    }
    mounts.unmount(&assembled);
    Ok(mounts)
}

/// The folder in which views are assembled.
fn view_folder() -> io::Result<PathBuf> {
    let runtime = RuntimeDir::for_user();
    runtime.create()?;
    let folder = runtime.path().join("view");
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// Checks that this machine allows the mounts of a view, by running `/bin/true` with an empty one.
pub fn check_allowed() -> io::Result<()> {
    let root = view_folder()?.with_file_name(format!("view-{}", std::process::id()));
    for (folder, devices) in FOLDERS {
        for device in devices {
            std::fs::create_dir_all(root.join(folder.trim_start_matches('/')).join(device))?;
        }
    }
    let mut command = Command::new("/bin/true");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let started = build_mounts(&root).and_then(|mounts| {
        mounts.apply_to(&mut command);
        command.status()
    });
    let _ = std::fs::remove_dir_all(&root);
    started.map(drop)
}

/// Mirrors a folder except for RDMA devices.
fn mirror_folder(mounts: &mut MountNamespace, from: &Path, at: &Path) -> io::Result<()> {
    mounts.mkdir(at);
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(from)?.map_while(Result::ok).map(|entry| entry.path()).collect();
    entries.sort();
    for entry in entries {
        let Some(name) = entry.file_name() else { continue };
        if name.to_string_lossy().starts_with(HIDDEN) {
            continue;
        }
        let target = at.join(name);
        let kind = std::fs::symlink_metadata(&entry)?.file_type();
        if kind.is_symlink() {
            mounts.symlink(&target, &std::fs::read_link(&entry)?);
            continue;
        }
        if kind.is_dir() {
            mounts.mkdir(&target);
        } else {
            mounts.file(&target, "");
        }
        mounts.bind(&entry, &target);
    }
    Ok(())
}
