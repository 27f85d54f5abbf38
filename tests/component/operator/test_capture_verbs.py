"""`specdecode capture up` where a deployment is in the way: against a real API server and a real operator."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from specdecode_operator.cli.main import app
from tests.support.conditions import condition
from tests.support.kubectl import Kubectl, program
from tests.support.objects import tiny_cpu
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

Up = Callable[[], Result]


@pytest.fixture
def up(kubectl: Kubectl, operator: OperatorProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Up:
    """Apply a capture of the deployment `tiny` as a user does, and wait for it."""
    monkeypatch.setenv("PATH", f"{Path(program('kubectl')).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(kubectl.kubeconfig))
    file = tmp_path / "capture.yaml"
    file.write_text(yaml.safe_dump(body("SpecDecodeCapture", "demo", {"deployment": "tiny"})))
    arguments = ["capture", "up", str(file), f"--namespace={kubectl.namespace}", "--deployment-timeout=1"]
    return lambda: CliRunner().invoke(app, arguments)


def body(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "specdecode.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def deploy(kubectl: Kubectl, name: str, **changes: Any) -> None:
    text = yaml.safe_dump(body("SpecDecodeDeployment", name, tiny_cpu(**changes)))
    assert kubectl.apply(text).returncode == 0


def test_a_deployment_that_is_not_there_ends_it_and_names_those_that_are(kubectl: Kubectl, up: Up) -> None:
    deploy(kubectl, "small")
    answer = up()
    assert answer.exit_code == 1
    where = f"in namespace {kubectl.namespace} (SpecDecodeDeployments there: small)"
    assert answer.stderr.startswith(f"error: capture demo: deployment tiny is not {where}: apply it, or create"), answer
    assert kubectl.object("sdc", "demo")["status"]["phase"] == "Pending", "the capture itself goes on waiting"


def test_a_deployment_that_is_not_accepted_ends_it_with_the_field(kubectl: Kubectl, up: Up) -> None:
    deploy(kubectl, "tiny", engine={"image": "i:1", "extraArgs": ["--nonsense"]})
    eventually(lambda: condition(kubectl, "tiny", "Accepted")[0] == "False", "the operator has seen it")
    answer = up()
    assert answer.exit_code == 1
    assert "spec.engine.extraArgs[0]: --nonsense: vLLM 0.33 has no such flag" in answer.stderr
    assert f"correct it (kubectl describe sdd tiny -n {kubectl.namespace})" in answer.stderr
