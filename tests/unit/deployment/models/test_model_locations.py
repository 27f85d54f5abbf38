"""Models on volumes and node directories: what may be mounted."""

import json
from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.models.model_locations import claims_named, image_fields
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from tests.support.decisions import desired_state
from tests.support.model_caches import cached, container, decide, jobs, said, template
from tests.support.model_caches import pod as said_by
from tests.support.objects import Body, parent, tiny_cpu

NODE_MODELS = {"volume": {"hostPath": {"path": "/mnt/models/llama"}}}


def on_nodes(allowed: tuple[str, ...], **changes: Any) -> tuple[DesiredState, Body]:
    spec = tiny_cpu(models=NODE_MODELS, **changes)
    return desired_state(parse_deployment(parent(spec)), (), host_paths=allowed), spec


@pytest.mark.parametrize("allowed", [("/mnt/models",), ("/srv", "/mnt/models/llama"), ("/mnt/models/",)])
def test_allowed_host_path_is_mounted(allowed: tuple[str, ...]) -> None:
    pod_spec = template(on_nodes(allowed)[0])
    assert {"name": "models", "hostPath": {"path": "/mnt/models/llama", "type": "Directory"}} in pod_spec["volumes"]
    mounts = pod_spec["containers"][0]["volumeMounts"]
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in mounts


@pytest.mark.parametrize(
    ("allowed", "fix"),
    [((), "--allow-host-path=/mnt/models/llama"), (("/mnt/model", "/srv"), "use one in /mnt/model, /srv")],
)
def test_host_path_that_is_not_allowed_is_refused(allowed: tuple[str, ...], fix: str) -> None:
    desired, spec = on_nodes(allowed)
    conditions = said(desired, spec)
    assert conditions["Accepted"][:2] == ("False", "HostPathNotAllowed")
    assert "spec.models.volume.hostPath.path: /mnt/models/llama" in conditions["Ready"][2]
    assert fix in conditions["Ready"][2]
    assert desired.children == []


def test_model_without_a_config_is_read_from_its_host_path() -> None:
    desired, _ = on_nodes(("/mnt",), target={"model": "pair/target"})
    (job,) = jobs(desired)
    assert container(job)["args"] == ["folder", "--", "/models/pair/target"]
    volume = job["spec"]["template"]["spec"]["volumes"][0]
    assert volume == {"name": "models", "hostPath": {"path": "/mnt/models/llama", "type": "Directory"}}


HEAD_CLAIM = "chat-training"


def with_head(claim: str = HEAD_CLAIM, *, config: bool = True, **changes: Any) -> Body:
    spec = tiny_cpu(**changes)
    draft = {"model": "default/chat/head", "persistentVolumeClaim": {"claimName": claim}}
    spec["speculation"]["draft"] = draft | ({"config": spec["speculation"]["draft"]["config"]} if config else {})
    return spec


def engine_parts(spec: Body) -> tuple[list[Body], list[Body], Body]:
    """Volumes of the engine pod, mounts of the engine, and its speculative config."""
    pod_spec = template(desired_state(parse_deployment(parent(spec)), ()))
    engine = next(each for each in pod_spec["containers"] if each["name"] == "engine")
    command = engine["command"]
    return pod_spec["volumes"], engine["volumeMounts"], json.loads(command[command.index("--speculative-config") + 1])


def test_engine_loads_the_draft_from_its_own_claim() -> None:
    volumes, mounts, speculative = engine_parts(with_head())
    assert speculative["model"] == f"/drafts/{HEAD_CLAIM}/default/chat/head"
    (mount,) = (each for each in mounts if each["mountPath"] == f"/drafts/{HEAD_CLAIM}")
    assert mount["readOnly"] is True
    (volume,) = (each for each in volumes if each["name"] == mount["name"])
    assert volume["persistentVolumeClaim"] == {"claimName": HEAD_CLAIM, "readOnly": True}
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "tiny-models", "readOnly": True}} in volumes


@pytest.mark.parametrize("models", [tiny_cpu()["models"], {"cache": {"persistentVolumeClaim": {"claimName": "hub"}}}])
def test_claim_of_models_and_draft_is_one_volume(models: Body) -> None:
    (place,) = models.values()
    claim = place["persistentVolumeClaim"]["claimName"]
    spec = with_head(claim, models=models)
    downloads = [said_by(job, '{"commit": "0123456789abcdef"}') for job in jobs(decide(spec))]
    pod_spec = template(decide(spec, downloads))
    named = [each for each in pod_spec["volumes"] if "persistentVolumeClaim" in each]
    assert [each["name"] for each in named] == ["models"], "a pod that names a claim twice may not start"
    mounts = {each["mountPath"]: each for each in pod_spec["containers"][0]["volumeMounts"]}
    assert mounts[f"/drafts/{claim}"] == {"name": "models", "mountPath": f"/drafts/{claim}", "readOnly": True}


