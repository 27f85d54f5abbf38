"""What cannot be captured: told by a reason, and nothing is written."""

import pytest

from specdecode_operator.capture.observation import CaptureObservation
from tests.support.capture_decisions import decided, words
from tests.support.captures import (
    capture,
    capture_spec,
    claim,
    observed_deployment,
    surroundings,
)
from tests.support.objects import Body, pair_70b, tiny_cpu
from tests.support.replay_field_cases import replaying

BAD: dict[str, tuple[Body, CaptureObservation, str, bool, str]] = {
    "no deployment": (capture(), surroundings(deployment=None), "DeploymentNotFound", False, "llama"),
    "no plan": (
        capture(),
        surroundings(deployment=observed_deployment(pair_70b())),
        "DeploymentNotPlanned",
        False,
        "NoMatchingNodes",
    ),
    "not accepted": (
        capture(),
        surroundings(deployment=observed_deployment(tiny_cpu(engine={"image": "i:1", "extraArgs": ["--nonsense"]}))),
        "DeploymentNotPlanned",
        True,
        "extraArgs",
    ),
    "tokens held back": (
        capture(),
        surroundings(
            deployment=observed_deployment(tiny_cpu(engine={"image": "i:1", "extraArgs": ["--stream_interval=4"]}))
        ),
        "StreamIntervalNotOne",
        True,
        "--stream-interval 4",
    ),
    "tokens held back by two arguments": (
        capture(),
        surroundings(
            deployment=observed_deployment(tiny_cpu(engine={"image": "i:1", "extraArgs": ["--stream-interval", "2"]}))
        ),
        "StreamIntervalNotOne",
        True,
        "--stream-interval 2",
    ),
    "a frontend without Python": (
        capture(),
        surroundings(
            deployment=observed_deployment(
                tiny_cpu(engine={"image": "i:1", "env": [{"name": "VLLM_USE_RUST_FRONTEND", "value": "1"}]})
            )
        ),
        "RustFrontend",
        True,
        "remove it",
    ),
    "no engine but a recording": (
        capture(),
        surroundings(deployment=observed_deployment(replaying())),
        "EngineReplayed",
        True,
        "specdecode replay serve --record",
    ),
    "an engine that is too old": (
        capture(),
        surroundings(deployment=observed_deployment(tiny_cpu(engine={"image": "i:1", "version": "0.27"}))),
        "DeploymentNotPlanned",
        True,
        "write 0.28 or newer",
    ),
    "longer than its deadline": (
        capture(capture_spec(deadlineSeconds=179, workload={})),
        surroundings(),
        "WorkloadTooLong",
        True,
        "take 180 s",
    ),
    "a phase without a rate": (
        capture(capture_spec(workload={"phases": [{"name": "a", "pattern": "Constant", "requests": 1}]})),
        surroundings(),
        "Invalid",
        True,
        "requestsPerSecond",
    ),
    "no claim": (
        capture(capture_spec(storage={"persistentVolumeClaim": {"claimName": "mine"}})),
        surroundings(),
        "ClaimNotFound",
        False,
        "spec.storage.persistentVolumeClaim.claimName: mine",
    ),
    "a claim to read only": (
        capture(capture_spec(storage={"persistentVolumeClaim": {"claimName": "mine"}})),
        surroundings(claim=claim("mine", spec={"accessModes": ["ReadOnlyMany"]})),
        "ClaimReadOnly",
        True,
        "mine",
    ),
    "a claim without a volume": (
        capture(capture_spec(storage={"persistentVolumeClaim": {"claimName": "mine"}})),
        surroundings(claim=claim("mine", status={"phase": "Lost"})),
        "ClaimLost",
        True,
        "mine",
    ),
    "a claim with the files of an earlier capture": (
        capture(capture_spec(deploymentDuringCapture="Suspend")),
        surroundings(claim=claim(labels={"specdecode.io/capture": "demo", "specdecode.io/published": "true"})),
        "AlreadyPublished",
        True,
        "claim demo-capture holds the files",
    ),
    "a stranger's claim": (
        capture(),
        surroundings(claim=claim()),
        "ChildNameConflict",
        True,
        "persistentVolumeClaim.claimName",
    ),
    "no dataset": (
        capture(
            capture_spec(
                workload={"prompts": {"dataset": {"configMap": {"name": "p"}, "path": "a.jsonl", "format": "JSONL"}}}
            )
        ),
        surroundings(),
        "DatasetNotFound",
        False,
        "configMap.name: p",
    ),
    "a dataset without the file": (
        capture(
            capture_spec(
                workload={"prompts": {"dataset": {"configMap": {"name": "p"}, "path": "a.jsonl", "format": "JSONL"}}}
            )
        ),
        surroundings(dataset={"data": {"b.jsonl": ""}}),
        "DatasetNotFound",
        False,
        "holds b.jsonl",
    ),
    "a phase of a file that is not there": (
        capture(
            capture_spec(
                workload={
                    "prompts": {"dataset": {"configMap": {"name": "p"}, "path": "a.jsonl", "format": "JSONL"}},
                    "phases": [
                        {"name": name, "pattern": "Closed", "concurrency": 1, "requests": 1, "path": f"{name}.jsonl"}
                        for name in ("a", "b")
                    ],
                }
            )
        ),
        surroundings(dataset={"data": {"a.jsonl": ""}}),
        "DatasetNotFound",
        False,
        "spec.workload.phases.path: b.jsonl: ConfigMap p holds a.jsonl",
    ),
    "an operator that does not know itself": (
        capture(),
        surroundings(operator_image=None),
        "OperatorImageUnknown",
        False,
        "SPECDECODE_OPERATOR_IMAGE",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_captured_is_told_and_nothing_is_written(name: str) -> None:
    body, seen, reason, permanent, said = BAD[name]
    decision, status = decided(body, seen)
    assert decision.writes.job is None
    assert decision.writes.claim is None
    found = words(status)
    assert found["Ready"] == (("False" if permanent else "Unknown"), reason)
    assert found["Accepted"] == (("False" if permanent else "Unknown"), reason)
    assert found["Stalled"][0] == str(permanent)
    assert found["Reconciling"][0] == str(not permanent)
    assert found["Succeeded"][0] == "Unknown"
    (message,) = (each.message for each in status.conditions if each.type == "Ready")
    assert said in message


@pytest.mark.parametrize(
    ("extra_args", "reason"),
    [
        (["--stream-interval=8"], "StreamIntervalNotOne"),
        (["--stream_interval", "8"], "StreamIntervalNotOne"),
        (["--stream-int=8"], "StreamIntervalNotOne"),
        (["--stream-interval=1", "--stream-interval=8"], "StreamIntervalNotOne"),
        (["--stream-interval=8", "--stream-interval=1"], "Starting"),
        (["--config=/settings.yaml"], "DeploymentNotPlanned"),
        (["--scheduler-config", '{"stream_interval": 8}'], "DeploymentNotPlanned"),
        (["-O", '{"stream_interval": 8}'], "DeploymentNotPlanned"),
    ],
)
def test_no_spelling_holds_tokens_back(extra_args: list[str], reason: str) -> None:
    deployment = observed_deployment(tiny_cpu(engine={"image": "i:1", "extraArgs": extra_args}))
    _, status = decided(capture(), surroundings(deployment=deployment))
    assert words(status)["Ready"][1] == reason


@pytest.mark.parametrize(
    ("variable", "reason"),
    [
        ({"value": "1"}, "RustFrontend"),
        ({"value": "True"}, "RustFrontend"),
        ({"valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}}, "RustFrontend"),
        ({"value": "0"}, "Starting"),
    ],
)
@pytest.mark.parametrize("place", ["engine.env", "podTemplate"])
def test_a_frontend_without_python(variable: Body, reason: str, place: str) -> None:
    env = [{"name": "VLLM_USE_RUST_FRONTEND", **variable}]
    changes = {"podTemplate": {"spec": {"containers": [{"name": "engine", "env": env}]}}}
    if place == "engine.env":
        changes = {"engine": {"image": "i:1", "env": env}}
    _, status = decided(capture(), surroundings(deployment=observed_deployment(tiny_cpu(**changes))))
    assert words(status)["Ready"][1] == reason
