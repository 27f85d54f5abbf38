"""The operator as a process of its own, outside the cluster."""

import http.client
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import yaml

from devcluster.cluster.settings import free_ports
from tests.support.forked_command import ForkedCommand
from tests.support.kubectl import Kubectl
from tests.support.waiting import eventually

NAMESPACE = "specdecode-system"
SERVICE_ACCOUNT = "specdecode-operator"
USER = f"system:serviceaccount:{NAMESPACE}:{SERVICE_ACCOUNT}"
IMAGE = "localhost/specdecode/operator:dev"
"""Outside a cluster it cannot know which image its captures run."""

_STOP_DEADLINE_S = 120


class OperatorProcess:
    """`specdecode operator`, started, watched and ended."""

    forks: ClassVar = False
    """Whether processes after the first are forked, not started from the command line.

    This saves the 1.3 s of CPU time that importing the operator takes, so it is not for measurements.
    """
    _first: ClassVar = True

    def __init__(
        self,
        kubeconfig: Path,
        log: Path,
        pod: str | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.kubeconfig = kubeconfig
        self._environment = environment or {}
        self.arguments = arguments
        self.log = log
        self.pod = pod
        """Name of the pod that it is taken for: it works while it has the Lease, as where it is installed."""
        self.calibration = log.with_name("calibration.json")
        self.facts = log.with_name("facts")
        self._process: subprocess.Popen[bytes] | ForkedCommand | None = None
        self._health_port = 0

    def start(self) -> None:
        """Start it and wait until it is healthy."""
        (port,) = free_ports(1)
        arguments = ["operator", f"--health-port={port}", "--metrics-port=0", f"--calibration={self.calibration}"]
        arguments += [f"--facts={self.facts}", *self.arguments]
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "SPECDECODE_OPERATOR_IMAGE": IMAGE}
        if self.pod:
            arguments.append(f"--leader-election={SERVICE_ACCOUNT}")
            environment |= {"POD_NAMESPACE": NAMESPACE, "POD_NAME": self.pod}
        environment |= self._environment
        if OperatorProcess._first or not self.forks:
            OperatorProcess._first = False
            command = [sys.executable, "-m", "specdecode_operator", *arguments]
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        else:
            self._process = ForkedCommand(arguments, environment, self.log)
        self._health_port = port
        eventually(self.health, "the operator is healthy")

    @property
    def pid(self) -> int:
        """Its process id, while it runs."""
        assert self._process is not None
        return self._process.pid

    def ensure(self) -> None:
        """Start it where a test before has left it killed.

        Raises
        ------
        AssertionError
            When it has ended by itself; the next call starts it.
        """
        if self._process is not None and (status := self._process.poll()) is not None:
            self._process = None
            message = f"the operator ended by itself ({status}): {self.tail()}"
            raise AssertionError(message)
        if self._process is None:
            self.start()

    def freeze(self) -> None:
        """Stop it in the middle of whatever it does."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let a frozen one go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> int:
        """Return the exit status of one that ends by itself."""
        assert self._process is not None
        return self._process.wait(timeout=_STOP_DEADLINE_S)

    def ended(self) -> str | None:
        """Return how it ended where nobody ended it."""
        status = self._process.poll() if self._process is not None else None
        return None if status is None else f"exit status {status}: {self.tail(500)}"

    def kill(self) -> None:
        """End it as an out-of-memory killer would."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process = None

    def stop(self) -> int:
        """End it as the kubelet would; return the exit status, 0 also where it was killed."""
        if self._process is None:
            return 0
        self._process.terminate()
        try:
            return self._process.wait(timeout=_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            self._process = None

    def tail(self, characters: int = 4000) -> str:
        """Return the end of its log; nothing where it was never started."""
        return self.log.read_text(errors="replace")[-characters:] if self.log.exists() else ""

    def address(self, path: str) -> str:
        """Return where it answers probes."""
        return f"http://127.0.0.1:{self._health_port}{path}"

    def health(self) -> str:
        """Return what a healthy operator says of itself; nothing while it is not healthy."""
        assert self._process is not None
        if (status := self._process.poll()) is not None:
            raise EarlyEndError(status, self.tail())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(self.address("/healthz"), timeout=5) as response:
                return str(response.read().decode())
        except (OSError, http.client.HTTPException):  # it does not listen yet, or not fast enough
            return ""


class EarlyEndError(Exception):
    """The operator ended before it was healthy: nothing more is to be waited for."""


def may(kubectl: Kubectl, verb: str, resource: str) -> bool:
    """Whether the API server would let the operator do this: what RBAC grants counts a little after it is written."""
    name, _, subresource = resource.partition("/")
    answer = kubectl("auth", "can-i", verb, name, f"--subresource={subresource}", f"--as={USER}")
    assert answer.stdout.strip() in {"yes", "no"}, answer.stderr
    return answer.stdout.strip() == "yes"


def service_account_kubeconfig(kubectl: Kubectl, destination: Path, account: str = SERVICE_ACCOUNT) -> Path:
    """Write a kubeconfig of the operator's own service account, with the rights that it is installed with."""
    token = kubectl.must("create", "token", account, f"--namespace={NAMESPACE}", "--duration=3h").strip()
    assert kubectl.kubeconfig
    config = yaml.safe_load(kubectl.kubeconfig.read_text())
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    destination.write_text(yaml.safe_dump(config))
    return destination
