//! `softhca course`: exercises, and their grades.
//!
//! An exercise is a folder of data. A check of it is the run of a scenario, which a student's program, scenario or answers
//! take part in: nothing here knows a single exercise.

mod exercise;
mod grader;
mod program;
mod report;
mod sandbox;
mod submission;

use crate::exit_code::{BAD_INPUT, CommandResult, bad_input, failure};
use crate::output;
use exercise::{Exercise, Files, Language};
use grader::Line;
use report::Grade;
use sandbox::{Isolation, TimeLimits};
use softhca_scenarios::quantity::Time;
use softhca_scenarios::{Recording, Scenario, Verdict, simulate};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use submission::Submission;

/// How deep below the folder of `--all` submissions are: one folder for each student, one for each exercise.
const MAX_DEPTH: usize = 2;

/// Arguments of `softhca course`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// List the exercises
    List(ListArguments),
    /// Begin an exercise: write its text and its template to a new folder
    Start(StartArguments),
    /// Grade a solution, or all solutions of a class
    Check(CheckArguments),
    /// Grade one solution in this process
    #[command(hide = true)]
    Grade(sandbox::GradeArguments),
}

#[derive(clap::Args)]
struct ListArguments {
    #[command(flatten)]
    folders: Folders,
    /// Print one JSON object per exercise
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct Folders {
    /// Folder with exercises of your own. May be repeated
    #[arg(long = "exercises", value_name = "DIR")]
    exercises: Vec<PathBuf>,
}

#[derive(clap::Args)]
struct StartArguments {
    /// Number or name of the exercise
    #[arg(value_name = "N")]
    exercise: String,
    /// Folder to create
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Language of the program [default: the first that the exercise has]
    #[arg(long, value_enum)]
    language: Option<Language>,
    #[command(flatten)]
    folders: Folders,
}

#[derive(clap::Args)]
#[command(
    after_help = "Exit code: 0 if every check passed, 1 if one failed, 2 if a solution could not be graded."
)]
struct CheckArguments {
    /// Folder of a solution, or of several
    #[arg(value_name = "DIR", required_unless_present = "all", conflicts_with = "all")]
    folder: Option<PathBuf>,
    /// Grade every solution in the folders of this folder
    #[arg(long, value_name = "DIR")]
    all: Option<PathBuf>,
    /// Print one JSON object per solution
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Print a line of comma-separated values per solution
    #[arg(long)]
    csv: bool,
    /// Write a JUnit report
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Show up to N hints for each failed check
    #[arg(long, value_name = "N", default_value_t = 1)]
    hint: usize,
    /// Time limit of a program, for example 20s
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_time)]
    program_timeout: Duration,
    /// Time limit of a solution with all its checks; cargo has 15 minutes more
    #[arg(long, value_name = "TIME", default_value = "300s", value_parser = parse_time)]
    timeout: Duration,
    #[command(flatten)]
    folders: Folders,
}

