"""Chromium, spoken to over a pipe: what a page shows, keys that are pressed, and what it asks the network for."""

from __future__ import annotations

import base64
import itertools
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.patience import STEP_S


class Page:
    """A page of a headless browser."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._rest = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.said: list[str] = []
        """Errors, and what the page wrote to the console."""
        self.asked: list[str] = []
        """Addresses that it asked for."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        first, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(first))

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.asked.append(parameters["request"]["url"])
        elif event.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.said.append(json.dumps(parameters))

    def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Its value once that is true."""
        deadline = time.monotonic() + STEP_S
        while not (value := self.run(expression)):
            assert time.monotonic() < deadline, (expression, self.run("document.body.innerText"))
            time.sleep(0.05)
        return value

    def press(self, key: str) -> None:
        code = {"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Escape": 27}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def look(self, width: int, *, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def shoot(self, path: Path) -> Path:
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))
        return path


@contextmanager
def open_page(chromium: str, folder: Path) -> Iterator[Page]:
    """A page of a browser of its own, which ends with it."""
    (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()

    def fds() -> None:  # the browser's ends of its pipe are 3 and 4
        os.dup2(to_read, 103)
        os.dup2(from_write, 104)
        os.dup2(103, 3)
        os.dup2(104, 4)

    argv = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
            "--disable-background-networking", f"--user-data-dir={folder / 'profile'}", "about:blank"]  # fmt: skip
    process = subprocess.Popen(
        argv, close_fds=False, preexec_fn=fds, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield Page(from_read, to_write)
    finally:
        process.kill()
        process.wait()
        for descriptor in (to_read, to_write, from_read, from_write):
            os.close(descriptor)
