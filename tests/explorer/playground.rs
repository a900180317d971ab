//! The playground in the browser behaves exactly like the native command.

use super::browser::{Browser, PROGRAM, scratch};
use crate::rig::softhca;
use libtest_mimic::{Failed, Trial};
use serde_json::Value;
use softhca_tests::tools;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const NAME: &str = "the_playground_does_what_the_command_does";

/// The path of the module built by `cargo build --profile playground --target wasm32-unknown-unknown -p
/// softhca-playground`.
pub fn module() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("a target folder");
    target.join("wasm32-unknown-unknown/playground/softhca_playground.wasm")
}

/// The test, ignored if the module was not built.
pub fn trial() -> Trial {
    if module().is_file() {
        return tools::needs(PROGRAM, NAME, run);
    }
    let reason = "the playground's module is not built";
    eprintln!("skipped: {reason}");
    Trial::test(NAME, move || Err(Failed::from(reason))).with_ignored_flag(true)
}

fn run() {
    let page = scratch("playground.html");
    let made = Command::new(softhca()).args(["playground", "-o"]).arg(&page).output().expect("it starts");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let mut browser = Browser::start(1440, 900);
    browser.open(&page, "");
    browser.wait("document.querySelector('.scenario').value.includes('[[fault]]')");
    // The page begins with a run.
    browser.wait("app.played !== undefined && currentRun().length > 10");
    assert_eq!(browser.text("app.played.verdict"), "pass");
    assert_eq!(browser.text("document.querySelector('.play-bar optgroup').label"), "Lesson 1");
    browser.screenshot("playground");
    browser.press("Escape");
    for view in ["ladder", "sequence", "timeline", "states", "memory", "why", "packet", "compare", "events"] {
        browser.click(&format!("#tab-{view}"));
        assert!(
            browser.number("document.querySelector('.view').textContent.length") > 0.0,
            "{view} is blank"
        );
        browser.screenshot(&format!("playground-{view}"));
    }
    browser.assert_no_errors();
    hashes(&mut browser);
    links(&mut browser, &page);
    editor(&mut browser, &page);
    refusals(&mut browser);
    stops(&mut browser);
}

/// The same scenario and seed give the same events in the browser and natively.
fn hashes(browser: &mut Browser) {
    let library = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios/library");
    let names = browser.value("app.meta.scenarios.map(({ name }) => name)");
    let names: Vec<&str> = names.as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    assert!(names.len() > 15, "{names:?}");
    for name in names {
        let file = library.join(name).with_extension("toml");
        for seed in ["1", "77"] {
            let native = Command::new(softhca()).args(["run", "--json", "--seed", seed]).arg(&file).output();
            let native = native.expect("the command starts");
            let native: Value = serde_json::from_slice(&native.stdout).expect("one line of JSON");
            let text =
                serde_json::to_string(&std::fs::read_to_string(&file).expect("a scenario")).expect("JSON");
            let start = Instant::now();
            let played =
                browser.value(&format!("runScenario({text}, '{seed}').then(({{ result }}) => result)"));
            eprintln!("{name} with seed {seed}: {:?}", start.elapsed());
            assert!(native["trace_sha256"].is_string(), "{name}: {native}");
            assert_eq!(played["trace_sha256"], native["trace_sha256"], "{name} with seed {seed}");
            assert_eq!(played["verdict"], native["verdict"], "{name} with seed {seed}");
            if start.elapsed() > Duration::from_secs(2) {
                break;
            }
        }
    }
}

/// A link restores the run and the view, also of an edited scenario.
fn links(browser: &mut Browser, page: &Path) {
    browser.open(page, "#view=sequence&scenario=gbn-random-loss&seed=7");
    browser.wait("app.played !== undefined && app.state.view === 'sequence'");
    assert_eq!(browser.text("app.runs[0].title"), browser.text("app.played.title"));
    browser.value("views.playground.text.value += '\\n# edited\\n'; views.playground.run()");
    browser.wait("app.state.text !== ''");
    browser.value("look({ view: 'events', sel: 5 })");
    let (link, sum) = (browser.link(), browser.text("app.played.trace_sha256"));
    browser.open(page, &link);
    browser.wait("app.played !== undefined && app.state.sel === 5 && app.state.view === 'events'");
    assert_eq!(browser.text("app.played.trace_sha256"), sum);
    assert!(browser.text("views.playground.text.value").ends_with("# edited\n"));
    browser.open(page, "#text=nonsense&view=ladder");
    browser.wait("document.querySelector('.play-result').textContent.includes('is the link complete?')");
    browser.open(page, "#scenario=nobody&view=ladder");
    browser.wait("document.querySelector('.play-result').textContent.includes('no scenario nobody')");
    browser.assert_no_errors();
}

