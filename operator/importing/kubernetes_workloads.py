"""Values of vLLM's production-stack chart: each model that they start as a Deployment of its own.

Read in helm/templates/deployment-vllm-multi.yaml and _helpers.tpl of the chart; the name of the release, which values
do not hold, is written RELEASE.
"""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final

from specdecode_operator.kube.nodes import GPU_RESOURCE
from specdecode_operator.kube.untyped import mapping, objects, texts
from specdecode_operator.migration.sources.workload import Remarks, Workload, plain_text

_SECTION: Final = "servingEngineSpec"
_RENDER: Final = "helm template RELEASE CHART -f VALUES writes it out: import what that prints"
_CONFIG_FLAGS: Final = {
    "maxModelLen": "--max-model-len",
    "dtype": "--dtype",
    "tensorParallelSize": "--tensor-parallel-size",
    "maxNumSeqs": "--max-num-seqs",
    "gpuMemoryUtilization": "--gpu-memory-utilization",
    "maxLoras": "--max-loras",
    "runner": "--runner",
    "convert": "--convert",
}
_CONFIG_READ: Final = (
    *_CONFIG_FLAGS,
    "enableChunkedPrefill",
    "enablePrefixCaching",
    "extraArgs",
    "v0",
    "prometheusMultiprocDir",
)
_OF_POD: Final = ("serviceAccountName", "priorityClassName", "runtimeClassName", "affinity", "nodeName")
_OF_OPERATOR: Final = {
    "annotations": "a Deployment of the operator has its own",
    "pvcAccessMode": "the claim stays as it is",
    "pvcAnnotations": "the claim stays as it is",
    "pvcLabels": "the claim stays as it is",
    "pvcMatchLabels": "the claim stays as it is",
    "storageClass": "the claim stays as it is",
    "shmSize": "the operator mounts shared memory itself",
}
_READ: Final = (
    "chatTemplate", "enabled", "enableLoRA", "enableTool", "env", "envFromSecret", "extraVolumeMounts", "extraVolumes",
    "hf_token", "imagePullSecret", "limitCPU", "limitMemory", "lmcacheConfig", "modelRevision", "modelURL", "name",
    "nodeSelectorTerms", "podAnnotations", "pvcExistingClaimName", "pvcStorage", "replicaCount", "repository",
    "requestCPU", "requestGPU", "requestGPUType", "requestMemory", "resources", "tag", "tolerations",
    "tolerationsPolicy", "toolCallParser", "vllmConfig",
)  # fmt: skip
_COMMON_READ: Final = (
    "containerPort", "containerSecurityContext", "enableEngine", "env", "extraPorts", "imagePullPolicy", "labels",
    "livenessProbe", "maxUnavailablePodDisruptionBudget", "modelSpec", "readinessProbe", "runtimeClassName",
    "schedulerName", "securityContext", "servicePort", "sidecar", "startupProbe", "strategy", "tolerations",
    "vllmApiKey",
)  # fmt: skip


def is_production_stack(body: Mapping[str, Any]) -> bool:
    """Return whether an object is the chart's values."""
    return "kind" not in body and isinstance(body.get(_SECTION), dict)


def read_production_stack(body: Mapping[str, Any]) -> list[Workload]:
    """Return the server of each model that is not turned off."""
    common = mapping(body, _SECTION)
    return [
        _read(index, model, common)
        for index, model in enumerate(objects(common, "modelSpec"))
        if model.get("enabled") is not False
    ]


def _read(index: int, model: Mapping[str, Any], common: Mapping[str, Any]) -> Workload:
    where = f"{_SECTION}.modelSpec[{index}]"
    name = str(model.get("name") or "vllm")
    container, volumes = _container(name, model, common)
    pod = {key: model[key] for key in _OF_POD if model.get(key)} | {"containers": [container], "volumes": volumes}
    deployment = f"deployment/{shlex.quote(f'RELEASE-{name}-deployment-vllm')}"
    return Workload(
        kind="production-stack model",
        name=name,
        pod=_scheduled(pod, model, common),
        where=where,
        metadata={"labels": mapping(common, "labels"), "annotations": mapping(model, "podAnnotations")},
        match_labels=mapping(common, "labels"),
        spec={"strategy": mapping(common, "strategy"), "replicas": model.get("replicaCount", 1)},
        end=f"kubectl scale {deployment} --replicas=0",
        remove=f"helm upgrade RELEASE CHART -f VALUES, without {where}",
        remarks=_remarks(model, common, where),
    )


def _remarks(model: Mapping[str, Any], common: Mapping[str, Any], where: str) -> Remarks:
    """Say what the values hold that no pod has, and what they do not hold."""
    remarks = Remarks()
    for key in (key for key in model if key in _OF_OPERATOR):
        remarks.own(f"{where}.{key}", _OF_OPERATOR[key])
    remarks.ask_for_rest(model, (*_READ, *_OF_POD, *_OF_OPERATOR), where)
    remarks.ask_for_rest(mapping(model, "vllmConfig"), _CONFIG_READ, f"{where}.vllmConfig")
    remarks.ask_for_rest(common, _COMMON_READ, _SECTION)
    if model.get("envFromSecret"):
        message = "it could undo what the operator sets: name its variables one by one, and import again"
        remarks.decide(f"{where}.envFromSecret", str(mapping(model, "envFromSecret").get("name")), message)
    if mapping(model, "lmcacheConfig").get("enabled"):
        remarks.decide(f"{where}.lmcacheConfig", "enabled", _RENDER)
    if model.get("chatTemplate"):
        remarks.decide(f"{where}.chatTemplate", "is set", f"its file is on a volume of the chart: {_RENDER}")
    for field, is_named in (
        (
            "spec.models.cache.persistentVolumeClaim.claimName",
            _has_claim(model) and not model.get("pvcExistingClaimName"),
        ),
        ("spec.models.hubTokenSecret.name", isinstance(model.get("hf_token"), str)),
        ("spec.serving.apiKeySecret.name", isinstance(common.get("vllmApiKey"), str)),
    ):
        if is_named:
            remarks.decide(
                field,
                "RELEASE",
                "values do not name the release: write its name, in small letters, as helm list has it",
            )
    return remarks


