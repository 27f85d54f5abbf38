"""Models without a config in the spec: Jobs read them, and plans use the facts."""

from datetime import UTC, datetime
from typing import Any

import pytest

from specdecode_operator.cluster.cache import slim
from specdecode_operator.deployment.decision import newly_read_models
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.models.checkpoint_reader import (
    Checkpoint,
    CheckpointError,
    Weights,
    pack_error,
    pack_facts,
)
from specdecode_operator.deployment.models.model_facts import SiteFacts, site_facts_of
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from tests.support.decisions import desired_state
from tests.support.objects import TINY_CONFIG, pair_70b, parent, tiny_cpu

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DRAFT_CONFIG = {**TINY_CONFIG, "num_hidden_layers": 1}
WEIGHTS = Weights(5_771_776, 39, True, {"BF16": 5_771_776}, {})
"""Those of the tiny target."""
DRAFT_WEIGHTS = Weights(2_229_760, 12, True, {"BF16": 2_229_760}, {})

Body = dict[str, Any]


def undescribed(**changes: Any) -> Body:
    """The tiny pair without the content of its config.json."""
    spec = tiny_cpu(**changes)
    return {
        **spec,
        "target": {"model": spec["target"]["model"]},
        "speculation": {**spec["speculation"], "draft": {"model": spec["speculation"]["draft"]["model"]}},
        **changes,
    }


def jobs(spec: Body, name: str = "tiny") -> list[Body]:
    return [
        child
        for child in desired_state(parse_deployment(parent(spec, name=name)), ()).children
        if child["kind"] == "Job"
    ]


def container(job: Body) -> Body:
    found: Body = job["spec"]["template"]["spec"]["containers"][0]
    return found


def pod(
    job: Body, *, message: str = "", exit_code: int = 0, created: str = "2026-01-01T00:00:00Z", **more: Any
) -> Body:
    """The pod of a Job whose reader has ended."""
    template = job["spec"]["template"]["metadata"]
    state = {"terminated": {"exitCode": exit_code, "message": message, **more}}
    if exit_code:
        state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    status = {"name": "read-model", "image": "i:1", "ready": False, "state": state}
    if exit_code:
        status["lastState"] = {"terminated": {"exitCode": exit_code, "message": message, **more}}
    return {"metadata": {**template, "creationTimestamp": created}, "status": {"containerStatuses": [status]}}


def answers(spec: Body, draft: Weights = DRAFT_WEIGHTS) -> list[Body]:
    """Pods that have read both models of the tiny pair."""
    read = (Checkpoint(TINY_CONFIG, WEIGHTS), Checkpoint(DRAFT_CONFIG, draft))
    return [pod(job, message=pack_facts(each)) for job, each in zip(jobs(spec), read, strict=True)]


def outcome(desired: DesiredState, spec: Body) -> dict[str, tuple[str, str, str]]:
    status = compose_status(parse_deployment(parent(spec)), desired, Observation(), NOW)
    return {found.type: (found.status.value, found.reason, found.message) for found in status.conditions}


def failed(spec: Body, **ended: Any) -> dict[str, tuple[str, str, str]]:
    """What the object says when the reader of its target failed so."""
    job = jobs(spec)[0]
    return outcome(desired_state(parse_deployment(parent(spec)), (), pods=[pod(job, **ended)]), spec)


def test_models_without_a_config_are_read_by_jobs_before_planning() -> None:
    spec = undescribed()
    desired = desired_state(parse_deployment(parent(spec)), ())
    said = outcome(desired, spec)
    assert said["Planned"][:2] == ("Unknown", "ResolvingModel")
    assert said["Ready"][:2] == ("Unknown", "ResolvingModel")
    assert (said["Reconciling"][0], said["Stalled"][0], said["Accepted"][0]) == ("True", "False", "Unknown")
    assert "pair/target on PersistentVolumeClaim tiny-models and pair/draft" in said["Ready"][2]
    assert [child["kind"] for child in desired.children] == ["Job", "Job"]
    folders = [container(job)["args"] for job in jobs(spec)]
    assert folders == [["folder", "--", "/models/pair/target"], ["folder", "--", "/models/pair/draft"]]


def test_jobs_read_only_models_without_a_config() -> None:
    assert jobs(tiny_cpu()) == []
    assert jobs(pair_70b()) == []
    both = undescribed()
    both["speculation"]["draft"]["config"] = DRAFT_CONFIG
    assert len(jobs(both)) == 1
    same = undescribed()
    same["speculation"]["draft"]["model"] = "pair/target/"
    assert len(jobs(same)) == 1, "a model that is target and draft is read once"


def test_cached_reader_pod_that_starts_is_reported_with_its_image() -> None:
    """The cache dropped the image, and kept a container with a token without its name."""
    spec = undescribed(models={"hubTokenSecret": {"name": "hub", "key": "token"}})
    template = jobs(spec)[0]["spec"]["template"]
    assert "HF_TOKEN" in [each["name"] for each in template["spec"]["containers"][0]["env"]]
    status = {"conditions": [{"type": "PodScheduled", "status": "True"}]}
    starting = slim("Pod", {"metadata": {**template["metadata"], "name": "p"}, **template, "status": status})
    message = outcome(desired_state(parse_deployment(parent(spec)), (), pods=[starting]), spec)["Ready"][2]
    assert f"its node pulls image {template['spec']['containers'][0]['image']}" in message


