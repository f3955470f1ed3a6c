"""A page in headless Chromium, asked over its debugging pipe: what it requests, complains of and looks like.

with open_page(path, width=1280) as page:
    page.requests, page.complaints                          # addresses beside its own; texts
    page.value("document.title")                            # of an expression, from JSON
    page.screenshot()                                       # bytes of a PNG
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium on this machine")
_LIMIT = 60.0
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
)

OVERLAPPING_WORDS = """[...document.querySelectorAll("svg")].flatMap(svg => {
  const found = [], room = svg.getBoundingClientRect();
  const all = [...svg.querySelectorAll("text")].map(e => [e.textContent, e.getBoundingClientRect()]);
  all.forEach(([name, a], i) => {
    if (a.left < room.left || a.right > room.right || a.top < room.top || a.bottom > room.bottom)
      found.push(name + " cut");
    all.slice(i + 1).forEach(([other, b]) => {
      if (a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom)
        found.push(name + " on " + other);
    });
  });
  return found;
})"""
"""An expression: which words of the SVG pictures of a page lie on others, or outside of their picture."""


class Page:
    """One page, loaded and shown."""

    def __init__(self, reader, writer):
        self._reader, self._writer, self._rest, self._number = reader, writer, b"", 0
        self._session, self._events, self._deadline = {}, [], time.monotonic() + _LIMIT

    def load(self, url, width, scheme):
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=wanted)
        self._call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._read()
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        self._url = url

    @property
    def requests(self):
        """Addresses that were asked for, beside the page itself."""
        sent = [event["params"] for event in self._events if event["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent if each["request"]["url"] != self._url]

    @property
    def complaints(self):
        """The lines of the console, whoever wrote them, and exceptions."""
        found = []
        for event in self._events:
            if event["method"] == "Log.entryAdded":
                found.append(event["params"]["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled":
                found += [str(argument.get("value")) for argument in event["params"]["args"]]
            elif event["method"] == "Runtime.exceptionThrown":
                found.append(event["params"]["exceptionDetails"]["text"])
        return found

    def value(self, expression):
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self):
        return base64.b64decode(self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def _call(self, method, **parameters):
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters, **self._session}
        self._writer.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            pass
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _read(self):
        while b"\0" not in self._rest:
            left = self._deadline - time.monotonic()
            assert left > 0 and select.select([self._reader], [], [], left)[0], "Chromium gives no answer"
            more = os.read(self._reader.fileno(), 1 << 16)
            assert more, "Chromium has ended"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self._events.append(message)
        return message


@contextmanager
def open_page(path, width=1280, scheme="light"):
    """The page of a file, in a browser of its own that ends with the block."""
    to_browser, writer = os.pipe()
    reader, from_browser = os.pipe()
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-chromium-", ignore_cleanup_errors=True) as profile,
        os.fdopen(writer, "wb", buffering=0) as asks,
        os.fdopen(reader, "rb", buffering=0) as answers,
    ):
        line = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        words = ["bash", "-c", line, PROGRAM, *_OPTIONS, f"--user-data-dir={profile}"]
        with subprocess.Popen(
            words, pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL, start_new_session=True
        ) as process:
            try:
                os.close(to_browser)
                os.close(from_browser)
                page = Page(answers, asks)
                page.load(Path(path).resolve().as_uri(), width, scheme)
                yield page
            finally:
                os.killpg(process.pid, 9)
