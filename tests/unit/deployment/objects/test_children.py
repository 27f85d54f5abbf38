"""What is rendered: pods, overlay and drift."""

import copy
import re
from typing import Any

import pytest

from specdecode_operator.cluster.cache import slim
from specdecode_operator.cluster.drift import content_digest, needs_apply
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.pod_template_merge import merge
from tests.support.decisions import desired_state
from tests.support.objects import H100, H200, pair_70b, parent, tiny_cpu

NODES = (NodeFacts("h200-0", H200, 8), NodeFacts("h100-0", H100, 8))


def render(spec: dict[str, Any], name: str = "llama") -> dict[str, dict[str, Any]]:
    children = desired_state(parse_deployment(parent(spec, name=name)), NODES).children
    return {child["kind"]: child for child in children}


def pod_spec(spec: dict[str, Any]) -> dict[str, Any]:
    template: dict[str, Any] = render(spec)["Deployment"]["spec"]["template"]
    pod: dict[str, Any] = template["spec"]
    return pod


def test_every_child_is_owned_labelled_and_hashed() -> None:
    for child in render(pair_70b(replicas=2)).values():
        owner = child["metadata"]["ownerReferences"][0]
        assert (owner["uid"], owner["controller"]) == ("uid-1", True)
        assert child["metadata"]["labels"]["specdecode.io/deployment"] == "llama"
        assert child["metadata"]["annotations"]["specdecode.io/applied-hash"]


@pytest.mark.parametrize(("replicas", "wanted"), [(1, False), (2, True)])
def test_a_disruption_budget_exists_where_there_is_something_to_keep(replicas: int, *, wanted: bool) -> None:
    assert ("PodDisruptionBudget" in render(pair_70b(replicas=replicas))) is wanted


def test_the_hub_and_its_token_are_seen_by_the_download_only() -> None:
    pod = pod_spec(pair_70b(models={"hubTokenSecret": {"name": "hub", "key": "token"}}))
    assert [container["name"] for container in pod["initContainers"]] == ["download-target", "download-draft"]
    for container in pod["initContainers"]:
        token = next(variable for variable in container["env"] if variable["name"] == "HF_TOKEN")
        assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    engine_env = {variable["name"]: variable for variable in pod["containers"][0]["env"]}
    assert "HF_TOKEN" not in engine_env
    assert engine_env["HF_HUB_OFFLINE"]["value"] == "1"


def as_the_kubelet_starts_it(arguments: list[str], env: dict[str, str]) -> list[str]:
    """Arguments after the kubelet has put variables in: Kubernetes, third_party/forked/golang/expansion/expand.go."""

    def expanded(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return env.get(match[1], match[0])

    return [re.sub(r"\$\$|\$\(([^)]*)\)", expanded, argument) for argument in arguments]


@pytest.mark.parametrize("text", ["$(HF_TOKEN)", "$$(HF_TOKEN)", "$$$(HF_TOKEN)", "a$b$$c$", "$(", "$()"])
def test_command_lines_reach_the_containers_literally(text: str) -> None:
    spec = pair_70b(models={"hubTokenSecret": {"name": "hub", "key": "token"}})
    spec["target"] = {**spec["target"], "revision": text}
    spec["engine"] = {"extraArgs": [f"--chat-template={text}"]}
    secret = {"HF_TOKEN": "hf_secret", "VLLM_API_KEY": "sk-secret"}
    pod = pod_spec(spec)
    download = as_the_kubelet_starts_it(pod["initContainers"][0]["command"], secret)
    assert download[-1] == f"--revision={text}"
    engine = as_the_kubelet_starts_it(pod["containers"][0]["command"], secret)
    assert f"--chat-template={text}" in engine


def test_the_api_key_comes_by_reference() -> None:
    spec = tiny_cpu()
    spec["serving"]["apiKeySecret"] = {"name": "clients", "key": "key"}
    env = {variable["name"]: variable for variable in pod_spec(spec)["containers"][0]["env"]}
    assert env["VLLM_API_KEY"]["valueFrom"] == {"secretKeyRef": {"name": "clients", "key": "key"}}
    assert "value" not in env["VLLM_API_KEY"]


def test_text_of_a_user_cannot_change_the_structure_of_a_manifest() -> None:
    evil = 'x"]\n      hostNetwork: true\n#'
    spec = tiny_cpu(engine={"image": "localhost/engine:1", "env": [{"name": "GREETING", "value": evil}]})
    pod = pod_spec(spec)
    assert "hostNetwork" not in pod
    env = {variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]}
    assert env["GREETING"] == evil


