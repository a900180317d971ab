//! Whether a program used a device of SoftHCA, and which libibverbs it loaded otherwise.

use softhca_control::RuntimeDir;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The library adds a letter to the file that this variable names: `l` when it is loaded, `u` when a program asks for the
/// list of devices. The file exists already: to create one takes a program longer than the list.
pub const MARK_VARIABLE: &str = "SOFTHCA_USED_MARK";

/// More than programs that load the library at the same moment write.
const MAX_MARKS: u64 = 4096;

/// How often the libraries of a program are looked at: soon after its start, and later.
const EARLY_INTERVAL: Duration = Duration::from_millis(20);
const LATE_INTERVAL: Duration = Duration::from_secs(1);
const EARLY: Duration = Duration::from_secs(2);

/// Watches a program and its children.
pub struct DeviceUse {
    mark: PathBuf,
    started: Instant,
    next: Instant,
    /// The files of other libraries.
    others: BTreeSet<String>,
}

impl DeviceUse {
    pub fn watch() -> DeviceUse {
        let now = Instant::now();
        let name = format!("used-{}-{}", std::process::id(), now.elapsed().as_nanos());
        let folder = RuntimeDir::for_user();
        remove_stale(folder.path());
        let mark = folder.path().join(name);
        // Without the file, a program that used a device is reported too.
        let _ = std::fs::File::create(&mark);
        DeviceUse { mark, started: now, next: now, others: BTreeSet::new() }
    }

    /// The variable for the program.
    pub fn variable(&self) -> (&'static str, OsString) {
        (MARK_VARIABLE, self.mark.clone().into())
    }

    /// Whether the library has written this letter.
    fn has_mark(&self, letter: u8) -> bool {
        let mut marks = Vec::new();
        let read =
            std::fs::File::open(&self.mark).and_then(|file| file.take(MAX_MARKS).read_to_end(&mut marks));
        read.is_ok() && marks.contains(&letter)
    }

    fn is_used(&self) -> bool {
        self.has_mark(b'u')
    }

    /// Looks at the libraries of the processes if it is time; returns the time until the next look.
    pub fn look(&mut self, program: i32) -> Option<Duration> {
        if self.is_used() {
            return None;
        }
        let now = Instant::now();
        if now >= self.next {
            let mut processes = vec![program.to_string()];
            while let Some(process) = processes.pop() {
                let files = loaded_files(&process);
                // SoftHCA's own library has another name behind its symlinks.
                self.others
                    .extend(files.into_iter().filter(|file| file_name(file).starts_with("libibverbs")));
                let children = std::fs::read_to_string(format!("/proc/{process}/task/{process}/children"));
                processes.extend(children.unwrap_or_default().split_whitespace().map(String::from));
            }
            let is_early = now.duration_since(self.started) < EARLY;
            self.next = now + if is_early { EARLY_INTERVAL } else { LATE_INTERVAL };
        }
        Some(self.next.saturating_duration_since(now))
    }

    /// The message for the user if the program never used a device.
    pub fn warning(self, program: &str, is_preloaded: bool) -> Option<String> {
        let (is_used, is_loaded) = (self.is_used(), self.has_mark(b'l'));
        let _ = std::fs::remove_file(&self.mark);
        if is_used {
            return None;
        }
        let files = self.others.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        Some(match (files.is_empty(), is_preloaded) {
            (true, _) if is_loaded => {
                format!("{program} loaded the emulated libibverbs and ended before it asked for a device")
            }
            (true, _) => format!("{program} did not use the emulated device: exec saw it load no libibverbs"),
            (false, false) => format!(
                "{program} did not use the emulated device: it loaded {files}. Try `softhca exec --preload -- {program} …`"
            ),
            (false, true) => format!("{program} did not use the emulated device, and loaded {files}"),
        })
    }
}

/// Removes the files of commands that were killed.
fn remove_stale(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let mark = name.to_str().and_then(|name| name.strip_prefix("used-")?.split_once('-'));
        if mark.is_some_and(|(pid, _)| !Path::new("/proc").join(pid).exists()) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// The files that a process has mapped.
fn loaded_files(process: &str) -> BTreeSet<String> {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap_or_default();
    maps.lines().filter_map(|line| line.find('/').map(|start| line[start..].into())).collect()
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_of_killed_commands_are_removed() {
        let folder = std::env::temp_dir().join(format!("softhca-marks-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        // No process has a number this large.
        let [own, stale, other] =
            [format!("used-{}-7", std::process::id()), "used-99999999-7".into(), "default.sock".into()]
                .map(|name| folder.join(name));
        [&own, &stale, &other].into_iter().for_each(|path| std::fs::write(path, "").unwrap());
        remove_stale(&folder);
        assert_eq!([own, stale, other].map(|path| path.exists()), [true, false, true]);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_program_without_a_device_is_reported_with_its_library() {
        let mut watched = DeviceUse::watch();
        assert!(watched.look(std::process::id() as i32).is_some());
        watched.others.insert("/opt/wheel/libibverbs-1a2b.so.1".into());
        let warning = watched.warning("train", false).expect("no device was used");
        assert!(warning.contains("it loaded /opt/wheel/libibverbs-1a2b.so.1"), "{warning}");
        assert!(warning.contains("softhca exec --preload -- train"), "{warning}");
    }

    #[test]
    fn a_program_that_ended_early_is_not_one_without_the_library() {
        let watched = DeviceUse::watch();
        std::fs::write(&watched.mark, "l").unwrap();
        let warning = watched.warning("ib_write_bw", false).expect("no device was used");
        assert_eq!(
            warning,
            "ib_write_bw loaded the emulated libibverbs and ended before it asked for a device"
        );
    }
}
