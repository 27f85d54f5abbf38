"""An desired is remembered while nothing that it depends on changes, and no longer."""

from datetime import UTC, datetime
from typing import Any

import pytest

from specdecode_operator.api.key import Key
from specdecode_operator.deployment.decision import intend
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.observation import Observation
from specdecode_operator.deployment.spec.parent import read_parent
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.handlers.intents import Intents
from specdecode_operator.kube.labels import READS_FOR_LABEL
from specdecode_operator.kube.nodes import NodeFacts
from specdecode_operator.sizing.pair.calibration import UNCALIBRATED, Calibration, CalibrationEntry
from tests.support.objects import H100, H200, pair_70b, parent

KEY = Key("default", "llama")
NODES = (NodeFacts("h100-0", H100, 8), NodeFacts("h200-0", H200, 8))
MEASURED = Calibration(
    (
        CalibrationEntry(
            product=H200,
            engine_version="0.32",
            runner="V2",
            tensor=2,
            enforce_eager=False,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            method="draft_model",
            num_speculative_tokens=5,
            target_precision="BF16",
            draft_precision="BF16",
            model="llama",
            residual_bytes=2**30,
        ),
    )
)

PLANNED = {
    "plan": compose_status(
        read_parent(parent(pair_70b())),
        intend(read_parent(parent(pair_70b())), NODES),
        Observation(),
        datetime.now(UTC),
    ).model_dump(by_alias=True, mode="json", exclude_none=True)["plan"]
}


def reader(version: str) -> dict[str, Any]:
    """A pod that reads a model."""
    return {"metadata": {"name": "reader", "uid": "1", "resourceVersion": version, "labels": {READS_FOR_LABEL: "x"}}}


def ask(intents: Intents, **changes: Any) -> DesiredState:
    given = {"body": parent(pair_70b()), "nodes": NODES, "entries": {}, "pods": (), "calibration": UNCALIBRATED}
    given |= changes
    return intents.intend(
        read_parent(given["body"]), given["nodes"], given["entries"], given["pods"], given["calibration"]
    )


def test_the_same_question_gets_the_same_answer_and_is_not_thought_about_again() -> None:
    intents = Intents()
    first, second = ask(intents), ask(intents)
    assert first.children == second.children
    assert [child["kind"] for child in second.children] == ["ConfigMap", "Service", "Deployment"]
    assert second.outcome is first.outcome


@pytest.mark.parametrize(
    "changes",
    [
        {"body": parent(pair_70b(replicas=3), generation=2)},
        {"body": {**parent(pair_70b()), "metadata": {**parent(pair_70b())["metadata"], "uid": "uid-2"}}},
        {"nodes": NODES[:1]},
        {"entries": {"model": "{}"}},
        {"calibration": MEASURED},
        {"body": parent(pair_70b(), status=PLANNED)},
        {"pods": (reader("2"),)},
    ],
    ids=["spec", "another object of the name", "nodes", "facts of models", "calibration", "plan in force", "reader"],
)
def test_another_question_is_thought_about(changes: dict[str, Any]) -> None:
    intents = Intents()
    before = ask(intents)
    assert ask(intents, **changes).outcome is not before.outcome


def test_what_is_forgotten_is_thought_about_again() -> None:
    intents = Intents()
    before = ask(intents)
    intents.forget(read_parent(parent(pair_70b())).key)
    assert ask(intents).outcome is not before.outcome


HOURLY = {"name": "hourly", "schedule": "0 * * * *"}


def asked(spec: dict[str, Any], generation: int = 1, intents: Intents | None = None) -> Intents:
    """Intents that thought about a spec."""
    intents = intents or Intents()
    ask(intents, body=parent(spec, generation=generation))
    return intents


def test_the_schedules_of_a_spec_are_read_once() -> None:
    intents = asked(pair_70b(captures=[HOURLY]))
    first = intents.schedules(KEY)
    assert first is not None
    assert [each.name for each in first] == ["hourly"]
    assert asked(pair_70b(captures=[HOURLY]), intents=intents).schedules(KEY) is first


def test_schedules_are_those_of_the_latest_spec() -> None:
    intents = asked(pair_70b(captures=[HOURLY]))
    names = [[each.name for each in intents.schedules(KEY) or ()]]
    for generation, captures in ((2, [{**HOURLY, "name": "other"}]), (3, [])):
        asked(pair_70b(captures=captures), generation, intents)
        names.append([each.name for each in intents.schedules(KEY) or ()])
    assert names == [["hourly"], ["other"], []]


@pytest.mark.parametrize(
    "spec",
    [pair_70b(captures=[{**HOURLY, "schedule": "0 0 30 2 *"}]), pair_70b(captures=[HOURLY], replicas="many")],
    ids=["a time that never comes", "a spec that cannot be read"],
)
def test_a_spec_that_does_not_hold_together_has_no_word_on_schedules(spec: dict[str, Any]) -> None:
    assert asked(spec).schedules(KEY) is None, "not the same as none: the status keeps what it says"
