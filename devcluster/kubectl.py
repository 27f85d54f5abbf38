"""kubectl, bound to one cluster and one namespace."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devcluster import binaries
from devcluster.errors import ClusterError

_DEADLINE_S = 120
Answer = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Kubectl:
    """Runs kubectl as a person would.

    Calling it gives the answer whatever it is; `must` raises when it failed.
    """

    kubeconfig: Path
    namespace: str = "default"

    def __call__(self, *arguments: str, stdin: str | None = None, timeout_s: float = _DEADLINE_S) -> Answer:
        """Return exit status, output and errors of ``kubectl ARGUMENTS``."""
        # A cache of its own: what the user's says about this address was true of another cluster.
        answers = self.kubeconfig.parent / "kubectl-cache"
        program = binaries.find("kubectl")["kubectl"]
        return subprocess.run(
            [str(program), f"--cache-dir={answers}", f"--namespace={self.namespace}", *arguments],
            input=stdin,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
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

    def object(self, kind: str, name: str) -> dict[str, Any]:
        """Return an object that must exist."""
        found: dict[str, Any] = json.loads(self.must("get", kind, name, "--output=json"))
        return found

    def objects(self, kind: str, *options: str) -> list[dict[str, Any]]:
        """Return all objects of a kind in the namespace."""
        found: list[dict[str, Any]] = json.loads(self.must("get", kind, "--output=json", *options))["items"]
        return found

    def wait(self, what: str, condition: str, timeout_s: int) -> None:
        """Wait for a condition of one object, such as ``job/tiny-models`` and ``condition=Complete``."""
        self.must("wait", f"--for={condition}", f"--timeout={timeout_s}s", what, timeout_s=timeout_s + 10)
