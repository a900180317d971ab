//! Exercises: folders of data, embedded in the command or given by a teacher.

use serde::Deserialize;
use softhca_scenarios::Verdict;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// The files of the exercises of this command, by path.
static EMBEDDED: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/exercises.rs"));

/// The manifest of an exercise.
const MANIFEST: &str = "exercise.toml";
/// The text of an exercise.
const TEXT: &str = "exercise.md";
/// Beside the exercises: the files that several share.
const SHARED: &str = "shared";
/// In an exercise: the files that `start` lays out, and the files that only the grader uses.
const START: &str = "start";
const HIDDEN: &str = "hidden";

/// Limits of a teacher's folder.
const MAX_FILES: usize = 4096;
const MAX_FILE_BYTES: u64 = 4 << 20;
const MAX_DEPTH: usize = 6;

/// The files of an exercise, by relative path.
pub type Files = BTreeMap<String, Vec<u8>>;

/// A language in which programs of exercises are written.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, serde::Serialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum Language {
    C,
    Rust,
    Python,
}

impl Language {
    pub const ALL: [Language; 3] = [Language::C, Language::Rust, Language::Python];

    /// The name, which is also that of the folder of its template.
    pub const fn name(self) -> &'static str {
        match self {
            Language::C => "c",
            Language::Rust => "rust",
            Language::Python => "python",
        }
    }

    /// The file that a student writes.
    pub const fn solution(self) -> &'static str {
        match self {
            Language::C => "solution.c",
            Language::Rust => "src/solution.rs",
            Language::Python => "solution.py",
        }
    }
}

/// The file `exercise.toml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Manifest {
    pub title: String,
    /// From 1, the easiest.
    pub level: u8,
    /// The files that a student hands in, of an exercise without a program.
    #[serde(default)]
    pub submit: Vec<String>,
    /// Files of the folder `shared` that templates of the language use.
    #[serde(default)]
    pub shared: Vec<String>,
    /// Files that `start` makes from runs.
    #[serde(default)]
    pub given: Vec<Given>,
    pub check: Vec<CheckSpec>,
}

/// A file that a run of a scenario makes.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Given {
    /// The scenario, in virtual time.
    pub run: String,
    /// The file that gets its packets.
    pub capture: Option<String>,
    /// The file that gets its event log.
    pub log: Option<String>,
}

/// A check: the run of a scenario.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckSpec {
    /// The requirement, as a sentence.
    pub name: String,
    /// The scenario: a hidden file or one of the submission.
    pub run: String,
    /// A file of the submission with values of the scenario's parameters.
    pub answers: Option<String>,
    /// A file with further expectations.
    pub expect: Option<String>,
    /// The verdict that the run must have.
    #[serde(default = "passes")]
    pub verdict: Verdict,
    /// Lines that programs must print.
    #[serde(default)]
    pub output: Vec<OutputSpec>,
    #[serde(default)]
    pub hint: Vec<HintSpec>,
}

const fn passes() -> Verdict {
    Verdict::Pass
}

/// A line that a program prints.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutputSpec {
    pub program: String,
    pub line: String,
}

/// Hints, each more explicit than the one before it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HintSpec {
    /// A text in the failure to which the hints belong; without it, any failure.
    pub when: Option<String>,
    pub text: Vec<String>,
}

/// An exercise.
#[derive(Clone, Debug)]
pub struct Exercise {
    /// The name of its folder.
    pub name: String,
    pub manifest: Manifest,
    /// Its own files, and those of `shared` below that name.
    files: Files,
}

impl Exercise {
    fn new(name: &str, mut files: Files, shared: &Files) -> Result<Exercise, String> {
        let text = |file: &str| {
            let bytes = files.get(file).ok_or_else(|| format!("{name}: {file} is missing"))?;
            std::str::from_utf8(bytes).map_err(|_| format!("{name}/{file} is not UTF-8"))
        };
        text(TEXT)?;
        let manifest: Manifest = toml::from_str(text(MANIFEST)?)
            .map_err(|error| format!("{name}/{MANIFEST}: {}", error.to_string().trim_end()))?;
        for file in &manifest.shared {
            let bytes = shared
                .get(file)
                .ok_or_else(|| format!("{name}/{MANIFEST}: no file {file:?} in the folder {SHARED}"))?;
            files.insert(format!("{SHARED}/{file}"), bytes.clone());
        }
        let exercise = Exercise { name: name.to_owned(), manifest, files };
        exercise.check().map_err(|why| format!("{name}/{MANIFEST}: {why}"))?;
        Ok(exercise)
    }

