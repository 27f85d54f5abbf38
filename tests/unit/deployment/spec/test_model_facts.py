"""Models that nobody describes: from a spec to a Job, from its pod to facts, from facts to a plan."""

from datetime import UTC, datetime
from typing import Any

import pytest

from specdecode_operator.deployment.decision import newly_read_models
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.models.checkpoint_reader import (
    Checkpoint,
    CheckpointError,
    Weights,
    pack_error,
    pack_facts,
)
from specdecode_operator.deployment.models.model_facts import SiteFacts, facts_entry, site_facts_of
from specdecode_operator.deployment.models.model_locations import ModelSource
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.status import compose_status
from tests.support.decisions import OPERATOR_IMAGE, desired_state
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


def test_models_that_nobody_describes_are_read_first() -> None:
    spec = undescribed()
    desired = desired_state(parse_deployment(parent(spec)), ())
    said = outcome(desired, spec)
    assert said["Planned"][:2] == ("Unknown", "ResolvingModel")
    assert said["Ready"][:2] == ("Unknown", "ResolvingModel")
    assert (said["Reconciling"][0], said["Stalled"][0], said["Accepted"][0]) == ("True", "False", "Unknown")
    assert "pair/target on PersistentVolumeClaim tiny-models and pair/draft" in said["Planned"][2]
    assert "where a quota or a policy refuses its pod" in said["Planned"][2]
    assert [child["kind"] for child in desired.children] == ["Job", "Job"]
    folders = [container(job)["args"] for job in jobs(spec)]
    assert folders == [["folder", "--", "/models/pair/target"], ["folder", "--", "/models/pair/draft"]]


def test_a_reader_runs_the_operators_image_and_not_the_engines() -> None:
    (job, _) = jobs(undescribed())
    assert container(job)["image"] == OPERATOR_IMAGE
    assert container(job)["command"] == ["specdecode", "read-model"]
    spec = undescribed()
    said = outcome(desired_state(parse_deployment(parent(spec)), (), operator_image=None), spec)
    assert (said["Ready"][1], said["Planned"][1]) == ("OperatorImageUnknown", "ResolvingModel")


def waiting(status: Body) -> str:
    """The condition while the pod of the first reader has this status."""
    spec = undescribed()
    job = jobs(spec)[0]
    template = job["spec"]["template"]
    metadata = {**template["metadata"], "name": "reader", "creationTimestamp": "2026-01-01T00:00:00Z"}
    found = {"metadata": metadata, "spec": template["spec"], "status": status}
    return outcome(desired_state(parse_deployment(parent(spec)), (), pods=[found]), spec)["Ready"][2]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({}, "waits for a node"),
        ({"conditions": [{"type": "PodScheduled", "status": "True"}]}, f"pulls image {OPERATOR_IMAGE} and mounts the"),
        (
            {
                "conditions": [{"type": "PodScheduled", "status": "True"}],
                "containerStatuses": [{"name": "read-model", "ready": True, "state": {"running": {}}}],
            },
            "its container runs",
        ),
        (
            {
                "containerStatuses": [
                    {
                        "name": "read-model",
                        "image": OPERATOR_IMAGE,
                        "ready": False,
                        "state": {"waiting": {"reason": "ImagePullBackOff"}},
                    }
                ]
            },
            "imagePullSecrets",
        ),
        (
            {
                "containerStatuses": [
                    {
                        "name": "read-model",
                        "ready": False,
                        "state": {
                            "waiting": {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}
                        },
                    }
                ]
            },
            'secret "hub" not found',
        ),
    ],
)
def test_the_condition_says_what_a_reader_waits_for(status: Body, words: str) -> None:
    assert words in waiting(status)


def test_only_what_nobody_describes_is_read() -> None:
    assert jobs(tiny_cpu()) == []
    assert jobs(pair_70b()) == []
    both = undescribed()
    both["speculation"]["draft"]["config"] = DRAFT_CONFIG
    assert len(jobs(both)) == 1
    same = undescribed()
    same["speculation"]["draft"]["model"] = "pair/target/"
    assert len(jobs(same)) == 1, "a model that is target and draft is read once"


def test_a_reader_may_do_nothing_but_read() -> None:
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