def _container(
    name: str, model: Mapping[str, Any], common: Mapping[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    env: list[dict[str, Any]] = []
    _add_secret(env, "HF_TOKEN", model.get("hf_token"), ("secretName", "secretKey"), f"hf_token_{name}")
    _add_secret(env, "VLLM_API_KEY", common.get("vllmApiKey"), ("secretName", "secretKey"), "vllmApiKey")
    env += [*objects(common, "env"), *objects(model, "env")]
    mounts, volumes = objects(model, "extraVolumeMounts"), objects(model, "extraVolumes")
    if _has_claim(model):
        claim = model.get("pvcExistingClaimName") or f"RELEASE-{name}-storage-claim"
        volumes = [{"name": "storage", "persistentVolumeClaim": {"claimName": claim}}, *volumes]
        mounts = [{"name": "storage", "mountPath": "/data"}, *mounts]
        env = [{"name": "HF_HOME", "value": "/data"}, *env]
    container = {
        "name": "vllm",
        "image": f"{model.get('repository') or ''}:{model.get('tag') or ''}",
        "command": ["vllm", "serve"],
        "args": list(_arguments(model, common)),
        "env": env,
        "resources": mapping(model, "resources") or _resources(model),
        "volumeMounts": mounts,
        "securityContext": mapping(common, "containerSecurityContext"),
    }
    return container, volumes


def _has_claim(model: Mapping[str, Any]) -> bool:
    return isinstance(model.get("pvcStorage"), str)


def _add_secret(env: list[dict[str, Any]], variable: str, given: Any, keys: tuple[str, str], own_key: str) -> None:
    """Name the Secret of a token; one that stands in the values lies in the chart's own Secret."""
    if isinstance(given, str) and given:
        secret, key = "RELEASE-secrets", own_key
    elif isinstance(given, dict) and all(given.get(each) for each in keys):
        secret, key = (str(given[each]) for each in keys)
    else:
        return
    env.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})


def _arguments(model: Mapping[str, Any], common: Mapping[str, Any]) -> Iterator[str]:
    config = mapping(model, "vllmConfig")
    if model.get("modelURL"):
        yield str(model["modelURL"])
    yield from ("--port", plain_text(common.get("containerPort") or 8000))
    for key, flag in (("enableLoRA", "--enable-lora"), ("enableTool", "--enable-auto-tool-choice")):
        if model.get(key):
            yield flag
    if model.get("toolCallParser"):
        yield from ("--tool-call-parser", str(model["toolCallParser"]))
    if "enableChunkedPrefill" in config:
        yield "--enable-chunked-prefill" if config["enableChunkedPrefill"] else "--no-enable-chunked-prefill"
    if config:
        # The chart turns it off where nobody turns it on.
        yield "--enable-prefix-caching" if config.get("enablePrefixCaching") else "--no-enable-prefix-caching"
    for key, flag in _CONFIG_FLAGS.items():
        if key in config:
            yield from (flag, plain_text(config[key]))
    yield from texts(config, "extraArgs")
    if model.get("modelRevision"):
        yield from ("--revision", str(model["modelRevision"]))


def _resources(model: Mapping[str, Any]) -> dict[str, Any]:
    gpus = (
        {str(model.get("requestGPUType") or GPU_RESOURCE): plain_text(model["requestGPU"])}
        if model.get("requestGPU")
        else {}
    )
    amounts = {
        kind: {
            name: plain_text(model[key])
            for name, key in (("cpu", f"{word}CPU"), ("memory", f"{word}Memory"))
            if model.get(key)
        }
        for kind, word in (("requests", "request"), ("limits", "limit"))
    }
    return {kind: amount | gpus for kind, amount in amounts.items() if amount | gpus}


def _scheduled(pod: dict[str, Any], model: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod with where it may run."""
    if model.get("imagePullSecret"):
        pod["imagePullSecrets"] = [{"name": str(model["imagePullSecret"])}]
    pod.setdefault("runtimeClassName", common.get("runtimeClassName"))
    pod["schedulerName"] = common.get("schedulerName")
    pod["securityContext"] = mapping(common, "securityContext")
    own, shared = objects(model, "tolerations"), objects(common, "tolerations")
    pod["tolerations"] = own if model.get("tolerationsPolicy") == "override" else [*shared, *own]
    terms = objects(model, "nodeSelectorTerms")
    if terms and "affinity" not in pod:
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        pod["affinity"] = {"nodeAffinity": required}
    return {key: value for key, value in pod.items() if value}
