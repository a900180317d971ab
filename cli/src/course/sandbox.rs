//! The process in which a submission is graded, and its limits.
//!
//! Where the kernel permits it, the process is the first one of new PID, mount and network namespaces. All processes of
//! the submission end with it. It sees a file system that is read-only, except for a tmpfs of limited size, and a loopback
//! interface of its own. Without namespaces, only time, file sizes and core dumps are limited.

use super::exercise::{Exercise, Language};
use super::grader::{Grader, Line};
use super::program::CARGO_TIMEOUT;
use super::submission::Submission;
#[cfg(target_os = "linux")]
use crate::lab::Namespaces;
use crate::output::ScratchFolder;
use rustix::process::{Resource, Rlimit, setrlimit};
use softhca_scenarios::Verdict;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The processes of a submission, with their daemon and compilers.
const MAX_PROCESSES: usize = 256;
/// The resident memory of all its processes.
const MAX_MEMORY: u64 = 2 << 30;
/// The files that it writes.
const MAX_DISK: u64 = 512 << 20;
/// Bytes that cargo writes in addition.
const MAX_CARGO_DISK: u64 = 3 << 30;
/// One file that it writes, its output among them.
const MAX_FILE: u64 = 256 << 20;
/// The output of the grading process.
const MAX_REPORT: u64 = 4 << 20;
/// How often the limits are checked.
const WATCH_INTERVAL: Duration = Duration::from_millis(5);
/// How long the processes of a submission may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(60);
/// How often the parent looks whether the time is over.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The time limits of a submission.
#[derive(Clone, Copy, Debug)]
pub struct TimeLimits {
    /// Of each program.
    pub program: Duration,
    /// Of everything.
    pub total: Duration,
}

/// How submissions are isolated.
pub enum Isolation {
    #[cfg(target_os = "linux")]
    Namespaces(Namespaces),
    /// They are not, for this reason.
    None(String),
}

