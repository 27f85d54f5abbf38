"""Every field of every CRD does something: it changes what the operator makes of an object, or is refused."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.api.deployment import Key
from specdecode_operator.api.renamed_fields import OLD_NAMES
from specdecode_operator.capture.decision import capture_attention, decide
from specdecode_operator.capture.golden_gate import gate_capture
from specdecode_operator.capture.load.run_settings import SETTINGS_VARIABLE
from specdecode_operator.capture.observation import COLLECT, LOAD, read_capture
from specdecode_operator.capture.recorder.segment_format import (
    FOLDER_VARIABLE,
    STEPS_VARIABLE,
    TOKEN_IDS_VARIABLE,
    Settings,
)
from specdecode_operator.capture.schedules import DueCapture
from specdecode_operator.capture.status import compose_status as compose_capture_status
from specdecode_operator.capture.status import is_outlived
from specdecode_operator.cluster.resources import ENGINE_CONTAINER
from specdecode_operator.deployment.conditions import SEE_READY
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.training.offers import offers_of
from specdecode_operator.training.promotion import Rollouts, choose
from specdecode_operator.untrusted import mapping
from tests.support import trainings
from tests.support.canary_field_cases import CANARY_FIELDS, canary_outcome
from tests.support.capture_field_cases import BURST, CAPTURE_FIELDS, MULTITURN, PLAIN
from tests.support.captures import capture, claim, golden, observed_deployment, serving, surroundings
from tests.support.decisions import NOW, desired_state
from tests.support.field_cases import DEPLOYMENT_FIELDS, NODES, FieldCase
from tests.support.objects import Body, parent
from tests.support.policy_field_cases import POLICY_FIELDS, policy_outcomes
from tests.support.replay_field_cases import REPLAY_FIELDS
from tests.support.schedule_field_cases import SCHEDULE_FIELDS, refresh_outcomes, schedule_outcomes
from tests.support.simulated_load import DATASETS, simulated_load
from tests.support.training_field_cases import TRAINING_FIELDS

Outcome = tuple[Any, Body]
"""What is made and done for an object, and its status."""

_COPIES = ("specdecode.io/applied-hash", "specdecode.io/template-hash", "plan.json")
"""Of all that is in an object, and of all that its plan was made from."""

_TOLD = (SETTINGS_VARIABLE, TOKEN_IDS_VARIABLE, STEPS_VARIABLE)
"""Variables that hold fields as they are, for programs that are asked here what they make of them."""

_LONG_AGO = {
    "finishedAt": "2025-01-01T00:00:00Z",
    "conditions": [
        {"type": "Succeeded", "status": "True", "reason": "Published", "message": "m", "observedGeneration": 1}
        | {"lastTransitionTime": "2025-01-01T00:00:00Z"}
    ],
}

_IDLE = {"borrow": {"since": "2026-01-01T00:00:00Z", "idleSince": "2026-01-01T00:00:00Z"}}
"""Of a capture whose pod does not run on the GPUs that it borrowed."""


def deployment_outcome(spec: Body, case: FieldCase) -> Outcome:
    """Objects that are wanted for a spec with what becomes of its captures, and its status."""
    owner = parse_deployment(parent(spec))
    desired = desired_state(owner, case.nodes)
    trained = choose(offers_of(parent(spec), ()), Rollouts(desired, Observation(), lambda _: ""), None, NOW)
    status = compose_status(owner, desired, Observation(), NOW, trained_draft=trained)
    scheduled = [
        dataclasses.replace(decision, create=[_created(due, case) for due in decision.create])
        for decision in schedule_outcomes(spec.get("captures", []))
    ]
    refreshes = refresh_outcomes(spec.get("captures", []))
    decided = policy_outcomes(spec.get("policy"))
    gate = None if isinstance(owner.spec, InvalidSpecError) else owner.spec.rollout.gate
    judges = gate_capture(owner.key, owner.uid, "judges", gate, golden()) if gate else None
    canary = None if isinstance(owner.spec, InvalidSpecError) else canary_outcome(owner.spec)
    return (_without_copies(desired.children), scheduled, refreshes, decided, judges, canary), _dumped(status)


def capture_outcome(spec: Body, case: FieldCase | None = None) -> Outcome:
    """What is written for a capture that may start, what is recorded and sent then, whether it goes long after."""
    captured = None if case is None or case.deployment is None else case.deployment
    done, status = _capture_outcome(json.dumps(spec, sort_keys=True), json.dumps(captured, sort_keys=True))
    return done, status


@cache
def _capture_outcome(spec_text: str, captured: str) -> Outcome:
    spec = json.loads(spec_text)
    subject = read_capture(capture(spec))
    deployment = observed_deployment(json.loads(captured), nodes=NODES, capture=spec, engines_wanted=1)
    if subject.is_live:
        deployment = serving(deployment)
    judged_by = golden((spec.get("against") or {}).get("capture", "golden"), of=spec)
    seen = surroundings(deployment=deployment, dataset={"data": DATASETS}, golden=judged_by)
    decision = decide(subject, seen, NOW)
    goes = is_outlived(read_capture(capture(spec, status=_LONG_AGO)), NOW, math.inf)
    due = capture_attention(read_capture(capture(spec, status=_IDLE))).due_at_s
    writes = dataclasses.replace(decision.writes, job=None, trial_pod=None)
    job = _job_outcome(decision.writes.job) if decision.writes.job else None
    return (writes, job, goes, due), _dumped(compose_capture_status(subject, decision, NOW))


def training_outcome(spec: Body, case: FieldCase) -> Outcome:
    """What is written for a training that starts, what judges its head, and the conditions of a better head."""
    body = trainings.training(spec)
    own = mapping(spec.get("storage") or {}, "persistentVolumeClaim").get("claimName")
    rows = {"data": {"rows.jsonl": "", "more.jsonl": ""}}
    seen = trainings.surroundings(
        deployment=dataclasses.replace(observed_deployment(case.deployment), key=Key("default", spec["deployment"])),
        captures={name: trainings.source(name, deployment=spec["deployment"]) for name in spec["captures"]},
        capture_claims={f"{name}-capture": claim(f"{name}-capture") for name in spec["captures"]},
        rows=rows,
        starting_head=claim("heads"),
        claim=claim(own) if own else None,
    )
    started, status = trainings.decided(body, seen)
    done = trainings.surroundings(job=trainings.job("Complete"), pods=[trainings.published()])
    judged = trainings.after(body, done)
    judging, _ = trainings.decided(judged, done)
    stamp = {"status": "True", "reason": "Better", "message": "m"}
    conditions = [each | (stamp if each["type"] == "Better" else {}) for each in judged["status"]["conditions"]]
    judged["status"] |= {"phase": "Complete", "conditions": conditions}
    _, ended = trainings.decided(judged)
    writes = dataclasses.asdict(started.writes)
    return (_without_copies(writes), judging.writes.capture, trainings.words(ended)), _dumped(status)


def forget_outcomes() -> None:
    """Let what comes of a capture be found out anew."""
    _capture_outcome.cache_clear()
    simulated_load.cache_clear()


def _job_outcome(job: Body) -> Any:
    """The Job without the settings that stand in it, and what those are for: the requests, and what is recorded."""
    pod = job["spec"]["template"]["spec"]
    if pod["containers"][0]["name"] == COLLECT:
        return _without_copies(job)
    containers = {each["name"]: each for each in [*pod["initContainers"], *pod["containers"]]}
    environments = {name: _literal(container) for name, container in containers.items()}
    settings = environments[LOAD][SETTINGS_VARIABLE].replace("$$", "$")
    told = json.loads(settings)
    # What is started when, and what is asked then, stands nowhere else.
    compared = [told.get(name) for name in ("repetitions", "slo", "checks")]
    arms = [{name: arm[name] for name in ("name", "command", "env")} for arm in told.get("arms", ())]
    for container in containers.values():
        container["env"] = [each for each in container.get("env") or [] if each["name"] not in _TOLD]
    recorded = Settings.from_environment({FOLDER_VARIABLE: "told later", **environments[ENGINE_CONTAINER]})
    return _without_copies(job), arms, compared, recorded, simulated_load(settings)


def _literal(container: Body) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container.get("env") or [] if "value" in each}


def _created(due: DueCapture, case: FieldCase) -> Any:
    """A capture that a schedule creates: for its spec, what comes of one."""
    others = {name: part for name, part in due.body.items() if name != "spec"}
    return others, due.replaces, capture_outcome(due.body["spec"], case)


def _without_copies(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_copies(part) for name, part in value.items() if name not in _COPIES}
    if isinstance(value, list | tuple):
        return [_without_copies(part) for part in value]
    return value


def _dumped(status: Any) -> Body:
    dumped: Body = status.model_dump(by_alias=True, mode="json", exclude_none=True)
    return dumped


# Every field of every CRD does something: it changes what the operator makes of an object, or is refused.

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


@cache
def fields() -> tuple[tuple[str, str], ...]:
    """Every kind with each field of its spec."""
    return tuple(_fields())


def _fields() -> Iterator[tuple[str, str]]:
    for file in sorted(CRDS.glob("*.yaml")):
        crd = yaml.safe_load(file.read_text())
        if crd["kind"] != "CustomResourceDefinition":
            continue
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        for field in leaves(schema):
            yield crd["spec"]["names"]["kind"], field


KINDS: Mapping[str, tuple[Mapping[str, FieldCase], Callable[[Body, FieldCase], Outcome]]] = {
    "SpecDecodeCapture": (CAPTURE_FIELDS, capture_outcome),
    "SpecDecodeTraining": (TRAINING_FIELDS, training_outcome),
    "SpecDecodeDeployment": (
        {**DEPLOYMENT_FIELDS, **SCHEDULE_FIELDS, **REPLAY_FIELDS, **POLICY_FIELDS, **CANARY_FIELDS},
        deployment_outcome,
    ),
}
"""For each kind its fields, and what comes of a spec."""


def accepted(outcome: Outcome) -> dict[str, Any]:
    """The condition Accepted; if it refers to Ready, with the message of Ready."""
    conditions: dict[str, dict[str, Any]] = {each["type"]: each for each in outcome[1]["conditions"]}
    refers = conditions["Accepted"]["message"] == SEE_READY
    return conditions["Accepted"] | ({"message": conditions["Ready"]["message"]} if refers else {})


def test_every_kind_has_field_cases() -> None:
    assert {kind for kind, _ in fields()} == set(KINDS), "say in KINDS what comes of the new kind"


def test_every_case_is_for_an_existing_field() -> None:
    assert {(kind, field) for kind, (cases, _) in KINDS.items() for field in cases} <= set(fields())


def test_the_same_spec_gives_the_same_outcome() -> None:
    """Only then is a difference the field's."""
    for spec in (PLAIN, BURST, MULTITURN):
        before = capture_outcome(spec)
        forget_outcomes()
        assert capture_outcome(spec) == before


@pytest.mark.parametrize(("kind", "field"), [each for each in fields() if each[0] in KINDS])
def test_every_field_changes_the_outcome_or_is_refused(kind: str, field: str) -> None:
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
