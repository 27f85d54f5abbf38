"""Rendered pods: tokens, command lines, and the merge of podTemplate."""

import re
from typing import Any

import pytest

from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.parsed_deployment import parse_deployment
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


def test_only_download_containers_get_the_hub_token() -> None:
    pod = pod_spec(pair_70b(models={"hubTokenSecret": {"name": "hub", "key": "token"}}))
    *downloads, recorder = pod["initContainers"]
    assert [container["name"] for container in downloads] == ["download-target", "download-draft"]
    assert "HF_TOKEN" not in {variable["name"] for variable in recorder["env"]}
    for container in downloads:
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
def test_kubelet_expands_no_variables_in_command_lines(text: str) -> None:
    spec = pair_70b(models={"hubTokenSecret": {"name": "hub", "key": "token"}})
    spec["target"] = {**spec["target"], "revision": text}
    spec["engine"] = {"extraArgs": [f"--chat-template={text}"]}
    secret = {"HF_TOKEN": "hf_secret", "VLLM_API_KEY": "sk-secret"}
    pod = pod_spec(spec)
    download = as_the_kubelet_starts_it(pod["initContainers"][0]["command"], secret)
    assert download[-1] == f"--revision={text}"
    engine = as_the_kubelet_starts_it(pod["containers"][0]["command"], secret)
    assert f"--chat-template={text}" in engine


def test_env_value_from_is_rendered_unchanged() -> None:
    sources: list[dict[str, Any]] = [
        {"secretKeyRef": {"name": "proxy", "key": "url", "optional": True}},
        {"configMapKeyRef": {"name": "settings", "key": "level"}},
        {"fieldRef": {"fieldPath": "status.podIP"}},
        {"resourceFieldRef": {"resource": "limits.memory", "containerName": "engine", "divisor": "1Mi"}},
    ]
    given = [{"name": f"V{index}", "valueFrom": source} for index, source in enumerate(sources)]
    # The operator sets HOME, too.
    given.append({"name": "HOME", "valueFrom": sources[1]})
    spec = tiny_cpu(engine={"image": "i:1", "env": given})
    rendered = [
        each for each in pod_spec(spec)["containers"][0]["env"] if each["name"] in {"HOME", "V0", "V1", "V2", "V3"}
    ]
    assert rendered == sorted(given, key=lambda each: each["name"])


def test_env_variables_follow_those_they_reference() -> None:
    """The kubelet expands only variables that it has already set."""
    given = [
        {"name": "V1", "value": "$(V3)/$(V2)/$(ABSENT)"},
        {"name": "V2", "value": "$(V1)"},
        {"name": "V3", "valueFrom": {"secretKeyRef": {"name": "proxy", "key": "url"}}},
        {"name": "V4", "value": "4"},
    ]
    pod = pod_spec(tiny_cpu(engine={"image": "i:1", "env": given}))
    names = [each["name"] for each in pod["containers"][0]["env"]]
    assert [name for name in names if name in {"V1", "V2", "V3", "V4"}] == ["V3", "V2", "V1", "V4"]


def test_downloads_get_the_proxy_by_the_same_reference() -> None:
    proxy = {"name": "HTTPS_PROXY", "valueFrom": {"secretKeyRef": {"name": "proxy", "key": "url"}}}
    pod = pod_spec(pair_70b(engine={"env": [proxy]}))
    *downloads, _ = pod["initContainers"]
    assert all(proxy in container["env"] for container in downloads)


def test_env_value_from_is_part_of_the_compile_cache_key() -> None:
    def folder(key: str) -> str:
        variable = {"name": "LEVEL", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": key}}}
        models = {**tiny_cpu()["models"], "cache": {"persistentVolumeClaim": {"claimName": "cache"}}}
        engine = {"image": "i:1", "env": [variable]}
        mounts = pod_spec(tiny_cpu(models=models, engine=engine))["containers"][0]["volumeMounts"]
        return next(each["subPath"] for each in mounts if each["mountPath"] == "/compiled")

    assert folder("one") == folder("one") != folder("two")


def test_log_level_from_a_config_map_counts_as_the_default() -> None:
    def logging(*env: dict[str, Any]) -> Any:
        annotations = render(tiny_cpu(engine={"image": "i:1", "env": list(env)}))["Deployment"]["spec"]["template"]
        return annotations["metadata"]["annotations"]["specdecode.io/engine-logging"]

    source = {"configMapKeyRef": {"name": "settings", "key": "level"}}
    assert logging({"name": "VLLM_LOGGING_LEVEL", "valueFrom": source}) == logging()
    assert logging({"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}) != logging()


def test_api_key_is_a_secret_reference() -> None:
    spec = tiny_cpu()
    spec["serving"]["apiKeySecret"] = {"name": "clients", "key": "key"}
    env = {variable["name"]: variable for variable in pod_spec(spec)["containers"][0]["env"]}
    assert env["VLLM_API_KEY"]["valueFrom"] == {"secretKeyRef": {"name": "clients", "key": "key"}}
    assert "value" not in env["VLLM_API_KEY"]


def test_pod_template_lists_are_merged_by_name() -> None:
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
    own = {"models", "tmp", "shm", "engine-config", "specdecode-recorder", "specdecode-sockets"}
    assert {volume["name"] for volume in pod["volumes"]} == own | {"extra"}
    assert [container["name"] for container in pod["containers"]] == ["engine", "sidecar"]
    mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert {"/extra", "/models"} <= mounts


def test_added_containers_get_the_default_security_context() -> None:
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


def test_pod_template_replaces_whole_env_entries() -> None:
    source = {"secretKeyRef": {"name": "team", "key": "level"}}
    plain, taken = {"name": "LEVEL", "value": "3"}, {"name": "LEVEL", "valueFrom": source}
    for env, template in ((plain, taken), (taken, plain)):
        engine = {"name": "engine", "env": [template]}
        pod = pod_spec(pair_70b(engine={"env": [env]}, podTemplate={"spec": {"containers": [engine]}}))
        assert [each for each in pod["containers"][0]["env"] if each["name"] == "LEVEL"] == [template]


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
def test_forbidden_pod_template_field_is_named(template: dict[str, Any], field: str) -> None:
    spec = parse_deployment(parent(pair_70b(podTemplate=template)))
    conditions = {finding.type: finding for finding in desired_state(spec, NODES).conditions}
    assert conditions["Accepted"].status == "False"
    assert field in conditions["Accepted"].message
