"""Models on volumes and node directories: what may be mounted."""

from typing import Any

import pytest

from specdecode_operator.deployment.desired_state import DesiredState
from specdecode_operator.deployment.models.model_locations import claims_named
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from tests.support.decisions import desired_state
from tests.support.model_caches import cached, container, jobs, said, template
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


@pytest.mark.parametrize(
    ("spec", "claims"),
    [
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