def test_the_overlay_is_merged_by_name() -> None:
    template = {
        "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team"}},
        "spec": {
            "priorityClassName": "high",
            "tolerations": [{"key": "a", "operator": "Exists"}],
            "volumes": [{"name": "extra", "emptyDir": {}}],
            "containers": [
                {"name": "engine", "volumeMounts": [{"name": "extra", "mountPath": "/extra"}]},
                {"name": "sidecar", "image": "s:1"},
            ],
        },
    }
    whole = render(pair_70b(podTemplate=template))["Deployment"]["spec"]["template"]
    assert whole["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert whole["metadata"]["labels"]["specdecode.io/deployment"] == "llama"
    pod = whole["spec"]
    assert pod["priorityClassName"] == "high"
    assert pod["tolerations"] == [{"key": "a", "operator": "Exists"}], "tolerations have no merge key"
    assert {volume["name"] for volume in pod["volumes"]} == {"models", "tmp", "shm", "engine-config", "extra"}
    assert [container["name"] for container in pod["containers"]] == ["engine", "sidecar"]
    mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert {"/extra", "/models"} <= mounts


def test_containers_that_are_added_are_confined_like_ours_where_they_say_nothing_else() -> None:
    bind = {"capabilities": {"add": ["NET_BIND_SERVICE"]}, "runAsUser": 0}
    said = [{"name": "quiet", "image": "a:1"}, {"name": "bind", "image": "b:1", "securityContext": bind}]
    pod = pod_spec(pair_70b(podTemplate={"spec": {"containers": said, "initContainers": said}}))
    for list_ in ("containers", "initContainers"):
        contexts = {each["name"]: each["securityContext"] for each in pod[list_]}
        assert contexts["quiet"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert contexts["bind"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"add": ["NET_BIND_SERVICE"], "drop": ["ALL"]},
            "runAsUser": 0,
        }


def test_an_affinity_of_the_user_leaves_the_planned_product_in_force() -> None:
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}
    pod = pod_spec(pair_70b(podTemplate={"spec": {"affinity": affinity, "nodeSelector": {"zone": "a"}}}))
    assert pod["affinity"] == affinity
    assert pod["nodeSelector"] == {"zone": "a", "nvidia.com/gpu.product": H200}


