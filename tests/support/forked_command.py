"""`specdecode` as a process that starts in a tenth of a second: forked from one that has imported everything."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["specdecode_operator.cli.main", "specdecode_operator.handlers.main", __name__])


class ForkedCommand:
    """A running command, with the methods of subprocess.Popen that tests need."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        given = list(arguments), dict(environment), str(log)
        self._process = CONTEXT.Process(target=_run, args=given, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status; None while the command runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the command to end, and return its exit status."""
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("specdecode", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _run(arguments: list[str], environment: dict[str, str], log: str) -> None:
    """Run the command in the forked process."""
    from kubernetes.aio.config import kube_config

    from specdecode_operator.cli.main import main

    with Path(log).open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    # kube_config read KUBECONFIG when it was imported, before the fork.
    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = environment["KUBECONFIG"]
    sys.argv[1:] = arguments
    main()
