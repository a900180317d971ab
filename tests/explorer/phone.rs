//! The page on a phone of 390 by 844 pixels, used with a finger.

use super::browser::{Browser, PROGRAM, scratch};
use super::{VIEWS, playground, runs};
use crate::rig::softhca;
use libtest_mimic::Trial;
use serde_json::json;
use softhca_engine::Recovery;
use softhca_tests::tools;
use std::process::Command;

const WIDTH: u32 = 390;
const HEIGHT: u32 = 844;

/// The test.
pub fn trial() -> Trial {
    tools::needs(PROGRAM, "a_phone_shows_everything_and_taps_explain_it", run)
}

fn run() {
    let mut browser = Browser::start(WIDTH, HEIGHT);
    browser.emulate_phone(WIDTH, HEIGHT);
    browser.open(&runs::page(&runs::fatal_loss()), "");
    frame(&mut browser);
    taps(&mut browser);
    views(&mut browser);
    scrolling(&mut browser);
    if playground::module().is_file() {
        scenario(&mut browser);
    }
    browser.assert_no_errors();
}

/// The height of an element.
fn height(browser: &mut Browser, selector: &str) -> f64 {
    browser.number(&format!("document.querySelector({selector:?}).getBoundingClientRect().height"))
}

/// The selectors that match an element with a box on the screen.
fn is_visible(browser: &mut Browser, selector: &str) -> bool {
    let test = "((element) => { const box = element?.getBoundingClientRect(); return Boolean(box && box.width > 0 && box.height > 0 \
                && box.left >= 0 && box.right <= innerWidth && box.top >= 0 && box.bottom <= innerHeight); })";
    browser.value(&format!("{test}(document.querySelector({selector:?}))")) == json!(true)
}

fn frame(browser: &mut Browser) {
    browser.screenshot("phone-ladder");
    assert_eq!(browser.number("innerWidth"), f64::from(WIDTH), "the page fits the screen");
    assert_eq!(browser.number("document.documentElement.scrollWidth"), f64::from(WIDTH));
    assert!(is_visible(browser, "h1"), "the title is on the screen");
    assert!(browser.text("document.querySelector('h1').textContent").contains("lost middle packet"));
    // Two rows of controls.
    assert!(height(browser, ".filters") < 90.0, "the toolbar is {} high", height(browser, ".filters"));
    assert!(height(browser, ".view") > 0.5 * f64::from(HEIGHT));
    // The buttons of the header and the filters are behind two buttons.
    for (button, control) in
        [("#more", ".top .button[title^=Help]"), ("#more-filters", "select[aria-label=opcode]")]
    {
        assert!(!is_visible(browser, control), "{control}");
        browser.tap(button);
        assert!(is_visible(browser, control), "{control}");
        browser.screenshot(&format!("phone{}", button.replace('#', "-")));
        browser.tap(button);
        assert!(!is_visible(browser, control), "{control}");
    }
}

fn taps(browser: &mut Browser) {
    assert!(!is_visible(browser, ".inspector"), "nothing is selected");
    browser.tap(".step:has(.cross)");
    let selected = browser.number("app.state.sel");
    assert!(is_visible(browser, ".inspector h2"), "a tap explains a packet");
    assert!(
        browser.text("document.querySelector('.inspector').textContent").contains("dropped by \"lose one\"")
    );
    assert!(is_visible(browser, ".step.selected"), "the packet stays visible");
    browser.screenshot("phone-inspector");
    browser.tap("button[title^=\"Next packet\"]");
    assert!(browser.number("app.state.sel") > selected);
    browser.tap(".inspector .close");
    assert!(!is_visible(browser, ".inspector"));
    assert_eq!(browser.number("app.state.sel"), -1.0);
}

fn views(browser: &mut Browser) {
    browser.value("nextTrouble()");
    for view in VIEWS {
        browser.value(&format!("document.getElementById('tab-{view}').scrollIntoView()"));
        browser.tap(&format!("#tab-{view}"));
        assert_eq!(browser.text("app.state.view"), view);
        assert_eq!(browser.number("document.documentElement.scrollWidth"), f64::from(WIDTH), "{view}");
        let first = "document.querySelector('.view').firstElementChild.getBoundingClientRect()";
        assert!(browser.number(&format!("{first}.width")) <= f64::from(WIDTH), "{view}");
        browser.screenshot(&format!("phone-{view}"));
    }
    // The sentence of an event is the widest column.
    browser.tap(".line");
    assert!(browser.number("document.querySelector('.line .what').getBoundingClientRect().width") > 180.0);
    assert!(is_visible(browser, ".inspector h2"));
}

/// A finger scrolls the ladder, and moves and zooms a chart.
fn scrolling(browser: &mut Browser) {
    browser.open(&runs::page(&runs::recovered_loss(Recovery::GoBackN)), "");
    browser.drag([200.0, 600.0], [200.0, 300.0]);
    assert!(browser.number("views.ladder.rows.top") > 3.0);
    assert_eq!(browser.number("app.state.sel"), -1.0, "a drag selects nothing");
    browser.value("look({ view: 'timeline' })");
    browser.wait("app.state.view === 'timeline'");
    browser.pinch([200.0, 500.0], 40.0, 120.0);
    let [from, to] = ["from", "to"].map(|end| browser.number(&format!("app.state.{end}")));
    assert!(
        from >= 0.0 && to > from && to - from < 0.6 * browser.number("currentRun().end"),
        "{from} to {to}"
    );
}

/// The playground has one column: the scenario, then its result.
fn scenario(browser: &mut Browser) {
    let page = scratch("phone-playground.html");
    let made = Command::new(softhca()).args(["playground", "-o"]).arg(&page).output().expect("it starts");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    browser.open(&page, "");
    browser.screenshot("phone-playground");
    assert!(is_visible(browser, ".scenario") && is_visible(browser, ".play-bar .button"));
    assert!(browser.number("document.querySelector('.scenario').clientWidth") > 380.0);
    browser.tap(".play-bar .button");
    browser.wait(
        "app.played !== undefined && document.querySelector('.play-result').textContent.includes('pass')",
    );
    browser.screenshot("phone-playground-result");
    let below = browser.number(
        "document.querySelector('.play-result').getBoundingClientRect().top - document.querySelector('.play-bar').getBoundingClientRect().bottom",
    );
    assert!(below >= 0.0);
}
