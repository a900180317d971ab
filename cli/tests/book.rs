//! Checks the README and the book: every command prints the output that is shown, every link has a target, every page
//! is in the table of contents, every `Type::member` exists.
//!
//! A `console` block contains commands after `$ ` and their output. In the output, `...` on a line of its own matches
//! any lines, `[..]` any text in a line, and a last line `? N` is an exit code other than 0. `console no-run` is not
//! run; `console needs=PROGRAM` runs where the program is installed (in CI always). `SOFTHCA_BLESS=1` updates the
//! output of blocks without `...` and `[..]`. `rust` blocks run as doc tests of the crate `softhca`. A `toml` block is
//! a scenario that passes, or with `fails` fails; with `part` it is a part of a scenario, with `daemon` a daemon
//! configuration; `file=NAME` writes it to the folder of the page's commands. Other blocks are `text` or `json`.

use softhca_daemon::Config;
use softhca_scenarios::{Recording, Scenario, Verdict, simulate};
use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The timeout of a command, a hundred times what any of them takes on an idle machine.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(300);

/// Where Debian has the diagnostics of InfiniBand.
const SYSTEM_PROGRAMS: &str = "/usr/sbin";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("the root of the project")
}

/// Every page, by its path from the root.
fn pages() -> Vec<PathBuf> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|end| end == "md") {
                found.push(path);
            }
        }
    }
    let mut found = vec![root().join("README.md"), root().join("CONTRIBUTING.md")];
    walk(&root().join("docs"), &mut found);
    found.sort();
    found
}

fn display_path(page: &Path) -> String {
    page.strip_prefix(root()).expect("a page of the project").display().to_string()
}

/// A fenced block: its language, its marks, and its line numbers in the page.
struct CodeBlock {
    language: String,
    marks: Vec<String>,
    lines: std::ops::Range<usize>,
}

fn blocks(page: &Path, text: &str) -> Vec<CodeBlock> {
    let mut blocks = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for (number, line) in text.lines().enumerate() {
        let Some(info) = line.trim_start().strip_prefix("```") else { continue };
        match open.take() {
            Some((start, info)) => {
                let mut words = info.split([' ', ',']).filter(|word| !word.is_empty()).map(str::to_owned);
                let language = words.next().unwrap_or_default();
                blocks.push(CodeBlock { language, marks: words.collect(), lines: start + 1..number });
            }
            None => open = Some((number, info.to_owned())),
        }
    }
    assert!(open.is_none(), "{}: a block does not end", display_path(page));
    blocks
}

/// A command with its expected output and exit code.
struct Step {
    line: usize,
    command: String,
    output: Vec<String>,
    code: i32,
}

fn steps(lines: &[&str], first: usize) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for (number, line) in lines.iter().enumerate() {
        if let Some(command) = line.strip_prefix("$ ") {
            steps.push(Step { line: first + number, command: command.into(), output: Vec::new(), code: 0 });
            continue;
        }
        let step = steps.last_mut().expect("a console block starts with a command after `$ `");
        match line.strip_prefix("? ").and_then(|code| code.parse().ok()) {
            Some(code) => step.code = code,
            None => step.output.push((*line).to_owned()),
        }
    }
    steps
}

/// The folder in which the commands of a page run: links to the project, and the files that they write.
struct Sandbox {
    folder: PathBuf,
}

