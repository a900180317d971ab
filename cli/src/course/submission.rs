//! The folder of a student: what `start` writes, and what the grader reads from it.

use super::exercise::{Files, Language};
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The file that names the exercise.
pub const MARKER: &str = "course.toml";
/// The largest file that is handed in.
const MAX_FILE: u64 = 1 << 20;
/// The folders of `--all` that are looked at.
const MAX_FOLDERS: usize = 10_000;

/// The file `course.toml`.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Marker {
    exercise: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    language: Option<Language>,
}

/// A folder with the solution of an exercise.
#[derive(Clone, Debug)]
pub struct Submission {
    pub folder: PathBuf,
    pub exercise: String,
    pub language: Option<Language>,
}

/// Writes the file that names the exercise.
pub fn marker(exercise: &str, language: Option<Language>) -> String {
    let marker = Marker { exercise: exercise.to_owned(), language };
    toml::to_string(&marker).expect("two strings are TOML")
}

/// Reads the file of a submission. Links are not followed, and nothing but a regular file is read.
fn read_file(path: &Path) -> std::io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(std::io::Error::other("not a file"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > MAX_FILE {
        true => Err(std::io::Error::other(format!("larger than {} MiB", MAX_FILE >> 20))),
        false => Ok(bytes),
    }
}

/// The submission in a folder; none if the folder is not one. The error says what is wrong with its marker.
pub fn read(folder: &Path) -> Result<Option<Submission>, String> {
    let path = folder.join(MARKER);
    if path.symlink_metadata().is_err() {
        return Ok(None);
    }
    let bytes = read_file(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let marker: Marker = toml::from_str(&String::from_utf8_lossy(&bytes))
        .map_err(|error| format!("{}: {}", path.display(), error.to_string().trim_end()))?;
    let Marker { exercise, language } = marker;
    Ok(Some(Submission { folder: folder.to_owned(), exercise, language }))
}

/// The files of a submission that exist and can be read. A file that cannot is missing; its check says so.
pub fn read_files(folder: &Path, wanted: &[&str]) -> Files {
    let read = |file: &&str| Some(((*file).to_owned(), read_file(&folder.join(file)).ok()?));
    wanted.iter().filter_map(read).collect()
}

/// Writes files into a folder.
pub fn write_files(folder: &Path, files: &Files) -> Result<(), String> {
    for (name, bytes) in files {
        let path = folder.join(name);
        let parent = path.parent().unwrap_or(folder);
        let written = fs::create_dir_all(parent).and_then(|()| fs::write(&path, bytes));
        written.map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

/// A submission below a folder, or why its marker cannot be used.
pub type Found = (PathBuf, Result<Submission, String>);

/// The submissions in a folder: the folder itself, or the folders in it, or those in these. Links are not followed.
pub fn below(folder: &Path, depth: usize) -> Result<Vec<Found>, String> {
    let mut found = Vec::new();
    collect(folder, depth, &mut found, &mut 0)?;
    Ok(found)
}

fn collect(folder: &Path, depth: usize, found: &mut Vec<Found>, seen: &mut usize) -> Result<(), String> {
    match read(folder) {
        Ok(Some(submission)) => found.push((folder.to_owned(), Ok(submission))),
        Err(why) => found.push((folder.to_owned(), Err(why))),
        Ok(None) if depth == 0 => {}
        Ok(None) => {
            let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
            let is_folder = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
            let folders = entries.flatten().filter(is_folder).map(|entry| entry.path());
            let mut folders: Vec<PathBuf> = folders.take(MAX_FOLDERS + 1).collect();
            *seen += folders.len();
            if *seen > MAX_FOLDERS {
                return Err(format!("{}: more than {MAX_FOLDERS} folders", folder.display()));
            }
            folders.sort();
            for inner in folders {
                // A folder that cannot be read is no submission.
                if let Err(why) = collect(&inner, depth - 1, found, seen) {
                    found.push((inner, Err(why)));
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_of_limited_size_are_read() {
        let folder = std::env::temp_dir().join(format!("softhca-submission-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("folder")).unwrap();
        fs::write(folder.join("good"), "text").unwrap();
        File::create(folder.join("large")).and_then(|file| file.set_len(1 << 40)).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", folder.join("link")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", folder.join("device")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, folder.join("pipe"), rustix::fs::FileType::Fifo, Mode::RWXU, 0)
            .unwrap();
        let files = read_files(&folder, &["good", "large", "link", "device", "pipe", "folder", "missing"]);
        assert_eq!(files.keys().collect::<Vec<_>>(), ["good"]);
        std::os::unix::fs::symlink("/etc/passwd", folder.join(MARKER)).unwrap();
        assert!(read(&folder).is_err(), "the marker is a link");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_marker_is_read_as_it_was_written_and_a_bad_one_is_an_error() {
        let folder = std::env::temp_dir().join(format!("softhca-marker-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("ada/01")).unwrap();
        fs::create_dir_all(folder.join("bad")).unwrap();
        fs::write(folder.join("ada/01").join(MARKER), marker("01-x", Some(Language::Python))).unwrap();
        fs::write(folder.join("bad").join(MARKER), "exercise = 1\n").unwrap();
        let found = below(&folder, 2).unwrap();
        let [(first, Ok(good)), (_, Err(why))] = &found[..] else { panic!("{found:?}") };
        assert!(first.ends_with("ada/01"));
        assert_eq!((good.exercise.as_str(), good.language), ("01-x", Some(Language::Python)));
        assert!(why.contains("course.toml: "), "{why}");
        fs::remove_dir_all(&folder).unwrap();
    }
}
