//! Headless Chromium, driven over the DevTools protocol through two pipes.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use blobd_fixtures::skipped::skipped;
use serde_json::{Value as Json, json};
use tempfile::TempDir;

use crate::wait::DEADLINE;

/// How long a browser may take to start: on a busy machine, its many processes take some seconds.
const START_LIMIT: Duration = Duration::from_secs(120);

/// A browser with one page.
#[derive(Debug)]
pub struct Browser {
    child: Child,
    input: File,
    messages: Receiver<Json>,
    events: VecDeque<Json>,
    next_id: u64,
    session: Option<String>,
    _folder: TempDir,
}

impl Browser {
    /// Starts Chromium; `None`, with the reason on standard output, where there is none.
    ///
    /// # Panics
    /// When it is there and does not start.
    #[must_use]
    pub fn start() -> Option<Self> {
        let program = ["chromium", "chromium-browser", "google-chrome"].into_iter().find(|program| {
            let found =
                Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
            found.is_ok_and(|status| status.success())
        });
        let Some(program) = program else {
            skipped("no chromium, which Debian's package of that name has");
            return None;
        };
        let folder = tempfile::tempdir().expect("a temporary directory");
        let (input, output) = (folder.path().join("in"), folder.path().join("out"));
        for pipe in [&input, &output] {
            rustix::fs::mkfifoat(rustix::fs::CWD, pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
                .expect("a pipe");
        }
        // Opened for reading and writing, so that neither side waits for the other; Chromium reads and writes
        // descriptors 3 and 4.
        let child = launch(program, folder.path(), &input, &output);
        let open = |path: &Path| OpenOptions::new().read(true).write(true).open(path).expect("a pipe");
        let (input, output) = (open(&input), open(&output));
        let (sender, messages) = channel();
        thread::spawn(move || {
            let mut reader = BufReader::new(output);
            let mut message = Vec::new();
            while reader.read_until(0, &mut message).is_ok_and(|length| length > 0) {
                message.pop();
                let Ok(parsed) = serde_json::from_slice(&message) else { return };
                message.clear();
                if sender.send(parsed).is_err() {
                    return;
                }
            }
        });
        let events = VecDeque::new();
        let mut browser = Self { child, input, messages, events, next_id: 1, session: None, _folder: folder };
        browser.attach();
        Some(browser)
    }

    fn attach(&mut self) {
        let target = self.call_within("Target.createTarget", json!({ "url": "about:blank" }), START_LIMIT);
        let attached =
            self.call("Target.attachToTarget", json!({ "targetId": target["targetId"], "flatten": true }));
        self.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Network", "Log"] {
            self.call(&format!("{domain}.enable"), json!({}));
        }
    }

    /// Sends a command, and returns its result.
    ///
    /// # Panics
    /// When it fails or takes too long.
    pub fn call(&mut self, method: &str, params: Json) -> Json {
        self.call_within(method, params, DEADLINE)
    }

