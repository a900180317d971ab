//! The core dumps of programs: whether the kernel writes them, and where.
//!
//! Reads `/proc/sys/kernel/core_pattern` and the limit of the process. Changes no setting of the system.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The kernel's treatment of core dumps of the programs of a sweep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CoreDumps {
    /// It writes none, for this reason.
    Disabled(String),
    /// It passes them to this program.
    Piped(String),
    /// It writes them to files whose names have this pattern, relative to the folder of the program.
    Files(String),
}

/// The core dump of a process.
#[derive(Clone, Debug)]
pub struct CoreDump {
    /// The file, if it was found.
    pub file: Option<PathBuf>,
    /// The name of the file, or why there is none.
    pub text: String,
}

impl CoreDump {
    /// Moves the file, so that the next core file does not replace it. If that fails, it stays where it is.
    pub fn move_to(&mut self, path: &Path) {
        let copy = |file: &Path| std::fs::copy(file, path).and_then(|_| std::fs::remove_file(file));
        if let Some(file) = &mut self.file
            && std::fs::rename(&file, path).or_else(|_| copy(file)).is_ok()
        {
            path.clone_into(file);
            self.text = format!("core file {}", path.display());
        }
    }
}

/// A part of the name of a core file.
#[derive(Debug, PartialEq, Eq)]
enum NamePart {
    Text(String),
    /// Something that differs between runs: a time, a name of a thread.
    Unknown,
}

impl CoreDumps {
    /// Reads the settings. With `raise`, programs that start from now on may write core files up to the hard limit.
    pub fn of_system(raise: bool) -> CoreDumps {
        let mut limit = getrlimit(Resource::Core);
        if raise && limit.current != limit.maximum {
            let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
            if setrlimit(Resource::Core, raised).is_ok() {
                limit = raised;
            }
        }
        let read = |name: &str| {
            let text = std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap_or_default();
            text.trim_end_matches('\n').to_owned()
        };
        CoreDumps::new(&read("core_pattern"), read("core_uses_pid") != "0", limit)
    }

    fn new(pattern: &str, uses_pid: bool, limit: Rlimit) -> CoreDumps {
        // The kernel ignores the limit for a program that reads the dump.
        if let Some(handler) = pattern.strip_prefix('|') {
            return CoreDumps::Piped(handler.split_whitespace().next().unwrap_or_default().to_owned());
        }
        match (limit.current, limit.maximum) {
            (_, Some(0)) => return CoreDumps::Disabled("the hard limit of core files is 0".into()),
            (Some(0), _) => {
                let why = "the limit of core files is 0 (ulimit -c); --out raises it to the hard limit";
                return CoreDumps::Disabled(why.into());
            }
            _ => {}
        }
        match (pattern, uses_pid && !pattern.contains("%p")) {
            ("", false) => CoreDumps::Disabled("/proc/sys/kernel/core_pattern is empty".into()),
            (pattern, true) => CoreDumps::Files(format!("{pattern}.%p")),
            (pattern, false) => CoreDumps::Files(pattern.to_owned()),
        }
    }

    /// The core dump of a process that ran in `folder` and started at `since`. `has_dumped` is the flag of its status.
    pub fn find(&self, process: u32, has_dumped: bool, folder: &Path, since: SystemTime) -> CoreDump {
        let none = |text: String| CoreDump { file: None, text };
        match self {
            CoreDumps::Disabled(why) => none(format!("no core file: {why}")),
            CoreDumps::Piped(handler) => none(format!(
                "no core file: the kernel passed the core dump of process {process} to {handler} (core_pattern)"
            )),
            CoreDumps::Files(_) if !has_dumped => none("no core file: the kernel did not write one".into()),
            CoreDumps::Files(pattern) => match newest_match(pattern, process, folder, since) {
                Some(file) => CoreDump { text: format!("core file {}", file.display()), file: Some(file) },
                None => {
                    none(format!("the core file has the name {pattern} (core_pattern); it was not found"))
                }
            },
        }
    }
}