    /// Checks that everything that the manifest names exists.
    fn check(&self) -> Result<(), String> {
        let Manifest { submit, check, given, .. } = &self.manifest;
        if check.is_empty() {
            return Err("no [[check]]".into());
        }
        if submit.is_empty() && self.languages().is_empty() {
            return Err("nothing is handed in: give `submit`, or a folder c, rust or python".into());
        }
        for file in submit {
            let is_plain = Path::new(file).components().all(|part| matches!(part, Component::Normal(_)));
            if !is_plain || !self.files.contains_key(&format!("{START}/{file}")) {
                return Err(format!("submit: no file {file:?} in the folder {START}"));
            }
        }
        for given in given {
            if given.capture.is_none() && given.log.is_none() {
                return Err(format!("given: {:?} makes no file: give `capture` or `log`", given.run));
            }
        }
        let runs = check.iter().map(|check| &check.run).chain(given.iter().map(|given| &given.run));
        for file in runs.chain(check.iter().filter_map(|check| check.expect.as_ref())) {
            if !submit.contains(file) && self.hidden(file).is_none() {
                return Err(format!(
                    "no file {file:?} in the folder {HIDDEN}, and `submit` does not name it"
                ));
            }
        }
        for CheckSpec { name, answers, verdict, hint, .. } in check {
            if answers.as_ref().is_some_and(|file| !submit.contains(file)) {
                return Err(format!("check {name:?}: the answers are not a file of `submit`"));
            }
            if *verdict == Verdict::Error {
                return Err(format!("check {name:?}: the verdict is \"pass\" or \"fail\""));
            }
            if hint.iter().any(|hint| hint.text.is_empty()) {
                return Err(format!("check {name:?}: a hint has no text"));
            }
        }
        Ok(())
    }

    /// The languages of its templates; none if it needs no program.
    pub fn languages(&self) -> Vec<Language> {
        let has = |language: &Language| !self.folder(language.name()).is_empty();
        Language::ALL.into_iter().filter(has).collect()
    }

    /// The files in one of its folders.
    fn folder(&self, folder: &str) -> Files {
        let inside = |(path, bytes): (&String, &Vec<u8>)| {
            Some((path.strip_prefix(folder)?.strip_prefix('/')?.to_owned(), bytes.clone()))
        };
        self.files.iter().filter_map(inside).collect()
    }

    /// A file that only the grader uses.
    pub fn hidden(&self, file: &str) -> Option<&[u8]> {
        self.files.get(&format!("{HIDDEN}/{file}")).map(Vec::as_slice)
    }

    /// The text.
    pub fn text(&self) -> &[u8] {
        &self.files[TEXT]
    }

    /// The files with which a student begins.
    pub fn template(&self, language: Option<Language>) -> Files {
        let mut files = self.folder(START);
        if let Some(language) = language {
            files.extend(self.folder(&format!("{SHARED}/{}", language.name())));
            files.extend(self.folder(language.name()));
        }
        files
    }

    /// The files that a student hands in. The grader takes all others from the template.
    pub fn submitted(&self, language: Option<Language>) -> Vec<&str> {
        let program = language.map(Language::solution);
        self.manifest.submit.iter().map(String::as_str).chain(program).collect()
    }
}

/// All exercises, in the order of their names: those of the command, and those of a teacher's folders, which replace
/// others of the same name.
pub fn all(folders: &[PathBuf]) -> Result<Vec<Exercise>, String> {
    let embedded = EMBEDDED.iter().map(|(path, bytes)| ((*path).to_owned(), bytes.to_vec())).collect();
    let mut exercises = parse(embedded, &Files::new())?;
    for folder in folders {
        let mut files = Files::new();
        read_folder(folder, "", MAX_DEPTH, &mut files)?;
        let own = parse(files, &embedded_shared()).map_err(|why| format!("{}: {why}", folder.display()))?;
        if own.is_empty() {
            return Err(format!("{}: no folder in it has a file {MANIFEST}", folder.display()));
        }
        exercises.retain(|exercise| own.iter().all(|other| other.name != exercise.name));
        exercises.extend(own);
    }
    exercises.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(exercises)
}

/// The shared files of the command, which exercises of teachers may use.
fn embedded_shared() -> Files {
    let shared = |(path, bytes): &(&str, &[u8])| {
        Some((path.strip_prefix(SHARED)?.strip_prefix('/')?.to_owned(), bytes.to_vec()))
    };
    EMBEDDED.iter().filter_map(shared).collect()
}

