"""Runs kubectl for commands that act in a cluster as the person who calls them."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from specdecode_operator.api.base import Body


class KubectlError(Exception):
    """kubectl did not do what it was asked; the message is its own, or says what is missing."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl with a context and a namespace; None leaves the choice to the kubeconfig."""

    context: str | None = None
    namespace: str | None = None

    def text(self, *arguments: str, stdin: str | None = None) -> str:
        """Return what kubectl prints.

        Raises
        ------
        KubectlError
            When it fails.
        """
        done = subprocess.run(  # noqa: S603  arguments are a list: no shell reads them
            self._command(arguments), input=stdin, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise KubectlError(_words(done.stderr, done.returncode))
        return done.stdout

    def find(self, *arguments: str) -> Body | None:
        """Return the object, or the list of objects, that ``get`` with these arguments finds; None where there is none.

        Raises
        ------
        KubectlError
            When it fails for another reason than absence.
        """
        printed = self.text("get", *arguments, "--ignore-not-found", "--output=json")
        found: Body | None = json.loads(printed) if printed.strip() else None
        return found

    def items(self, *arguments: str) -> list[Body]:
        """Return the objects that ``get`` with these arguments lists."""
        listed: list[Body] = (self.find(*arguments) or {}).get("items", [])
        return listed

    def stream(self, *arguments: str, output: int | BinaryIO = subprocess.PIPE) -> subprocess.Popen[bytes]:
        """Start kubectl, whose output is read while it runs; end it when it is no longer needed."""
        return subprocess.Popen(  # noqa: S603  arguments are a list: no shell reads them
            self._command(arguments), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE
        )

    def _command(self, arguments: Sequence[str]) -> list[str]:
        program = shutil.which("kubectl")
        if program is None:
            raise KubectlError("kubectl: not on PATH: install it, captures are driven through it")
        chosen = [
            *([f"--context={self.context}"] if self.context else []),
            *([f"--namespace={self.namespace}"] if self.namespace else []),
        ]
        return [program, *chosen, *arguments]


def _words(stderr: str, code: int) -> str:
    """Return what kubectl said, without its warnings: a refusal has a line for each field."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and not line.startswith("Warning:")]
    return "\n  ".join(lines) or f"kubectl ended with exit code {code} and said nothing"
