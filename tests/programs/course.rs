//! `softhca course`: right and wrong solutions of every exercise, and submissions that misbehave.
//!
//! The solutions are in tests/course: `NAME/right*`, and in `wrong.toml` the changes that make them wrong.

use crate::exec::compiler;
use crate::rig::softhca;
use libtest_mimic::Trial;
use serde_json::Value;
use softhca_tests::tools;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A long test grades every right solution this often.
const REPETITIONS: usize = 10;

/// The tests of this file.
pub fn trials() -> Vec<Trial> {
    let mut trials = vec![
        // Without isolation these submissions would harm the machine of whoever runs the tests.
        tools::needs_condition(
            has_isolation() && tools::is_installed(compiler()),
            "a compiler and namespaces are needed".into(),
            "submissions_that_misbehave_cost_their_own_grade_only",
            misbehaving,
        ),
        tools::needs(compiler(), "sixty_submissions_are_graded", sixty_submissions),
        tools::needs(
            "unshare",
            "without_namespaces_submissions_are_graded_with_a_warning",
            without_namespaces,
        ),
        tools::needs(compiler(), "a_class_gets_junit_and_csv", a_class_gets_reports),
        tools::needs(compiler(), "a_teacher_adds_an_exercise_as_a_folder", exercises_of_a_teacher),
        tools::needs("sh", "bad_arguments_and_bad_folders_are_errors", bad_input),
    ];
    for (exercise, solutions) in right_solutions() {
        let needed = needed_by(&solutions);
        let (right, name) = (solutions.clone(), exercise.clone());
        let needs = |name: &str, test: Box<dyn FnOnce() + Send>| {
            tools::needs_condition(needed.is_ok(), needed.clone().err().unwrap_or_default(), name, test)
        };
        trials.push(needs(
            &format!("solutions_of_{exercise}"),
            Box::new(move || solutions_are_graded(&name, &right)),
        ));
        let ten_times = move || {
            for _ in 0..REPETITIONS {
                solutions.iter().for_each(|solution| assert_right(solution));
            }
        };
        trials.push(
            needs(&format!("right_solutions_of_{exercise}_pass_ten_times"), Box::new(ten_times))
                .with_ignored_flag(true),
        );
    }
    trials
}

/// Whether the command can isolate submissions here.
fn has_isolation() -> bool {
    let namespaces = ["--net", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let works = |options: &[&str]| {
        let status = Command::new("unshare").args(options).args(namespaces).arg("true").output();
        status.is_ok_and(|output| output.status.success())
    };
    works(&[]) || works(&["--map-root-user"])
}

fn solutions_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("course")
}

/// The right solutions, by exercise.
fn right_solutions() -> BTreeMap<String, Vec<PathBuf>> {
    let mut found = BTreeMap::<String, Vec<PathBuf>>::new();
    for folder in fs::read_dir(solutions_folder()).expect("the solutions").flatten() {
        if !folder.path().is_dir() {
            continue;
        }
        let name = folder.file_name().into_string().expect("UTF-8");
        let files = fs::read_dir(folder.path()).expect("a folder").flatten().map(|file| file.path());
        let mut files: Vec<PathBuf> = files.collect();
        files.sort();
        found.insert(name, files);
    }
    found
}

/// What the solutions need, or what of it is missing.
fn needed_by(solutions: &[PathBuf]) -> Result<(), String> {
    let has = |end: &str| solutions.iter().any(|path| path.extension().is_some_and(|found| found == end));
    if has("c") && !tools::is_installed(compiler()) {
        return Err(format!("{} is not installed", compiler()));
    }
    let imports = |python: &&str| {
        let output = Command::new(python).args(["-c", "import pyverbs.device"]).output();
        output.is_ok_and(|output| output.status.success())
    };
    if has("py") && !["python3", "/usr/bin/python3"].iter().any(imports) {
        return Err("python3-pyverbs is not installed".into());
    }
    Ok(())
}

