"""The operator as a process of its own, outside the cluster."""

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import yaml

from tests.support.kubectl import Kubectl
from tests.support.waiting import eventually

NAMESPACE = "specdecode-system"
SERVICE_ACCOUNT = "specdecode-operator"
IMAGE = "localhost/specdecode/operator:dev"
"""Outside a cluster it cannot know which image its captures run."""


class OperatorProcess:
    """`specdecode operator`, started, watched and ended."""

    def __init__(self, kubeconfig: Path, log: Path) -> None:
        self.kubeconfig = kubeconfig
        self.log = log
        self.calibration = log.with_name("calibration.json")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it is healthy."""
        port = _free_port()
        command = [sys.executable, "-m", "specdecode_operator", "operator"]
        command += [f"--health-port={port}", "--metrics-port=0", f"--calibration={self.calibration}"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "KUBECONFIG": str(self.kubeconfig), "SPECDECODE_OPERATOR_IMAGE": IMAGE},
                stdout=log,
                stderr=log,
            )
        eventually(lambda: self._healthy(port), "the operator is healthy")

    def kill(self) -> None:
        """End it as an out-of-memory killer would."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process = None

    def stop(self) -> int:
        """End it as the kubelet would; return the exit status."""
        assert self._process is not None
        self._process.terminate()
        status = self._process.wait(timeout=30)
        self._process = None
        return status

    def _healthy(self, port: int) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the operator ended: {self.log.read_text()[-2000:]}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{port}/healthz", timeout=5) as response:
                return bool(response.status == 200)
        except urllib.error.URLError:
            return False


def service_account_kubeconfig(kubectl: Kubectl, destination: Path) -> Path:
    """Write a kubeconfig of the operator's own service account, with the rights that it is installed with."""
    token = kubectl.must("create", "token", SERVICE_ACCOUNT, f"--namespace={NAMESPACE}", "--duration=3h").strip()
    config = yaml.safe_load(kubectl.kubeconfig.read_text())
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    destination.write_text(yaml.safe_dump(config))
    return destination


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
