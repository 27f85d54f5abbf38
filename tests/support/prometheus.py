"""Prometheus and its promtool, of the machine's own packages."""

import subprocess
from pathlib import Path

from devcluster.host.packages import ensure, which

OLDEST = "2.42"
"""That of Debian 12, the oldest that ran these tests; others come with a newer one."""


def provide() -> None:
    """Install them where they are missing.

    Raises
    ------
    ClusterError
        When that cannot be done here: it says what to install.
    """
    ensure(("prometheus", "promtool"))


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run promtool; what it prints comes back as standard output."""
    provide()
    command = [str(which("promtool")), *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