def test_draft_on_its_own_claim_is_not_downloaded() -> None:
    in_pods = template(desired_state(parse_deployment(parent(with_head(models={}))), ()))
    assert [each["name"] for each in in_pods["initContainers"]] == ["download-target", "recorder"]
    cache = {"cache": {"persistentVolumeClaim": {"claimName": "hub"}}}
    (job,) = jobs(decide(with_head(models=cache)))
    assert container(job)["args"][0] == "--model=pair/target"


def test_draft_without_a_config_is_read_from_its_own_claim() -> None:
    (job,) = jobs(desired_state(parse_deployment(parent(with_head(config=False))), ()))
    assert container(job)["args"] == ["folder", "--", "/models/default/chat/head"]
    volume = job["spec"]["template"]["spec"]["volumes"][0]
    assert volume == {"name": "models", "persistentVolumeClaim": {"claimName": HEAD_CLAIM, "readOnly": True}}


IMAGE, HEAD_IMAGE = "registry.example.com/models/llama:v1", "registry.example.com/models/head:v1"


def on_image(*, head: bool = False, config: bool = True, target: str = "pair/target", **changes: Any) -> Body:
    spec = tiny_cpu(models={"volume": {"image": {"reference": IMAGE}}}, **changes)
    spec["target"] = {**spec["target"], "model": target}
    if head:
        spec["speculation"]["draft"] |= {"model": "head", "image": {"reference": HEAD_IMAGE}}
    for model in () if config else (spec["target"], spec["speculation"]["draft"]):
        model.pop("config")
    return spec


def test_models_on_an_image_are_mounted_read_only() -> None:
    volumes, mounts, speculative = engine_parts(on_image())
    assert {"name": "models", "image": {"reference": IMAGE}} in volumes
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in mounts
    assert speculative["model"].startswith("/models/")


def test_a_draft_on_its_own_image_has_its_own_volume() -> None:
    volumes, mounts, speculative = engine_parts(on_image(head=True))
    assert {"name": "models", "image": {"reference": IMAGE}} in volumes
    (volume,) = (each for each in volumes if each.get("image") == {"reference": HEAD_IMAGE})
    (mount,) = (each for each in mounts if each["name"] == volume["name"])
    assert speculative["model"] == f"{mount['mountPath']}/head"
    assert mount["readOnly"] is True


def test_models_on_images_are_read_from_them() -> None:
    found = jobs(desired_state(parse_deployment(parent(on_image(head=True, config=False))), ()))
    read = {container(job)["args"][-1]: job["spec"]["template"]["spec"]["volumes"][0] for job in found}
    assert read == {
        "/models/pair/target": {"name": "models", "image": {"reference": IMAGE}},
        "/models/head": {"name": "models", "image": {"reference": HEAD_IMAGE}},
    }
    keys = {job["spec"]["template"]["metadata"]["annotations"]["specdecode.io/model-key"] for job in found}
    assert len(keys) == 2


def test_a_model_may_be_the_root_of_an_image() -> None:
    spec = on_image(target=".", config=False)
    spec["serving"] |= {"servedModelNames": ["llama"]}
    jobs_of = jobs(desired_state(parse_deployment(parent(spec)), ()))
    assert "/models" in {container(job)["args"][-1] for job in jobs_of}


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (on_image(), ["spec.models.volume.image"]),
        (on_image(head=True), ["spec.models.volume.image", "spec.speculation.draft.image"]),
        (with_head(), []),
        (tiny_cpu(), []),
    ],
)
def test_fields_that_need_image_volumes(spec: Body, fields: list[str]) -> None:
    assert image_fields(SpecDecodeDeploymentSpec.parse(spec)) == fields


@pytest.mark.parametrize(
    ("spec", "claims"),
    [
        (with_head(), {"tiny-models", HEAD_CLAIM}),
        ({"speculation": {"draft": {"persistentVolumeClaim": "x"}}}, set()),
        (cached(), {"hub"}),
        (tiny_cpu(), {"tiny-models"}),
        ({"models": {"volume": {"hostPath": {"path": "/x"}}}}, set()),
        ({"models": {"volume": "x", "cache": {"persistentVolumeClaim": {"claimName": 7}}}}, set()),
        ({"models": []}, set()),
        (None, set()),
    ],
)
def test_claim_names_are_read_from_invalid_specs_too(spec: Body | None, claims: set[str]) -> None:
    assert claims_named(spec) == claims
