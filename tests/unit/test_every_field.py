"""Every field of every CRD does something: it changes what the operator makes of an object, or is refused."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.services.capture.decision import decide
from specdecode_operator.services.capture.status import compose_status as compose_capture_status
from specdecode_operator.services.capture.status import is_outlived
from specdecode_operator.services.capture.subject import read_capture
from specdecode_operator.services.decision import intend
from specdecode_operator.services.deployment_status import compose_status
from specdecode_operator.services.observation import Observation
from specdecode_operator.services.parent import read_parent
from tests.support.capture_field_cases import CAPTURE_FIELDS
from tests.support.captures import capture, deployment_seen, surroundings
from tests.support.decisions import NOW
from tests.support.field_cases import DEPLOYMENT_FIELDS, FieldCase
from tests.support.objects import Body, parent
from tests.support.schedule_field_cases import SCHEDULE_FIELDS, schedule_outcomes

CRDS = Path(__file__).parents[2] / "crds"
Outcome = tuple[Any, Body]
"""What is wanted for an object, and its status."""

LONG_AGO = {
    "finishedAt": "2025-01-01T00:00:00Z",
    "conditions": [
        {"type": "Succeeded", "status": "True", "reason": "Published", "message": "m", "observedGeneration": 1}
        | {"lastTransitionTime": "2025-01-01T00:00:00Z"}
    ],
}


def leaves(schema: Body, path: str = "") -> Iterator[str]:
    """Fields without fields of their own; ``[]`` stands for any element of a list."""
    if "properties" in schema:
        for name, child in schema["properties"].items():
            yield from leaves(child, f"{path}.{name}" if path else name)
    elif schema.get("type") == "array":
        yield from leaves(schema["items"], f"{path}[]")
    else:
        yield path


def fields() -> Iterator[tuple[str, str]]:
    """Every kind with each field of its spec."""
    for file in sorted(CRDS.glob("*.yaml")):
        crd = yaml.safe_load(file.read_text())
        if crd["kind"] != "CustomResourceDefinition":
            continue
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        for field in leaves(schema):
            yield crd["spec"]["names"]["kind"], field


def deployment_outcome(spec: Body, case: FieldCase) -> Outcome:
    """Objects that are wanted for a spec, and its status."""
    owner = read_parent(parent(spec))
    intent = intend(owner, case.nodes)
    status = compose_status(owner, intent, Observation(), NOW)
    wanted = (intent.children, schedule_outcomes(spec.get("captures", [])))
    return wanted, status.model_dump(by_alias=True, mode="json", exclude_none=True)


def capture_outcome(spec: Body, _: FieldCase) -> Outcome:
    """What is written for a capture that may start, its status, and whether it goes once it ended long ago."""
    subject = read_capture(capture(spec))
    engine = deployment_seen(engines_wanted=1)
    decision = decide(subject, surroundings(deployment=engine, dataset={"data": {"a.jsonl": ""}}), NOW)
    status = compose_capture_status(subject, decision, NOW)
    goes = is_outlived(read_capture(capture(spec, status=LONG_AGO)), NOW)
    return (decision.writes, goes), status.model_dump(by_alias=True, mode="json", exclude_none=True)


KINDS: Mapping[str, tuple[Mapping[str, FieldCase], Callable[[Body, FieldCase], Outcome]]] = {
    "SpecDecodeCapture": (CAPTURE_FIELDS, capture_outcome),
    "SpecDecodeDeployment": ({**DEPLOYMENT_FIELDS, **SCHEDULE_FIELDS}, deployment_outcome),
}
"""For each kind its fields, and what comes of a spec."""


def accepted(outcome: Outcome) -> dict[str, Any]:
    """The condition that says whether the object is refused, and for which fields."""
    condition: dict[str, Any] = next(each for each in outcome[1]["conditions"] if each["type"] == "Accepted")
    return condition


def test_every_kind_is_walked() -> None:
    assert {kind for kind, _ in fields()} == set(KINDS), "say in KINDS what comes of the new kind"


def test_no_case_is_for_a_field_that_is_gone() -> None:
    assert {(kind, field) for kind, (cases, _) in KINDS.items() for field in cases} <= set(fields())


@pytest.mark.parametrize(("kind", "field"), [each for each in fields() if each[0] in KINDS])
def test_every_field_makes_a_difference_or_is_refused(kind: str, field: str) -> None:
    cases, outcome = KINDS[kind]
    assert field in cases, f"add a line for {field} to tests/support/*field_cases.py: a value that makes a difference"
    case = cases[field]
    before, after = outcome(case.on, case), outcome(case.changed(field), case)
    assert accepted(before)["status"] != "False" or field == "override.planning", accepted(before)["message"]
    if case.refusal:
        assert accepted(after)["status"] == "False"
        assert case.refusal in accepted(after)["message"]
    else:
        assert accepted(after)["status"] != "False", accepted(after)["message"]
        assert after != before
