"""Read servers from Deployments, StatefulSets, Pods, LeaderWorkerSets and values of vLLM's production-stack chart."""

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, Final

from specdecode_operator.cluster.nodes import GPU_RESOURCE
from specdecode_operator.importing.model_sources import USUAL_CACHES
from specdecode_operator.importing.spec_builder import (
    ROLLS_OUT,
    SOURCE_KEYS,
    UNDOES,
    MigrationError,
    Object,
    Remarks,
    Workload,
    kubectl,
    name_in,
    namespace_of,
    plain_text,
    required,
)
from specdecode_operator.untrusted import mapping, name_of, objects, texts

_BOUND: Final = ("nodeName", "restartPolicy", "priority", "preemptionPolicy", "hostname", "subdomain")
"""Fields that the scheduler and admission write into a pod, and names that only one pod can have."""


def read_deployment(body: Object) -> Workload:
    """Return the server of a Deployment."""
    return _of_template(body, mapping(body, "spec"), Remarks())


def read_stateful_set(body: Object) -> Workload:
    """Return the server of a StatefulSet; ask for claims of single pods, which replicas cannot share."""
    spec, remarks = mapping(body, "spec"), Remarks()
    for key in ("podManagementPolicy", "serviceName", "persistentVolumeClaimRetentionPolicy", "ordinals"):
        if spec.get(key):
            remarks.drop(key, "engines are alike: they need no names of their own")
    if spec.get("updateStrategy"):
        remarks.own("updateStrategy", ROLLS_OUT)
    claims = [name_in(each) for each in objects(spec, "volumeClaimTemplates")]
    containers = objects(mapping(mapping(spec, "template"), "spec"), "containers")
    mounts = [each for container in containers for each in objects(container, "volumeMounts")]
    message = "gives each pod a claim of its own: name one that all replicas can read in spec.models, or use the hub"
    for claim in claims:
        paths = [str(each.get("mountPath")).rstrip("/") for each in mounts if name_of(each) == claim]
        if not all(any(f"{cache}/".startswith(f"{path}/") for cache in USUAL_CACHES) for path in paths):
            remarks.decide("spec.models", f"volumeClaimTemplates {claim}", message)
    return _of_template(body, spec, remarks, [{"name": claim, "emptyDir": {}} for claim in claims])


def read_pod(body: Object) -> Workload:
    """Return the server of a single Pod."""
    metadata = mapping(body, "metadata")
    return Workload(
        kind="Pod",
        name=name_in(body),
        pod={key: value for key, value in required(body, "spec").items() if key not in _BOUND},
        where="spec.containers",
        metadata={key: mapping(metadata, key) for key in ("labels", "annotations")},
        namespace=namespace_of(body),
        end=kubectl("delete", body),
    )


def _of_template(body: Object, spec: Object, remarks: Remarks, volumes: Sequence[dict[str, Any]] = ()) -> Workload:
    pod = required(body, "spec.template.spec")
    remarks.drop_metadata(body)
    return Workload(
        kind=str(body.get("kind")),
        name=name_in(body),
        pod={**pod, "volumes": [*objects(pod, "volumes"), *volumes]} if volumes else pod,
        where="spec.template.spec.containers",
        metadata=mapping(required(body, "spec.template"), "metadata"),
        namespace=namespace_of(body),
        match_labels=mapping(mapping(spec, "selector"), "matchLabels"),
        spec=spec,
        end=kubectl("scale", body, " --replicas=0"),
        remove=kubectl("delete", body),
        remarks=remarks,
    )


_TEMPLATE: Final = "spec.leaderWorkerTemplate"
_OWN_KEYS: Final = ("rolloutStrategy", "startupPolicy", "networkConfig")


