"""A page in a headless browser that can be asked and typed into: DevTools over its WebSocket."""

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import websocket

from tests.support.waiting import eventually

_TIMEOUT_S = 60
_ATTEMPTS = 5
_INTERRUPTED = "net::ERR_NETWORK_CHANGED"
"""Chromium gives up what it loads when an interface of the machine comes or goes, as tests with clusters have them."""


@dataclass
class Tab:
    """The one tab of a browser."""

    connection: Any
    asked: list[str] = field(default_factory=list)  # what pages wanted to load
    said: list[str] = field(default_factory=list)  # errors in the console
    _calls: int = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer to one command; what happens until then is noted."""
        self._calls += 1
        self.connection.send(json.dumps({"id": self._calls, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.connection.recv())
            if message.get("id") == self._calls:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        if message["method"] == "Network.requestWillBeSent":
            self.asked.append(message["params"]["request"]["url"])
        elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.said.append(message["params"]["entry"]["text"])

    def ask(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait_until(self, expression: str) -> Any:
        """Return the value of an expression once it is one."""
        return eventually(lambda: self.ask(expression), expression, _TIMEOUT_S)

    def open(self, address: str, *, width: int = 1366) -> None:
        """Load a page and all that it loads."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False)
        self._load(address)
        for _ in range(_ATTEMPTS):
            if not any(_INTERRUPTED in each for each in self.said):
                break
            self.said = [each for each in self.said if _INTERRUPTED not in each]
            self._load("about:blank")
            self._load(address)

    def _load(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait_until(f"location.href === {json.dumps(address)} && document.readyState === 'complete'")

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)


@contextmanager
def tab(browser: str, profile: Path, *, reaches: str) -> Iterator[Tab]:
    """Open a browser that reaches one address, HOST:PORT, and nothing else."""
    told = profile / "DevToolsActivePort"
    command = [
        *(
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-port=0",
            "--remote-allow-origins=*",
        ),
        *("--proxy-server=127.0.0.1:9", f"--proxy-bypass-list={reaches}", f"--user-data-dir={profile}", "about:blank"),
    ]
    # A session of its own: Debian's browser is a script, which would end without what it started.
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        port = eventually(lambda: told.exists() and told.read_text().partition("\n")[0], "DevTools", _TIMEOUT_S)
        yield _connected(f"127.0.0.1:{port}")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def _connected(address: str) -> Tab:
    with urllib.request.urlopen(f"http://{address}/json", timeout=_TIMEOUT_S) as answer:
        (target,) = (each for each in json.load(answer) if each["type"] == "page")
    opened = Tab(websocket.create_connection(target["webSocketDebuggerUrl"], timeout=_TIMEOUT_S))
    for domain in ("Network", "Page", "Log", "Runtime"):
        opened.call(f"{domain}.enable")
    return opened
