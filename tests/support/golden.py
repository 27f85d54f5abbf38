"""What the operator makes of the examples; of eight of them as text that is checked in under tests/golden.

Run as a module, this file writes that text: `./just golden`.
"""

import json
import pickle
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from specdecode_operator.api import deployment, training
from specdecode_operator.api.base import GROUP
from specdecode_operator.cli.render import (
    AssumedCluster,
    RenderedDeployment,
    documents_text,
    render_capture,
    render_deployment,
    with_recorders,
)
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.resources import APPLIED_HASH_ANNOTATION
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.status import compose_status
from tests.support.objects import H100, H200, Body

_MOST_LINES = 20

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
GOLDEN = ROOT / "tests/golden"
FLEET = tuple(
    NodeFacts(f"{name}-{number}", product, 8) for name, product in (("h100", H100), ("h200", H200)) for number in (0, 1)
)
"""Two nodes of each product that examples may run on."""

KEPT = (
    "capture-tiny",
    "llama-405b-two-nodes",
    "llama-70b",
    "llama-70b-cache",
    "qwen3-8b-claim",
    "qwen3-8b-trained",
    "qwen3-8b-two-pools",
    "replay",
    "tiny-cpu",
)
"""Examples whose objects are checked in: a draft model, two nodes, a download, claimed devices, a head with a claim,
two pools, a replay, a CPU."""

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@cache
def _deployment(text: str) -> RenderedDeployment:
    return render_deployment(json.loads(text), AssumedCluster(FLEET))


def _rendered(body: Body) -> RenderedDeployment:
    return _deployment(json.dumps(body))


def _objects(body: Body) -> list[Body]:
    """What is made for one of ours, of a capture by the deployment that it names; nothing for a training."""
    if body["kind"] == training.KIND:
        return []
    if body["kind"] == deployment.KIND:
        return _rendered(body).objects
    (captured,) = (
        each for each in _ours() if each["kind"] == deployment.KIND and _name(each) == body["spec"]["deployment"]
    )
    return render_capture(body, _rendered(captured))


def _name(body: Body) -> str:
    name: str = body["metadata"]["name"]
    return name


def _ours() -> list[Body]:
    return [body for path in sorted(EXAMPLES.glob("*.yaml")) for body in ours_in(path)]


def ours_in(path: Path) -> list[Body]:
    """Return the deployments and captures in a file."""
    bodies = _copied(path.read_text())
    return [body for body in bodies if body["apiVersion"].startswith(f"{GROUP}/") and body["kind"] != training.KIND]


def _copied(text: str) -> list[Body]:
    bodies: list[Body] = pickle.loads(_parsed(text))
    return bodies


@cache
def _parsed(text: str) -> bytes:
    """Parse each YAML text once; rendering a capture searches all examples for its deployment."""
    return pickle.dumps([*yaml.safe_load_all(text)])


def rendered_examples() -> dict[str, list[Body]]:
    """Return the objects that the operator makes of every example, by the name of its file."""
    return {
        path.name: with_recorders(made for body in ours for made in _objects(body))
        for path in sorted(EXAMPLES.glob("*.yaml"))
        if (ours := ours_in(path))
    }


def rendered_pods() -> list[Body]:
    """Return the pod templates of all workloads and Jobs that the operator makes of the examples."""
    specs = [body.get("spec") or {} for objects in rendered_examples().values() for body in objects]
    groups = [spec.get("leaderWorkerTemplate") or {} for spec in specs]
    found = [
        template
        for spec, group in zip(specs, groups, strict=True)
        for template in (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate"))
    ]
    return [template for template in found if template]


def golden_texts() -> dict[str, str]:
    """Return the texts to be checked in, by the name of the file."""
    made = rendered_examples()
    return {f"{name}.yaml": _text(f"{name}.yaml", made[f"{name}.yaml"]) for name in KEPT}


def statuses() -> dict[str, Body]:
    """Return the status of every deployment among the examples, by its name."""
    owners = [body for body in _ours() if body["kind"] == deployment.KIND]
    rendered = {_name(body): _rendered(body) for body in owners}
    return {
        name: compose_status(each.parent, each.desired, Observation(), NOW).model_dump(
            by_alias=True, mode="json", exclude_none=True
        )
        for name, each in rendered.items()
    }


def _text(name: str, objects: list[Body]) -> str:
    head = f"# What the operator makes of examples/{name}. Written by `./just golden`; do not edit.\n"
    return head + documents_text([_without_long_texts(body) for body in objects])


def _without_long_texts(value: Any) -> Any:
    """Return an object without long texts: the matrix of a plan, and scripts and archives that are files of ours."""
    if isinstance(value, dict):
        short = {key: _without_long_texts(each) for key, each in value.items()}
        if "binaryData" in value:
            short["binaryData"] = dict.fromkeys(value["binaryData"], "(base64)")
            short["metadata"]["annotations"][APPLIED_HASH_ANNOTATION] = "(of the files)"
        return short
    if isinstance(value, list):
        return [_without_long_texts(each) for each in value]
    if isinstance(value, str) and value.count("\n") > _MOST_LINES:
        return f"({value.count(chr(10))} lines)"
    return value


if __name__ == "__main__":
    fresh = golden_texts()
    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.glob("*.yaml"):
        if old.name not in fresh:
            old.unlink()
            sys.stdout.write(f"{old.relative_to(ROOT)} is gone\n")
    for name, text in fresh.items():
        file = GOLDEN / name
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
            sys.stdout.write(f"{file.relative_to(ROOT)} has changed\n")
