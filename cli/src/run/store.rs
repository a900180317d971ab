//! Where runs leave something behind, as far as there is room: a large scenario has a hundred megabytes a run, and
//! a thousand seeds of it fill a disk.
//!
//! How much a run's files take is known when the first of its kind has ended. Before anything of it is written, what
//! the others of its kind will need is compared with what the file system has free.

use super::artifacts::{Artifacts, folder_size, run_folder};
use super::job::{Job, RunResult};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tells how many bytes may still be written to the file system of a folder, if it says.
type FreeSpace = fn(&Path) -> Option<u64>;

/// What the file system of a folder says, or of the folder that it will be made in.
fn free_space(folder: &Path) -> Option<u64> {
    let system = folder.ancestors().find_map(|folder| rustix::fs::statvfs(folder).ok())?;
    // Some have no blocks, and are not full either.
    (system.f_blocks > 0).then(|| system.f_bavail.saturating_mul(system.f_frsize))
}

/// Which runs leave something behind.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum KeepPolicy {
    /// All.
    All,
    /// Those that fail, and nobody knows how many will.
    Failures,
}

/// A folder in which runs have folders.
pub struct ArtifactStore<'a> {
    root: PathBuf,
    jobs: &'a [Job],
    policy: KeepPolicy,
    free_space: FreeSpace,
    group: RunGroup,
}

/// Runs of one file with the same parameters: their files take about as much.
#[derive(Default)]
struct RunGroup {
    /// The first behind its last.
    end: usize,
    /// Runs that were written, and the bytes of their files.
    written: u64,
    bytes: u64,
    /// Bytes of an earlier run of the same, which those to come will replace.
    replaced: u64,
}

fn is_same_group(one: &Job, other: &Job) -> bool {
    Arc::ptr_eq(&one.scenario, &other.scenario) && one.parameters == other.parameters
}

impl<'a> ArtifactStore<'a> {
    /// An empty store, or one with what earlier runs left.
    pub fn new(root: PathBuf, jobs: &'a [Job], leaves: KeepPolicy) -> ArtifactStore<'a> {
        ArtifactStore { root, jobs, policy: leaves, free_space, group: RunGroup::default() }
    }

    /// Which runs are to be written.
    pub fn policy(&self) -> KeepPolicy {
        self.policy
    }

    /// Writes everything that was kept of a run, if it fits and so will all others of its kind; returns the folder.
    /// Runs come in the order of jobs.
    pub fn write(&mut self, index: usize, ran: &RunResult) -> Result<PathBuf, String> {
        let job = &self.jobs[index];
        let folder = self.root.join(run_folder(job));
        let artefacts = Artifacts::new(job, ran)
            .map_err(|error| format!("cannot write {}: {error}", folder.display()))?;
        if index >= self.group.end {
            self.begin_group(index);
        }
        self.check_free_space(index, artefacts.size())?;
        self.group.replaced = self.group.replaced.saturating_sub(folder_size(&folder));
        artefacts.write(&folder).map_err(|error| {
            format!("cannot write to {}, what is there is incomplete: {error}", folder.display())
        })?;
        self.group.written += 1;
        self.group.bytes += folder_size(&folder);
        Ok(folder)
    }

    fn begin_group(&mut self, index: usize) {
        let rest = &self.jobs[index..];
        let count = rest.iter().take_while(|job| is_same_group(job, &rest[0])).count();
        let replaced = match self.root.join(run_folder(&rest[0])).parent() {
            Some(parent) if parent.exists() => {
                rest[..count].iter().map(|job| folder_size(&self.root.join(run_folder(job)))).sum()
            }
            _ => 0,
        };
        self.group = RunGroup { end: index + count, replaced, ..RunGroup::default() };
    }

    /// Whether a run of so many bytes fits, and those of its kind after it if they are like those until now.
    fn check_free_space(&self, index: usize, bytes: u64) -> Result<(), String> {
        let Some(free) = (self.free_space)(&self.root) else { return Ok(()) };
        let RunGroup { end, written, bytes: before, replaced } = self.group;
        let each = before.saturating_add(bytes) / (written + 1);
        let after = match self.policy {
            KeepPolicy::All => (end - index - 1) as u64,
            KeepPolicy::Failures => 0,
        };
        let needed = bytes.saturating_add(each.saturating_mul(after));
        if needed <= free.saturating_add(replaced) {
            return Ok(());
        }
        let (root, name, seed) =
            (self.root.display(), self.jobs[index].scenario.name(), self.jobs[index].seed);
        let (each, bytes, needed, free) = (ByteSize(each), ByteSize(bytes), ByteSize(needed), ByteSize(free));
        Err(match after {
            0 => format!(
                "no room in {root}: the run of {name} with seed {seed} would leave {bytes} behind, and {free} are \
                 free; make room, or give --out a folder on a larger file system"
            ),
            _ => format!(
                "no room in {root}: a run of {name} leaves about {each} behind, the {} from seed {seed} on need \
                 {needed}, and {free} are free; ask for fewer seeds, give --out a folder on a larger file system, or \
                 leave --out away: runs that fail are kept all the same",
                after + 1,
            ),
        })
    }
}

/// A number of bytes that people can read.
struct ByteSize(u64);

impl std::fmt::Display for ByteSize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            bytes if bytes < 10_000 => write!(f, "{bytes} bytes"),
            bytes if bytes < 10_000_000 => write!(f, "{} kB", bytes / 1000),
            bytes if bytes < 10_000_000_000 => write!(f, "{} MB", bytes / 1_000_000),
            bytes => write!(f, "{} GB", bytes / 1_000_000_000),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Backend;
    use crate::run::job::run_all;
    use softhca_scenarios::{ParameterValues, Scenario};
    use std::fs;
    use std::ops::ControlFlow;

