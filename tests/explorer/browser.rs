//! A headless browser, controlled over two pipes with zero-terminated JSON messages.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// The browser executable.
pub const PROGRAM: &str = "chromium";
/// The timeout of any operation, sufficient on a busy machine.
const BROWSER_TIMEOUT: Duration = Duration::from_secs(120);

/// Browsers that no test uses: starting one takes longer than most tests.
static IDLE: Mutex<Vec<Chromium>> = Mutex::new(Vec::new());

/// A browser process, which serves one test at a time.
struct Chromium {
    process: Child,
    input: ChildStdin,
    messages: Receiver<Value>,
    profile: PathBuf,
    calls: u64,
}

/// A window with storage of its own in a browser process.
pub struct Browser {
    chromium: Option<Chromium>,
    session: Option<String>,
    storage: Value,
    errors: Vec<String>,
}

impl Chromium {
    fn start() -> Chromium {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let profile = scratch(&format!("browser-{}-{serial}", std::process::id()));
        // The pipes of the protocol are descriptors 3 and 4.
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$@\" 3<&0 4>&1 0</dev/null 1>/dev/null", "sh", PROGRAM]);
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]);
        command.args(["--force-device-scale-factor=1", "--enable-precise-memory-info", "--no-first-run"]);
        command.arg(format!("--user-data-dir={}", profile.display()));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = command.spawn().expect("the browser starts");
        let input = process.stdin.take().expect("a pipe");
        let mut output = BufReader::new(process.stdout.take().expect("a pipe"));
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            loop {
                let mut message = Vec::new();
                if output.read_until(0, &mut message).is_err() || message.pop() != Some(0) {
                    return;
                }
                let message = serde_json::from_slice(&message).expect("the browser speaks JSON");
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        Chromium { process, input, messages, profile, calls: 0 }
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        // Its children may still write there for a moment; leftovers are in the target folder.
        let _ = std::fs::remove_dir_all(&self.profile);
    }
}

/// Ends the browsers that no test uses.
pub fn end_idle() {
    IDLE.lock().expect("no panic with the lock").clear();
}