impl Isolation {
    /// The best isolation of this machine.
    #[cfg(target_os = "linux")]
    pub fn of_system() -> Isolation {
        let options = ["--net", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"];
        match crate::lab::find_namespaces("isolation needs namespaces", &options) {
            Ok(namespaces) => Isolation::Namespaces(namespaces),
            Err(why) => Isolation::None(why),
        }
    }

    #[cfg(not(target_os = "linux"))]
    pub fn of_system() -> Isolation {
        Isolation::None("only Linux has namespaces".into())
    }

    /// The warning for a teacher.
    pub fn warning(&self) -> Option<String> {
        match self {
            #[cfg(target_os = "linux")]
            Isolation::Namespaces(_) => None,
            Isolation::None(why) => Some(format!(
                "submissions are not isolated: they can write files, and processes that they leave behind \
                 continue; {why}"
            )),
        }
    }

    /// The command that starts this command again.
    fn command(&self) -> Result<Command, String> {
        let own = std::env::current_exe()
            .map_err(|error| format!("cannot find the path of the executable: {error}"))?;
        Ok(match self {
            #[cfg(target_os = "linux")]
            Isolation::Namespaces(Namespaces { options, path }) => {
                let mut command = Command::new("unshare");
                command.args(options).arg(own).env_clear().env("PATH", path);
                command
            }
            Isolation::None(_) => {
                let mut command = Command::new(own);
                command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
                command
            }
        })
    }

    const fn is_some(&self) -> bool {
        !matches!(self, Isolation::None(_))
    }
}

/// Arguments of the grading process.
#[derive(clap::Args)]
pub struct GradeArguments {
    #[arg(long)]
    exercise: String,
    #[arg(long)]
    pub exercises: Vec<PathBuf>,
    #[arg(long, value_enum)]
    language: Option<Language>,
    /// The folder of the submission.
    #[arg(long)]
    submission: PathBuf,
    /// An empty folder.
    #[arg(long)]
    scratch: PathBuf,
    /// The folder of all submissions.
    #[arg(long)]
    hide: Option<PathBuf>,
    #[arg(long)]
    program_seconds: u64,
    /// It is in namespaces of its own.
    #[arg(long)]
    isolated: bool,
}

/// The report of the grading process.
pub struct Graded {
    pub lines: Vec<Line>,
    /// Why it did not report an end.
    pub failed: Option<(Verdict, String)>,
}

/// Starts the grading process for a submission and waits for it, until the limit at most. `hide` is a folder that the
/// submission cannot read.
pub fn grade(
    submission: &Submission,
    exercises: &[PathBuf],
    limits: TimeLimits,
    isolation: &Isolation,
    hide: Option<&Path>,
) -> Result<Graded, String> {
    let scratch = ScratchFolder::new("softhca-course-")?;
    let absolute = |path: &Path| path.canonicalize().map_err(|error| format!("{}: {error}", path.display()));
    let scratch_path = absolute(&scratch.0)?;
    let mut errors = fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(scratch.0.join("errors.txt"))
        .map_err(|error| format!("{}: {error}", scratch.0.display()))?;
    let mut command = isolation.command()?;
    command.args(["course", "grade", "--exercise", &submission.exercise]);
    for folder in exercises {
        command.arg("--exercises").arg(absolute(folder)?);
    }
    if let Some(language) = submission.language {
        command.args(["--language", language.name()]);
    }
    command.arg("--submission").arg(absolute(&submission.folder)?);
    command.arg("--scratch").arg(&scratch_path);
    if let Some(hide) = hide {
        command.arg("--hide").arg(absolute(hide)?);
    }
    command.args(["--program-seconds", &limits.program.as_secs().max(1).to_string()]);
    if isolation.is_some() {
        command.arg("--isolated");
    }
    command.envs(environment(&scratch_path)).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command.stderr(errors.try_clone().map_err(|error| error.to_string())?);
    #[cfg(target_os = "linux")]
    softhca_daemon::Signals::kill_with_parent(&mut command);
    let total = limits.total
        + if submission.language == Some(Language::Rust) { CARGO_TIMEOUT } else { Duration::ZERO };
    let mut child = command.spawn().map_err(|error| format!("the grading process: {error}"))?;
    let mut graded = receive(&mut child, total);
    let mut text = String::new();
    let _ = errors.rewind().and_then(|()| errors.take(1 << 12).read_to_string(&mut text));
    if let Some((Verdict::Error, why)) = &mut graded.failed
        && let Some(last) = text.lines().last()
    {
        *why = format!("{why}: {last}");
    }
    Ok(graded)
}

/// The variables of the grading process, and of the programs in it: none of the teacher's but these.
fn environment(scratch: &Path) -> Vec<(&'static str, OsString)> {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let own = |name: &'static str, below: &str| {
        let value = std::env::var_os(name).or_else(|| Some(home.as_ref()?.join(below).into_os_string()));
        value.map(|value| (name, value))
    };
    let here = |name: &'static str, folder: &str| (name, scratch.join(folder).into_os_string());
    let mut variables = vec![
        here("HOME", "home"),
        here("TMPDIR", "tmp"),
        here("XDG_RUNTIME_DIR", "run"),
        ("LANG", "C.UTF-8".into()),
        ("PYTHONDONTWRITEBYTECODE", "1".into()),
    ];
    // The libraries of this command, and compilers, are there.
    let kept = [("XDG_CACHE_HOME", ".cache"), ("CARGO_HOME", ".cargo"), ("RUSTUP_HOME", ".rustup")];
    variables.extend(kept.into_iter().filter_map(|(name, below)| own(name, below)));
    variables
}

/// Reads the lines of the grading process until it ends or its time is over.
fn receive(child: &mut Child, total: Duration) -> Graded {
    let output = child.stdout.take().expect("it is piped");
    let (sender, receiver) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(output.take(MAX_REPORT)).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let until = Instant::now() + total;
    let mut graded = Graded { lines: Vec::new(), failed: None };
    let mut has_ended = false;
    while !has_ended {
        if Instant::now() >= until {
            let why = format!("the submission exceeded its time, {} s in all", total.as_secs());
            graded.failed = Some((Verdict::Fail, why));
            break;
        }
        match receiver.recv_timeout(POLL_INTERVAL) {
            Ok(line) => match serde_json::from_str(&line) {
                Ok(Line::End) => has_ended = true,
                Ok(Line::Stopped(why)) => {
                    graded.failed = Some((Verdict::Fail, why));
                    has_ended = true;
                }
                Ok(check) => graded.lines.push(check),
                Err(_) => {
                    graded.failed = Some((Verdict::Fail, "the report of the grading is damaged".into()));
                    has_ended = true;
                }
            },
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                graded.failed = Some((Verdict::Error, "the grading ended without a result".into()));
                has_ended = true;
            }
        }
    }
    // The first process of a PID namespace ends after all others. The next submission needs what they occupy.
    let until = Instant::now() + if has_ended { END_TIMEOUT } else { Duration::ZERO };
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < until {
        std::thread::sleep(WATCH_INTERVAL);
    }
    // With namespaces, this ends all processes of the submission.
    if let Ok(None) = child.try_wait() {
        let group = rustix::process::Pid::from_child(child);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
    let _ = child.wait();
    // Without namespaces, a process that was left behind may hold the pipe.
    drop(reader);
    graded
}

fn print(line: &Line) {
    let mut output = std::io::stdout().lock();
    let _ = writeln!(output, "{}", serde_json::to_string(line).unwrap_or_default());
    let _ = output.flush();
}

/// The grading process. It prints its results as lines of JSON.
pub fn run(arguments: &GradeArguments, exercises: &[Exercise]) -> Result<(), String> {
    let exercise = super::exercise::find(exercises, &arguments.exercise)?;
    let wanted = exercise.submitted(arguments.language);
    let submitted = super::submission::read_files(&arguments.submission, &wanted);
    let isolation = if arguments.isolated { isolate(arguments) } else { Ok(()) };
    isolation.map_err(|why| format!("cannot isolate the submission: {why}"))?;
    let failed = |error: std::io::Error| format!("{}: {error}", arguments.scratch.display());
    for folder in ["home", "tmp", "run", "work"] {
        crate::output::create_folder(&arguments.scratch.join(folder)).map_err(failed)?;
    }
    let work = arguments.scratch.join("work");
    std::env::set_current_dir(&work).map_err(failed)?;
    let mut files = exercise.template(arguments.language);
    files.extend(submitted.clone());
    super::submission::write_files(Path::new("."), &files)?;
    limit_resources(arguments.isolated);
    if arguments.isolated {
        std::thread::spawn(watch);
    }
    let program_timeout = Duration::from_secs(arguments.program_seconds);
    let grader = Grader { exercise, language: arguments.language, submitted, program_timeout };
    let scratch = &arguments.scratch;
    grader.grade(&mut |mut check| {
        // A full disk makes recordings and compilers fail.
        if check.result == Verdict::Error && arguments.isolated && is_full(scratch) {
            let limit = MAX_DISK >> 20;
            print(&Line::Stopped(format!("the submission filled its disk, {limit} MiB")));
            std::process::exit(0);
        }
        check.details.truncate(16);
        print(&Line::Check(check));
    });
    print(&Line::End);
    // The end of the first process of a PID namespace ends all others.
    std::process::exit(0);
}

/// Whether less than one part in a hundred of a file system is free.
fn is_full(folder: &Path) -> bool {
    rustix::fs::statvfs(folder).is_ok_and(|system| system.f_bavail * 100 < system.f_blocks)
}

fn limit_resources(isolated: bool) {
    let mut limits = vec![(Resource::Core, 0), (Resource::Fsize, MAX_FILE)];
    // Without a namespace, the other processes of the user count too.
    if isolated {
        limits.push((Resource::Nproc, 2 * MAX_PROCESSES as u64));
    }
    for (resource, value) in limits {
        // A lower limit of the user stays.
        let _ = setrlimit(resource, Rlimit { current: Some(value), maximum: Some(value) });
    }
}

/// Ends the grading when the submission exceeds a limit.
fn watch() {
    // Among hundreds of processes that fork, this thread must run. Only root may do this; for other users, the kernel
    // limits the processes.
    let _ = rustix::process::setpriority_process(None, -20);
    loop {
        if let Some(why) = exceeded() {
            print(&Line::Stopped(why));
            std::process::exit(0);
        }
        std::thread::sleep(WATCH_INTERVAL);
    }
}

/// The limit that the processes of this PID namespace exceed.
fn exceeded() -> Option<String> {
    let entries = fs::read_dir("/proc").ok()?;
    let is_process = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    let (mut processes, mut kibibytes) = (0, 0);
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if !is_process(&name) {
            continue;
        }
        processes += 1;
        if processes > MAX_PROCESSES {
            return Some(format!("the submission started more than {MAX_PROCESSES} processes"));
        }
        let status = fs::read_to_string(format!("/proc/{name}/status")).unwrap_or_default();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let number = resident.and_then(|text| text.split_whitespace().next());
        kibibytes += number.and_then(|number| number.parse::<u64>().ok()).unwrap_or(0);
    }
    (kibibytes << 10 > MAX_MEMORY)
        .then(|| format!("the submission used more than {} GiB of memory", MAX_MEMORY >> 30))
}

