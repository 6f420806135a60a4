"""A headless Chromium driven over its own pipe: what a page looks like, and what it complains about.

Called by the report's slow test. Invariant: needs no package; `find` says where the browser is, or None.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """The browser's path; CHROMIUM names one explicitly."""
    return os.environ.get("CHROMIUM") or next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a running browser. Use it in a `with` statement."""

    def __init__(self, path: str, profile: Path) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()

        def connect() -> None:
            # The browser reads commands from descriptor 3 and answers on 4; the pipes' own numbers may be among them.
            os.dup2(os.dup2(requests, 10), 3)
            os.dup2(os.dup2(answers, 11), 4)

        self._process = subprocess.Popen(
            [path, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=connect,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(requests)
        os.close(answers)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = next(item for item in self._call("Target.getTargets")["targetInfos"] if item["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._session = None
            self._call("Browser.close")
        except OSError:
            pass
        os.close(self._requests)
        os.close(self._answers)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def open(self, url: str, width: int, *, dark: bool = False) -> None:
        """Load a page in a window of this width."""
        phone = width < 600
        scale = 2 if phone else 1
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=scale, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=url)
        self._wait("Page.loadEventFired")

    def evaluate(self, expression: str) -> object:
        """The value of an expression in the page."""
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG file."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self._call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def print(self, path: Path) -> None:
        """The page as a PDF file."""
        path.write_bytes(base64.b64decode(self._call("Page.printToPDF", printBackground=True)["data"]))

    def _call(self, method: str, **parameters: object) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _wait(self, method: str) -> None:
        while self._next().get("method") != method:
            pass

    def _next(self) -> dict:
        while b"\0" not in self._buffer:
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise OSError("the browser went away")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Log.entryAdded":
                self.complaints.append(parameters["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(str(parameters["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