def test_reader_job_is_read_only_and_has_no_tokens() -> None:
    job = jobs(undescribed(models={**tiny_cpu()["models"], "hubTokenSecret": {"name": "hub", "key": "token"}}))[0]
    pod_spec = job["spec"]["template"]["spec"]
    assert pod_spec["securityContext"]["runAsNonRoot"] is True
    assert pod_spec["automountServiceAccountToken"] is False
    assert container(job)["securityContext"]["readOnlyRootFilesystem"] is True
    assert container(job)["volumeMounts"][0] == {"name": "models", "mountPath": "/models", "readOnly": True}
    assert pod_spec["volumes"][0]["persistentVolumeClaim"] == {"claimName": "tiny-models", "readOnly": True}
    assert not any("HF_" in variable["name"] for variable in container(job)["env"]), "a volume needs no hub, no token"
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert "specdecode.io/deployment" not in labels, "a Service would send requests to it"


def test_hub_reader_gets_the_token_as_a_secret_reference() -> None:
    spec = pair_70b(models={"hubTokenSecret": {"name": "hub", "key": "token"}})
    spec["target"] = {"model": "acme/$(HF_TOKEN)", "revision": "v1"}
    (job,) = jobs(spec)
    assert container(job)["args"] == ["hub", "--revision=v1", "--", "acme/$$(HF_TOKEN)"], "the kubelet fills nothing in"
    env = {variable["name"]: variable for variable in container(job)["env"]}
    assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert [volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]] == ["tmp"]
    assert job["spec"]["template"]["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_facts_from_jobs_give_the_same_plan_as_an_inline_config() -> None:
    spec = undescribed()
    owner = parse_deployment(parent(spec))
    entries = newly_read_models(owner, {}, answers(spec))
    assert len(entries) == 2
    desired = desired_state(owner, (), entries)
    inline = desired_state(parse_deployment(parent(tiny_cpu())), ())
    assert desired.children == inline.children
    assert outcome(desired, spec)["Planned"][:2] == ("True", "Fits")


@pytest.mark.parametrize("text", ["", "null", "{}", "[1]", '{"checkpoint": 3}', "{" * 10_000])
def test_model_with_a_broken_facts_entry_is_read_again(text: str) -> None:
    spec = undescribed()
    owner = parse_deployment(parent(spec))
    entries = newly_read_models(owner, {}, answers(spec))
    broken = {**entries, next(iter(entries)): text}
    assert [child["kind"] for child in desired_state(owner, (), broken).children] == ["Job"]


def test_facts_entries_of_another_model_are_ignored() -> None:
    spec = undescribed()
    owner = parse_deployment(parent(spec))
    entries = newly_read_models(owner, {}, answers(spec))
    first, second = entries
    swapped = {first: entries[second], second: entries[first]}
    assert len(desired_state(owner, (), swapped).children) == 2


FAILURES: dict[str, tuple[str, str, str]] = {
    "ModelNotFound": ("Unknown", "True", "put the model there"),
    "ModelNotReadable": ("Unknown", "True", "runAsUser"),
    "WeightsNotFound": ("Unknown", "True", "safetensors files"),
    "WeightsUnreadable": ("Unknown", "True", "file again"),
    "HubRefused": ("Unknown", "True", "hubTokenSecret"),
    "HubUnreachable": ("Unknown", "True", "name a volume"),
    "ReaderTimedOut": ("Unknown", "True", "spec.target.config"),
    "ReaderFailed": ("Unknown", "True", "kubectl logs"),
    "ConfigUnreadable": ("False", "False", "fix the file"),
    "ConfigTooLong": ("False", "False", "spec.target.config"),
}


@pytest.mark.parametrize("reason", FAILURES)
def test_reader_failure_names_field_value_and_fix(reason: str) -> None:
    planned, reconciling, fix = FAILURES[reason]
    said = failed(undescribed(), message=pack_error(CheckpointError(reason, "what went wrong")), exit_code=1)
    assert said["Planned"][0] == planned
    assert said["Ready"][:2] == ("False" if planned == "False" else "Unknown", reason)
    assert (said["Reconciling"][0], said["Stalled"][0]) == (reconciling, "True" if reconciling == "False" else "False")
    message = said["Ready"][2]
    assert message.startswith("spec.target.model: pair/target on PersistentVolumeClaim tiny-models: what went wrong; ")
    assert fix in message
    assert message.endswith("retried automatically") is (reconciling == "True")


@pytest.mark.parametrize(("reason", "asks"), [("HubRefused", True), ("HubUnreachable", True), ("ConfigTooLong", False)])
@pytest.mark.parametrize(
    ("field", "misspelt", "meant"),
    [
        ("target", "Qwen/Qwen3-8b", "Qwen/Qwen3-8B"),
        ("speculation.draft", "AngelSlim/Qwen3-8B_eagel3", "AngelSlim/Qwen3-8B_eagle3"),
        ("speculation.draft", "Qwen/Qwen3-0.6b", "Qwen/Qwen3-0.6B"),
    ],
)
def test_reader_failure_asks_whether_a_known_model_was_meant(
    reason: str, asks: bool, field: str, misspelt: str, meant: str
) -> None:
    spec = pair_70b()
    model = spec["target"] if field == "target" else spec["speculation"]["draft"]
    model["model"] = misspelt
    message = failed(spec, message=pack_error(CheckpointError(reason, "what went wrong")), exit_code=1)["Ready"][2]
    assert message.startswith(f"spec.{field}.model: {misspelt} on the hub: what went wrong")
    assert (f"what went wrong (did you mean {meant}?); " in message) is asks


@pytest.mark.parametrize(
    ("ended", "reason", "words"),
    [
        ({"message": "Traceback:\nOSError: [Errno 5]\n", "exit_code": 1}, "ReaderFailed", "OSError: [Errno 5]"),
        ({"message": "", "exit_code": 127}, "ReaderFailed", "exit code 127: no message was logged"),
        ({"message": "", "exit_code": 137, "reason": "OOMKilled"}, "OutOfMemory", "memory"),
        ({"message": "hello", "exit_code": 0}, "ReaderFailed", "hello"),
        ({"message": '{"error": {"reason": "Pwned", "message": "x"}}', "exit_code": 1}, "ReaderFailed", "x;"),
    ],
)
def test_crashed_reader_is_reported(ended: Body, reason: str, words: str) -> None:
    said = failed(undescribed(), **ended)
    assert said["Ready"][:2] == ("Unknown", reason)
    assert words in said["Ready"][2]


def knowledge(spec: Body, desired: DesiredState) -> tuple[str | None, str | None]:
    """How well target and draft are known, as the status says it."""
    plan = compose_status(parse_deployment(parent(spec)), desired, Observation(), NOW).plan
    assert plan is not None
    return plan.target_knowledge, plan.draft_knowledge


def test_unknown_model_class_is_estimated() -> None:
    spec = undescribed()
    job = jobs(spec)[0]
    found = pod(job, message=pack_facts(Checkpoint({**TINY_CONFIG, "architectures": ["BrandNewForCausalLM"]}, WEIGHTS)))
    entries = newly_read_models(parse_deployment(parent(spec)), {}, [found, answers(spec)[1]])
    desired = desired_state(parse_deployment(parent(spec)), (), entries)
    assert outcome(desired, spec)["Accepted"][0] == "True"
    assert knowledge(spec, desired) == ("estimated", "exact")


def test_models_with_assumed_numbers_are_not_read() -> None:
    spec = undescribed()
    numbers = {"weightsGiB": "0.006", "kvBytesPerToken": 512}
    spec["target"]["assume"] = spec["speculation"]["draft"]["assume"] = numbers
    assert jobs(spec) == []
    desired = desired_state(parse_deployment(parent(spec)), ())
    assert outcome(desired, spec)["Accepted"][0] == "True"
    assert knowledge(spec, desired) == ("assumed", "assumed")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target": {"model": "../../etc"}}, "spec.target.model: ../../etc"),
        ({"engine": {"image": "i:1", "extraArgs": ["--swap-space=4"]}}, "spec.engine.extraArgs[0]"),
        ({"engine": {"version": "0.1"}}, "spec.engine.version"),
        ({"podTemplate": {"spec": {"imagePullSecrets": [{}]}}}, "spec.podTemplate.spec.imagePullSecrets[0]"),
    ],
)
def test_invalid_spec_is_reported_before_a_model_is_read(change: Body, words: str) -> None:
    spec = undescribed(**change)
    desired = desired_state(parse_deployment(parent(spec)), ())
    assert desired.children == []
    assert words in outcome(desired, spec)["Ready"][2]


def of_site(config: Body, file: str, weights: Weights = WEIGHTS) -> SiteFacts:
    return SiteFacts(file, str(config), Checkpoint(config, weights))


SITE = {
    "pair/target": of_site(TINY_CONFIG, "target.json"),
    "pair/draft": of_site(DRAFT_CONFIG, "draft.json", DRAFT_WEIGHTS),
}


def with_site_facts(spec: Body, site: dict[str, SiteFacts], **cluster: Any) -> DesiredState:
    owner = parse_deployment(parent(spec))
    assert not isinstance(owner.spec, Exception)
    return desired_state(owner, (), site_facts=site_facts_of(owner.spec, site), **cluster)


def test_site_facts_replace_reader_jobs() -> None:
    spec = undescribed()
    desired = with_site_facts(spec, SITE)
    assert not [child for child in desired.children if child["kind"] == "Job"]
    planned = outcome(desired, spec)["Planned"]
    assert planned[:2] == ("True", "Fits")
    assert all(part in planned[2] for part in ("pair/target", "target.json", "pair/draft", "draft.json"))
    plan = compose_status(parse_deployment(parent(spec)), desired, Observation(), NOW).plan
    assert plan is not None
    assert plan.target_knowledge == "exact"
