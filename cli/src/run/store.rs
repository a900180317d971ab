//! Stores the files of runs while the file system has enough free space. A large scenario can write a hundred megabytes
//! per run, and a thousand seeds fill a disk.
//!
//! The size of a run is known when the first run of its group has ended. Before writing it, the store compares the
//! estimated size of the rest of the group with the free space.

use super::artifacts::{Artifacts, folder_size, run_folder};
use super::job::{Job, RunResult};
use crate::output::Access;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Returns the free bytes of the file system of a folder, if known.
type FreeSpace = fn(&Path) -> Option<u64>;

/// The free bytes of the file system of a folder, or of its closest existing parent.
fn free_space(folder: &Path) -> Option<u64> {
    let system = folder.ancestors().find_map(|folder| rustix::fs::statvfs(folder).ok())?;
    // Some file systems report no blocks and are not full.
    (system.f_blocks > 0).then(|| system.f_bavail.saturating_mul(system.f_frsize))
}

/// Which runs are stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum KeepPolicy {
    /// All runs, in a folder that the user named.
    All,
    /// Failed runs, in a temporary folder; their number is not known in advance.
    Failures,
}

/// The folder with the folders of runs.
pub struct ArtifactStore<'a> {
    root: PathBuf,
    jobs: &'a [Job],
    policy: KeepPolicy,
    free_space: FreeSpace,
    group: RunGroup,
}

/// Runs of one scenario with the same parameters, whose files have about the same size.
#[derive(Default)]
struct RunGroup {
    /// The index after the last run.
    end: usize,
    /// The number of stored runs, and the bytes of their files.
    written: u64,
    bytes: u64,
    /// Bytes of existing files that later runs of the group will replace.
    replaced: u64,
}

fn is_same_group(one: &Job, other: &Job) -> bool {
    Arc::ptr_eq(&one.scenario, &other.scenario) && one.parameters == other.parameters
}

impl<'a> ArtifactStore<'a> {
    /// Creates a store in `root`, which may contain earlier runs.
    pub fn new(root: PathBuf, jobs: &'a [Job], policy: KeepPolicy) -> ArtifactStore<'a> {
        ArtifactStore { root, jobs, policy, free_space, group: RunGroup::default() }
    }

    /// Which runs are stored.
    pub fn policy(&self) -> KeepPolicy {
        self.policy
    }

    /// Writes the files of a run if the rest of its group fits too; returns the folder. Runs arrive in the order of
    /// jobs.
    pub fn write(&mut self, index: usize, ran: &RunResult) -> Result<PathBuf, String> {
        let job = &self.jobs[index];
        let folder = self.root.join(run_folder(job));
        let artifacts = Artifacts::new(job, ran)
            .map_err(|error| format!("cannot write {}: {error}", folder.display()))?;
        if index >= self.group.end {
            self.begin_group(index);
        }
        self.check_free_space(index, artifacts.size())?;
        self.group.replaced = self.group.replaced.saturating_sub(folder_size(&folder));
        let access = match self.policy {
            KeepPolicy::All => Access::Umask,
            KeepPolicy::Failures => Access::Owner,
        };
        artifacts.write(&folder, access).map_err(|error| {
            format!("cannot write to {}, its contents are incomplete: {error}", folder.display())
        })?;
        self.group.written += 1;
        self.group.bytes += folder_size(&folder);
        Ok(folder)
    }

    fn begin_group(&mut self, index: usize) {
        let remaining = &self.jobs[index..];
        let count = remaining.iter().take_while(|job| is_same_group(job, &remaining[0])).count();
        let replaced = match self.root.join(run_folder(&remaining[0])).parent() {
            Some(parent) if parent.exists() => {
                remaining[..count].iter().map(|job| folder_size(&self.root.join(run_folder(job)))).sum()
            }
            _ => 0,
        };
        self.group = RunGroup { end: index + count, replaced, ..RunGroup::default() };
    }

    /// Checks the space for a run of `bytes`, and for the rest of its group at the average size so far.
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
                "not enough space in {root}: the run of {name} with seed {seed} needs {bytes}, and {free} are free; free \
                 some space, or give --out a folder on a larger file system"
            ),
            _ => format!(
                "not enough space in {root}: a run of {name} needs about {each}, the {} runs from seed {seed} need \
                 {needed}, and {free} are free; use fewer seeds, give --out a folder on a larger file system, or omit \
                 --out: failed runs are kept anyway",
                after + 1,
            ),
        })
    }
}

