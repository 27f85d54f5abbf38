"""kubectl, bound to one cluster and one namespace."""

import json
import os
import socket
import subprocess
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from devcluster.builds import binaries
from devcluster.cluster.api import is_established
from devcluster.host.errors import ClusterError
from devcluster.host.processes import GO_SETTINGS

_DEADLINE_S = 120
_ADDRESS_DEADLINE_S = 120
Answer = subprocess.CompletedProcess[str]


@cache
def _program() -> str:
    """Where kubectl is; finding out starts one to ask for its version."""
    return str(binaries.find("kubectl")["kubectl"])


@dataclass(frozen=True)
class Kubectl:
    """Runs kubectl as a person would.

    Calling it gives the answer whatever it is; `must` raises when it failed.

    Attributes
    ----------
    kubeconfig
        File that says where the cluster is; None for kubectl's own choice.
    namespace
        Namespace of objects that do not name theirs.
    context
        Entry of the kubeconfig; None for its current one.
    """

    kubeconfig: Path | None
    namespace: str = "default"
    context: str | None = None

    def __call__(self, *arguments: str, stdin: str | None = None, timeout_s: float = _DEADLINE_S) -> Answer:
        """Return exit status, output and errors of ``kubectl ARGUMENTS``."""
        options = [f"--namespace={self.namespace}"]
        environment = GO_SETTINGS | os.environ
        if self.context:
            options.append(f"--context={self.context}")
        if self.kubeconfig:
            environment["KUBECONFIG"] = str(self.kubeconfig)
            # A cache of its own: what the user's says about this address was true of another cluster.
            options.append(f"--cache-dir={self.kubeconfig.parent / 'kubectl-cache'}")
        return subprocess.run(
            [_program(), *options, *arguments],
            input=stdin,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def must(self, *arguments: str, stdin: str | None = None, timeout_s: float = _DEADLINE_S) -> str:
        """Return the output of a command that must succeed.

        Raises
        ------
        ClusterError
            With what kubectl said.
        """
        answer = self(*arguments, stdin=stdin, timeout_s=timeout_s)
        if answer.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {answer.stderr.strip() or answer.stdout.strip()}")
        return answer.stdout

    def within(self, namespace: str) -> Self:
        """Return the same cluster's kubectl in another namespace."""
        return replace(self, namespace=namespace)

    def object(self, kind: str, name: str) -> dict[str, Any]:
        """Return an object that must exist."""
        found: dict[str, Any] = json.loads(self.must("get", kind, name, "--output=json"))
        return found

    def objects(self, kind: str, *options: str) -> list[dict[str, Any]]:
        """Return all objects of a kind in the namespace."""
        found: list[dict[str, Any]] = json.loads(self.must("get", kind, "--output=json", *options))["items"]
        return found

    def wait_for_crds(self, *names: str) -> None:
        """Wait until the API server has taken CRDs into use.

        Not by ``kubectl wait``, which fails on one that has no conditions yet (kubernetes/kubernetes#66439).

        Raises
        ------
        ClusterError
            When one is not taken into use.
        """
        deadline = time.monotonic() + _DEADLINE_S
        for name in names:
            while not is_established(self.object("crd", name)):
                if time.monotonic() > deadline:
                    raise ClusterError(f"CRD {name} is not established: see kubectl describe crd {name}")
                time.sleep(0.1)

    def service_address(self, name: str) -> str:
        """Return address and port of a Service as soon as it takes connections, a little after its pods are ready.

        Raises
        ------
        ClusterError
            When it does not take any.
        """
        spec = self.object("service", name)["spec"]
        host, port = str(spec["clusterIP"]), int(spec["ports"][0]["port"])
        deadline = time.monotonic() + _ADDRESS_DEADLINE_S
        while True:
            try:
                with socket.create_connection((host, port), timeout=5):
                    return f"{host}:{port}"
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ClusterError(f"Service {name} at {host}:{port} takes no connections: {error}") from error
            time.sleep(0.1)

    def wait(self, what: str, condition: str, timeout_s: int) -> None:
        """Wait for a condition of one object, such as ``job/tiny-models`` and ``condition=Complete``."""
        self.must("wait", f"--for={condition}", f"--timeout={timeout_s}s", what, timeout_s=timeout_s + 10)