    const SCENARIO: &str = include_str!("../../../scenarios/library/fatal-lost-write-middle.toml");

    fn jobs(seeds: u64) -> Vec<Job> {
        let scenario = Arc::new(Scenario::parse("lost.toml", SCENARIO).expect("a scenario of the library"));
        let job = |seed| Job {
            scenario: scenario.clone(),
            parameters: ParameterValues::new(),
            seed,
            backend: Backend::Sim,
        };
        (1..=seeds).map(job).collect()
    }

    /// A folder that is not there yet.
    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("softhca-store-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    fn bytes_below(folder: &Path) -> u64 {
        let Ok(entries) = fs::read_dir(folder) else { return 0 };
        let below = entries.map(|entry| bytes_below(&entry.expect("an entry").path()));
        folder_size(folder) + below.sum::<u64>()
    }

    /// Runs all until one cannot be written: how many were, and what was said then.
    fn write_all(root: &Path, jobs: &[Job], free: FreeSpace) -> (usize, Option<String>) {
        let (mut written, mut trouble) = (0, None);
        let mut store =
            ArtifactStore { free_space: free, ..ArtifactStore::new(root.into(), jobs, KeepPolicy::All) };
        run_all(jobs, Backend::Sim, true, |index, ran| match store.write(index, &ran) {
            Ok(_) => {
                written += 1;
                ControlFlow::Continue(())
            }
            Err(why) => {
                trouble = Some(why);
                ControlFlow::Break(())
            }
        });
        (written, trouble)
    }

    #[test]
    fn runs_that_will_not_fit_are_refused_before_the_first_is_written() {
        let root = folder("refused");
        // Room for the first run and some more, by far not for a thousand.
        let (written, trouble) = write_all(&root, &jobs(1000), |_| Some(100_000));
        let why = trouble.expect("a thousand runs do not fit");
        assert_eq!((written, root.exists()), (0, false), "{why}");
        assert!(
            why.starts_with(&format!("no room in {}: a run of lost.toml leaves about ", root.display())),
            "{why}"
        );
        for words in ["the 1000 from seed 1 on need", "100 kB are free", "fewer seeds", "leave --out away"] {
            assert!(why.contains(words), "{words:?} is not in: {why}");
        }
    }

    #[test]
    fn a_file_system_that_others_fill_meanwhile_stops_the_runs_and_leaves_only_whole_ones() {
        let root = folder("filled");
        // Enough for all until three runs are there.
        let (written, trouble) = write_all(&root, &jobs(20), |root| {
            let runs = fs::read_dir(root.join("lost")).map_or(0, Iterator::count);
            Some(if runs < 3 { u64::MAX } else { 100 })
        });
        let why = trouble.expect("the fourth does not fit");
        assert_eq!(written, 3, "{why}");
        assert!(why.contains("the 17 from seed 4 on need"), "{why}");
        for seed in 1..=3 {
            for name in ["result.json", "events.jsonl", "capture.pcapng", "ladder.txt"] {
                let path = root.join(format!("lost/seed-{seed}/{name}"));
                assert!(path.metadata().is_ok_and(|file| file.len() > 0), "{}", path.display());
            }
        }
        assert!(!root.join("lost/seed-4").exists());
        fs::remove_dir_all(&root).expect("it is ours");
    }

    /// The second time, the files of the first give back what they have.
    #[test]
    fn runs_that_replace_others_need_no_room_of_their_own() {
        let root = folder("replaced");
        assert_eq!(write_all(&root, &jobs(5), |_| None), (5, None));
        let before = bytes_below(&root);
        // Seeds differ by a few bytes.
        let little: FreeSpace = |_| Some(10_000);
        assert_eq!(write_all(&root, &jobs(5), little), (5, None));
        assert_eq!(bytes_below(&root), before, "the same runs");
        let (written, trouble) = write_all(&root, &jobs(6), little);
        assert_eq!((written, trouble.is_some()), (0, true), "one more does not fit");
        fs::remove_dir_all(&root).expect("it is ours");
    }

    #[test]
    fn a_failure_needs_room_for_itself_only() {
        let root = folder("failure");
        let jobs = jobs(1000);
        let mut store = ArtifactStore {
            free_space: |_| Some(100_000),
            ..ArtifactStore::new(root.clone(), &jobs, KeepPolicy::Failures)
        };
        let mut first = None;
        run_all(&jobs[..1], Backend::Sim, true, |index, ran| {
            first = Some(store.write(index, &ran));
            store.free_space = |_| Some(10);
            let why = store.write(index + 1, &ran).unwrap_err();
            assert!(why.contains("seed 2 would leave") && why.contains("10 bytes are free"), "{why}");
            ControlFlow::Break(())
        });
        assert_eq!(first, Some(Ok(root.join("lost/seed-1"))));
        fs::remove_dir_all(&root).expect("it is ours");
    }

    #[test]
    fn this_machine_says_how_much_is_free() {
        let here = free_space(&std::env::temp_dir());
        assert!(here.is_some_and(|bytes| bytes > 0), "{here:?}");
        assert!(free_space(&std::env::temp_dir().join("no/such/folder")).is_some());
    }

    #[test]
    fn sizes_are_rounded_to_what_people_read() {
        let told = [9_999, 120_000, 120_000_000, 12_000_000_000].map(|bytes| ByteSize(bytes).to_string());
        assert_eq!(told, ["9999 bytes", "120 kB", "120 MB", "12 GB"]);
    }
}