def test_the_hub_is_read_with_the_users_secret_by_reference() -> None:
    spec = pair_70b(models={"hubTokenSecret": {"name": "hub", "key": "token"}})
    spec["target"] = {"model": "acme/$(HF_TOKEN)", "revision": "v1"}
    (job,) = jobs(spec)
    assert container(job)["args"] == ["hub", "--revision=v1", "--", "acme/$$(HF_TOKEN)"], "the kubelet fills nothing in"
    env = {variable["name"]: variable for variable in container(job)["env"]}
    assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert [volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]] == ["tmp"]
    assert job["spec"]["template"]["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_another_reader_has_another_name() -> None:
    name = "n" * 52
    names = [job["metadata"]["name"] for job in jobs(undescribed(), name)]
    assert all(len(found) <= 63 for found in names), "a Job's name is a label"
    assert jobs(undescribed(engine={"image": "localhost/engine:2"}), name) == jobs(undescribed(), name)
    other = undescribed(podTemplate={"spec": {"nodeSelector": {"pool": "other"}}})
    assert not {job["metadata"]["name"] for job in jobs(other, name)} & {*names}
    assert jobs(undescribed(), name) == jobs(undescribed(replicas=3), name)


def test_what_pods_found_leads_to_the_plan_of_an_inline_config() -> None:
    spec = undescribed()
    owner = parse_deployment(parent(spec))
    entries = newly_read_models(owner, {}, answers(spec))
    assert len(entries) == 2
    desired = desired_state(owner, (), entries)
    inline = desired_state(parse_deployment(parent(tiny_cpu())), ())
    assert desired.children == inline.children
    assert outcome(desired, spec)["Planned"][:2] == ("True", "Fits")


@pytest.mark.parametrize(
    "change",
    [
        {"models": {"volume": {"persistentVolumeClaim": {"claimName": "other"}}}},
        {"models": {}},
    ],
)
def test_the_same_name_elsewhere_is_another_model(change: Body) -> None:
    spec = undescribed()
    entries = newly_read_models(parse_deployment(parent(spec)), {}, answers(spec))
    elsewhere = parse_deployment(parent(undescribed(**change)))
    assert [child["kind"] for child in desired_state(elsewhere, (), entries).children] == ["Job", "Job"]
    assert not {*newly_read_models(elsewhere, entries, answers(undescribed(**change)))} & {*entries}, "both are kept"


@pytest.mark.parametrize("text", ["", "null", "{}", "[1]", '{"checkpoint": 3}', "{" * 10_000])
def test_an_entry_that_somebody_broke_is_read_anew(text: str) -> None:
    spec = undescribed()
    owner = parse_deployment(parent(spec))
    entries = newly_read_models(owner, {}, answers(spec))
    broken = {**entries, next(iter(entries)): text}
    assert [child["kind"] for child in desired_state(owner, (), broken).children] == ["Job"]


def test_an_entry_for_another_model_is_not_taken() -> None:
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
    "WeightsUnreadable": ("Unknown", "True", "anew"),
    "HubRefused": ("Unknown", "True", "hubTokenSecret"),
    "HubUnreachable": ("Unknown", "True", "name a volume"),
    "ReaderTimedOut": ("Unknown", "True", "spec.target.config"),
    "ReaderFailed": ("Unknown", "True", "kubectl logs"),
    "ConfigUnreadable": ("False", "False", "mend the file"),
    "ConfigTooLong": ("False", "False", "spec.target.config"),
}


@pytest.mark.parametrize("reason", FAILURES)
def test_a_failure_names_field_value_and_fix(reason: str) -> None:
    planned, reconciling, fix = FAILURES[reason]
    said = failed(undescribed(), message=pack_error(CheckpointError(reason, "what went wrong")), exit_code=1)
    assert said["Planned"][0] == planned
    assert said["Ready"][:2] == ("False" if planned == "False" else "Unknown", reason)
    assert (said["Reconciling"][0], said["Stalled"][0]) == (reconciling, "True" if reconciling == "False" else "False")
    message = said["Ready"][2]
    assert message.startswith("spec.target.model: pair/target on PersistentVolumeClaim tiny-models: what went wrong; ")
    assert fix in message
    assert message.endswith("it is tried again by itself") is (reconciling == "True")


@pytest.mark.parametrize(
    ("ended", "reason", "words"),
    [
        ({"message": "Traceback:\nOSError: [Errno 5]\n", "exit_code": 1}, "ReaderFailed", "OSError: [Errno 5]"),
        ({"message": "", "exit_code": 127}, "ReaderFailed", "exit code 127: it said nothing"),
        ({"message": "", "exit_code": 137, "reason": "OOMKilled"}, "OutOfMemory", "memory"),
        ({"message": "hello", "exit_code": 0}, "ReaderFailed", "hello"),
        ({"message": '{"error": {"reason": "Pwned", "message": "x"}}', "exit_code": 1}, "ReaderFailed", "x;"),
    ],
)
def test_a_reader_that_breaks_is_told(ended: Body, reason: str, words: str) -> None:
    said = failed(undescribed(), **ended)
    assert said["Ready"][:2] == ("Unknown", reason)
    assert words in said["Ready"][2]