impl Sandbox {
    fn new(page: &Path) -> Sandbox {
        let name = display_path(page).replace(['/', '.'], "-");
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("book").join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join(".bin")).expect("a folder in the target folder");
        for entry in fs::read_dir(root()).expect("the root") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name");
            if name != "target" && !name.to_string_lossy().starts_with('.') {
                std::os::unix::fs::symlink(&path, folder.join(name)).expect("a link");
            }
        }
        let softhca = Path::new(env!("CARGO_BIN_EXE_softhca"));
        std::os::unix::fs::symlink(softhca, folder.join(".bin/softhca")).expect("a link");
        Sandbox { folder }
    }

    /// Replaces `cargo run` by the built program.
    fn translate(&self, command: &str) -> String {
        if let Some(rest) = command.strip_prefix("cargo run --release --example ") {
            let (name, rest) = rest.split_once(' ').unwrap_or((rest, ""));
            return format!("{} {}", example(name).display(), rest.strip_prefix("-- ").unwrap_or(rest));
        }
        match command.strip_prefix("cargo run --release -- ") {
            Some(arguments) => format!("softhca {arguments}"),
            None => command.into(),
        }
    }

    /// Runs a command and returns its output and exit code.
    fn run(&self, command: &str) -> (Vec<String>, i32) {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut child = Command::new("sh")
            .arg("-c")
            .arg(format!("exec 2>&1; {}", self.translate(command)))
            .current_dir(&self.folder)
            .env("PATH", format!("{}:{path}:{SYSTEM_PROGRAMS}", self.folder.join(".bin").display()))
            .env("XDG_RUNTIME_DIR", &self.folder)
            .env_remove("SOFTHCA_BLESS")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a shell");
        let mut pipe = child.stdout.take().expect("a pipe");
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            pipe.read_to_end(&mut bytes).map(|_| bytes)
        });
        let deadline = Instant::now() + COMMAND_TIMEOUT;
        let status = loop {
            match child.try_wait().expect("the state of the command") {
                Some(status) => break status,
                None if Instant::now() > deadline => {
                    let _ = child.kill();
                    panic!("`{command}` timed out");
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let bytes = reader.join().expect("the reader").expect("what it prints");
        let text = String::from_utf8(bytes).expect("UTF-8");
        (text.lines().map(|line| line.trim_end().to_owned()).collect(), status.code().unwrap_or(-1))
    }
}

/// The program of an example, built if it does not exist.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let program = test.ancestors().nth(2).expect("target/PROFILE").join("examples").join(name);
    if !program.exists() {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let built = Command::new(cargo).args(["build", "--workspace", "--example", name]).status();
        assert!(built.is_ok_and(|status| status.success()), "the example {name} cannot be built");
    }
    program
}

/// Whether the output matches the page.
fn output_matches(shown: &[String], printed: &[String]) -> bool {
    match shown.split_first() {
        None => printed.is_empty(),
        Some((line, rest)) if line == "..." => {
            (0..=printed.len()).any(|skip| output_matches(rest, &printed[skip..]))
        }
        Some((line, rest)) => printed
            .split_first()
            .is_some_and(|(first, others)| line_matches(line, first) && output_matches(rest, others)),
    }
}

fn line_matches(shown: &str, printed: &str) -> bool {
    let mut parts = shown.split("[..]");
    let first = parts.next().unwrap_or_default();
    let Some(mut left) = printed.strip_prefix(first) else { return false };
    let rest: Vec<&str> = parts.collect();
    for (number, part) in rest.iter().enumerate() {
        if number + 1 == rest.len() {
            return left.ends_with(part);
        }
        match left.find(part) {
            Some(at) => left = &left[at + part.len()..],
            None => return false,
        }
    }
    left.is_empty()
}

fn is_installed(program: &str) -> bool {
    let required = std::env::var_os("SOFTHCA_REQUIRE_TOOLS").is_some_and(|value| value == "1");
    let script = format!("PATH=$PATH:{SYSTEM_PROGRAMS}; command -v {program}");
    let found = Command::new("sh").args(["-c", &script]).output();
    required || found.is_ok_and(|output| output.status.success())
}

/// Runs the console blocks of a page; with `bless`, updates the page.
fn check(page: &Path, bless: bool) -> Vec<String> {
    let text = fs::read_to_string(page).expect("a page");
    let lines: Vec<&str> = text.lines().collect();
    let mut written: Vec<String> = Vec::new();
    let (mut copied, mut failures, mut sandbox) = (0, Vec::new(), None);
    for block in blocks(page, &text) {
        if let Some(name) = block.marks.iter().find_map(|mark| mark.strip_prefix("file=")) {
            let sandbox = sandbox.get_or_insert_with(|| Sandbox::new(page));
            let file = lines[block.lines.clone()].join("\n") + "\n";
            fs::write(sandbox.folder.join(name), file).expect("a folder that can be written");
        }
        if block.language != "console" {
            continue;
        }
        let missing =
            block.marks.iter().filter_map(|mark| mark.strip_prefix("needs=")).any(|p| !is_installed(p));
        if missing || block.marks.iter().any(|mark| mark == "no-run") {
            continue;
        }
        let sandbox = sandbox.get_or_insert_with(|| Sandbox::new(page));
        written.extend(lines[copied..block.lines.start].iter().map(|line| (*line).to_owned()));
        for step in steps(&lines[block.lines.clone()], block.lines.start + 1) {
            let (printed, code) = sandbox.run(&step.command);
            let is_pattern = step.output.iter().any(|line| line == "..." || line.contains("[..]"));
            if !(output_matches(&step.output, &printed) && code == step.code) {
                failures.push(format!(
                    "{}:{}: `{}` exits with {code} and prints\n{}",
                    display_path(page),
                    step.line,
                    step.command,
                    printed.join("\n")
                ));
            }
            written.push(format!("$ {}", step.command));
            written.extend(if is_pattern { step.output } else { printed });
            written.extend((code != 0).then(|| format!("? {code}")));
        }
        copied = block.lines.end;
    }
    written.extend(lines[copied..].iter().map(|line| (*line).to_owned()));
    if bless && !failures.is_empty() {
        fs::write(page, written.join("\n") + "\n").expect("a page that can be written");
        return check(page, false);
    }
    failures
}