fn parse_time(text: &str) -> Result<Duration, String> {
    let time: Time = text.parse()?;
    match Duration::from_nanos(time.0) {
        time if time >= Duration::from_secs(1) => Ok(time),
        _ => Err("at least 1s".into()),
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> CommandResult {
    match &arguments.action {
        Action::List(arguments) => list(arguments),
        Action::Start(arguments) => start(arguments).map_err(bad_input),
        Action::Check(arguments) => check(arguments).map_err(bad_input),
        Action::Grade(arguments) => {
            let exercises = exercise::all(&arguments.exercises).map_err(failure)?;
            sandbox::run(arguments, &exercises).map_err(failure)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn list(arguments: &ListArguments) -> CommandResult {
    let exercises = exercise::all(&arguments.folders.exercises).map_err(bad_input)?;
    let width = exercises.iter().map(|exercise| exercise.name.len()).max().unwrap_or(0);
    for (index, exercise) in exercises.iter().enumerate() {
        let languages: Vec<&str> = exercise.languages().into_iter().map(Language::name).collect();
        let Exercise { name, manifest, .. } = exercise;
        if arguments.json {
            let object = serde_json::json!({
                "number": index + 1,
                "name": name,
                "title": manifest.title,
                "level": manifest.level,
                "languages": languages,
                "checks": manifest.check.len(),
            });
            outln!("{object}");
            continue;
        }
        let needs = if languages.is_empty() { "no program".to_owned() } else { languages.join(", ") };
        outln!("{:>3}  {name:<width$}  level {}  {}  ({needs})", index + 1, manifest.level, manifest.title);
    }
    Ok(ExitCode::SUCCESS)
}

fn start(arguments: &StartArguments) -> Result<ExitCode, String> {
    let exercises = exercise::all(&arguments.folders.exercises)?;
    let exercise = exercise::find(&exercises, &arguments.exercise)?;
    let languages = exercise.languages();
    let language = match arguments.language {
        Some(language) if !languages.contains(&language) => {
            let names: Vec<&str> = languages.iter().map(|language| language.name()).collect();
            let has = if names.is_empty() {
                "needs no program".into()
            } else {
                format!("has {}", names.join(", "))
            };
            return Err(format!("--language {}: {} {has}", language.name(), exercise.name));
        }
        Some(language) => Some(language),
        None => languages.first().copied(),
    };
    let folder = &arguments.folder;
    let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
    fs::create_dir_all(folder).map_err(failed)?;
    if fs::read_dir(folder).map_err(failed)?.next().is_some() {
        return Err(format!("{}: the folder is not empty; give a new one", folder.display()));
    }
    let mut files = exercise.template(language);
    files.extend(given_files(exercise)?);
    files.insert("exercise.md".into(), exercise.text().to_vec());
    files.insert(submission::MARKER.into(), submission::marker(&exercise.name, language).into_bytes());
    submission::write_files(folder, &files)?;
    let shown = folder.display();
    outln!("{}", exercise.manifest.title);
    outln!("read:  {}", folder.join("exercise.md").display());
    for file in exercise.submitted(language) {
        outln!("edit:  {}", folder.join(file).display());
    }
    outln!("grade: softhca course check {}", crate::shell::quote(&shown.to_string()));
    Ok(ExitCode::SUCCESS)
}

/// The files that runs make for a student.
fn given_files(exercise: &Exercise) -> Result<Files, String> {
    let mut files = Files::new();
    for given in &exercise.manifest.given {
        let failed = |why: String| format!("exercise {}: {why}", exercise.name);
        let bytes = exercise.hidden(&given.run).unwrap_or_default();
        let scenario = Scenario::parse(&given.run, &String::from_utf8_lossy(bytes));
        let scenario = scenario.map_err(|problem| failed(problem.to_string()))?;
        let plan = scenario.plan(&Default::default(), scenario.seed);
        let plan = plan.map_err(|problem| failed(problem.to_string()))?;
        let outcome = simulate(&plan, Recording::Everything);
        let artifacts = outcome
            .artifacts
            .ok_or_else(|| failed(outcome.error.unwrap_or_else(|| "the run recorded nothing".into())))?;
        files.extend(given.capture.clone().map(|file| (file, artifacts.capture)));
        files.extend(given.log.clone().map(|file| (file, artifacts.events)));
    }
    Ok(files)
}

fn check(arguments: &CheckArguments) -> Result<ExitCode, String> {
    let exercises = exercise::all(&arguments.folders.exercises)?;
    let folder = arguments.folder.as_ref().or(arguments.all.as_ref()).expect("clap requires one");
    let submissions = submission::below(folder, MAX_DEPTH)?;
    if submissions.is_empty() {
        return Err(format!(
            "{}: no folder with {}, which `softhca course start` writes",
            folder.display(),
            submission::MARKER
        ));
    }
    if let Some(path) = &arguments.junit {
        output::create("--junit", path)?;
    }
    let isolation = Isolation::of_system();
    if let (Some(warning), Some(_)) = (isolation.warning(), &arguments.all) {
        warnln!("{warning}");
    }
    if arguments.csv {
        outln!("{}", Grade::CSV_HEADER);
    }
    let mut grades = Vec::new();
    for (path, submission) in submissions {
        let name = path.strip_prefix(folder).ok().filter(|name| !name.as_os_str().is_empty());
        let name = name.filter(|_| arguments.all.is_some()).unwrap_or(&path).display().to_string();
        let mut grade = match submission {
            Ok(submission) => grade(arguments, &exercises, &isolation, &submission, name),
            Err(why) => Grade::unusable(name, Verdict::Fail, why),
        };
        let all_hints: Vec<usize> = grade.checks.iter().map(|check| check.hints.len()).collect();
        grade.limit_hints(arguments.hint);
        if arguments.csv {
            outln!("{}", grade.csv());
        } else if arguments.json {
            outln!("{}", serde_json::to_string(&grade).unwrap_or_default());
        } else {
            outln!("{}", grade.text(&all_hints).trim_end());
        }
        grades.push(grade);
    }
    if let Some(path) = &arguments.junit {
        fs::write(path, report::junit(&grades))
            .map_err(|error| output::write_error("--junit", path, &error))?;
    }
    let has = |result| grades.iter().any(|grade| grade.result == result);
    Ok(match (has(Verdict::Error), has(Verdict::Fail)) {
        (true, _) => ExitCode::from(BAD_INPUT),
        (false, true) => ExitCode::FAILURE,
        (false, false) => ExitCode::SUCCESS,
    })
}

/// Grades one submission. Nothing that it does is an error of the command.
fn grade(
    arguments: &CheckArguments,
    exercises: &[Exercise],
    isolation: &Isolation,
    submission: &Submission,
    name: String,
) -> Grade {
    let exercise = match exercise::find(exercises, &submission.exercise) {
        Ok(exercise) => exercise,
        Err(why) => return Grade::unusable(name, Verdict::Fail, format!("{}: {why}", submission::MARKER)),
    };
    let languages = exercise.languages();
    let is_known = match submission.language {
        Some(language) => languages.contains(&language),
        None => languages.is_empty(),
    };
    if !is_known {
        let why = format!("{}: the exercise has no such language", submission::MARKER);
        return Grade::unusable(name, Verdict::Fail, why);
    }
    let CheckArguments { program_timeout: program, timeout: total, .. } = *arguments;
    let hide: Option<&Path> = arguments.all.as_deref();
    let folders = &arguments.folders.exercises;
    let graded = sandbox::grade(submission, folders, TimeLimits { program, total }, isolation, hide);
    let graded = match graded {
        Ok(graded) => graded,
        Err(why) => return Grade::unusable(name, Verdict::Error, why),
    };
    let checks = graded.lines.into_iter().filter_map(|line| match line {
        Line::Check(check) => Some(check),
        Line::Stopped(_) | Line::End => None,
    });
    let checks: Vec<_> = checks.collect();
    let worst = |result| checks.iter().any(|check| check.result == result);
    let result = match &graded.failed {
        Some((result, _)) => *result,
        None if worst(Verdict::Error) => Verdict::Error,
        None if worst(Verdict::Fail) || checks.is_empty() => Verdict::Fail,
        None => Verdict::Pass,
    };
    Grade {
        submission: name,
        exercise: exercise.name.clone(),
        title: exercise.manifest.title.clone(),
        language: submission.language.map(Language::name),
        result,
        passed: checks.iter().filter(|check| check.result == Verdict::Pass).count(),
        total: exercise.manifest.check.len(),
        checks,
        stopped: graded.failed.map(|(_, why)| why),
    }
}