/// The parts of a name with this pattern, for a process.
fn name_parts(pattern: &str, process: u32) -> Vec<NamePart> {
    let mut parts = vec![NamePart::Text(String::new())];
    let mut characters = pattern.chars();
    while let Some(c) = characters.next() {
        let text = match c {
            '%' => match characters.next() {
                Some('%') => "%".to_owned(),
                Some('p') => process.to_string(),
                Some(_) => {
                    parts.extend([NamePart::Unknown, NamePart::Text(String::new())]);
                    continue;
                }
                None => continue,
            },
            c => c.to_string(),
        };
        if let Some(NamePart::Text(last)) = parts.last_mut() {
            last.push_str(&text);
        }
    }
    parts
}

/// Whether a file name consists of the parts.
fn matches(parts: &[NamePart], name: &str) -> bool {
    match parts {
        [] => name.is_empty(),
        [NamePart::Text(text), rest @ ..] => {
            name.strip_prefix(text.as_str()).is_some_and(|name| matches(rest, name))
        }
        [NamePart::Unknown, rest @ ..] => {
            name.char_indices().any(|(at, _)| matches(rest, &name[at..])) || matches(rest, "")
        }
    }
}

/// The newest file that matches the pattern and is not older than `since`.
fn newest_match(pattern: &str, process: u32, folder: &Path, since: SystemTime) -> Option<PathBuf> {
    let (parent, name) = pattern.rsplit_once('/').unwrap_or((".", pattern));
    let folder = folder.join(if parent.is_empty() { "/" } else { parent });
    let parts = name_parts(name, process);
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let files = entries.filter(|entry| matches(&parts, &entry.file_name().to_string_lossy()));
    let dated = files.filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())));
    dated.filter(|(time, _)| *time >= since).max().map(|(_, path)| path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(current: Option<u64>, maximum: Option<u64>) -> Rlimit {
        Rlimit { current, maximum }
    }

    #[test]
    fn the_settings_say_where_core_files_are() {
        let of = |pattern, uses_pid, limit| CoreDumps::new(pattern, uses_pid, limit);
        let free = || limit(None, None);
        assert_eq!(of("core", false, free()), CoreDumps::Files("core".into()));
        assert_eq!(of("core", true, free()), CoreDumps::Files("core.%p".into()));
        assert_eq!(of("core-%p", true, free()), CoreDumps::Files("core-%p".into()));
        assert_eq!(
            of("|/bin/handler %p", true, limit(Some(0), None)),
            CoreDumps::Piped("/bin/handler".into())
        );
        for (pattern, limit, part) in [
            ("core", limit(Some(0), None), "ulimit -c"),
            ("core", limit(Some(0), Some(0)), "hard limit"),
            ("", free(), "core_pattern is empty"),
        ] {
            let CoreDumps::Disabled(why) = of(pattern, false, limit) else { panic!("{pattern}") };
            assert!(why.contains(part), "{why}");
        }
    }

    #[test]
    fn a_core_file_is_found_by_pattern_process_and_time() {
        let folder = std::env::temp_dir().join(format!("softhca-core-test-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("sub")).expect("a folder");
        let before = SystemTime::now() - std::time::Duration::from_secs(1);
        for name in ["core", "core-rping-77-1700000000", "sub/100%-78.dump"] {
            std::fs::write(folder.join(name), "").expect("a file");
        }
        let later = SystemTime::now() + std::time::Duration::from_secs(60);
        for (pattern, process, since, name) in [
            ("core", 77, before, Some("core")),
            ("core", 77, later, None),
            ("core-%e-%p-%t", 77, before, Some("core-rping-77-1700000000")),
            ("core-%e-%p-%t", 78, before, None),
            ("sub/%c%%-%p.dump", 78, before, Some("sub/100%-78.dump")),
            ("absent/core", 77, before, None),
        ] {
            let found = CoreDumps::Files(pattern.into()).find(process, true, &folder, since);
            assert_eq!(found.file, name.map(|name| folder.join(name)), "{pattern}: {}", found.text);
        }
        let piped = CoreDumps::Piped("/bin/handler".into()).find(77, true, &folder, before);
        assert!(piped.file.is_none() && piped.text.contains("process 77 to /bin/handler"), "{piped:?}");
        let unwritten = CoreDumps::Files("core".into()).find(77, false, &folder, before);
        assert!(unwritten.file.is_none() && unwritten.text.contains("did not write"), "{unwritten:?}");
        std::fs::remove_dir_all(&folder).expect("it is ours");
    }
}