    fn call_within(&mut self, method: &str, params: Json, limit: Duration) -> Json {
        self.try_call(method, params, limit).unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    #[expect(clippy::needless_pass_by_value, reason = "made for the call")]
    fn try_call(&mut self, method: &str, params: Json, limit: Duration) -> Result<Json, Json> {
        let id = self.next_id;
        self.next_id += 1;
        let mut message = json!({ "id": id, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = serde_json::to_vec(&message).expect("JSON");
        bytes.push(0);
        self.input.write_all(&bytes).expect("the browser reads");
        let end = Instant::now() + limit;
        loop {
            match self.messages.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(response) if response["id"] == id => {
                    let error = response["error"].clone();
                    return if error.is_null() { Ok(response["result"].clone()) } else { Err(error) };
                }
                Ok(event) => self.events.push_back(event),
                Err(RecvTimeoutError::Timeout) => panic!("{method}: no response of the browser"),
                Err(RecvTimeoutError::Disconnected) => panic!("{method}: the browser has ended"),
            }
        }
    }

    /// Opens an address.
    pub fn open(&mut self, url: &str) {
        let opened = self.call("Page.navigate", json!({ "url": url }));
        assert!(opened["errorText"].is_null(), "{url}: {opened}");
    }

    /// The value of an expression in JavaScript.
    ///
    /// # Panics
    /// When it throws.
    pub fn evaluate(&mut self, expression: &str) -> Json {
        self.try_evaluate(expression).unwrap_or_else(|error| panic!("{expression}: {error}"))
    }

    fn try_evaluate(&mut self, expression: &str) -> Result<Json, Json> {
        let params = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let evaluated = self.try_call("Runtime.evaluate", params, DEADLINE)?;
        let exception = &evaluated["exceptionDetails"];
        if exception.is_null() { Ok(evaluated["result"]["value"].clone()) } else { Err(exception.clone()) }
    }

    /// Waits until an expression is true.
    pub fn wait_for(&mut self, expression: &str) {
        let end = Instant::now() + DEADLINE;
        // While a page is loaded, expressions fail.
        while self.try_evaluate(&format!("Boolean({expression})")) != Ok(Json::Bool(true)) {
            if Instant::now() > end {
                let page = self.try_evaluate("document.body.innerText.slice(0, 2000)");
                panic!("never true: {expression}: {page:?}");
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Presses and releases a key.
    pub fn press(&mut self, key: &str) {
        let (code, text) = match key {
            "Tab" => (9, None),
            "Enter" => (13, Some("\r")),
            "ArrowRight" => (39, None),
            "End" => (35, None),
            _ => (0, Some(key)),
        };
        for kind in [if text.is_some() { "keyDown" } else { "rawKeyDown" }, "keyUp"] {
            let mut params = json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code });
            if let Some(text) = text.filter(|_| kind == "keyDown") {
                params["text"] = json!(text);
            }
            self.call("Input.dispatchKeyEvent", params);
        }
    }

    /// Sets the size of the window and the colour scheme.
    pub fn show_in(&mut self, width: u32, height: u32, scheme: &str) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", size);
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.call("Emulation.setEmulatedMedia", json!({ "features": features }));
    }

    /// A picture of the window, as PNG.
    ///
    /// # Panics
    /// When the browser sends none.
    pub fn screenshot(&mut self) -> Vec<u8> {
        let taken = self.call("Page.captureScreenshot", json!({ "format": "png" }));
        BASE64_STANDARD.decode(taken["data"].as_str().expect("a picture")).expect("base64")
    }

    /// The addresses that were requested, and the errors and warnings of the console, since the last call.
    pub fn take_requests_and_errors(&mut self) -> (Vec<String>, Vec<Json>) {
        // All earlier events are received before the response.
        self.evaluate("0");
        let (mut requests, mut errors) = (Vec::new(), Vec::new());
        for event in self.events.drain(..) {
            let params = &event["params"];
            match event["method"].as_str().unwrap_or_default() {
                "Network.requestWillBeSent" => {
                    requests.push(params["request"]["url"].as_str().unwrap_or_default().to_owned());
                }
                "Runtime.exceptionThrown" => errors.push(event.clone()),
                "Runtime.consoleAPICalled" if params["type"] != "log" => errors.push(event.clone()),
                "Log.entryAdded" if params["entry"]["level"] != "info" => errors.push(event.clone()),
                _ => {}
            }
        }
        (requests, errors)
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Its other processes end when it does.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn launch(program: &str, folder: &Path, input: &Path, output: &Path) -> Child {
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$@\" 3<>\"$IN\" 4<>\"$OUT\"", "sh", program]);
    command.env("IN", input).env("OUT", output).env("HOME", folder);
    command.arg(format!("--user-data-dir={}", folder.join("profile").display()));
    command.args([
        "--headless=new",
        "--remote-debugging-pipe",
        // Its sandbox does not work for root, nor in most containers; the page is the repository's own.
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-extensions",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--no-default-browser-check",
        "--hide-scrollbars",
        "--force-color-profile=srgb",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().expect("a shell")
}
