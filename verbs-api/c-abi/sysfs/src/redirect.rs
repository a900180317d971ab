//! Which paths are redirected, and where to.

use core::ffi::{CStr, c_char};
use core::mem::MaybeUninit;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

const VARIABLE: &CStr = c"SOFTHCA_SYSFS";
const MAX_PATH: usize = libc::PATH_MAX as usize;

/// The folders that are redirected, by their components. `softhca_daemon` creates them.
const FOLDERS: [&[&[u8]]; 4] = [
    &[b"sys", b"class", b"infiniband"],
    &[b"sys", b"class", b"infiniband_verbs"],
    &[b"sys", b"devices", b"pci5fca:00"],
    &[b"dev", b"infiniband"],
];

/// The folder that the variable named when it was first needed; empty without the variable.
fn root() -> &'static [u8] {
    static ROOT: AtomicPtr<c_char> = AtomicPtr::new(ptr::null_mut());
    let mut root = ROOT.load(Ordering::Acquire);
    if root.is_null() {
        // SAFETY: the name is a string. A copy outlives changes of the environment; a race leaks one.
        root = unsafe {
            let value = libc::getenv(VARIABLE.as_ptr());
            libc::strdup(if value.is_null() { c"".as_ptr() } else { value })
        };
        if root.is_null() {
            return &[];
        }
        ROOT.store(root, Ordering::Release);
    }
    // SAFETY: a string that is never freed.
    unsafe { CStr::from_ptr(root) }.to_bytes()
}

/// The rest of a path behind the components of a folder, if it is that folder or below it.
fn rest_below<'a>(mut path: &'a [u8], folder: &[&[u8]]) -> Option<&'a [u8]> {
    for component in folder {
        loop {
            path = path.strip_prefix(b"/")?;
            match path {
                [b'/', ..] => {}
                [b'.', b'/', ..] => path = &path[1..],
                _ => break,
            }
        }
        path = path.strip_prefix(*component)?;
        if !matches!(path.first(), None | Some(b'/')) {
            return None;
        }
    }
    Some(path)
}

/// Writes the redirected path, with its final null byte. `None` if the path stays as it is.
fn redirect(path: &[u8], root: impl FnOnce() -> &'static [u8], into: &mut [MaybeUninit<u8>]) -> Option<()> {
    let (folder, rest) = FOLDERS.iter().find_map(|folder| Some((folder, rest_below(path, folder)?)))?;
    let root = root();
    if root.is_empty() {
        return None;
    }
    let components = folder.iter().flat_map(|component| [&b"/"[..], component]);
    let mut at = 0;
    for part in [root].into_iter().chain(components).chain([rest, b"\0"]) {
        // A path that is too long stays as it is, and is not found.
        let place = into.get_mut(at..at + part.len())?;
        place.iter_mut().zip(part).for_each(|(to, from)| {
            to.write(*from);
        });
        at += part.len();
    }
    Some(())
}

/// Calls a function with a path, redirected if it is one of an RDMA device. Returns whether it was.
///
/// # Safety
/// `path` is null or a string.
pub unsafe fn with_redirected<R>(path: *const c_char, call: impl FnOnce(*const c_char) -> R) -> (R, bool) {
    // SAFETY: not null, so a string.
    if path.is_null() || unsafe { *path } != b'/' as c_char {
        return (call(path), false);
    }
    let mut place = [MaybeUninit::<u8>::uninit(); MAX_PATH];
    // SAFETY: a string, as the caller guarantees.
    let text = unsafe { CStr::from_ptr(path) }.to_bytes();
    match redirect(text, root, &mut place) {
        Some(()) => (call(place.as_ptr().cast()), true),
        None => (call(path), false),
    }
}

/// The path below `/sys` or `/dev` that a redirected path stands for: its end. `None` for a path that a link led elsewhere.
pub fn shown(path: &CStr) -> Option<&CStr> {
    let below = path.to_bytes_with_nul().strip_prefix(root())?;
    let is_shown = below.starts_with(b"/sys/") || below.starts_with(b"/dev/");
    CStr::from_bytes_with_nul(below).ok().filter(|_| is_shown)
}

/// Takes the folder off the start of a path in place.
///
/// # Safety
/// `path` is null or a string that may be changed.
pub unsafe fn restore(path: *mut c_char, is_redirected: bool) -> *mut c_char {
    if path.is_null() || !is_redirected {
        return path;
    }
    // SAFETY: a string, as the caller guarantees. Its end and its null byte move to its start.
    unsafe {
        if let Some(below) = shown(CStr::from_ptr(path)) {
            ptr::copy(below.as_ptr(), path, below.count_bytes() + 1);
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redirected(path: &str) -> Option<String> {
        let mut place = [MaybeUninit::<u8>::zeroed(); 64];
        redirect(path.as_bytes(), || b"/v", &mut place)?;
        // SAFETY: every byte was written or zeroed.
        let bytes: Vec<u8> = place.iter().map(|byte| unsafe { byte.assume_init() }).collect();
        Some(CStr::from_bytes_until_nul(&bytes).expect("an end").to_str().expect("text").into())
    }

    #[test]
    fn only_the_paths_of_devices_are_redirected() {
        let seen = |path: &str| redirected(path).unwrap_or_else(|| "unchanged".into());
        assert_eq!(seen("/sys/class/infiniband"), "/v/sys/class/infiniband");
        assert_eq!(seen("//sys/./class//infiniband/x/../.."), "/v/sys/class/infiniband/x/../..");
        assert_eq!(seen("/sys/class/infiniband_verbs/uverbs0"), "/v/sys/class/infiniband_verbs/uverbs0");
        assert_eq!(seen("/dev/infiniband/rdma_cm"), "/v/dev/infiniband/rdma_cm");
        assert_eq!(seen("/sys/devices/pci5fca:00/5fca:00:00.0"), "/v/sys/devices/pci5fca:00/5fca:00:00.0");
        for path in ["/sys/class/infiniband_mad", "/sys/class", "/sys/class/net/lo", "/dev/null", "/", ""] {
            assert_eq!(seen(path), "unchanged", "{path}");
        }
        assert_eq!(seen(&format!("/dev/infiniband/{}", "x".repeat(64))), "unchanged", "too long");
    }
}