/// A folder for one test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        use std::sync::atomic::{AtomicU32, Ordering};
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("softhca-test-course-{}-{serial}", std::process::id()));
        fs::create_dir_all(&path).expect("the temporary folder can be written");
        Folder(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn course(words: &[&str]) -> Output {
    Command::new(softhca()).arg("course").args(words).output().expect("the command starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The exercise of a solution, its language and the file that it is handed in as.
fn destination(solution: &Path) -> (String, Option<&'static str>, &'static str) {
    let exercise =
        solution.parent().and_then(Path::file_name).expect("a folder").to_string_lossy().into_owned();
    let name = solution.file_name().expect("a name").to_string_lossy().into_owned();
    let (language, file) = match name.as_str() {
        name if name.ends_with(".c") => (Some("c"), "solution.c"),
        name if name.ends_with(".py") => (Some("python"), "solution.py"),
        name if name.ends_with("scenario.toml") => (None, "scenario.toml"),
        name if name.ends_with("expect.toml") => (None, "expectations.toml"),
        _ => (None, "answers.toml"),
    };
    (exercise, language, file)
}

/// Starts an exercise in a folder and hands in a solution.
fn hand_in(folder: &str, solution: &Path, contents: &str) {
    let (exercise, language, file) = destination(solution);
    let mut words = vec!["start", &exercise, folder];
    words.extend(language.map(|language| ["--language", language]).into_iter().flatten());
    let started = course(&words);
    assert!(started.status.success(), "{}", text(&started.stderr));
    fs::write(Path::new(folder).join(file), contents).expect("the folder was made");
}

/// Grades a solution: the exit code and the object of the report.
fn check(solution: &Path, contents: &str) -> (i32, Value) {
    let folder = Folder::new();
    let path = folder.path("submission");
    hand_in(&path, solution, contents);
    let graded = course(&["check", &path, "--json", "--hint", "9", "--program-timeout", "20s"]);
    let report = text(&graded.stdout);
    let value = serde_json::from_str(&report).unwrap_or_else(|_| panic!("{report}{}", text(&graded.stderr)));
    (graded.status.code().expect("an exit code"), value)
}

fn assert_right(solution: &Path) {
    let contents = fs::read_to_string(solution).expect("a solution");
    let (code, report) = check(solution, &contents);
    assert_eq!((code, report["result"].as_str()), (0, Some("pass")), "{}: {report:#}", solution.display());
}

fn solutions_are_graded(exercise: &str, right: &[PathBuf]) {
    for solution in right {
        assert_right(solution);
    }
    // The template alone is not a solution.
    let folder = Folder::new();
    for language in ["c", "python"] {
        let path = folder.path(language);
        let with_language = course(&["start", exercise, &path, "--language", language]);
        if with_language.status.success() {
            assert_eq!(course(&["check", &path]).status.code(), Some(1), "the template of {exercise}");
        }
    }
    let wrong = fs::read_to_string(solutions_folder().join("wrong.toml")).expect("the wrong solutions");
    let wrong = wrong.split("[[wrong]]\n").skip(1).map(WrongSolution::parse);
    let wrong: Vec<WrongSolution> =
        wrong.filter(|wrong| wrong.of.starts_with(&format!("{exercise}/"))).collect();
    assert!(!wrong.is_empty(), "no wrong solution of {exercise}");
    for WrongSolution { of, replace, hint } in wrong {
        let solution = solutions_folder().join(&of);
        let mut contents = fs::read_to_string(&solution).expect("a solution");
        for change in replace.chunks(2) {
            let [from, to] = change else { panic!("{of}: pairs") };
            assert!(contents.contains(from), "{of} does not contain {from:?}");
            contents = contents.replace(from, to);
        }
        let (code, report) = check(&solution, &contents);
        assert_eq!((code, report["result"].as_str()), (1, Some("fail")), "{of} {replace:?}: {report:#}");
        let checks = report["checks"].as_array().expect("checks");
        let failed = checks.iter().find(|check| check["result"] != "pass").expect("a failed check");
        assert!(failed["hints"].to_string().contains(&hint), "{of} {replace:?}: {hint:?}: {failed:#}");
    }
}

/// A wrong solution of `wrong.toml`. Its lists are also JSON.
struct WrongSolution {
    of: String,
    replace: Vec<String>,
    hint: String,
}

impl WrongSolution {
    fn parse(text: &str) -> WrongSolution {
        let value = |key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
            let line = line.unwrap_or_else(|| panic!("no {key} in {text}"));
            serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{line}: {error}"))
        };
        let words = |value: Value| serde_json::from_value(value).expect("a list of texts");
        let word = |value: Value| value.as_str().expect("a text").to_owned();
        WrongSolution { of: word(value("of")), replace: words(value("replace")), hint: word(value("hint")) }
    }
}

/// What a program does instead of connecting.
const MISBEHAVIOUR: [(&str, &str, &str); 9] = [
    ("loops", "for (;;);", "did not end within"),
    ("crashes", "volatile int *p = 0; *p = 1;", "139"),
    ("forks", "for (int i = 0; i < 11; i++) fork(); pause();", ""),
    ("prints", "for (;;) puts(\"endless endless endless endless endless\");", ""),
    (
        "fills-the-disk",
        "FILE *f = fopen(\"big\", \"w\"); static char b[1 << 20]; while (fwrite(b, sizeof b, 1, f));  \
      for (int i = 0; ; i++) { char n[20]; sprintf(n, \"f%d\", i); f = fopen(n, \"w\"); \
      if (!f) return -1; while (fwrite(b, sizeof b, 1, f)); }",
        "",
    ),
    ("eats-memory", "for (;;) memset(malloc(1 << 26), 1, 1 << 26);", ""),
    ("leaves-a-process", "if (!fork()) { setsid(); if (!fork()) for (;;) pause(); exit(0); } return -1;", ""),
    ("kills", "kill(-1, SIGKILL); kill(getppid(), SIGKILL); return -1;", ""),
    (
        "ignores-signals",
        "for (int i = 1; i < 65; i++) signal(i, SIG_IGN); for (;;) pause();",
        "did not end within",
    ),
];

fn misbehaving_solution(action: &str) -> String {
    format!(
        "#include \"endpoint.h\"\n#include <signal.h>\n#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n\
         #include <unistd.h>\n#include <fcntl.h>\n\
         int connect_queue_pair(struct ibv_qp *qp, const struct endpoint *mine, const struct endpoint *peer)\n\
         {{ (void)qp, (void)mine, (void)peer; {action} return -1; }}\n"
    )
}

/// The rows of CSV, without the header, by submission.
fn rows(csv: &str) -> BTreeMap<String, String> {
    let mut lines = csv.lines();
    assert_eq!(lines.next(), Some("submission,exercise,language,result,passed,checks,message"));
    lines.map(|line| (line.split(',').next().unwrap_or_default().to_owned(), line.to_owned())).collect()
}

fn misbehaving() {
    let folder = Folder::new();
    let right = solutions_folder().join("01-connect/right.c");
    let good = fs::read_to_string(&right).expect("a solution");
    for (name, action, _) in MISBEHAVIOUR {
        hand_in(&folder.path(&format!("all/{name}")), &right, &misbehaving_solution(action));
    }
    // Files outside of the scratch folder: the submission's, the user's, and that of another submission.
    let outside = folder.path("outside");
    let other = folder.path("all/zoe/solution.c");
    let write = format!(
        "int a = open(\"{outside}\", O_CREAT | O_WRONLY, 0644), b = open(\"{other}\", O_RDWR); \
         int c = open(\"{other}\", O_RDONLY); fprintf(stderr, \"opened %d %d %d\\n\", a, b, c); return -1;"
    );
    hand_in(&folder.path("all/writes"), &right, &misbehaving_solution(&write));
    hand_in(&folder.path("all/zoe"), &right, &good);
    // Files that cannot be read, and a marker of an exercise that does not exist.
    for (name, file, target) in [("link", "solution.c", "/dev/zero"), ("marker", "course.toml", "/dev/zero")]
    {
        hand_in(&folder.path(&format!("all/{name}")), &right, &good);
        let path = folder.0.join("all").join(name).join(file);
        fs::remove_file(&path).expect("a file of ours");
        std::os::unix::fs::symlink(target, &path).expect("a link");
    }
    hand_in(&folder.path("all/unknown"), &right, &good);
    fs::write(folder.path("all/unknown/course.toml"), "exercise = \"99-none\"\n").expect("a folder of ours");
    let all = folder.path("all");
    let graded = course(&["check", "--all", &all, "--csv", "--program-timeout", "4s", "--timeout", "60s"]);
    let (csv, errors) = (text(&graded.stdout), text(&graded.stderr));
    let rows = rows(&csv);
    assert_eq!(rows.len(), MISBEHAVIOUR.len() + 5, "{csv}{errors}");
    assert!(!errors.contains("are not isolated"), "{errors}");
    for (name, _, message) in MISBEHAVIOUR {
        let row = &rows[name];
        assert!(row.contains(",fail,") && row.contains(message), "{row}\n{csv}{errors}");
    }
    assert!(rows["forks"].contains("more than 256 processes"), "{csv}");
    assert!(rows["writes"].contains("opened -1 -1 -1"), "{csv}");
    assert!(!Path::new(&outside).exists());
    assert!(rows["zoe"].ends_with(",pass,2,2,"), "{csv}{errors}");
    assert!(rows["link"].contains(",fail,"), "{csv}");
    assert!(rows["marker"].contains(",fail,0,0,"), "{csv}");
    assert!(rows["unknown"].contains("no exercise"), "{csv}");
    assert_eq!(graded.status.code(), Some(1), "{csv}{errors}");
    assert_eq!(fs::read_to_string(&other).expect("zoe's file"), good, "nobody has changed it");
}

fn sixty_submissions() {
    let folder = Folder::new();
    let right = solutions_folder().join("02-predict/right.toml");
    let good = fs::read_to_string(&right).expect("a solution");
    for number in 0..60 {
        let contents = if number % 2 == 0 { good.clone() } else { good.replace("first = 0", "first = 1") };
        hand_in(&folder.path(&format!("all/s{number:02}/02")), &right, &contents);
    }
    let graded = || course(&["check", "--all", &folder.path("all"), "--csv"]);
    let first = graded();
    let csv = text(&first.stdout);
    let rows = rows(&csv);
    assert_eq!((rows.len(), first.status.code()), (60, Some(1)), "{csv}{}", text(&first.stderr));
    for number in 0..60 {
        let wanted = if number % 2 == 0 { ",pass,1,1," } else { ",fail,0,1," };
        assert!(rows[&format!("s{number:02}/02")].contains(wanted), "{csv}");
    }
    assert_eq!(text(&graded().stdout), csv, "the second time");
}

fn without_namespaces() {
    let folder = Folder::new();
    let right = solutions_folder().join("03-capture/right.toml");
    hand_in(&folder.path("all/ada"), &right, &fs::read_to_string(&right).expect("a solution"));
    let program = solutions_folder().join("01-connect/right.c");
    hand_in(&folder.path("all/bob"), &program, &misbehaving_solution("for (;;);"));
    let script = "echo 0 > /proc/sys/user/max_pid_namespaces; exec \"$0\" \"$@\"";
    let graded = Command::new("unshare")
        .args(["--user", "--map-root-user", "sh", "-c", script])
        .arg(softhca())
        .args(["course", "check", "--csv", "--program-timeout", "1s", "--all", &folder.path("all")])
        .output()
        .expect("unshare runs");
    let (csv, errors) = (text(&graded.stdout), text(&graded.stderr));
    assert!(errors.contains("submissions are not isolated: "), "{csv}{errors}");
    let rows = rows(&csv);
    assert!(rows["ada"].contains(",pass,1,1,"), "{csv}{errors}");
    // Without a compiler it cannot be graded, and otherwise it fails.
    assert!(!rows["bob"].contains(",pass,"), "{csv}{errors}");
    if tools::is_installed(compiler()) {
        assert!(rows["bob"].contains(",fail,0,2,") && rows["bob"].contains("did not end"), "{csv}{errors}");
    }
}

fn a_class_gets_reports() {
    let folder = Folder::new();
    let right = solutions_folder().join("01-connect/right.c");
    let good = fs::read_to_string(&right).expect("a solution");
    hand_in(&folder.path("all/ada"), &right, &good);
    hand_in(&folder.path("all/bob"), &right, &good.replace("rts.retry_cnt = 7;", "rts.retry_cnt = 0;"));
    let (all, junit) = (folder.path("all"), folder.path("junit.xml"));
    let graded = course(&["check", "--all", &all, "--json", "--junit", &junit]);
    let reports: Vec<Value> =
        text(&graded.stdout).lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let seen: Vec<_> =
        reports.iter().map(|report| (report["submission"].as_str(), report["passed"].as_u64())).collect();
    assert_eq!(seen, [(Some("ada"), Some(2)), (Some("bob"), Some(1))]);
    assert_eq!(reports[1]["checks"][1]["hints"].as_array().map(Vec::len), Some(1), "one hint without --hint");
    let report = fs::read_to_string(&junit).expect("the report");
    assert!(
        report.contains("<testsuites name=\"softhca course\" tests=\"4\" failures=\"1\" errors=\"0\""),
        "{report}"
    );
    assert!(report.contains("retry_cnt is") || report.contains("instead of being sent again"), "{report}");
    let one = course(&["check", &folder.path("all/ada")]);
    assert_eq!(one.status.code(), Some(0), "{}", text(&one.stdout));
}

fn exercises_of_a_teacher() {
    let folder = Folder::new();
    let write = |name: &str, text: &str| {
        let path = folder.0.join("exercises").join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder of ours");
        fs::write(path, text).expect("a folder of ours");
    };
    write(
        "99-echo/exercise.toml",
        "title = \"Say hello\"\nlevel = 1\n[[check]]\nname = \"it says hello\"\nrun = \"run.toml\"\n\
         output = [{ program = \"server\", line = \"hello\" }]\n[[check.hint]]\ntext = [\"puts\"]\n",
    );
    write("99-echo/exercise.md", "Print hello.\n");
    write("99-echo/c/solution.c", "int main(void) { return 0; }\n");
    write(
        "99-echo/hidden/run.toml",
        "title = \"t\"\n[hosts]\nalice = {}\n[[workload]]\nname = \"server\"\n\
         command = { host = \"alice\", argv = [\"./program\"] }\n",
    );
    let (exercises, path) = (folder.path("exercises"), folder.path("solution"));
    let own = |words: &[&str]| course(&[words, &["--exercises", &exercises]].concat());
    assert!(text(&own(&["list"]).stdout).contains("99-echo"));
    assert!(own(&["start", "echo", &path]).status.success());
    let seen = own(&["check", &path]);
    assert!(seen.status.code() == Some(1) && text(&seen.stdout).contains("hint 1 of 1: puts"), "{seen:?}");
    fs::write(
        folder.path("solution/solution.c"),
        "#include <stdio.h>\nint main(void) { puts(\"hello\"); }\n",
    )
    .expect("a folder of ours");
    assert_eq!(own(&["check", &path]).status.code(), Some(0));
    // cargo takes its time: a crate without dependencies.
    let rust = folder.path("rust");
    let package = "[package]\nname = \"solution\"\nversion = \"0.1.0\"\nedition = \"2021\"\n[workspace]\n";
    write("99-echo/rust/Cargo.toml", package);
    write("99-echo/rust/src/main.rs", "mod solution;\nfn main() {\n    solution::hello();\n}\n");
    write("99-echo/rust/src/solution.rs", "pub fn hello() {}\n");
    let started = own(&["start", "99-echo", &rust, "--language", "rust"]);
    assert!(started.status.success(), "{started:?}");
    assert_eq!(own(&["check", &rust]).status.code(), Some(1));
    fs::write(folder.path("rust/src/solution.rs"), "pub fn hello() {\n    println!(\"hello\");\n}\n")
        .expect("a folder of ours");
    let seen = own(&["check", &rust]);
    assert_eq!(seen.status.code(), Some(0), "{seen:?}");
    write("99-echo/hidden/run.toml", "title = 1\n");
    let seen = own(&["check", &path]);
    assert!(seen.status.code() == Some(2) && text(&seen.stdout).contains("run.toml:1"), "{seen:?}");
}

fn bad_input() {
    let folder = Folder::new();
    for (words, part) in [
        (&["start", "99", "x"][..], "no exercise \"99\": `softhca course list`"),
        (&["start", "2", &folder.path("x"), "--language", "c"], "needs no program"),
        (&["start", "10", &folder.path("x"), "--language", "rust"], "has c"),
        (&["start", "1", "/proc"], "the folder is not empty"),
        (&["check", &folder.path("")], "which `softhca course start` writes"),
        (&["check", "/no/such/folder"], "/no/such/folder: "),
        (&["check"], "required"),
        (&["check", "x", "--program-timeout", "1ms"], "at least 1s"),
        (&["list", "--exercises", &folder.path("")], "no folder in it has a file exercise.toml"),
    ] {
        let seen = course(words);
        let message = text(&seen.stderr);
        assert!(seen.status.code() == Some(2) && message.contains(part), "{words:?}: {message}");
    }
}