#[test]
fn every_command_prints_the_output_that_is_shown() {
    let bless = std::env::var_os("SOFTHCA_BLESS").is_some();
    let failures: Vec<String> = pages().iter().flat_map(|page| check(page, bless)).collect();
    assert!(
        failures.is_empty(),
        "{}\nrun again with SOFTHCA_BLESS=1 to update the pages",
        failures.join("\n\n")
    );
}

/// The scenario around a part.
const TITLE: &str = "title = \"a part\"\n";
const WHOLE: &str = r#"
[hosts]
alice = {}
bob = {}
[[pair]]
qps = ["alice.1", "bob.1"]
[[pair]]
qps = ["alice.2", "bob.2"]
[[step]]
qp = "alice.1"
write = { bytes = 16000 }
[[step]]
qp = "alice.2"
write = { bytes = 16000 }
"#;

/// `cargo run --example` considers the default members only.
#[test]
fn examples_are_found_from_the_root() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).expect("the workspace");
    let members = manifest.lines().find(|line| line.starts_with("default-members")).expect("it has some");
    assert!(members.contains("\"verbs-api\""), "{members}");
}

#[test]
fn every_scenario_has_the_expected_verdict() {
    let mut ran = 0;
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        let lines: Vec<&str> = text.lines().collect();
        for block in blocks(&page, &text).into_iter().filter(|block| block.language == "toml") {
            let location = format!("{}:{}", display_path(&page), block.lines.start);
            let file = lines[block.lines].join("\n") + "\n";
            let is = |mark: &str| block.marks.iter().any(|known| known == mark);
            if is("daemon") {
                Config::parse(&file).unwrap_or_else(|error| panic!("{location}: {error}"));
                continue;
            }
            let whole = match (is("part"), file.starts_with('[')) {
                (false, _) => file,
                (true, true) => format!("{TITLE}{WHOLE}{file}"),
                (true, false) => format!("{TITLE}{file}{WHOLE}"),
            };
            let plan = Scenario::parse(&location, &whole)
                .and_then(|scenario| scenario.plan(&Default::default(), 1))
                .unwrap_or_else(|problem| panic!("{location}: {problem}"));
            if !is("part") && !is("plan") {
                let outcome = simulate(&plan, Recording::Digest);
                let wanted = if is("fails") { Verdict::Fail } else { Verdict::Pass };
                assert!(
                    outcome.verdict == wanted,
                    "{location}: {:?}, {:?}",
                    outcome.verdict,
                    outcome.expectations
                );
                ran += 1;
            }
        }
    }
    assert!(ran >= 2, "{ran} scenarios");
}

#[test]
fn every_block_has_a_known_language() {
    let doc_tests = fs::read_to_string(root().join("verbs-api/src/lib.rs")).expect("the library");
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        for block in blocks(&page, &text) {
            let (name, line) = (display_path(&page), block.lines.start);
            let known = ["console", "rust", "text", "toml", "json"];
            let is_lesson = name.starts_with("docs/lessons") || !name.contains("docs/");
            let said = known.contains(&block.language.as_str()) || !is_lesson;
            assert!(said, "{name}:{line}: unknown language `{}`", block.language);
            let tested = doc_tests.contains(&format!("include_str!(\"../../{name}\")"));
            assert!(block.language != "rust" || tested, "{name}: its rust blocks are not doc tests");
        }
    }
}

/// The targets of the links of a page.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut in_block = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        }
        let mut rest = if in_block { "" } else { line };
        while let Some(at) = rest.find("](") {
            rest = &rest[at + 2..];
            let Some(end) = rest.find(')') else { break };
            found.push(rest[..end].to_owned());
        }
    }
    found
}

/// The anchors of the headings of a page, as in mdBook and GitHub.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#'));
    let anchor = |heading: &str| {
        let kept = heading.trim().to_lowercase().replace(' ', "-");
        kept.chars().filter(|c| c.is_alphanumeric() || *c == '-' || *c == '_').collect()
    };
    headings.map(anchor).collect()
}

/// The page of `softhca playground` that the book links to.
const PLAYGROUND: &str = "playground/index.html";