/// The exercises among files whose paths begin with their names.
fn parse(files: Files, more_shared: &Files) -> Result<Vec<Exercise>, String> {
    let (mut folders, mut shared) = (BTreeMap::<String, Files>::new(), more_shared.clone());
    for (path, bytes) in files {
        match path.split_once('/') {
            Some((SHARED, file)) => drop(shared.insert(file.to_owned(), bytes)),
            Some((name, file)) => {
                folders.entry(name.to_owned()).or_default().insert(file.to_owned(), bytes);
            }
            None => {}
        }
    }
    folders.retain(|_, files| files.contains_key(MANIFEST));
    folders.into_iter().map(|(name, files)| Exercise::new(&name, files, &shared)).collect()
}

fn read_folder(folder: &Path, prefix: &str, depth: usize, files: &mut Files) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            return Err(format!("{}: the name is not UTF-8", path.display()));
        };
        if name.starts_with('.') {
            continue;
        }
        let below = format!("{prefix}{name}");
        if path.is_dir() {
            if depth == 0 {
                return Err(format!("{}: folders are nested too deeply", path.display()));
            }
            read_folder(&path, &format!("{below}/"), depth - 1, files)?;
            continue;
        }
        let length = path.metadata().map_err(failed)?.len();
        if length > MAX_FILE_BYTES || files.len() == MAX_FILES {
            return Err(format!(
                "{}: exercises have up to {MAX_FILES} files of {} MiB each",
                path.display(),
                MAX_FILE_BYTES >> 20
            ));
        }
        files.insert(below, fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?);
    }
    Ok(())
}

/// The exercise with this number, from 1, or this name, with or without its number.
pub fn find<'e>(exercises: &'e [Exercise], wanted: &str) -> Result<&'e Exercise, String> {
    let by_number = wanted.parse::<usize>().ok().and_then(|number| exercises.get(number.wrapping_sub(1)));
    let is_named = |exercise: &&Exercise| {
        let short = exercise.name.split_once('-').map_or("", |(_, short)| short);
        exercise.name == wanted || short == wanted
    };
    by_number
        .or_else(|| exercises.iter().find(is_named))
        .ok_or_else(|| format!("no exercise {wanted:?}: `softhca course list` has the numbers and the names"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(manifest: &str) -> Files {
        let file = |name: &str, text: &str| (name.to_owned(), text.as_bytes().to_vec());
        [
            file("exercise.toml", manifest),
            file("exercise.md", "text"),
            file("start/answers.toml", ""),
            file("hidden/run.toml", ""),
        ]
        .into()
    }

    #[test]
    fn a_bad_manifest_is_an_error_that_names_the_cause() {
        let good = "title = \"t\"\nlevel = 1\nsubmit = [\"answers.toml\"]\n";
        let check = "[[check]]\nname = \"n\"\nrun = \"run.toml\"\n";
        let parse = |text: &str| Exercise::new("01-x", files(text), &Files::new());
        assert!(parse(&format!("{good}{check}")).is_ok());
        for (text, part) in [
            (good.to_owned(), "missing field `check`"),
            (format!("{good}check = []\n"), "no [[check]]"),
            (format!("{good}{check}colour = 1\n"), "unknown field `colour`"),
            (format!("{}{check}", good.replace("answers", "../answers")), "submit: no file"),
            (format!("title = \"t\"\nlevel = 1\n{check}"), "nothing is handed in"),
            (format!("{good}{}", check.replace("run.toml", "no.toml")), "no file \"no.toml\" in the folder"),
            (format!("{good}{check}answers = \"x\"\n"), "the answers are not a file of `submit`"),
            (format!("{good}{check}verdict = \"error\"\n"), "the verdict is"),
            (format!("{good}shared = [\"c/no.h\"]\n{check}"), "no file \"c/no.h\" in the folder shared"),
            (format!("{good}{check}[[check.hint]]\ntext = []\n"), "a hint has no text"),
            (format!("{good}{check}[[given]]\nrun = \"run.toml\"\n"), "makes no file"),
        ] {
            let error = parse(&text).map(|_| ()).expect_err(&text);
            assert!(error.starts_with("01-x/exercise.toml: ") && error.contains(part), "{error}");
        }
    }

    #[test]
    fn the_embedded_exercises_are_valid_and_every_check_has_a_hint() {
        let exercises = all(&[]).expect("they are valid");
        assert!(exercises.len() >= 3, "{}", exercises.len());
        for exercise in &exercises {
            for check in &exercise.manifest.check {
                assert!(
                    check.hint.iter().any(|hint| hint.when.is_none()),
                    "{}: {}",
                    exercise.name,
                    check.name
                );
            }
        }
        assert_eq!(find(&exercises, "1").map(|found| &found.name), Ok(&exercises[0].name));
        assert!(find(&exercises, "0").is_err() && find(&exercises, "none").is_err());
    }
}
