"""Tools that bring what a checkout has into a namespace."""

from pathlib import Path
from typing import Protocol

from tests.support.kubectl import Kubectl

FOLDER = "pairs"
"""Of the repository: what is applied."""


class Tool(Protocol):
    """Whoever applies a checkout."""

    def sync(self, checkout: Path) -> str:
        """Apply it; return what was refused, empty where nothing was."""

    def differences(self, checkout: Path) -> str:
        """Return how the cluster differs from it."""


class ServerSideApply:
    """kubectl in the place of Argo CD with `ServerSideApply=true`, or of Flux."""

    def __init__(self, kubectl: Kubectl, manager: str = "argocd-controller") -> None:
        self._kubectl = kubectl
        self._arguments = ("--server-side", "--force-conflicts", f"--field-manager={manager}")

    def sync(self, checkout: Path) -> str:
        """Apply its files."""
        answer = self._kubectl("apply", *self._arguments, f"--filename={checkout / FOLDER}")
        return answer.stderr if answer.returncode else ""

    def differences(self, checkout: Path) -> str:
        """Return what a dry run of an apply would change."""
        answer = self._kubectl("diff", *self._arguments, f"--filename={checkout / FOLDER}")
        return answer.stdout if answer.returncode else ""
