"""Every field of every CRD does something: it changes what the operator makes of an object, or is refused."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.api.renamed_fields import OLD_NAMES
from tests.support.capture_field_cases import BURST, CAPTURE_FIELDS, MULTITURN, PLAIN
from tests.support.field_cases import DEPLOYMENT_FIELDS, FieldCase
from tests.support.field_outcomes import Outcome, capture_outcome, deployment_outcome, forget_outcomes
from tests.support.objects import Body
from tests.support.policy_field_cases import POLICY_FIELDS
from tests.support.replay_field_cases import REPLAY_FIELDS
from tests.support.schedule_field_cases import SCHEDULE_FIELDS

CRDS = Path(__file__).parents[2] / "crds"


def leaves(schema: Body, path: str = "") -> Iterator[str]:
    """Fields without fields of their own; ``[]`` stands for any element of a list."""
    if "properties" in schema:
        for name, child in schema["properties"].items():
            yield from leaves(child, f"{path}.{name}" if path else name)
    elif schema.get("type") == "array":
        yield from leaves(schema["items"], f"{path}[]")
    elif f"spec.{path.removesuffix('[]')}" not in OLD_NAMES:
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


KINDS: Mapping[str, tuple[Mapping[str, FieldCase], Callable[[Body, FieldCase], Outcome]]] = {
    "SpecDecodeCapture": (CAPTURE_FIELDS, capture_outcome),
    "SpecDecodeDeployment": (
        {**DEPLOYMENT_FIELDS, **SCHEDULE_FIELDS, **REPLAY_FIELDS, **POLICY_FIELDS},
        deployment_outcome,
    ),
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


def test_the_same_spec_gives_the_same_outcome() -> None:
    """Only then is a difference the field's."""
    for spec in (PLAIN, BURST, MULTITURN):
        before = capture_outcome(spec)
        forget_outcomes()
        assert capture_outcome(spec) == before


@pytest.mark.parametrize(("kind", "field"), [each for each in fields() if each[0] in KINDS])
def test_every_field_makes_a_difference_or_is_refused(kind: str, field: str) -> None:
    cases, outcome = KINDS[kind]
    assert field in cases, f"add a line for {field} to tests/support/*field_cases.py: a value that makes a difference"
    case = cases[field]
    before, after = outcome(case.on, case), outcome(case.changed(field), case)
    assert accepted(before)["status"] != "False", accepted(before)["message"]
    if case.refusal:
        assert accepted(after)["status"] == "False"
        assert case.refusal in accepted(after)["message"]
    else:
        assert accepted(after)["status"] != "False", accepted(after)["message"]
        assert after != before