#[cfg(not(target_os = "linux"))]
fn isolate(_: &GradeArguments) -> Result<(), String> {
    Err("only Linux has namespaces".into())
}

/// Prepares the namespaces: a loopback interface, a scratch folder of limited size, everything else read-only.
#[cfg(target_os = "linux")]
fn isolate(arguments: &GradeArguments) -> Result<(), String> {
    use rustix::mount::{MountFlags, mount};
    use std::ffi::CString;
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).stdin(Stdio::null()).status();
    if !up.is_ok_and(|status| status.success()) {
        return Err("the loopback interface does not come up".into());
    }
    let size = MAX_DISK + if arguments.language == Some(Language::Rust) { MAX_CARGO_DISK } else { 0 };
    let tmpfs = |at: &Path, options: &str| {
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        let options = CString::new(options).expect("no zero byte");
        let mounted = mount("softhca-course", at, "tmpfs", flags, &*options);
        mounted.map_err(|error| format!("a tmpfs on {}: {error}", at.display()))
    };
    // The number of files is limited as well.
    tmpfs(&arguments.scratch, &format!("mode=700,size={size},nr_inodes=200000"))?;
    if let Some(hide) = &arguments.hide {
        // That folder may also have files that grading needs.
        let variables = ["XDG_CACHE_HOME", "CARGO_HOME", "RUSTUP_HOME"].iter().filter_map(std::env::var_os);
        let needed = variables.map(PathBuf::from).chain(std::env::current_exe().ok());
        let mut needed = needed.chain(arguments.exercises.iter().cloned()).chain([arguments.scratch.clone()]);
        if !needed.any(|path| path.starts_with(hide)) {
            tmpfs(hide, "mode=500,size=4096")?;
        }
    }
    make_read_only(&arguments.scratch)?;
    drop_privileges()
}

