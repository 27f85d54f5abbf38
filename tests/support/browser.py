"""A headless browser: what a page looks like in it, and what it has to complain of."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from devcluster.host.packages import ensure, which

PACKAGED = "chromium-headless-shell"
_PROGRAMS = (PACKAGED, "google-chrome", "chromium", "chromium-browser")
_CONSOLE = re.compile(r":CONSOLE[:(].*")
_DEADLINE_S = 120


@dataclass(frozen=True)
class Visit:
    """What came of opening a page."""

    console: list[str]  # what the page said: errors, warnings, and what its policy refused
    document: str  # as the browser understood it


def find() -> str | None:
    """Return a browser of this machine."""
    return next((path for name in _PROGRAMS if (path := which(name))), None)


def provide() -> None:
    """Install a browser where there is none.

    Raises
    ------
    ClusterError
        When that cannot be done here: it says what to install.
    """
    if find() is None:
        ensure((PACKAGED,))


def visit(browser: str, page: Path, profile: Path, *, picture: Path | None = None, width: int = 1200) -> Visit:
    """Open a page without a network."""
    command = [
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"),
        *("--proxy-server=127.0.0.1:9", f"--user-data-dir={profile}", f"--window-size={width},6000"),
        *([f"--screenshot={picture}"] if picture else ["--dump-dom"]),
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
    return Visit(_CONSOLE.findall(done.stderr), done.stdout)
