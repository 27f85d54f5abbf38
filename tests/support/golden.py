"""What the operator makes of every example, as text that is checked in under tests/golden.

Run as a module, this file writes that text anew: `./just golden`.
"""

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import yaml

from specdecode_operator.api import deployment
from specdecode_operator.api.base import GROUP
from specdecode_operator.cli.render import (
    AssumedCluster,
    RenderedDeployment,
    documents_text,
    render_capture,
    render_deployment,
)
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.status import compose_status
from tests.support.objects import H100, H200, Body

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
GOLDEN = ROOT / "tests/golden"
FLEET = tuple(
    NodeFacts(f"{name}-{number}", product, 8) for name, product in (("h100", H100), ("h200", H200)) for number in (0, 1)
)
"""Two nodes of each product that examples may run on."""

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@cache
def _deployment(text: str) -> RenderedDeployment:
    return render_deployment(json.loads(text), AssumedCluster(FLEET))


def _rendered(body: Body) -> RenderedDeployment:
    return _deployment(json.dumps(body))


def _objects(body: Body) -> list[Body]:
    """What is made for one of ours; for a capture, of the example's deployment that it names."""
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
    """Return the objects of our kinds in a file."""
    return [body for body in yaml.safe_load_all(path.read_text()) if body["apiVersion"].startswith(f"{GROUP}/")]


def golden_texts() -> dict[str, str]:
    """Return the objects of every example that has some, by the name of its file."""
    texts = {}
    for path in sorted(EXAMPLES.glob("*.yaml")):
        if ours := ours_in(path):
            texts[path.name] = "".join(_documents(path, ours))
    return texts


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


def _documents(path: Path, bodies: list[Body]) -> Iterator[str]:
    yield f"# What the operator makes of examples/{path.name}. Written by `./just golden`; do not edit.\n"
    for body in bodies:
        yield documents_text(_objects(body))


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
