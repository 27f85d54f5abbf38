"""Run kubectl for commands that act in a cluster with the caller's own rights."""

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import update_wrapper
from inspect import Signature, signature
from typing import Any, BinaryIO, Final

from specdecode_operator.api.base import Body
from specdecode_operator.cli.options import Context, Kubeconfig, Namespace
from specdecode_operator.cluster.no_cluster import no_kubeconfig, unknown_context, unreachable
from specdecode_operator.problems import printable
from specdecode_operator.untrusted import mapping, objects, parse_json


class KubectlError(Exception):
    """kubectl failed. The message is kubectl's, or one with a fix."""


_MOST_NAMED: Final = 8
_LOG_LINE: Final = re.compile(r"[IWEF]\d{4} ")
_QUOTED: Final = re.compile(r'^.*? err="(.*)"$')
_NO_CONTEXT: Final = re.compile(r'context was not found for specified context: (\S+)|context "(.+)" does not exist')
_NO_KUBECONFIG: Final = re.compile(r"loading config file|invalid configuration|stat .*: no such file")
_NOT_ALL: Final = "some validation rules were not checked because the object was invalid"
_UNSET: Final = "localhost:8080"
"""Default server of kubectl without a kubeconfig. API servers no longer serve without TLS."""
_REFUSED: Final = re.compile(r"connection to the server (\S+) was refused")
_NOT_GOT: Final = re.compile(r'Get \\?"(https?://[^/"]+)[^"]*": (.*?)(?:;|"?$)')
_NO_CLUSTER: Final = ("Unable to connect to the server", "no such host", "i/o timeout", "connection refused")


