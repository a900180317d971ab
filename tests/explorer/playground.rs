//! The card in the browser does exactly what the card does here.

use crate::browser::{Browser, PROGRAM, scratch};
use libtest_mimic::{Failed, Trial};
use serde_json::json;
use softhca_explorer::Page;
use softhca_scenarios::{Recording, Scenario, simulate};
use softhca_tests::tools;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

const NAME: &str = "the_playground_does_what_the_command_does";

/// The module, where `cargo build --profile playground --target wasm32-unknown-unknown -p softhca-playground` puts it.
fn module() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("a target folder");
    target.join("wasm32-unknown-unknown/playground/softhca_playground.wasm")
}

/// The test; ignored where the module was not built, unless everything is required.
pub fn trial() -> Trial {
    if module().is_file() {
        return tools::needs(PROGRAM, NAME, play);
    }
    let is_required = std::env::var_os("SOFTHCA_REQUIRE_TOOLS").is_some_and(|value| value == "1");
    let reason = "the playground's module is not built";
    if is_required {
        return Trial::test(NAME, || Err(Failed::from(reason)));
    }
    eprintln!("skipped: {reason}");
    Trial::test(NAME, || Ok(())).with_ignored_flag(true)
}

fn play() {
    let library = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios/library");
    let read = |name: &str| std::fs::read_to_string(library.join(name).with_extension("toml")).expect("a scenario");
    let page = scratch("playground.html");
    let file = BufWriter::new(File::create(&page).expect("a file"));
    let module = std::fs::read(module()).expect("the module");
    eprintln!("the module has {} KiB", module.len() >> 10);
    Page::playground(module, &read("fatal-lost-write-middle")).write(file).expect("a page");
    let mut browser = Browser::start(1440, 900);
    browser.open(&page, "");
    browser.wait("document.querySelector('.scenario').value.includes('[[fault]]')");
    browser.click(".play-bar .button");
    browser.wait("app.played !== undefined && currentRun().length > 10");
    assert_eq!(browser.text("app.played.verdict"), "pass");
    browser.picture("playground");
    browser.press("Escape");
    for view in ["ladder", "sequence", "why", "states", "packet"] {
        browser.click(&format!("#tab-{view}"));
        browser.picture(&format!("playground-{view}"));
    }
    let mut compared = 0;
    for (name, seed) in [
        ("fatal-lost-write-middle", 1u64),
        ("gbn-random-loss", 7),
        ("livelock-go-back-0", 1),
        ("rnr-recovers", 3),
        ("corrupt-seen", 2),
        ("psn-wrap", 1),
    ] {
        let text = read(name);
        let plan = Scenario::read(name, &text).and_then(|scenario| scenario.plan(&Default::default(), seed)).expect("a plan");
        let native = simulate(&plan, Recording::Digest);
        let text = serde_json::to_string(&text).expect("JSON");
        let played = browser.value(&format!("runScenario({text}, '{seed}').then((played) => played.result)"));
        assert_eq!(played["trace_sha256"], json!(native.trace_sha256), "{name}");
        assert!(native.trace_sha256.is_some());
        compared += 1;
    }
    assert_eq!(compared, 6);
    browser.value("look({ view: 'playground' }); document.querySelector('.scenario').value = 'titel = 1'; views.playground.run()");
    browser.wait("document.querySelector('.play-result').textContent.includes('line 1')");
    browser.is_content();
}
