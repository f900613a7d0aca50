"""Headless Chromium over its debugging pipe: open a page, look at it, hear what it asks and says."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
_DEADLINE_S = 60.0


def find_chromium() -> str | None:
    """Path of an installed Chromium or Chrome; None without one."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@dataclass
class Browser:
    """One browser process with one page. ``said``: console lines and errors; ``asked``: URLs."""

    chromium: str
    profile: Path
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __enter__(self) -> "Browser":
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # Chromium reads file descriptor 3 and writes 4; the shell puts our pipes there.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}', self.chromium,
             *_FLAGS, f"--user-data-dir={self.profile}", "about:blank"],
            pass_fds=(to_browser, from_browser), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._next_id = 0
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)  # Chromium ends when its pipe closes
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        os.close(self._in)

    def show(self, page: Path, *, width: int, height: int = 900, scheme: str = "light") -> None:
        """Open a file at a width and colour scheme, and wait until its charts are drawn."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.send("Page.navigate", url=page.as_uri())
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            # An animation frame is the page's own clock: no sleep of ours.
            state = self.evaluate(
                "new Promise(r => requestAnimationFrame(() => {"
                "const d = document.documentElement.dataset;"
                "r(document.readyState === 'complete' ? d.drawn ?? d.failed ?? '' : '')}))"
            )
            if state:
                return
        raise AssertionError(f"the page was not drawn in {_DEADLINE_S} s; it said {self.said}")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, promises awaited."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path, *, height: int | None = None) -> None:
        """Save what is seen; ``height`` pixels from the top, None for the window's."""
        options: dict[str, Any] = {}
        if height is not None:
            width = self.evaluate("innerWidth")
            clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
            options = {"clip": clip, "captureBeyondViewport": True}
        answer = self.send("Page.captureScreenshot", format="png", **options)
        path.write_bytes(base64.b64decode(answer["data"]))

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer; events that come in between are kept."""
        self._next_id += 1
        message: dict[str, Any] = {"id": self._next_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._next_id:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            assert left > 0, "the browser did not answer in time"
            if select.select([self._in], [], [], left)[0]:
                part = os.read(self._in, 1 << 20)
                assert part, "the browser ended"
                self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])
            case "Runtime.consoleAPICalled":
                self.said.append(f"{params['type']}: {params['args']}")
            case "Runtime.exceptionThrown":
                self.said.append(str(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.said.append(str(params["entry"]))
