"""Commands that ask a cluster and find none: the same exit code and message for the same cause."""

import sys
from pathlib import Path

import pytest
import yaml

from specdecode_operator.cli.options import ExitCode
from tests.unit.cli.conftest import Specdecode

UNKNOWN_CONTEXT = "Error in configuration: context was not found for specified context: nope\n"
UNKNOWN_TO_APPLY = 'error: context "nope" does not exist\n'
NO_KUBECONFIG = "The connection to the server localhost:8080 was refused - did you specify the right host or port?\n"
REFUSED = "The connection to the server 127.0.0.1:1 was refused - did you specify the right host or port?\n"
REFUSED_TO_APPLY = (
    'error: error validating "STDIN": error validating data: failed to download openapi: Get '
    '"https://127.0.0.1:1/openapi/v2?timeout=32s": dial tcp 127.0.0.1:1: connect: connection refused; if you choose to'
    " ignore these errors, turn validation off with --validate=false\n"
)
COMMANDS = [
    ("status",),
    ("status", "chat"),
    ("doctor",),
    ("import", "deployment/chat"),
    ("metrics", "chat"),
    ("capture", "status"),
    ("capture", "run"),
    ("capture", "fetch", "demo", "out"),
    ("capture", "down"),
    ("capture", "up", "-f", "capture.yaml"),
]


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubeconfig of an API server that refuses connections, in the folder where commands run."""
    file = tmp_path / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    body = {"clusters": [cluster], "contexts": [context], "users": [{"name": "u", "user": {}}], "current-context": "x"}
    file.write_text(yaml.safe_dump(body))
    capture = {
        "apiVersion": "specdecode.io/v1alpha1",
        "kind": "SpecDecodeCapture",
        "metadata": {"name": "demo"},
        "spec": {"deployment": "chat"},
    }
    (tmp_path / "capture.yaml").write_text(yaml.safe_dump(capture))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(file))
    return file


def kubectl_says(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.exit({text!r}.rstrip())\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("options", "kubectl", "message"),
    [
        ((), REFUSED, "cannot reach the API server at 127.0.0.1:1 (Connection refused): check "),
        (("--context=nope",), UNKNOWN_CONTEXT, "--context: nope: no such context in the kubeconfig: "),
        (("--context=nope",), UNKNOWN_TO_APPLY, "--context: nope: no such context in the kubeconfig: "),
        ((), REFUSED_TO_APPLY, "cannot reach the API server at 127.0.0.1:1 (Connection refused): check "),
        (("--kubeconfig=absent",), NO_KUBECONFIG, "--kubeconfig: absent: no such file: "),
        (("--kubeconfig=absent", "--context=nope"), UNKNOWN_CONTEXT, "--kubeconfig: absent: no such file: "),
    ],
    ids=[
        "refused",
        "unknown context",
        "unknown to apply",
        "refused to apply",
        "no kubeconfig",
        "no kubeconfig for a context",
    ],
)
@pytest.mark.usefixtures("kubeconfig")
def test_same_connection_error_gives_the_same_message(
    specdecode: Specdecode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    options: tuple[str, ...],
    kubectl: str,
    message: str,
) -> None:
    kubectl_says(kubectl, tmp_path, monkeypatch)
    answer = specdecode(*command, *options)
    assert answer.exit_code == ExitCode.INVALID
    assert answer.stderr.startswith(f"error: {message}")
    assert answer.stderr.count("\n") == 1
