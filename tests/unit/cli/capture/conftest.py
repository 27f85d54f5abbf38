"""What the tests of `specdecode capture` share: a cluster that a fake kubectl answers for."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from specdecode_operator.cli.main import app
from specdecode_operator.cluster.resources import CAPTURE_LABEL

MINE = {
    "apiVersion": "specdecode.io/v1alpha1",
    "kind": "SpecDecodeCapture",
    "metadata": {"name": "demo", "namespace": "team"},
    "spec": {"deployment": "llama"},
}
FOLDER = "team/demo/as-deployed/1"
CONTENT = b"".join(b'{"line": %d}\n' % number for number in range(2000))
CANCELLED = "spec.suspend is true: no engine and no load"
Body = dict[str, Any]


def capture(name: str = "demo", phase: str = "Succeeded", **status: Any) -> Body:
    return {
        "metadata": {"name": name, "namespace": "team", "generation": 1, "uid": f"{name}-uid"},
        "spec": {"deployment": "llama"},
        "status": {"phase": phase, "observedGeneration": 1, **status},
    }


def published(**status: Any) -> Body:
    recorded = {"claim": "demo-capture", "path": FOLDER, "job": "demo-capture", "operatorImage": "operator:1"}
    return capture(**{**recorded, **status})


CLAIM = {"metadata": {"name": "demo-capture", "namespace": "team", "labels": {CAPTURE_LABEL: "demo"}}}


class Cluster:
    """What the fake kubectl answers from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.volume = folder / "volume" / FOLDER
        self.volume.mkdir(parents=True)
        self.holds()

    def holds(self, *captures: Body, pod: Body | None = None, streams: Body | None = None, **more: Any) -> None:
        objects = {f"specdecodecapture/{each['metadata']['name']}": each for each in captures}
        objects |= {"persistentvolumeclaim/demo-capture": CLAIM, **more}
        state: Body = {"objects": objects, **(streams or {})}
        if pod is not None:
            objects["pod/*"] = pod
            state["unready"] = True
        (self.folder / "objects.json").write_text(json.dumps(state))

    def publish(
        self,
        sha256: str = hashlib.sha256(CONTENT).hexdigest(),
        *,
        name: str = "trace.jsonl",
        size: int = len(CONTENT),
        **said: Any,
    ) -> None:
        (self.volume / "trace.jsonl").write_bytes(CONTENT)
        files = {name: {"bytes": size, "lines": 2000, "sha256": sha256}}
        (self.volume / "manifest.json").write_text(json.dumps({"files": files, **said}))

    def applied(self) -> list[Body]:
        """What was sent to be applied, or tried."""
        return [json.loads(each) for each in (self.folder / "applied.jsonl").read_text().splitlines()]

    def created(self) -> list[Body]:
        """Return the objects that `kubectl create` got."""
        return [json.loads(each) for each in (self.folder / "created.jsonl").read_text().splitlines()]

    def calls(self, verb: str) -> list[list[str]]:
        calls = self.folder / "calls.jsonl"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [call for call in map(json.loads, lines) if verb in call]


@pytest.fixture
def run() -> Callable[..., Result]:
    return lambda *arguments: CliRunner().invoke(app, ["capture", *map(str, arguments)])


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def cancelled(generation: int, **spec: Any) -> Body:
    """One whose status is of generation 2."""
    told = {"type": "Ready", "status": "True", "reason": "Suspended", "message": CANCELLED}
    body = capture(phase="Cancelled", observedGeneration=2, conditions=[told])
    body["metadata"]["generation"] = generation
    return {**body, "spec": {**body["spec"], **spec}}