/// Makes every mount read-only, except for the scratch folder and the kernel's own file systems.
#[cfg(target_os = "linux")]
fn make_read_only(scratch: &Path) -> Result<(), String> {
    use rustix::mount::{MountFlags, mount_remount};
    let table = fs::read_to_string("/proc/self/mountinfo").map_err(|error| error.to_string())?;
    for line in table.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let (Some(at), Some(options)) = (words.get(4), words.get(5)) else { continue };
        let at = unescape(at);
        if at == *scratch || at.starts_with("/proc") {
            continue;
        }
        // The flags that it has: a user namespace must not remove any.
        let flags = options.split(',').filter_map(|option| match option {
            "nosuid" => Some(MountFlags::NOSUID),
            "nodev" => Some(MountFlags::NODEV),
            "noexec" => Some(MountFlags::NOEXEC),
            "noatime" => Some(MountFlags::NOATIME),
            "nodiratime" => Some(MountFlags::NODIRATIME),
            "relatime" => Some(MountFlags::RELATIME),
            _ => None,
        });
        let flags = flags.fold(MountFlags::BIND | MountFlags::RDONLY, |all, flag| all | flag);
        match mount_remount(&at, flags, c"") {
            Ok(()) => {}
            // A mount below another one cannot be reached.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT | rustix::io::Errno::ACCESS) => {}
            Err(error) => return Err(format!("{} cannot be made read-only: {error}", at.display())),
        }
    }
    Ok(())
}

/// A path of `/proc/self/mountinfo`, which has space, tab, newline and backslash as octal numbers.
#[cfg(target_os = "linux")]
fn unescape(text: &str) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        let octal = after
            .get(..3)
            .filter(|_| *first == b'\\')
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(octal.unwrap_or(*first));
        rest = if octal.is_some() { &after[3..] } else { after };
    }
    OsString::from_vec(bytes).into()
}

/// Programs get no capability: root inside of the namespaces could undo the mounts.
#[cfg(target_os = "linux")]
fn drop_privileges() -> Result<(), String> {
    use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set, set_no_new_privs};
    for capability in CapabilitySet::all().iter() {
        // An older kernel does not know all of them.
        let _ = remove_capability_from_bounding_set(capability);
    }
    set_no_new_privs(true).map_err(|error| format!("no_new_privs: {error}"))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn paths_of_mountinfo_are_unescaped() {
        assert_eq!(unescape(r"/a\040b\134c"), Path::new(r"/a b\c"));
        assert_eq!(unescape(r"/plain\"), Path::new(r"/plain\"));
    }

    #[test]
    fn a_report_that_is_damaged_or_missing_is_not_a_pass() {
        let limit = Duration::from_secs(60);
        let receive_from = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
            let mut child = command.spawn().expect("a shell");
            receive(&mut child, limit)
        };
        let good = receive_from("echo '\"end\"'");
        assert!(good.failed.is_none());
        for (script, result, part) in [
            ("echo garbage", Verdict::Fail, "damaged"),
            ("exit 0", Verdict::Error, "without a result"),
            ("echo '{\"stopped\":\"too much\"}'", Verdict::Fail, "too much"),
            ("head -c 100000000 /dev/zero", Verdict::Fail, "damaged"),
        ] {
            let (seen, why) = receive_from(script).failed.expect(script);
            assert!(seen == result && why.contains(part), "{script}: {why}");
        }
    }

    #[test]
    fn the_time_of_a_submission_is_limited() {
        let mut command = Command::new("sleep");
        command.arg("600").stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn().expect("it starts");
        let graded = receive(&mut child, Duration::from_millis(1));
        let (result, why) = graded.failed.expect("it took too long");
        assert!(result == Verdict::Fail && why.contains("exceeded its time"), "{why}");
        assert!(child.try_wait().is_ok_and(|status| status.is_some()), "it was killed");
    }
}
