"""What the operator makes of every example, as text that is checked in under tests/golden.

Run as a module, this file writes that text anew: `./just golden`.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import yaml

from specdecode_operator.api import capture, deployment
from specdecode_operator.api.base import GROUP
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.key import Key
from specdecode_operator.capture.control.capture import read_capture
from specdecode_operator.capture.control.decision import decide
from specdecode_operator.capture.control.observation import CaptureObservation, ObservedDeployment
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.models.download import wanted_downloads
from specdecode_operator.deployment.observation import Observation
from specdecode_operator.deployment.spec.parent import read_parent
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.kube.nodes import NodeFacts
from tests.support.decisions import desired_state
from tests.support.objects import H100, H200, Body, parent

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
GOLDEN = ROOT / "tests/golden"
FLEET = tuple(
    NodeFacts(f"{name}-{number}", product, 8) for name, product in (("h100", H100), ("h200", H200)) for number in (0, 1)
)
"""Two nodes of each product that examples may run on."""

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OPERATOR_IMAGE = "localhost/specdecode-operator:1"
CAPTURE_METADATA = {"namespace": "default", "uid": "capture-uid", "generation": 1, "resourceVersion": "1"}
_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_LINE_WIDTH = 120


def _intent(body: Body, *, downloaded: bool = True) -> DesiredState:
    """Decide for an object whose models are in its cache, if it has one."""
    return _decided(json.dumps(body), downloaded=downloaded)


@cache
def _decided(text: str, *, downloaded: bool) -> DesiredState:
    body = json.loads(text)
    owner = read_parent(parent(body["spec"], name=body["metadata"]["name"]))
    sources = wanted_downloads(SpecDecodeDeploymentSpec.model_validate(body["spec"])).values() if downloaded else ()
    return desired_state(
        owner, FLEET, has_leader_worker_sets=True, downloads={source.key: _COMMIT for source in sources}
    )


def _children(body: Body) -> list[Body]:
    """What is launched; before that what downloads its models to a cache, if it has one."""
    launched, downloading = _intent(body).children, _intent(body, downloaded=False).children
    return [*(child for child in downloading if child["kind"] == "Job" and child not in launched), *launched]


def _captured(body: Body) -> list[Body]:
    """Claim and Job of a capture, of the example's deployment that it names."""
    (owner,) = (
        each for each in _ours() if each["kind"] == deployment.KIND and _name(each) == body["spec"]["deployment"]
    )
    seen = ObservedDeployment(Key("default", _name(owner), deployment.KIND), "uid-1", 1, _intent(owner))
    subject = read_capture({**body, "metadata": {**CAPTURE_METADATA, **body["metadata"]}})
    given = CaptureObservation(deployment=seen, operator_image=OPERATOR_IMAGE, **_given(body["spec"]))
    writes = decide(subject, given, NOW).writes
    return [made for made in (writes.claim, writes.job) if made is not None]


def _given(spec: Body) -> Body:
    """What a capture names beside its deployment, as if it was there."""
    claim, prompts = spec.get("storage", {}).get("existingClaim"), spec.get("workload", {}).get("prompts", {})
    return {
        "claim": {"metadata": {"name": claim}, "spec": {"accessModes": ["ReadWriteMany"]}} if claim else None,
        "dataset": {"data": {prompts["dataset"]["path"]: ""}} if "dataset" in prompts else None,
    }


def _name(body: Body) -> str:
    name: str = body["metadata"]["name"]
    return name


def _ours() -> list[Body]:
    return [body for path in sorted(EXAMPLES.glob("*.yaml")) for body in ours_in(path)]


def ours_in(path: Path) -> list[Body]:
    """Return the objects of our kinds in a file."""
    return [body for body in yaml.safe_load_all(path.read_text()) if body["apiVersion"].startswith(f"{GROUP}/")]


RENDERERS: Mapping[str, Callable[[Body], list[Body]]] = {deployment.KIND: _children, capture.KIND: _captured}
"""What makes the objects of each of our kinds."""


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
    return {
        _name(body): compose_status(
            read_parent(parent(body["spec"], name=_name(body))), _intent(body), Observation(), NOW
        ).model_dump(by_alias=True, mode="json", exclude_none=True)
        for body in owners
    }


def _documents(path: Path, bodies: list[Body]) -> Iterator[str]:
    yield f"# What the operator makes of examples/{path.name}. Written by `./just golden`; do not edit.\n"
    for body in bodies:
        for child in RENDERERS[body["kind"]](body):
            yield "---\n" + yaml.dump(child, Dumper=_Readable, allow_unicode=True, width=_LINE_WIDTH)


class _Readable(yaml.SafeDumper):
    """Writes texts of several lines as such, and equal values out each time."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Readable.add_representer(str, _text)
_Readable.add_multi_representer(str, _text)


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
