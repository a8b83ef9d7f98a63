//! A headless Chromium, controlled by the DevTools protocol over pipes: JSON messages that end with zero
//! bytes.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, anyhow, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

/// A browser with one page. Dropping this ends the browser.
pub struct Browser {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    asked: u64,
    session: Option<String>,
}

impl Browser {
    /// Starts a browser with its data in `folder` and a page of this size in pixels.
    pub fn start(folder: &Path, width: u32, height: u32) -> Result<Browser> {
        // Chromium reads descriptor 3 and writes descriptor 4. Its sandbox does not work as root.
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$@\" 3<&0 4>&1 >/dev/null", "sh", "chromium", "--headless=new"]);
        command.args(["--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]);
        command.arg(format!("--user-data-dir={}", folder.join("browser").display()));
        command.arg("about:blank").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().context("cannot start chromium")?;
        let (to, from) = (child.stdin.take().context("no pipe")?, child.stdout.take().context("no pipe")?);
        let mut browser = Browser { child, to, from: BufReader::new(from), asked: 0, session: None };
        let page = browser.ask("Target.createTarget", json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": page["targetId"], "flatten": true });
        let attached = browser.ask("Target.attachToTarget", attach)?;
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        browser.ask("Emulation.setDeviceMetricsOverride", size)?;
        Ok(browser)
    }

    /// Opens a page.
    pub fn open(&mut self, url: &str) -> Result<()> {
        self.ask("Page.navigate", json!({ "url": url })).map(drop)
    }

    /// Evaluates an expression in the page, and waits for its value.
    pub fn evaluate(&mut self, expression: &str) -> Result<Value> {
        let wish = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let mut answer = self.ask("Runtime.evaluate", wish)?;
        if let Some(thrown) = answer.get("exceptionDetails") {
            bail!(
                "the page fails: {}",
                thrown["exception"]["description"].as_str().unwrap_or("unknown reason")
            );
        }
        Ok(answer["result"]["value"].take())
    }

    /// A screenshot of the page, as PNG.
    pub fn screenshot(&mut self) -> Result<Vec<u8>> {
        let answer = self.ask("Page.captureScreenshot", json!({ "format": "png" }))?;
        let text = answer["data"].as_str().context("no picture")?;
        STANDARD.decode(text).map_err(|error| anyhow!("the picture is not in base64: {error}"))
    }

    fn ask(&mut self, method: &str, parameters: Value) -> Result<Value> {
        self.asked += 1;
        let mut message = json!({ "id": self.asked, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = serde_json::to_vec(&message)?;
        bytes.push(0);
        self.to.write_all(&bytes).with_context(|| format!("cannot ask chromium for {method}"))?;
        loop {
            let mut bytes = Vec::new();
            self.from.read_until(0, &mut bytes).context("cannot read what chromium answers")?;
            if bytes.pop() != Some(0) {
                bail!("chromium has ended before it answered {method}");
            }
            let mut answer: Value = serde_json::from_slice(&bytes).context("chromium answers no JSON")?;
            // Events come between answers.
            if answer["id"] == self.asked {
                if let Some(error) = answer.get("error") {
                    bail!("chromium refuses {method}: {error}");
                }
                return Ok(answer["result"].take());
            }
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