@dataclass(frozen=True)
class Kubectl:
    """kubectl with a context, namespace and kubeconfig. None selects kubectl's default."""

    context: str | None = None
    namespace: str | None = None
    kubeconfig: str | None = None

    def text(self, *arguments: str, stdin: str | None = None) -> str:
        """Return kubectl's output."""
        done = subprocess.run(  # noqa: S603  without a shell
            self._command(arguments),
            input=None if stdin is None else stdin.encode(),
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise KubectlError(self._words(done.stderr.decode(errors="replace"), done.returncode))
        return done.stdout.decode(errors="replace")

    def short_text(self, *arguments: str, most_bytes: int) -> str:
        """Return kubectl's output, limited to ``most_bytes`` because an untrusted server may send without end."""
        with tempfile.TemporaryFile() as errors, self.stream(*arguments, errors=errors) as process:
            printed = process.stdout.read(most_bytes + 1) if process.stdout else b""
            if len(printed) > most_bytes:
                process.kill()
                raise KubectlError(f"the answer exceeds {most_bytes} bytes")
            if process.wait():
                errors.seek(0)
                raise KubectlError(self._words(errors.read().decode(errors="replace"), process.returncode))
        return printed.decode(errors="replace")

    def find(self, *arguments: str) -> Body | None:
        """Return the object or list of ``kubectl get``; None if not found."""
        printed = self.text("get", *arguments, "--ignore-not-found", "--output=json")
        return _object(printed) if printed.strip() else None

    def apply(self, body: Body, *options: str) -> Body:
        """Apply an object or a List, and return it as stored by the API server."""
        text = json.dumps(body, default=str)
        return _object(self.text("apply", "--server-side", "--filename=-", "--output=json", *options, stdin=text))

    def items(self, *arguments: str) -> list[Body]:
        """Return the items that ``kubectl get`` lists."""
        listed: list[Body] = (self.find(*arguments) or {}).get("items", [])
        return listed

    def select(self, resource: str, *, all_namespaces: bool, selector: str | None) -> list[Body]:
        """Return the objects of a resource that -A and -l select."""
        options = ["--all-namespaces"] if all_namespaces else []
        return self.items(resource, *options, *([f"--selector={selector}"] if selector else []))

    def within(self, body: Body) -> "Kubectl":
        """Return kubectl for the namespace of an object."""
        return replace(self, namespace=str(body["metadata"]["namespace"]))

    def names_here(self, resource: str, plural: str, name: str) -> str:
        """Return a hint for a name that was not found: a similar name, and the existing ones."""
        names = [each["metadata"]["name"] for each in self.items(resource)]
        if not names:
            return f"no {plural} here"
        meant = get_close_matches(name, names, n=1)
        listed = f"{plural} here: {', '.join(names[:_MOST_NAMED])}{', …' if len(names) > _MOST_NAMED else ''}"
        return f"did you mean {meant[0]}? {listed}" if meant else listed

    def stream(self, *arguments: str, errors: int | BinaryIO = subprocess.PIPE) -> subprocess.Popen[bytes]:
        """Start kubectl and return the process; the caller reads its output and stops it."""
        return subprocess.Popen(  # noqa: S603  without a shell
            self._command(arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        )

    def _command(self, arguments: Sequence[str]) -> list[str]:
        program = shutil.which("kubectl")
        if program is None:
            raise KubectlError("kubectl: not found on PATH: install it; this command needs it to reach the cluster")
        # With "=", a value that starts with a dash is not parsed as an option.
        chosen = [
            *([f"--kubeconfig={self.kubeconfig}"] if self.kubeconfig else []),
            *([f"--context={self.context}"] if self.context else []),
            *([f"--namespace={self.namespace}"] if self.namespace else []),
        ]
        return [program, *chosen, *arguments]

    def _words(self, stderr: str, code: int) -> str:
        said = one_line(stderr)
        if not said:
            return f"kubectl exited with code {code} and no message"
        if match := _NO_CONTEXT.search(said):
            return unknown_context(match[1] or match[2], self.kubeconfig)
        if _NO_KUBECONFIG.search(said):
            return no_kubeconfig(self.kubeconfig, f"cannot be read ({said})")
        return no_kubeconfig(self.kubeconfig) if _UNSET in said else _of_no_answer(said)


def _of_no_answer(said: str) -> str:
    """Return kubectl's message, or the common one if the API server does not answer."""
    if match := _REFUSED.search(said):
        return unreachable(match[1], "Connection refused")
    if not any(words in said for words in _NO_CLUSTER):
        return said
    if match := _NOT_GOT.search(said):
        return unreachable(match[1], "Connection refused" if "connection refused" in match[2] else match[2])
    return unreachable("", said.removeprefix("Unable to connect to the server: "))


def _object(printed: str) -> Body:
    try:
        found = parse_json(printed)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise KubectlError(
            "kubectl did not print an object: check that kubectl and the server in the kubeconfig are the right ones"
        )
    return found


def condition_of(body: Body, type_: str) -> Body:
    """Return the condition of a type from an object's status; empty if it is missing."""
    conditions = objects(mapping(body, "status"), "conditions")
    return next((each for each in conditions if each.get("type") == type_), {})


def with_kubectl(command: Callable[..., None]) -> Callable[..., None]:
    """Add -n, --context and --kubeconfig to a command, which gets a Kubectl as its first argument.

    Other arguments of the command must be keyword-only.
    """

    def run(
        *, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None, **options: Any
    ) -> None:
        command(Kubectl(context, namespace, kubeconfig), **options)

    *shared, _ = signature(run).parameters.values()
    _, *own = signature(command).parameters.values()
    update_wrapper(run, command).__dict__["__signature__"] = Signature([*own, *shared])  # typer reads it
    return run


def one_line(stderr: str) -> str:
    """Return kubectl's error message on one line, without log lines, warnings and ``error:``.

    A rejected object has one line per field.
    """
    lines = [line.strip() for line in stderr.splitlines()]
    said = [line for line in lines if line and not line.startswith("Warning:") and not _LOG_LINE.match(line)]
    said = [line for line in said if _NOT_ALL not in line]
    # If there are only log lines, the last one has the reason.
    said = said or [_QUOTED.sub(r"\1", line).replace('\\"', '"') for line in lines if line][-1:]
    text = "; ".join(line.removeprefix("* ").removeprefix("error: ") for line in said)
    return printable(text.replace(":; ", ": "))