/// A number of bytes in a readable unit.
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
    use crate::run::job::Backend;
    use crate::run::runner::{RunOptions, run_all};
    use softhca_scenarios::{ParameterValues, Scenario};
    use std::fs;
    use std::ops::ControlFlow;

    const SCENARIO: &str = include_str!("../../../scenarios/library/fatal-lost-write-middle.toml");

    const KEEP: RunOptions = RunOptions { at_once: None, retries: 0, keep: true };

    fn jobs(seeds: u64) -> Vec<Job> {
        let scenario = Arc::new(Scenario::parse("lost.toml", SCENARIO).expect("a scenario of the library"));
        let job = |seed| Job {
            scenario: scenario.clone(),
            parameters: ParameterValues::new(),
            seed,
            swarm: false,
            backend: Backend::Sim,
        };
        (1..=seeds).map(job).collect()
    }

    /// A folder that does not exist yet.
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

    /// Stores all runs until an error: the number of stored runs, and the error.
    fn write_all(root: &Path, jobs: &[Job], free_space: FreeSpace) -> (usize, Option<String>) {
        let (mut written, mut error) = (0, None);
        let mut store =
            ArtifactStore { free_space, ..ArtifactStore::new(root.into(), jobs, KeepPolicy::All) };
        run_all(jobs, Backend::Sim, KEEP, |index, ran| match store.write(index, &ran) {
            Ok(_) => {
                written += 1;
                ControlFlow::Continue(())
            }
            Err(why) => {
                error = Some(why);
                ControlFlow::Break(())
            }
        });
        (written, error)
    }

    #[test]
    fn a_group_that_does_not_fit_is_rejected_before_its_first_run_is_written() {
        let root = folder("rejected");
        // Enough for some runs, not for a thousand.
        let (written, error) = write_all(&root, &jobs(1000), |_| Some(100_000));
        let why = error.expect("a thousand runs do not fit");
        assert_eq!((written, root.exists()), (0, false), "{why}");
        assert!(
            why.starts_with(&format!(
                "not enough space in {}: a run of lost.toml needs about ",
                root.display()
            )),
            "{why}"
        );
        for text in ["the 1000 runs from seed 1 need", "100 kB are free", "fewer seeds", "omit --out"] {
            assert!(why.contains(text), "{text:?} is not in: {why}");
        }
    }

    #[test]
    fn a_file_system_that_fills_up_stops_the_runs_and_keeps_only_complete_ones() {
        let root = folder("filled");
        // Enough space until three runs are stored.
        let (written, error) = write_all(&root, &jobs(20), |root| {
            let runs = fs::read_dir(root.join("lost")).map_or(0, Iterator::count);
            Some(if runs < 3 { u64::MAX } else { 100 })
        });
        let why = error.expect("the fourth does not fit");
        assert_eq!(written, 3, "{why}");
        assert!(why.contains("the 17 runs from seed 4 need"), "{why}");
        for seed in 1..=3 {
            for name in ["result.json", "events.jsonl", "capture.pcapng", "ladder.txt"] {
                let path = root.join(format!("lost/seed-{seed}/{name}"));
                assert!(path.metadata().is_ok_and(|file| file.len() > 0), "{}", path.display());
            }
        }
        assert!(!root.join("lost/seed-4").exists());
        fs::remove_dir_all(&root).expect("it is ours");
    }

    /// The second time, new files replace those of the first.
    #[test]
    fn runs_that_replace_existing_files_need_no_additional_space() {
        let root = folder("replaced");
        assert_eq!(write_all(&root, &jobs(5), |_| None), (5, None));
        let before = bytes_below(&root);
        // Seeds differ by a few bytes.
        let little: FreeSpace = |_| Some(5_000);
        assert_eq!(write_all(&root, &jobs(5), little), (5, None));
        assert_eq!(bytes_below(&root), before, "the same runs");
        let (written, error) = write_all(&root, &jobs(6), little);
        assert_eq!((written, error.is_some()), (0, true), "one more does not fit");
        fs::remove_dir_all(&root).expect("it is ours");
    }

    #[test]
    fn a_failed_run_needs_space_for_itself_only() {
        let root = folder("failure");
        let jobs = jobs(1000);
        let mut store = ArtifactStore {
            free_space: |_| Some(100_000),
            ..ArtifactStore::new(root.clone(), &jobs, KeepPolicy::Failures)
        };
        let mut first = None;
        run_all(&jobs[..1], Backend::Sim, KEEP, |index, ran| {
            first = Some(store.write(index, &ran));
            store.free_space = |_| Some(10);
            let why = store.write(index + 1, &ran).unwrap_err();
            assert!(why.contains("with seed 2 needs") && why.contains("10 bytes are free"), "{why}");
            ControlFlow::Break(())
        });
        assert_eq!(first, Some(Ok(root.join("lost/seed-1"))));
        fs::remove_dir_all(&root).expect("it is ours");
    }

    #[test]
    fn the_free_space_of_this_machine_is_known() {
        let here = free_space(&std::env::temp_dir());
        assert!(here.is_some_and(|bytes| bytes > 0), "{here:?}");
        assert!(free_space(&std::env::temp_dir().join("no/such/folder")).is_some());
    }

    #[test]
    fn sizes_have_readable_units() {
        let sizes = [9_999, 120_000, 120_000_000, 12_000_000_000].map(|bytes| ByteSize(bytes).to_string());
        assert_eq!(sizes, ["9999 bytes", "120 kB", "120 MB", "12 GB"]);
    }
}