/// The editor colours the text, completes keys and values from the schema, and marks an error where it is.
fn editor(browser: &mut Browser, page: &Path) {
    browser.open(page, "");
    let text = "document.querySelector('.scenario').value";
    assert_eq!(
        browser.text("document.querySelector('.scenario-copy').textContent"),
        browser.text(text) + "\n"
    );
    for (kind, token) in [("table", "[[fault]]"), ("key", "action"), ("string", "\"drop\""), ("literal", "1")]
    {
        let tokens = browser.value(&format!(
            "[...document.querySelectorAll('.toml-{kind}')].map((token) => token.textContent)"
        ));
        assert!(tokens.as_array().expect("a list").iter().any(|found| found == token), "{kind}: {tokens}");
    }
    browser.value("views.playground.text.value = '[[fault]]\\n'; views.playground.text.focus()");
    let listed = "[...document.querySelectorAll('.completions:not([hidden]) b')].map((item) => item.textContent).join()";
    browser.insert_text("act");
    assert_eq!(browser.text(listed), "action");
    browser.screenshot("playground-completion");
    browser.press("Enter");
    browser.insert_text("\"dr");
    assert_eq!(browser.text(listed), "drop,drop-notification");
    browser.press("Tab");
    browser.insert_text("\nmatch = { cl");
    assert_eq!(browser.text(listed), "class");
    browser.press("Escape");
    assert_eq!(browser.text(listed), "");
    assert_eq!(browser.text(text), "[[fault]]\naction = \"drop\"\nmatch = { cl");
    browser.value("views.playground.choose('rnr-recovers'); views.playground.text.setSelectionRange(0, 0); views.playground.text.focus()");
    browser.insert_text("# é\n  titel = 1\n");
    browser.wait("document.querySelector('.squiggle')?.textContent === 'titel'");
    assert!(
        browser
            .text("document.querySelector('.scenario-problem').textContent")
            .contains("line 2, column 3: → did you mean")
    );
    browser.screenshot("playground-squiggle");
    // A link keeps what was not run yet.
    browser.press("Escape");
    browser.click(".top .button[title^=\"Copy a link\"]");
    browser.wait("location.hash.includes('text=')");
    let link = browser.link();
    browser.open(page, &link);
    assert!(browser.text(text).starts_with("# é\n  titel = 1\n"));
    browser.value("views.playground.choose('rnr-recovers')");
    browser.assert_no_errors();
}

/// Errors in a scenario are shown with their position, and do not affect the next run.
fn refusals(browser: &mut Browser) {
    browser.value(
        "look({ view: 'playground' }); views.playground.text.value = 'titel = 1'; views.playground.run()",
    );
    browser.wait("document.querySelector('.play-result').textContent.includes('line 1')");
    browser.screenshot("playground-problem");
    browser.value("views.playground.choose('rnr-recovers'); views.playground.run()");
    browser.wait("document.querySelector('.play-result').textContent.includes('pass')");
    browser.assert_no_errors();
}

/// An endless run does not block the page, and ends when the user stops it or starts another.
fn stops(browser: &mut Browser) {
    let endless = "title = 'endless'\nduration = '600s'\n[hosts]\nalice = {}\nbob = {}\n[[pair]]\nqps = ['alice.1', 'bob.1']\n\
                   [[workload]]\nstream = { qp = 'alice.1', op = 'write', bytes = 64, interval = '1ms' }\n";
    let start = format!(
        "views.playground.text.value = {}; app.played = undefined; document.querySelector('.play-bar .button').click()",
        serde_json::to_string(endless).expect("JSON")
    );
    let halt = "!document.querySelector('.play-bar .button[title=\"Stop this run\"]').hidden";
    browser.value(&start);
    browser.wait("document.querySelector('.play-result').textContent.includes('Running for')");
    browser.screenshot("playground-running");
    // The previous run is still visible.
    browser.click("#tab-ladder");
    assert!(browser.number("document.querySelectorAll('.step').length") > 0.0);
    browser.click("#tab-playground");
    assert_eq!(browser.value(halt), true);
    browser.click(".play-bar .button[title=\"Stop this run\"]");
    browser.wait("document.querySelector('.play-result').textContent.includes('Stopped after')");
    assert_eq!(browser.value(&format!("app.played === undefined && !({halt})")), true);
    browser.screenshot("playground-stopped");
    browser.value(&start);
    browser.wait(halt);
    browser.value("views.playground.choose('rnr-recovers'); void views.playground.run()");
    browser.wait("document.querySelector('.play-result').textContent.includes('pass')");
    assert_eq!(browser.value(&format!("app.played.title === currentRun().title && !({halt})")), true);
    browser.assert_no_errors();
}