impl Browser {
    /// Opens a window of this size with an empty page.
    pub fn start(width: u32, height: u32) -> Browser {
        let idle = IDLE.lock().expect("no panic with the lock").pop();
        let chromium = Some(idle.unwrap_or_else(Chromium::start));
        let mut browser = Browser { chromium, session: None, storage: Value::Null, errors: Vec::new() };
        browser.storage = browser.call("Target.createBrowserContext", json!({}))["browserContextId"].clone();
        let place = json!({"url": "about:blank", "browserContextId": browser.storage});
        let target = browser.call("Target.createTarget", place)["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        browser.session = Some(attached["sessionId"].as_str().expect("a session").into());
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        let metrics = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        browser.call("Emulation.setDeviceMetricsOverride", metrics);
        browser
    }

    fn call(&mut self, method: &str, parameters: Value) -> Value {
        let chromium = self.chromium.as_mut().expect("a browser until the end");
        chromium.calls += 1;
        let id = json!(chromium.calls);
        let mut message = json!({"id": id, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = serde_json::to_vec(&message).expect("JSON");
        bytes.push(0);
        chromium.input.write_all(&bytes).expect("the browser listens");
        let deadline = Instant::now() + BROWSER_TIMEOUT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let answer = chromium.messages.recv_timeout(left).expect("the browser answers");
            if answer["id"] == id {
                assert!(answer.get("error").is_none(), "{method}: {answer}");
                return answer["result"].clone();
            }
            // Windows of earlier tests may have the last word.
            if answer["sessionId"].as_str() == self.session.as_deref() {
                self.errors.extend(complaint(&answer));
            }
        }
    }

    /// The value of an expression in the page; promises are awaited.
    pub fn value(&mut self, expression: &str) -> Value {
        let parameters = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.call("Runtime.evaluate", parameters);
        assert!(answer.get("exceptionDetails").is_none(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    pub fn text(&mut self, expression: &str) -> String {
        self.value(expression).as_str().unwrap_or_else(|| panic!("{expression} is no text")).into()
    }

    pub fn number(&mut self, expression: &str) -> f64 {
        self.value(expression).as_f64().unwrap_or_else(|| panic!("{expression} is no number"))
    }

    /// Waits until an expression is true.
    pub fn wait(&mut self, expression: &str) {
        let start = Instant::now();
        while self.value(expression) != json!(true) {
            assert!(
                start.elapsed() < BROWSER_TIMEOUT,
                "`{expression}` does not become true: {:?}",
                self.errors
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        self.wait_for_frames();
    }

    /// Opens a page from disk and waits until it has loaded everything.
    pub fn open(&mut self, page: &Path, link: &str) {
        self.visit("about:blank");
        self.visit(&format!("file://{}{link}", page.display()));
        self.wait("document.readyState === 'complete' && typeof app === 'object' && app.readAt > 0");
    }

    /// Navigates to a URL.
    pub fn visit(&mut self, address: &str) {
        self.call("Page.navigate", json!({"url": address}));
    }

    pub fn click(&mut self, selector: &str) {
        self.value(&format!("document.querySelector({selector:?}).click()"));
        self.wait_for_frames();
    }

    pub fn press(&mut self, key: &str) {
        let text = if key.chars().count() == 1 { key } else { "" };
        self.call("Input.dispatchKeyEvent", json!({"type": "keyDown", "key": key, "text": text}));
        self.call("Input.dispatchKeyEvent", json!({"type": "keyUp", "key": key}));
        self.wait_for_frames();
    }

    /// Emulates a phone with a touch screen of this size in CSS pixels.
    pub fn emulate_phone(&mut self, width: u32, height: u32) {
        let metrics = json!({"width": width, "height": height, "deviceScaleFactor": 2, "mobile": true});
        self.call("Emulation.setDeviceMetricsOverride", metrics);
        self.call("Emulation.setTouchEmulationEnabled", json!({"enabled": true}));
    }

    /// Runs a script in every page before its own.
    pub fn run_before_pages(&mut self, script: &str) {
        self.call("Page.addScriptToEvaluateOnNewDocument", json!({"source": script}));
    }

    /// Touches the middle of the first element that matches, as a finger does. It must be visible and uncovered.
    pub fn tap(&mut self, selector: &str) {
        let place = self.value(&format!(
            "(() => {{ const element = document.querySelector({selector:?}); const box = element.getBoundingClientRect(); \
             const [x, y] = [box.x + box.width / 2, box.y + box.height / 2]; const top = document.elementFromPoint(x, y); \
             return [x, y, top === element || element.contains(top)]; }})()"
        ));
        assert_eq!(place[2], json!(true), "{selector} is not on the screen: {place}");
        let touch = json!({"type": "touchStart", "touchPoints": [{"x": place[0], "y": place[1]}]});
        self.call("Input.dispatchTouchEvent", touch);
        self.call("Input.dispatchTouchEvent", json!({"type": "touchEnd", "touchPoints": []}));
        self.wait_for_frames();
    }

    /// Moves a finger from one point to another in steps.
    pub fn drag(&mut self, from: [f64; 2], to: [f64; 2]) {
        let point = |step: f64| json!([{"x": from[0] + (to[0] - from[0]) * step, "y": from[1] + (to[1] - from[1]) * step}]);
        self.call("Input.dispatchTouchEvent", json!({"type": "touchStart", "touchPoints": point(0.0)}));
        for step in 1..=10 {
            let touch = json!({"type": "touchMove", "touchPoints": point(f64::from(step) / 10.0)});
            self.call("Input.dispatchTouchEvent", touch);
        }
        self.call("Input.dispatchTouchEvent", json!({"type": "touchEnd", "touchPoints": []}));
        self.wait_for_frames();
    }

    /// Moves two fingers apart, each from `start` to `end` pixels beside a point.
    pub fn pinch(&mut self, middle: [f64; 2], start: f64, end: f64) {
        let points = |apart: f64| {
            json!([
                {"x": middle[0] - apart, "y": middle[1], "id": 0},
                {"x": middle[0] + apart, "y": middle[1], "id": 1},
            ])
        };
        self.call("Input.dispatchTouchEvent", json!({"type": "touchStart", "touchPoints": points(start)}));
        for step in 1..=10 {
            let apart = start + (end - start) * f64::from(step) / 10.0;
            self.call("Input.dispatchTouchEvent", json!({"type": "touchMove", "touchPoints": points(apart)}));
        }
        self.call("Input.dispatchTouchEvent", json!({"type": "touchEnd", "touchPoints": []}));
        self.wait_for_frames();
    }

    /// Types text into the focused element.
    pub fn insert_text(&mut self, text: &str) {
        self.call("Input.insertText", json!({"text": text}));
        self.wait_for_frames();
    }

    /// Waits until pending drawing is done.
    fn wait_for_frames(&mut self) {
        self.value(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))",
        );
    }

    /// Saves a screenshot if SOFTHCA_SCREENSHOTS is set to a folder.
    pub fn screenshot(&mut self, name: &str) {
        let Some(folder) = std::env::var_os("SOFTHCA_SCREENSHOTS") else { return };
        let answer = self.call("Page.captureScreenshot", json!({"format": "png"}));
        let data = answer["data"].as_str().expect("a picture");
        let png = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, data).expect("base64");
        std::fs::write(Path::new(&folder).join(name).with_extension("png"), png).expect("a picture");
    }

    /// The current and the peak memory of the page's process in MiB.
    pub fn memory(&mut self) -> [u64; 2] {
        let session = self.session.take();
        let processes = self.call("SystemInfo.getProcessInfo", json!({}));
        self.session = session;
        let processes = processes["processInfo"].as_array().expect("a list").iter();
        let renderers = processes.filter(|process| process["type"] == "renderer");
        let mut sums = [0; 2];
        for process in renderers {
            let status =
                std::fs::read_to_string(format!("/proc/{}/status", process["id"])).unwrap_or_default();
            for (sum, key) in sums.iter_mut().zip(["VmRSS:", "VmHWM:"]) {
                let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
                *sum += line.trim().trim_end_matches(" kB").parse().unwrap_or(0) >> 10;
            }
        }
        sums
    }

    /// The link to the state of the page.
    pub fn link(&mut self) -> String {
        self.wait("app.linkTimer === null");
        self.text("location.hash")
    }

    /// Asserts that the page has reported no errors.
    pub fn assert_no_errors(&mut self) {
        self.value("1");
        assert!(self.errors.is_empty(), "the page reports: {}", self.errors.join("\n"));
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The state of a browser after a failure is unknown.
        if !std::thread::panicking() {
            self.session = None;
            let storage = self.storage.take();
            self.call("Target.disposeBrowserContext", json!({"browserContextId": storage}));
            IDLE.lock().expect("no panic with the lock").extend(self.chromium.take());
        }
    }
}

/// The exception, error, warning or blocked request of a page that an event reports.
fn complaint(event: &Value) -> Option<String> {
    let parameters = &event["params"];
    match event["method"].as_str()? {
        "Runtime.exceptionThrown" => Some(parameters["exceptionDetails"].to_string()),
        "Log.entryAdded" => Some(parameters["entry"].to_string()),
        "Runtime.consoleAPICalled"
            if matches!(parameters["type"].as_str(), Some("error" | "warning" | "assert")) =>
        {
            Some(parameters["args"].to_string())
        }
        _ => None,
    }
}

/// A path in the target folder, different in each call.
pub fn fresh_scratch(name: &str) -> PathBuf {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let folder = scratch("runs").join(SERIAL.fetch_add(1, Ordering::Relaxed).to_string());
    std::fs::create_dir_all(&folder).expect("a folder");
    folder.join(name)
}

/// A path in the target folder.
pub fn scratch(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("explorer-{name}"))
}
