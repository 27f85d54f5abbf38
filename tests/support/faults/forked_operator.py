"""The operator as a process that starts in a tenth of a second: forked from one that has imported everything."""

import multiprocessing
import os
import sys
from pathlib import Path

from tests.support.operator_process import IMAGE

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["specdecode_operator.handlers.main"])


class ForkedOperator:
    """The whole operator, started again and again, and ended as an out-of-memory killer would."""

    def __init__(self, kubeconfig: Path, log: Path) -> None:
        self._given = str(kubeconfig), str(log)
        self._process: multiprocessing.process.BaseProcess | None = None

    def start(self) -> None:
        """Start it, and wait for nothing."""
        self._process = _context.Process(target=_run, args=self._given, daemon=True)
        self._process.start()

    def kill(self) -> None:
        """End it where it stands."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    @property
    def runs(self) -> bool:
        """Whether it has not ended by itself."""
        return self._process is not None and self._process.is_alive()


def _run(kubeconfig: str, log: str) -> None:
    """Run the operator, in the process that was forked."""
    from kubernetes.aio.config import kube_config

    from specdecode_operator.handlers.main import run_operator
    from specdecode_operator.handlers.settings import Settings

    with Path(log).open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.environ |= {"KUBECONFIG": kubeconfig, "SPECDECODE_OPERATOR_IMAGE": IMAGE}
    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = kubeconfig  # it was read when that was imported, before the fork
    run_operator(Settings(), health_port=0, metrics_port=0)