def test_merging_leaves_its_inputs_alone_and_null_removes() -> None:
    base = {"a": {"b": 1, "c": 2}}
    before = copy.deepcopy(base)
    assert merge(base, {"a": {"b": None}}) == {"a": {"c": 2}}
    assert base == before


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ({"metadata": {"name": "mine"}}, "spec.podTemplate.metadata.name"),
        ({"metadata": {"labels": {"specdecode.io/deployment": "x"}}}, "spec.podTemplate.metadata.labels"),
        (
            {"metadata": {"annotations": {"specdecode.io/engine-logging": "{}"}}},
            "spec.podTemplate.metadata.annotations.specdecode.io/engine-logging",
        ),
        ({"spec": {"containers": [{"name": "engine", "ports": []}]}}, "spec.podTemplate.spec.containers[0].ports"),
        ({"spec": {"volumes": [{"name": "models"}]}}, "spec.podTemplate.spec.volumes[0].name"),
        (
            {"spec": {"initContainers": [{"name": "download-draft", "image": "mine:1"}]}},
            "spec.podTemplate.spec.initContainers[0].image",
        ),
        ({"spec": {"restartPolicy": "Never"}}, "spec.podTemplate.spec.restartPolicy"),
        ({"spec": {"terminationGracePeriodSeconds": None}}, "spec.podTemplate.spec.terminationGracePeriodSeconds"),
        (
            {"spec": {"containers": [{"name": "engine", "volumeMounts": [{"name": "mine", "mountPath": "/models/"}]}]}},
            "spec.podTemplate.spec.containers[0].volumeMounts[0].mountPath",
        ),
        ({"spec": {"nodeSelector": None}}, "spec.podTemplate.spec.nodeSelector"),
        (
            {"spec": {"containers": [{"name": "engine", "resources": None}]}},
            "spec.podTemplate.spec.containers[0].resources",
        ),
        (
            {"spec": {"containers": [{"name": "engine", "resources": {"limits": None}}]}},
            "spec.podTemplate.spec.containers[0].resources.limits",
        ),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.podTemplate.spec.containers[0]"),
        ({"spec": {"containers": "engine"}}, "spec.podTemplate.spec.containers"),
        ({"spec": {"containers": [{"name": "engine", "env": [{"value": "x"}]}]}}, "containers[0].env[0]"),
        (
            {"spec": {"containers": [{"name": "engine", "env": [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}]}]}},
            "spec.podTemplate.spec.containers[0].env[0].name",
        ),
        ({"spec": {"containers": [{"name": "engine", "envFrom": []}]}}, "containers[0].envFrom"),
        ({"spec": {"$patch": "delete"}}, "spec.podTemplate.spec.$patch"),
        (
            {"spec": {"containers": [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": 1}}}]}},
            "containers[0].resources.limits.nvidia.com/gpu",
        ),
        ({"spec": {"nodeSelector": {"nvidia.com/gpu.product": H200}}}, "spec.nodeSelector.nvidia.com/gpu.product"),
    ],
    ids=str,
)
def test_what_the_overlay_may_not_touch_is_named(template: dict[str, Any], field: str) -> None:
    spec = parse_deployment(parent(pair_70b(podTemplate=template)))
    conditions = {finding.type: finding for finding in desired_state(spec, NODES).conditions}
    assert conditions["Accepted"].status == "False"
    assert field in conditions["Accepted"].message


def answer(desired: dict[str, Any]) -> dict[str, Any]:
    """What the API server makes of it: defaults are filled in, and quantities come back in other words."""
    body = copy.deepcopy(desired)
    body["metadata"]["resourceVersion"] = "7"
    pod = body["spec"]["template"]["spec"]
    pod["dnsPolicy"] = "ClusterFirst"
    pod["containers"][0]["resources"]["limits"]["memory"] = "8192Mi"
    return body


def test_an_object_that_is_as_asked_for_is_not_applied_again() -> None:
    desired = render(tiny_cpu())["Deployment"]
    live = answer(desired)
    applied = content_digest(live, desired)
    live["status"] = {"replicas": 1}
    live["metadata"]["resourceVersion"] = "8"
    live["metadata"]["annotations"]["deployment.kubernetes.io/revision"] = "1"
    live["metadata"]["labels"]["team"] = "somebody"
    assert not needs_apply(desired, live, applied)


def test_an_object_that_this_process_never_applied_is_applied_once() -> None:
    desired = render(tiny_cpu())["Deployment"]
    assert needs_apply(desired, answer(desired), None)


def test_drift_is_seen() -> None:
    desired = render(tiny_cpu())["Deployment"]
    applied = content_digest(answer(desired), desired)
    scaled, longer, stolen, unlabelled = (answer(desired) for _ in range(4))
    scaled["spec"]["replicas"] = 5
    longer["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "X", "value": "1"})
    stolen["metadata"]["ownerReferences"] = []
    unlabelled["metadata"]["labels"].popitem()
    for live in (scaled, longer, stolen, unlabelled):
        assert needs_apply(desired, live, applied)


def test_what_is_no_longer_asked_for_is_seen() -> None:
    before = render(tiny_cpu(podTemplate={"spec": {"priorityClassName": "high"}}))["Deployment"]
    after = render(tiny_cpu())["Deployment"]
    assert needs_apply(after, answer(before), content_digest(answer(before), before))


def test_a_plan_that_someone_edits_is_seen_through_the_cache() -> None:
    """The cache keeps digests of a plan's text, and what was applied is compared as slim as it."""
    desired = render(tiny_cpu())["ConfigMap"]
    applied = content_digest(slim("ConfigMap", copy.deepcopy(desired)), desired)
    edited = copy.deepcopy(desired)
    edited["data"]["plan.json"] += " "
    assert not needs_apply(desired, slim("ConfigMap", copy.deepcopy(desired)), applied)
    assert needs_apply(desired, slim("ConfigMap", edited), applied)