def read_leader_worker_set(body: Object) -> Workload:
    """Return the server that the leaders start; the workers only lend it their GPUs."""
    template, spec, remarks = required(body, _TEMPLATE), mapping(body, "spec"), Remarks()
    size = template.get("size", 1)
    if not isinstance(size, int) or not 0 < size <= 1024:  # noqa: PLR2004  more pods than any server has
        raise MigrationError(f"{_TEMPLATE}.size", str(size), "must be the number of pods in a group")
    leader = "leaderTemplate" if mapping(template, "leaderTemplate") else "workerTemplate"
    pod = required(body, f"{_TEMPLATE}.{leader}.spec")
    for key in _OWN_KEYS:
        if spec.get(key):
            remarks.own(key, "the operator makes a LeaderWorkerSet of its own where a replica needs several nodes")
    if template.get("subGroupPolicy"):
        remarks.decide(f"{_TEMPLATE}.subGroupPolicy", "is set", "groups are not divided: keep the LeaderWorkerSet")
    remarks.ask_for_rest(spec, ("replicas", "leaderWorkerTemplate", *_OWN_KEYS), "spec")
    remarks.drop_metadata(body)
    # The controller gives a leader these variables; its command line may name them.
    given = {"LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "leader"}
    containers = []
    for container in objects(pod, "containers"):
        text = " ".join(str(container.get(key) or "") for key in ("command", "args"))
        env = [{"name": name, "value": value} for name, value in given.items() if re.search(rf"\b{name}\b", text)]
        containers.append({**container, "env": [*env, *objects(container, "env")]} if env else container)
    return Workload(
        kind="LeaderWorkerSet",
        name=name_in(body),
        pod={**pod, "containers": containers},
        where=f"{_TEMPLATE}.{leader}.spec.containers",
        metadata=mapping(mapping(template, leader), "metadata"),
        namespace=namespace_of(body),
        spec={"replicas": spec["replicas"]} if "replicas" in spec else {},
        nodes=size,
        end=kubectl("scale", body, " --replicas=0"),
        remove=kubectl("delete", body),
        remarks=remarks,
    )


_SECTION: Final = "servingEngineSpec"
_RENDER: Final = "helm template RELEASE CHART -f VALUES writes it out: import what that prints"
_STACK: Final = SOURCE_KEYS["production-stack"]


def is_production_stack(body: Object) -> bool:
    """Return whether an object is the chart's values."""
    return "kind" not in body and isinstance(body.get(_SECTION), dict)


def read_production_stack(body: Object) -> list[Workload]:
    """Return the server of each model that is not turned off."""
    common, found = mapping(body, _SECTION), []
    for index, model in enumerate(objects(common, "modelSpec")):
        if model.get("enabled") is False:
            continue
        where, name = f"{_SECTION}.modelSpec[{index}]", str(model.get("name") or "vllm")
        deployment = f"deployment/{shlex.quote(f'RELEASE-{name}-deployment-vllm')}"
        workload = Workload(
            kind="production-stack model",
            name=name,
            pod=_pod(name, model, common),
            where=where,
            metadata={"labels": mapping(common, "labels"), "annotations": mapping(model, "podAnnotations")},
            match_labels=mapping(common, "labels"),
            spec={"strategy": mapping(common, "strategy"), "replicas": model.get("replicaCount", 1)},
            end=f"kubectl scale {deployment} --replicas=0",
            remove=f"helm upgrade RELEASE CHART -f VALUES, without {where}",
            remarks=_remarks(model, common, where),
        )
        found.append(workload)
    return found


def _remarks(model: Object, common: Object, where: str) -> Remarks:
    remarks = Remarks()
    remarks.own_keys(model, _STACK["own"], f"{where}.")
    remarks.ask_for_rest(model, (*_STACK["read"], *_STACK["pod"], *_STACK["own"]), where)
    remarks.ask_for_rest(
        mapping(model, "vllmConfig"), (*_STACK["vllm_flags"], *_STACK["vllm_config"]), f"{where}.vllmConfig"
    )
    remarks.ask_for_rest(common, _STACK["common"], _SECTION)
    if model.get("envFromSecret"):
        remarks.decide(f"{where}.envFromSecret", str(mapping(model, "envFromSecret").get("name")), UNDOES)
    if mapping(model, "lmcacheConfig").get("enabled"):
        remarks.decide(f"{where}.lmcacheConfig", "enabled", _RENDER)
    if model.get("chatTemplate"):
        remarks.decide(f"{where}.chatTemplate", "is set", f"its file is on a volume of the chart: {_RENDER}")
    message = "values do not name the release: write its name, in small letters, as helm list has it"
    if _has_claim(model) and not model.get("pvcExistingClaimName"):
        remarks.decide("spec.models.cache.persistentVolumeClaim.claimName", "RELEASE", message)
    if isinstance(model.get("hf_token"), str):
        remarks.decide("spec.models.hubTokenSecret.name", "RELEASE", message)
    if isinstance(common.get("vllmApiKey"), str):
        remarks.decide("spec.serving.apiKeySecret.name", "RELEASE", message)
    return remarks


def _pod(name: str, model: Object, common: Object) -> dict[str, Any]:
    env = [
        *_secret("HF_TOKEN", model.get("hf_token"), f"hf_token_{name}"),
        *_secret("VLLM_API_KEY", common.get("vllmApiKey"), "vllmApiKey"),
        *objects(common, "env"),
        *objects(model, "env"),
    ]
    resources = {}
    for kind, word in (("requests", "request"), ("limits", "limit")):
        keys = {"cpu": f"{word}CPU", "memory": f"{word}Memory"}
        amounts = {resource: plain_text(model[key]) for resource, key in keys.items() if model.get(key)}
        if model.get("requestGPU"):
            amounts[str(model.get("requestGPUType") or GPU_RESOURCE)] = plain_text(model["requestGPU"])
        if amounts:
            resources[kind] = amounts
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
        "resources": mapping(model, "resources") or resources,
        "volumeMounts": mounts,
        "securityContext": mapping(common, "containerSecurityContext"),
    }
    pod = {key: model[key] for key in _STACK["pod"] if model.get(key)} | {"containers": [container], "volumes": volumes}
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


def _has_claim(model: Object) -> bool:
    return isinstance(model.get("pvcStorage"), str)


def _secret(variable: str, given: Any, own_key: str) -> list[dict[str, Any]]:
    if isinstance(given, str) and given:
        secret, key = "RELEASE-secrets", own_key
    elif isinstance(given, dict) and given.get("secretName") and given.get("secretKey"):
        secret, key = str(given["secretName"]), str(given["secretKey"])
    else:
        return []
    return [{"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}]


def _arguments(model: Object, common: Object) -> Iterator[str]:
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
        # The chart turns it off unless it is turned on.
        yield "--enable-prefix-caching" if config.get("enablePrefixCaching") else "--no-enable-prefix-caching"
    for key, flag in _STACK["vllm_flags"].items():
        if key in config:
            yield from (flag, plain_text(config[key]))
    yield from texts(config, "extraArgs")
    if model.get("modelRevision"):
        yield from ("--revision", str(model["modelRevision"]))
