"""`specdecode capture up` where a deployment is in the way, and `specdecode status`: against a real API server."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from specdecode_operator.cli.main import app
from specdecode_operator.cli.options import ExitCode
from tests.support.conditions import condition
from tests.support.kubectl import Kubectl, program
from tests.support.objects import tiny_cpu
from tests.support.operator_process import OperatorProcess
from tests.support.waiting import eventually

Up = Callable[[], Result]


def _use(kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands find kubectl, and the cluster."""
    monkeypatch.setenv("PATH", f"{Path(program('kubectl')).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(kubectl.kubeconfig))


@pytest.fixture
def up(kubectl: Kubectl, operator: OperatorProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Up:
    """Apply a capture of the deployment `tiny` as a user does, and wait for it."""
    _use(kubectl, monkeypatch)
    file = tmp_path / "capture.yaml"
    file.write_text(yaml.safe_dump(body("SpecDecodeCapture", "demo", {"deployment": "tiny"})))
    arguments = ["capture", "up", str(file), f"--namespace={kubectl.namespace}", "--deployment-timeout=1"]
    return lambda: CliRunner().invoke(app, arguments)


def body(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "specdecode.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def deploy(kubectl: Kubectl, name: str, **changes: Any) -> None:
    text = yaml.safe_dump(body("SpecDecodeDeployment", name, tiny_cpu(**changes)))
    assert kubectl.apply(text).returncode == 0


def test_capture_up_fails_on_missing_deployment_and_lists_existing_ones(kubectl: Kubectl, up: Up) -> None:
    deploy(kubectl, "small")
    answer = up()
    assert answer.exit_code == 1
    where = f"in namespace {kubectl.namespace} (SpecDecodeDeployments there: small)"
    assert answer.stderr.startswith(f"error: capture demo: deployment tiny not found {where}: apply it, or create"), (
        answer
    )
    assert kubectl.object("sdc", "demo")["status"]["phase"] == "Pending", "the capture itself goes on waiting"


def test_capture_up_fails_on_invalid_deployment_and_names_the_field(kubectl: Kubectl, up: Up) -> None:
    deploy(kubectl, "tiny", engine={"image": "i:1", "extraArgs": ["--nonsense"]})
    eventually(lambda: condition(kubectl, "tiny", "Accepted")[0] == "False", "the operator has seen it")
    answer = up()
    assert answer.exit_code == 1
    assert "spec.engine.extraArgs[0]: --nonsense: vLLM 0.33 has no such flag" in answer.stderr
    assert f"fix the deployment (kubectl describe sdd tiny -n {kubectl.namespace})" in answer.stderr


@pytest.mark.usefixtures("operator")
def test_status_shows_conditions_and_events_of_a_deployment(kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(kubectl, monkeypatch)
    deploy(kubectl, "small")
    eventually(lambda: condition(kubectl, "small", "Accepted")[0] == "True", "the operator has seen it")
    metadata = kubectl.object("sdd", "small")["metadata"]
    reference = {"kind": "SpecDecodeDeployment", "name": "small", "uid": metadata["uid"]}
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "small-1", "namespace": kubectl.namespace},
        "involvedObject": {**reference, "apiVersion": "specdecode.io/v1alpha1", "namespace": kubectl.namespace},
        "reason": "FromATest",
        "lastTimestamp": "2999-01-01T00:00:00Z",
    }
    kubectl.must("apply", "--filename=-", stdin=yaml.safe_dump(event))

    def shown(*arguments: str) -> dict[str, Any]:
        answer = CliRunner().invoke(app, ["status", *arguments, "-o", "json"])
        assert answer.exit_code == 0, answer.output
        found: dict[str, Any] = json.loads(answer.stdout)
        return found

    (found,) = shown("small", "-n", kubectl.namespace)["deployments"]
    assert found["deployment"]["metadata"]["uid"] == metadata["uid"]
    assert found["events"][0]["reason"] == "FromATest"
    everywhere = shown("-A")["deployments"]
    assert (kubectl.namespace, "small") in {
        (each["deployment"]["metadata"]["namespace"], each["deployment"]["metadata"]["name"]) for each in everywhere
    }
    assert shown("-n", kubectl.namespace, "-l", "no=such")["deployments"] == []
    screen = CliRunner().invoke(app, ["status", "small", "-n", kubectl.namespace])
    assert screen.exit_code == 0, screen.output
    assert all(word in screen.stdout for word in ("Accepted", "FromATest"))
    assert CliRunner().invoke(app, ["status", "none", "-n", kubectl.namespace]).exit_code == ExitCode.INVALID