def test_what_holds_the_reader_up_is_told() -> None:
    spec = undescribed()
    job = jobs(spec)[0]
    message = '0/1 nodes: persistentvolumeclaim "tiny-models" not found. not found'
    waits = pod(job)
    waits["status"] = {"conditions": [{"type": "PodScheduled", "status": "False", "message": message}]}
    said = outcome(desired_state(parse_deployment(parent(spec)), (), pods=[waits]), spec)
    assert said["Ready"][:2] == ("Unknown", "WaitingForVolume")
    assert '"tiny-models" not found' in said["Planned"][2]


def test_the_newest_pod_speaks() -> None:
    spec = undescribed()
    job = jobs(spec)[0]
    old = pod(job, message=pack_error(CheckpointError("ModelNotFound", "gone")), exit_code=1)
    new = pod(job, message=pack_facts(Checkpoint(TINY_CONFIG, WEIGHTS)), created="2026-01-02T00:00:00Z")
    assert len(newly_read_models(parse_deployment(parent(spec)), {}, [new, old])) == 1
    same_second = pod(job, message=pack_facts(Checkpoint(TINY_CONFIG, WEIGHTS)))
    assert len(newly_read_models(parse_deployment(parent(spec)), {}, [old, same_second])) == 1
    said = outcome(desired_state(parse_deployment(parent(spec)), (), pods=[new, old]), spec)
    assert said["Ready"][1] == "ResolvingModel"


def test_a_shape_that_cannot_be_sized_is_named() -> None:
    spec = undescribed()
    job = jobs(spec)[0]
    found = pod(job, message=pack_facts(Checkpoint({**TINY_CONFIG, "architectures": ["Unheard"]}, WEIGHTS)))
    entries = newly_read_models(parse_deployment(parent(spec)), {}, [found, answers(spec)[1]])
    said = outcome(desired_state(parse_deployment(parent(spec)), (), entries), spec)
    assert said["Accepted"][:2] == ("False", "Invalid")
    assert said["Accepted"][2].startswith("spec.target.model: pair/target: its class Unheard")


def knowledge(spec: Body, desired: DesiredState) -> tuple[str | None, str | None]:
    """How well target and draft are known, as the status says it."""
    plan = compose_status(parse_deployment(parent(spec)), desired, Observation(), NOW).plan
    assert plan is not None
    return plan.target_knowledge, plan.draft_knowledge


def test_a_class_that_sizing_does_not_implement_is_estimated() -> None:
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
def test_what_is_wrong_without_the_model_is_told_before_it_is_read(change: Body, words: str) -> None:
    spec = undescribed(**change)
    desired = desired_state(parse_deployment(parent(spec)), ())
    assert desired.children == []
    assert words in outcome(desired, spec)["Accepted"][2]


def test_files_of_another_model_are_told_beside_the_plan() -> None:
    spec = undescribed()
    owner = parse_deployment(parent(spec))
    entries = newly_read_models(owner, {}, answers(spec, draft=WEIGHTS))
    said = outcome(desired_state(owner, (), entries), spec)["Planned"]
    assert said[:2] == ("True", "Fits")
    assert "the safetensors files of pair/draft hold" in said[2], "it has the bytes of the target here"
    assert "the draft pair/draft is estimated: its files hold more than its config.json describes" in said[2]
    assert "files of pair/target" not in said[2]


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


def test_facts_of_the_site_take_the_place_of_jobs() -> None:
    spec = undescribed()
    desired = with_site_facts(spec, SITE)
    assert not [child for child in desired.children if child["kind"] == "Job"]
    planned = outcome(desired, spec)["Planned"]
    assert planned[:2] == ("True", "Fits")
    assert "pair/target is known (exact) from the operator's facts file target.json" in planned[2]
    assert "pair/draft is known (exact) from the operator's facts file draft.json" in planned[2]
    plan = compose_status(parse_deployment(parent(spec)), desired, Observation(), NOW).plan
    assert plan is not None
    assert plan.target_knowledge == "exact"


def test_only_models_without_facts_of_the_site_are_read() -> None:
    desired = with_site_facts(undescribed(), {"pair/target": SITE["pair/target"]})
    assert [container(child)["args"][-1] for child in desired.children if child["kind"] == "Job"] == [
        "/models/pair/draft"
    ]


def test_facts_of_the_site_come_before_what_a_job_has_read_and_after_the_spec() -> None:
    longer = {**TINY_CONFIG, "max_position_embeddings": 4096}
    source = ModelSource("pair/target", claim="tiny-models")
    read = {source.key: facts_entry(source, Checkpoint({**TINY_CONFIG, "max_position_embeddings": 999}, WEIGHTS))}

    def longest(spec: Body) -> int:
        desired = with_site_facts(spec, {**SITE, "pair/target": of_site(longer, "t")}, entries=read)
        plan = compose_status(parse_deployment(parent(spec)), desired, Observation(), NOW).plan
        assert plan is not None
        return plan.max_model_len or 0

    assert longest(undescribed(serving={})) == 4096
    assert longest(tiny_cpu(serving={})) == TINY_CONFIG["max_position_embeddings"]
