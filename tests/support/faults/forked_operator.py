"""The operator as a process that starts in a tenth of a second: forked from one that has imported everything."""

import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from threading import Thread
from unittest.mock import patch

import kopf
import time_machine

from specdecode_operator.handlers.leadership import LeaseName
from tests.support.forked_command import CONTEXT
from tests.support.operator_process import IMAGE

_CLOCK_LOOKS_S = 0.05
_SHORTEST_WATCH_S = 10


@dataclass
class Circumstances:
    """How the operator's process is otherwise than where it is installed."""

    hurry: float = 1.0
    """So many times as often as usual it looks at what no watch tells, and opens silent watches anew."""

    lease: LeaseName | None = None
    """Held while it works; absent: it works alone."""


class ForkedOperator:
    """The whole operator, started again and again, and ended as an out-of-memory killer would."""

    def __init__(self, kubeconfig: Path, log: Path, circumstances: Circumstances | None = None) -> None:
        self.circumstances = circumstances or Circumstances()
        self._kubeconfig, self._log = str(kubeconfig), str(log)
        self._clock_s: Synchronized[float] = CONTEXT.Value("d", 0.0)
        self._process: multiprocessing.process.BaseProcess | None = None

    def start(self) -> None:
        """Start it, and wait for nothing."""
        given = self._kubeconfig, self._log, self.circumstances, self._clock_s
        self._process = CONTEXT.Process(target=_run, args=given, daemon=True)
        self._process.start()

    def kill(self) -> None:
        """End it where it stands."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def set_clock(self, ahead_s: float) -> None:
        """Set the wall clock of its machine, as it looks from the operator, ahead of everybody else's, or back."""
        self._clock_s.value = ahead_s

    @property
    def runs(self) -> bool:
        """Whether it has not ended by itself."""
        return self._process is not None and self._process.is_alive()


def _run(kubeconfig: str, log: str, circumstances: Circumstances, clock_s: "Synchronized[float]") -> None:
    """Run the operator, in the process that was forked."""
    from kubernetes.aio.config import kube_config

    from specdecode_operator.handlers.main import run_operator
    from specdecode_operator.handlers.settings import Settings

    with Path(log).open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.environ |= {"KUBECONFIG": kubeconfig, "SPECDECODE_OPERATOR_IMAGE": IMAGE}
    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = kubeconfig  # it was read when that was imported, before the fork
    if circumstances.hurry != 1:
        _hurry(circumstances.hurry)
    Thread(target=_follow, args=(clock_s,), daemon=True).start()
    run_operator(Settings(lease=circumstances.lease), health_port=0, metrics_port=0)


def _hurry(times: float) -> None:
    """Have rounds and watches last a part of what they last."""
    from specdecode_operator.handlers import main

    configure = main.configure

    def hurried(settings: kopf.OperatorSettings) -> None:
        configure(settings)
        settings.watching.inactivity_timeout /= times
        settings.watching.server_timeout = _SHORTEST_WATCH_S

    patch.object(main, "configure", hurried).start()
    patch.object(main, "RESYNC_S", main.RESYNC_S / times).start()


def _follow(clock_s: "Synchronized[float]") -> None:
    """Set the wall clock of this process alone whenever it is to be set; clocks that nobody sets go on."""
    traveller = None
    seen_s = 0.0
    while True:
        if (ahead_s := clock_s.value) != seen_s:
            if traveller is None:
                traveller = time_machine.travel(time.time(), tick=True).start()
            traveller.shift(ahead_s - seen_s)
            seen_s = ahead_s
        time.sleep(_CLOCK_LOOKS_S)