#[test]
fn every_link_has_a_target() {
    let playground = fs::read_to_string(root().join("scenarios/src/lessons.rs")).expect("its scenarios");
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        for link in links(&text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            if file == PLAYGROUND {
                let scenario = anchor.strip_prefix("scenario=").and_then(|rest| rest.split('&').next());
                let scenario =
                    scenario.unwrap_or_else(|| panic!("{}: {link} has no scenario", display_path(&page)));
                assert!(
                    playground.contains(&format!("\"{scenario}\"")),
                    "{}: the playground does not have {scenario}",
                    display_path(&page)
                );
                continue;
            }
            let target =
                if file.is_empty() { page.clone() } else { page.parent().expect("a folder").join(file) };
            assert!(target.exists(), "{}: {link} does not exist", display_path(&page));
            if !anchor.is_empty() {
                let there = fs::read_to_string(&target).expect("a page");
                assert!(
                    anchors(&there).contains(anchor),
                    "{}: {link} has no such heading",
                    display_path(&page)
                );
            }
        }
    }
}

#[test]
fn every_page_is_in_the_table_of_contents() {
    let docs = root().join("docs");
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).expect("the table of contents");
    let listed: BTreeSet<PathBuf> = links(&summary).iter().map(|link| docs.join(link)).collect();
    for page in pages().into_iter().filter(|page| page.starts_with(&docs) && !page.ends_with("SUMMARY.md")) {
        // The decisions have their own index; reference pages need not be listed.
        let elsewhere = ["decisions", "reference"].iter().any(|folder| page.starts_with(docs.join(folder)));
        let is_listed = listed.contains(&page) || elsewhere;
        assert!(is_listed, "{} is not in docs/SUMMARY.md", display_path(&page));
    }
}

/// The path and text of every source file of the workspace.
fn source_files(folder: &Path, found: &mut Vec<(PathBuf, String)>) {
    for entry in fs::read_dir(folder).expect("a folder of the repository") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            source_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).expect("a source");
            found.push((path, text));
        }
    }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// The name that a line declares, if it declares one: a function, a field, a variant, a constant.
fn declared(line: &str) -> Option<&str> {
    let is_modifier =
        |word: &&str| ["pub", "crate", "super", "async", "const", "unsafe", "fn"].contains(word);
    words(line).find(|word| !is_modifier(word))
}

/// `Type::member` in the text of a page stands for a member that a file with the name `Type` declares.
#[test]
fn every_type_member_exists() {
    let mut files = Vec::new();
    source_files(&root(), &mut files);
    let files: Vec<(BTreeSet<&str>, BTreeSet<&str>)> = files
        .iter()
        .filter(|(path, _)| display_path(path).contains("src/"))
        .map(|(_, text)| (words(text).collect(), text.lines().filter_map(declared).collect()))
        .collect();
    let (mut checked, mut missing) = (0, Vec::new());
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        for span in text.split("```").step_by(2).flat_map(|prose| prose.split('`').skip(1).step_by(2)) {
            let mut parts = span.split("::").map(|part| words(part).collect::<Vec<_>>()).peekable();
            while let (Some(left), Some(right)) = (parts.next(), parts.peek()) {
                let (Some(owner), Some(member)) = (left.last(), right.first()) else { continue };
                if owner.starts_with(char::is_uppercase) {
                    checked += 1;
                    let exists = files
                        .iter()
                        .any(|(names, members)| names.contains(owner) && members.contains(member));
                    missing.extend((!exists).then(|| format!("{}: {owner}::{member}", display_path(&page))));
                }
            }
        }
    }
    assert!(checked > 30 && missing.is_empty(), "{checked} checked, no such member: {missing:#?}");
}

/// The threat model names the file or the test that shows each of its statements.
#[test]
fn every_test_of_the_threat_model_exists() {
    let page = fs::read_to_string(root().join("docs/reference/threat-model.md")).expect("the page");
    let mut files = Vec::new();
    source_files(&root(), &mut files);
    let code: String = files.into_iter().map(|(_, text)| text).collect();
    let spans = page.split('`').skip(1).step_by(2);
    let (mut named, mut tests) = (0, 0);
    for span in spans {
        let is_name = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || "_./-".contains(c));
        if span.ends_with(".rs") {
            assert!(root().join(span).is_file(), "{span} does not exist");
            named += 1;
        } else if span.matches('_').count() >= 3 && is_name(span) {
            assert!(code.contains(&format!("fn {span}(")), "no test is called {span}");
            tests += 1;
        }
    }
    assert!(named > 10 && tests > 10, "{named} files and {tests} tests are named");
}
