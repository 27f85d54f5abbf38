"""States of the schema, by seed."""

import itertools

import pytest

from hunt.findings import Beat, as_manifests, read, write
from hunt.schema import ABSENT, Field, fields, spec_schema
from hunt.states import BASES, REPOSITORY, Change, State
from hunt.steps import DISTURBANCES, FAULTS, HOW, Step, healing, short_tour, tour, wander, wrongs

SCHEMA = spec_schema(REPOSITORY / "crds" / "specdecode.io_specdecodedeployments.yaml")
FIELDS = {".".join(field.path): field for field in fields(SCHEMA)}
INTEGERS = [field for field in FIELDS.values() if field.schema.get("type") == "integer"]


def field(path: str) -> Field:
    return FIELDS[path]


def test_nested_fields_are_found_and_open_objects_are_skipped() -> None:
    assert {"replicas", "serving.port", "speculation.draft.model", "rollout.gate.override.reason"} <= set(FIELDS)
    assert not [path for path in FIELDS if path.startswith("podTemplate.spec") or path == "target.config"]


def test_legal_integers_are_within_bounds_and_illegal_ones_beyond() -> None:
    for each in INTEGERS:
        low, high = each.schema.get("minimum", 0), each.schema.get("maximum", 2**31)
        numbers = [value for value in each.legal() if value != ABSENT]
        assert low in numbers, each
        assert all(low <= value <= high for value in numbers), each
        beyond = [value for value in each.illegal() if isinstance(value, int)]
        assert all(value < low or value > high for value in beyond), each


def test_state_is_an_example_with_its_changes_applied() -> None:
    changes = (Change(("serving", "port"), 9000), Change(("models",), ABSENT), Change(("rollout", "paused"), True))
    spec = State("llama-8b-ngram", changes).body()["spec"]
    assert spec["serving"] == {"maxModelLen": 16384, "port": 9000}
    assert spec["rollout"] == {"paused": True}
    assert "models" not in spec


@pytest.mark.parametrize("base", BASES)
def test_examples_are_legal_states(base: str) -> None:
    assert State(base).legal
    assert State(base).body()["metadata"] == {"name": "hunted"}


def test_sequences_are_the_same_only_for_the_same_seed() -> None:
    assert wander(7, 20) == wander(7, 20)
    assert wander(7, 20) != wander(8, 20)
    assert tour(1) == tour(1)


def test_tour_includes_every_fault_and_disturbance() -> None:
    kinds = {step.kind for sequence in tour(1) for step in sequence.steps}
    assert {*FAULTS, *DISTURBANCES.values(), "capture", "uncapture", "terminate", "apply"} <= kinds
    assert kinds | {step.kind for each in short_tour() for step in each.steps} <= {*HOW, "apply", "capture"}


def test_each_lasting_fault_is_healed_once() -> None:
    steps = [Step("quota"), Step("unready"), Step("podkill"), Step("finalize", number=2)]
    assert [step.kind for step in healing(steps)] == ["unquota", "unfinalize"]
    assert wrongs(steps) == {"quota", "finalize"}
    assert wrongs([*steps, *healing(steps)]) == frozenset()


def test_finding_survives_write_and_read(tmp_path) -> None:
    sequences, faults = wander(3, 5)
    beats = [Beat(step, fault) for each in sequences for step, fault in zip(each.steps, itertools.cycle(faults))]
    write(tmp_path / "finding.yaml", beats, "something")
    assert read(tmp_path / "finding.yaml") == beats
    assert "kubectl apply -f -" in as_manifests(beats)
