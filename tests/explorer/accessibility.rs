//! The checks of axe-core on every view, at the widths of a desktop and a phone, in light and dark.

use super::browser::{Browser, PROGRAM, scratch};
use super::{VIEWS, playground, runs};
use crate::rig::softhca;
use libtest_mimic::Trial;
use softhca_engine::Recovery;
use softhca_tests::tools;
use std::path::{Path, PathBuf};
use std::process::Command;

const NAME: &str = "axe_finds_nothing_in_any_view";

/// The path of axe-core as `npm install --prefix target/tools axe-core` writes it.
fn axe() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("a target folder");
    target.join("tools/node_modules/axe-core/axe.min.js")
}

/// The test, ignored if axe-core is not installed.
pub fn trial() -> Trial {
    if axe().is_file() {
        return tools::needs(PROGRAM, NAME, run);
    }
    eprintln!("skipped: axe-core is not installed; npm install --prefix target/tools axe-core");
    Trial::test(NAME, || Ok(())).with_ignored_flag(true)
}

fn run() {
    let axe = std::fs::read_to_string(axe()).expect("axe-core");
    let [n, zero] = [Recovery::GoBackN, Recovery::GoBack0].map(runs::recovered_loss);
    let mut pages = vec![
        (runs::page(&runs::fatal_loss()), VIEWS.to_vec()),
        (runs::comparison_page(&[&n, &zero]), vec!["compare"]),
    ];
    if playground::module().is_file() {
        let page = scratch("axe-playground.html");
        let made = Command::new(softhca()).args(["playground", "-o"]).arg(&page).output().expect("it starts");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        pages.push((page, vec!["playground"]));
    }
    let mut findings = Vec::new();
    for is_phone in [false, true] {
        let mut browser = Browser::start(1440, 900);
        if is_phone {
            browser.emulate_phone(390, 844);
        }
        for (page, views) in &pages {
            browser.open(page, "");
            browser.value(&format!("{axe}; nextTrouble()"));
            for theme in ["light", "dark"] {
                browser.value(&format!("document.documentElement.dataset.theme = {theme:?}; redraw()"));
                for view in views {
                    browser.click(&format!("#tab-{view}"));
                    let found = browser.value(
                        "axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) => violations.flatMap(({ id, nodes }) => \
                         nodes.map((node) => id + ': ' + node.html.slice(0, 200))))",
                    );
                    for finding in found.as_array().expect("a list") {
                        findings.push(format!("phone: {is_phone}, {theme}, {view}: {finding}"));
                    }
                }
            }
        }
    }
    assert!(findings.is_empty(), "{}", findings.join("\n"));
}
