"""Find servers in objects, manifests, docker commands and compose files; report what to import instead of other kinds.

Resolves variables that a server takes from ConfigMaps and Secrets of the same input. Commands of podman and nerdctl
are read as those of docker.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Final

from specdecode_operator.api.deployment import KIND
from specdecode_operator.cluster.nodes import GPU_RESOURCE
from specdecode_operator.importing.dynamo import read_graph
from specdecode_operator.importing.engine_container import TOKEN_VARIABLES
from specdecode_operator.importing.kserve import read_inference_service, read_llm_inference_service
from specdecode_operator.importing.model_sources import USUAL_CACHES
from specdecode_operator.importing.runtimes import read_ray_service, read_vllm_runtime
from specdecode_operator.importing.server_command import (
    MAX_CHARACTERS,
    Command,
    ScriptError,
    is_harmless,
    read_script,
    script_index,
    shown,
    without_log,
)
from specdecode_operator.importing.spec_builder import (
    ROLLS_OUT,
    SOURCE_KEYS,
    UNDOES,
    MigrationError,
    Object,
    Remarks,
    Workload,
    in_namespace,
    kubectl,
    name_in,
    namespace_of,
    operand,
    plain_text,
    required,
)
from specdecode_operator.untrusted import mapping, name_of, objects, texts, whole_number
from specdecode_operator.vllm.environment import API_KEY_VARIABLE

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
            remarks.drop(key, "engines are interchangeable and need no fixed names")
    if spec.get("updateStrategy"):
        remarks.own("updateStrategy", ROLLS_OUT)
    claims = [name_in(each) for each in objects(spec, "volumeClaimTemplates")]
    containers = objects(mapping(mapping(spec, "template"), "spec"), "containers")
    mounts = [each for container in containers for each in objects(container, "volumeMounts")]
    message = "gives each pod its own claim: name a claim in spec.models that all replicas can read, or use the hub"
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
            remarks.own(key, "the operator creates a LeaderWorkerSet if a replica needs several nodes")
    if template.get("subGroupPolicy"):
        remarks.decide(
            f"{_TEMPLATE}.subGroupPolicy", "is set", "the operator does not divide groups: keep the LeaderWorkerSet"
        )
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
_RENDER: Final = "import the output of helm template RELEASE CHART -f VALUES, which contains it"
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
    message = "values do not contain the release: write its name in lower case, as in helm list"
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


GROUPS: Final[Mapping[str, str]] = {
    "Deployment": "apps",
    "StatefulSet": "apps",
    "Pod": "",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io",
    "LLMInferenceService": "serving.kserve.io",
    "InferenceService": "serving.kserve.io",
    "ServingRuntime": "serving.kserve.io",
    "ClusterServingRuntime": "serving.kserve.io",
    "DynamoGraphDeployment": "nvidia.com",
    "VLLMRuntime": "production-stack.vllm.ai",
    "RayService": "ray.io",
}

_CREATES: Final[Mapping[tuple[str | None, str], tuple[str, str]]] = {
    ("inference.llmkube.dev", "InferenceService"): ("Deployment", "deployment"),
    ("kaito.sh", "Workspace"): ("StatefulSet", "statefulset"),
}
"""Kinds of other projects, with the kind that their controllers create under the same name."""


def is_of_its_group(body: Object) -> bool:
    """Return whether an object's apiVersion, if it has one, is of the group of its kind in `GROUPS`."""
    group = _group(body)
    return group is None or GROUPS.get(str(body.get("kind")), group) == group


def import_instead(body: Object) -> str | None:
    """Return what to import instead of an object of another project; None for an unknown kind."""
    kind, group = str(body.get("kind")), _group(body)
    name, where = name_in(body), in_namespace(namespace_of(body))
    shown = f"{kind} of {body.get('apiVersion')} is not read"
    if kind == "Model" and group == "kubeai.org":
        selector = shlex.quote(f"model={name}")
        return (
            f"{shown}: import a Pod that it creates, specdecode import pod/NAME{where}; its Pods:"
            f" kubectl get pods{where} -l {selector}"
        )
    if (group, kind) in _CREATES:
        created, written = _CREATES[group, kind]
        command = f"specdecode import {shlex.quote(f'{written}/{name}')}{where}"
        return f"{shown}: import the {created} that it creates: {command}"
    if kind in GROUPS and not is_of_its_group(body):
        return f"{shown}: import the Deployment that it creates, specdecode import deployment/NAME{where}"
    return None


def _group(body: Object) -> str | None:
    version = body.get("apiVersion")
    return version.rpartition("/")[0] if isinstance(version, str) else None


def with_values(workload: Workload, others: Sequence[Object]) -> Workload:
    """Return the server with the values of its variables that ConfigMaps of the same file hold.

    A variable from a Secret stays a reference: only the names of its keys are read.
    """
    maps, secrets = (
        {
            name_in(each): each
            for each in others
            if each.get("kind") == kind and mapping(each, "metadata").get("namespace") in (None, workload.namespace)
        }
        for kind in ("ConfigMap", "Secret")
    )
    if not maps and not secrets:
        return workload

    def runs_vllm(container: Object) -> bool:
        return any("vllm" in str(container.get(key)).lower() for key in ("image", "command", "args"))

    pod, used = dict(workload.pod), set[str]()
    for key in ("containers", "initContainers"):
        if isinstance(pod.get(key), list):
            pod[key] = [
                _resolved(each, maps, secrets, used)
                if isinstance(each, dict) and (key == "initContainers" or runs_vllm(each))
                else each
                for each in pod[key]
            ]
    for name in sorted(used):
        why = "its current values are copied: later changes do not reach the engines"
        workload.remarks.drop(f"ConfigMap {name}", why)
    return replace(workload, pod=pod)


def _resolved(
    container: Object, maps: Mapping[str, Object], secrets: Mapping[str, Object], used: set[str]
) -> dict[str, Any]:
    from_all: list[dict[str, Any]] = []
    unread, own = [], []
    sources = container.get("envFrom")
    for source in sources if isinstance(sources, list) else []:
        found = list(_of_source(source, maps, secrets, used)) if isinstance(source, dict) else []
        from_all += found
        if not found:
            unread.append(source)
    for each in objects(container, "env"):
        reference = mapping(mapping(each, "valueFrom"), "configMapKeyRef")
        name, key = name_of(reference), str(reference.get("key"))
        values = mapping(maps.get(name, {}), "data") if reference else {}
        if key in values:
            used.add(name)
            # The kubelet reads two dollars as one: a value of a ConfigMap is text.
            own.append({"name": name_of(each), "value": str(values[key]).replace("$(", "$$(")})
        else:
            own.append(each)
    names = {name_of(each) for each in own}
    env = [*(each for each in from_all if each["name"] not in names), *own]
    rest = {key: value for key, value in container.items() if key not in ("env", "envFrom")}
    return rest | ({"env": env} if env else {}) | ({"envFrom": unread} if unread else {})


def _of_source(
    source: Object, maps: Mapping[str, Object], secrets: Mapping[str, Object], used: set[str]
) -> Iterator[dict[str, Any]]:
    prefix = str(source.get("prefix") or "")
    config, secret = name_of(mapping(source, "configMapRef")), name_of(mapping(source, "secretRef"))
    if "configMapRef" in source and config in maps:
        used.add(config)
        for key, value in mapping(maps[config], "data").items():
            yield {"name": f"{prefix}{key}", "value": str(value)}
    elif "secretRef" in source and secret in secrets:
        for key in {**mapping(secrets[secret], "data"), **mapping(secrets[secret], "stringData")}:
            yield {"name": f"{prefix}{key}", "valueFrom": {"secretKeyRef": {"name": secret, "key": str(key)}}}


_STARTS: Final = re.compile(
    r"^[ \t]*(?:(?:[A-Za-z_]\w*=\S*|sudo|exec|env|nohup|time)[ \t]+)*"
    r"(?:(?:\S*/)?(?:docker|podman|nerdctl)[ \t]|(?:\S*/)?vllm[ \t]+serve\b|(?:\S*/)?python[\d.]*[ \t].*\bvllm\b)",
    re.MULTILINE,
)
_OBJECT: Final = re.compile(r"^(?:apiVersion|kind|services|servingEngineSpec)[ \t]*:|\A\s*\{", re.MULTILINE)
_PROMPT: Final = re.compile(r"^[ \t]*[$#][ \t]+(?=\S+[ \t])(?=(?:sudo |docker |podman |nerdctl |vllm ))", re.MULTILINE)

_NOHUP: Final = re.compile(r"^([ \t]*(?:[A-Za-z_]\w*=\S*[ \t]+|sudo[ \t]+)*)nohup[ \t]+", re.MULTILINE)


def is_command_text(text: str) -> bool:
    """Return whether a text is a command line or a script that starts vLLM, and not YAML."""
    if len(text) > MAX_CHARACTERS:
        return False
    return _OBJECT.search(text) is None and _STARTS.search(_PROMPT.sub("", text)) is not None


def read_command_text(text: str) -> Workload:
    """Return the server that a command line or a script starts; raise MigrationError for several containers."""
    text = "\n".join(map(without_log, _NOHUP.sub(r"\1", _PROMPT.sub("", text)).split("\n")))
    try:
        commands = read_script(text, {})
    except ScriptError as error:
        raise MigrationError("command line", error.text, str(error)) from error
    if len(commands) == 1:
        (command,) = commands
        at = script_index(command.words)
        if at is not None and at + 1 == len(command.words) and not command.env and not command.unknown:
            return read_command_text(command.words[at])
    runs = [command for command in commands if is_docker_run(command.words)]
    if len(runs) > 1:
        raise MigrationError("command line", f"{len(runs)} containers", "import them one at a time")
    if runs:
        workload = read_docker_run(runs[0])
        for command in commands:
            if command is not runs[0] and not is_of_docker(command.words) and not is_harmless(command):
                message = "import only reads the container: do it in the image, or in an init container"
                workload.remarks.decide("command line", shown(command.words), message)
        return workload
    # The shell expands variables here, not the kubelet.
    container = {"name": "vllm", "command": ["bash", "-c", text.replace("$$", "$$$$")]}
    return Workload(
        kind="command line",
        name="",
        pod={"containers": [container]},
        where="command line",
        says_gpus=False,
        outside=True,
    )


def read_words(words: Sequence[str]) -> Workload:
    """Return the server that the words of one command start; raise MigrationError as `read_command_text` does."""
    # A single word is a whole command line in quotes.
    return read_command_text(words[0] if len(words) == 1 else shlex.join(words))


_OF_KINDS: Final[Mapping[str, Callable[[Object], Workload]]] = {
    "Deployment": read_deployment,
    "StatefulSet": read_stateful_set,
    "Pod": read_pod,
    "LeaderWorkerSet": read_leader_worker_set,
    "VLLMRuntime": read_vllm_runtime,
}
_SEVERAL: Final[Mapping[str, Callable[[Object], list[Workload]]]] = {
    "DynamoGraphDeployment": read_graph,
    "RayService": read_ray_service,
}
"""Kinds that may run several servers."""
KINDS: Final = (*_OF_KINDS, *_SEVERAL, "LLMInferenceService", "InferenceService")

READABLE: Final = (
    f"{', '.join(KINDS[:-1])} or {KINDS[-1]}, docker compose, values of the production-stack chart,"
    " or a vllm serve or docker run command line"
)


def read_workloads(body: Object, others: Sequence[Object] = ()) -> list[Workload]:
    """Return the servers of one object, empty for an unknown kind; ``others`` are the other objects of the input."""
    for owner in objects(mapping(body, "metadata"), "ownerReferences"):
        if owner.get("kind") == KIND:
            fix = f"it belongs to {KIND} {owner.get('name')} already, so it does not need an import"
            raise MigrationError("metadata.ownerReferences", KIND, fix)
    if is_compose(body):
        return read_compose(body)
    if is_production_stack(body):
        return read_production_stack(body)
    kind = str(body.get("kind"))
    if not is_of_its_group(body):
        return []
    if kind == "InferenceService":
        found = [read_inference_service(body, others)]
    elif kind == "LLMInferenceService":
        found = read_llm_inference_service(body, others)
    elif kind in _SEVERAL:
        found = _SEVERAL[kind](body)
    else:
        found = [_OF_KINDS[kind](body)] if kind in _OF_KINDS else []
    return [with_values(each, others) for each in found]


_MOST_USER_ID: Final = 2**31 - 1
"""Largest runAsUser and runAsGroup that Kubernetes takes (IsValidUserID of k8s.io/apimachinery)."""

_OF_MACHINE: Final = "only applies to the machine that runs it; a pod has its own"


def _as_text(word: str) -> str:
    """Escape text that a pod would expand as a variable."""
    return re.sub(r"\$(?=[$(])", "$$", word)


@dataclass
class _Container:
    body: dict[str, Any] = field(default_factory=lambda: {"name": "vllm"})
    volumes: list[dict[str, Any]] = field(default_factory=list)
    remarks: Remarks = field(default_factory=Remarks)
    gpus: int | None = None
    cdi_gpus: list[str] = field(default_factory=list)  # CDI names of single GPUs, or of all
    name: str = ""

    def add_variable(self, name: str, value: str | None) -> None:
        """Add a variable; None is a value that only the machine has that runs it."""
        if value is None and name not in {API_KEY_VARIABLE, *TOKEN_VARIABLES}:
            message = "has its value only on the machine that runs it: write NAME=VALUE, and import again"
            self.remarks.decide("spec.engine.env", name, message)
        else:
            # A token belongs into a Secret, wherever its value comes from.
            self.body.setdefault("env", []).append({"name": name, "value": _as_text(value or "")})

    def add_mount(self, source: str, target: str, *, read_only: bool) -> None:
        name = f"volume-{len(self.volumes)}"
        # docker stores a named volume in its own folder.
        is_folder = source.startswith(("/", ".", "~", "$"))
        path = source if is_folder else f"/var/lib/docker/volumes/{source or 'nameless'}/_data"
        self.volumes.append({"name": name, "hostPath": {"path": path}})
        mount = {"name": name, "mountPath": target} | ({"readOnly": True} if read_only else {})
        self.body.setdefault("volumeMounts", []).append(mount)

    def add_volume(self, text: str) -> None:
        """Add a volume that is written as SOURCE:TARGET or SOURCE:TARGET:ro."""
        source, _, rest = text.partition(":")
        if "${" in source:
            # The default of a variable may contain a colon.
            source, _, rest = text.rpartition(":/")
            rest = f"/{rest}"
        if target := rest.partition(":")[0]:
            self.add_mount(source, target, read_only=rest.endswith(":ro"))

    def limit(self, resource: str, amount: str) -> None:
        if resource == "memory":
            match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)\s?([bkmgt]?)i?b?", amount.lower())
            units = {"": "", "b": "", "k": "Ki", "m": "Mi", "g": "Gi", "t": "Ti"}
            amount = f"{match[1]}{units[match[2]]}" if match else amount
        self.body.setdefault("resources", {}).setdefault("limits", {})[resource] = amount


def gpus_of_devices(value: str) -> int | None:
    """Return the number of GPUs that ``--gpus`` requests; None for all."""
    text = value.strip("\"'")
    if (number := whole_number(text, 99_999)) is not None:
        return number
    if devices := re.search(r"device=([^\"']+)", text):
        return len([each for each in devices[1].split(",") if each and "=" not in each])
    count = re.search(r"count=(\d{1,5})\b", text)
    return int(count[1]) if count else None


_CDI_GPU: Final = re.compile(r"nvidia\.com/gpu=.+")
"""CDI name of an NVIDIA GPU, or of all, in the specification that nvidia-ctk writes."""


def gpus_of_cdi(names: Sequence[str]) -> int | None:
    """Return the number of distinct GPUs among CDI names; None if they include `nvidia.com/gpu=all`."""
    return None if "nvidia.com/gpu=all" in names else len(set(names))


_PROGRAMS: Final = frozenset({"docker", "podman", "nerdctl"})
_RUN: Final = SOURCE_KEYS["docker run"]


def is_docker_run(words: Sequence[str]) -> bool:
    """Test whether a command starts a container."""
    return _image_options(words) is not None


def is_of_docker(words: Sequence[str]) -> bool:
    """Test whether a command is one of docker's, such as docker pull."""
    return any(PurePosixPath(word).name in _PROGRAMS for word in words[:2])


def read_docker_run(command: Command) -> Workload:
    """Return the container that one command starts; raise MigrationError if it names no image."""
    words = list(_image_options(command.words) or ())
    run = _Container()
    while words and words[0].startswith("-") and words[0] != "-":
        for name, value in _option(words):
            _take(name, value, run, command.unknown)
    if words[:1] == ["--"]:
        words.pop(0)
    if not words:
        raise MigrationError("command line", "docker run", "names no image: name the one that holds vLLM")
    if unknown := sorted(command.unknown.intersection(words)):
        names = ", ".join(sorted({name for word in unknown for name in re.findall(r"\$\{?(\w+)", word)}))
        raise MigrationError(
            "command line", names, "are replaced on the machine that runs it: write the values, and import again"
        )
    run.body["image"], *args = map(_as_text, words)
    if args:
        run.body["args"] = args
    if run.cdi_gpus:
        run.gpus = gpus_of_cdi(run.cdi_gpus)
    if run.gpus is not None:
        run.limit(GPU_RESOURCE, str(run.gpus))
    return Workload(
        kind="docker run",
        name=run.name,
        pod={"containers": [run.body], "volumes": run.volumes},
        where="docker run",
        says_gpus=run.gpus is not None,
        outside=True,
        end=f"docker stop {operand(run.name)}" if run.name else "",
        remarks=run.remarks,
    )


def _image_options(words: Sequence[str]) -> Sequence[str] | None:
    rest = list(words)
    while rest and (rest[0] in {"sudo", "exec"} or re.fullmatch(r"[A-Za-z_]\w*=.*", rest[0])):
        rest.pop(0)
    if not rest or PurePosixPath(rest[0]).name not in _PROGRAMS:
        return None
    rest.pop(0)
    if rest[:1] == ["container"]:
        rest.pop(0)
    return rest[1:] if rest[:1] in (["run"], ["create"]) else None


def _option(words: list[str]) -> Iterator[tuple[str, str]]:
    word = words.pop(0)
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        if not equals and name not in _RUN["switches"] and words:
            value = words.pop(0)
        yield name, value
        return
    letters = word[1:]
    while letters:
        name, letters = _RUN["letters"].get(letters[0], f"-{letters[0]}"), letters[1:]
        if name in _RUN["switches"]:
            yield name, ""
            continue
        # The rest is the letter's value; an unknown letter takes no further word.
        value = letters.removeprefix("=") if letters else words.pop(0) if words and name.startswith("--") else ""
        yield name, value
        return


def _take(name: str, value: str, run: _Container, unknown: frozenset[str]) -> None:
    is_unknown = bool(value) and any(word.endswith(value) for word in unknown)
    if is_unknown and name == "--env":
        run.add_variable(value.partition("=")[0], None)
    elif is_unknown and name != "--volume":
        run.remarks.decide(
            "command line", name, "has its value only on the machine that runs it: write the value, and import again"
        )
    elif name in _TAKERS or name in _RUN["own"]:
        if name in _TAKERS:
            _TAKERS[name](value, run)
        if name in _RUN["own"]:
            run.remarks.own(name, _RUN["own"][name])
    elif name in _RUN["dropped"]:
        run.remarks.drop(name, _OF_MACHINE)
    elif name == "--device" and _CDI_GPU.fullmatch(value):
        run.cdi_gpus.append(value)
    else:
        message = "is a setting that the pods of the operator do not have: set it in podTemplate, or remove it"
        run.remarks.decide("spec.podTemplate", name, message)


def _take_mount(value: str, run: _Container) -> None:
    parts = dict(part.partition("=")[::2] for part in value.split(","))
    target = parts.get("target") or parts.get("destination") or parts.get("dst")
    if target and parts.get("type") != "tmpfs":
        run.add_mount(parts.get("source") or parts.get("src") or "", target, read_only="ro" in parts)


def _take_user(value: str, run: _Container) -> None:
    user, _, group = value.partition(":")
    numbers = {"runAsUser": whole_number(user, _MOST_USER_ID), "runAsGroup": whole_number(group, _MOST_USER_ID)}
    context = {key: number for key, number in numbers.items() if number is not None}
    if context:
        run.body["securityContext"] = context
    else:
        run.remarks.decide("spec.podTemplate", f"--user {value}", "a pod needs a numeric user: write --user UID:GID")


_ENV_FILE: Final = "contains variables that import does not read: write them as --env NAME=VALUE, and import again"
_TAKERS: Final[Mapping[str, Callable[[str, _Container], None]]] = {
    "--gpus": lambda value, run: setattr(run, "gpus", gpus_of_devices(value)),
    "--env": lambda value, run: run.add_variable(*(value.split("=", 1) if "=" in value else (value, None))),
    "--env-file": lambda value, run: run.remarks.decide("spec.engine.env", f"--env-file {value}", _ENV_FILE),
    "--volume": lambda value, run: run.add_volume(value),
    "--mount": _take_mount,
    "--memory": lambda value, run: run.limit("memory", value),
    "--cpus": lambda value, run: run.limit("cpu", value),
    "--user": _take_user,
    "--workdir": lambda value, run: run.body.update(workingDir=value),
    "--entrypoint": lambda value, run: run.body.update(command=[value] if value else []),
    "--name": lambda value, run: setattr(run, "name", value),
}


_RESOLVE: Final = "import the output of docker compose config, which contains it"
_COMPOSE: Final = SOURCE_KEYS["docker compose"]


def is_compose(body: Object) -> bool:
    """Test whether an object is a compose file."""
    return "kind" not in body and isinstance(body.get("services"), dict)


def read_compose(body: Object) -> list[Workload]:
    """Return the services that start vLLM; raise MigrationError if one has values that only compose fills in."""
    return [
        _read(str(name), service)
        for name, service in mapping(body, "services").items()
        if isinstance(service, dict)
        and any(re.search(r"(?i)\bvllm\b", str(service.get(key) or "")) for key in ("image", "command", "entrypoint"))
    ]


def _read(name: str, service: Object) -> Workload:
    where, container = f"services.{name}", _Container()
    remarks = container.remarks
    for key, entry in (("image", "image"), ("entrypoint", "command"), ("command", "args")):
        if service.get(key):
            words = list(_words(service[key], f"{where}.{key}"))
            container.body[entry] = words[0] if key == "image" else words
    _take_variables(service, container, where)
    _take_volumes(service, container)
    if service.get("working_dir"):
        container.body["workingDir"] = str(service["working_dir"])
    if (user := whole_number(service.get("user"), _MOST_USER_ID)) is not None:
        container.body["securityContext"] = {"runAsUser": user}
    elif service.get("user"):
        remarks.decide("spec.podTemplate", f"{where}.user", "a pod needs a numeric user: write UID:GID")
    _take_resources(service, container, where)
    for key in service:
        if key in _COMPOSE["own"]:
            remarks.own(f"{where}.{key}", _COMPOSE["own"][key])
        elif key in _COMPOSE["dropped"]:
            remarks.drop(f"{where}.{key}", _OF_MACHINE)
    only_gpus = ["devices"] if service.get("devices") == container.cdi_gpus else []
    remarks.ask_for_rest(service, (*_COMPOSE["read"], *_COMPOSE["own"], *_COMPOSE["dropped"], *only_gpus), where)
    replicas = mapping(service, "deploy").get("replicas", service.get("scale"))
    return Workload(
        kind="docker compose",
        name=str(service.get("container_name") or name),
        pod={"containers": [container.body], "volumes": container.volumes},
        where=where,
        spec={"replicas": replicas} if replicas is not None else {},
        says_gpus=container.gpus is not None,
        outside=True,
        end=f"docker compose stop {operand(name)}",
        remarks=remarks,
    )


def _words(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, str):
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise MigrationError(where, "the text", f"holds an open quote ({error}): close it") from error
    else:
        words = [plain_text(each) for each in value] if isinstance(value, list) else []
    for word in words:
        name = _filled_in(word)
        if name is not None:
            raise MigrationError(where, f"${{{name}}}", f"is filled in from another place: {_RESOLVE}")
        # Compose and a pod both read two dollars as one.
        yield word


def _filled_in(text: str) -> str | None:
    found = re.search(r"\$(?:\{(\w+)[^}]*\}|(\w+))", text.replace("$$", ""))
    return (found[1] or found[2]) if found else None


def _take_variables(service: Object, container: _Container, where: str) -> None:
    given = service.get("environment")
    if isinstance(given, dict):
        pairs = [(str(name), value) for name, value in given.items()]
    else:
        written = [each.partition("=") for each in texts(service, "environment")]
        pairs = [(name, value if equals else None) for name, equals, value in written]
    for name, value in pairs:
        text = None if value is None else plain_text(value)
        is_known = text is not None and _filled_in(text) is None
        container.add_variable(name, str(text).replace("$$", "$") if is_known else None)
    if service.get("env_file"):
        container.remarks.decide("spec.engine.env", f"{where}.env_file", f"is not read by import: {_RESOLVE}")


def _take_volumes(service: Object, container: _Container) -> None:
    given = service.get("volumes")
    for each in given if isinstance(given, list) else []:
        if not isinstance(each, dict):
            container.add_volume(str(each))
        elif each.get("type") != "tmpfs" and each.get("target"):
            source, read_only = str(each.get("source") or ""), each.get("read_only") is True
            container.add_mount(source, str(each["target"]), read_only=read_only)


def _take_resources(service: Object, container: _Container, where: str) -> None:
    resources = mapping(mapping(service, "deploy"), "resources")
    limits = mapping(resources, "limits")
    if cpus := limits.get("cpus") or service.get("cpus"):
        container.limit("cpu", plain_text(cpus))
    if memory := limits.get("memory") or service.get("mem_limit"):
        container.limit("memory", plain_text(memory))
    _take_gpus(service, resources, container, where)
    for key in mapping(service, "deploy"):
        if key not in ("resources", "replicas"):
            message = "only applies to the machines that run it; the operator plans and rolls out itself"
            container.remarks.drop(f"{where}.deploy.{key}", message)


def _take_gpus(service: Object, resources: Object, container: _Container, where: str) -> None:
    gpus: list[int | None] = []
    for device in [*objects(mapping(resources, "reservations"), "devices"), *objects(service, "gpus")]:
        if device.get("driver") not in (None, "nvidia", "cdi"):
            message = "the operator only supports NVIDIA GPUs"
            container.remarks.decide(f"{where}.deploy.resources", str(device.get("driver")), message)
        elif ids := texts(device, "device_ids"):
            gpus.append(gpus_of_cdi(ids))
        else:
            gpus.append(gpus_of_devices(str(device.get("count", "all"))))
    container.cdi_gpus += (each for each in texts(service, "devices") if _CDI_GPU.fullmatch(each))
    if container.cdi_gpus:
        gpus.append(gpus_of_cdi(container.cdi_gpus))
    known = [each for each in gpus if each is not None]
    if gpus and len(known) == len(gpus):
        container.gpus = sum(known)
    if container.gpus:
        container.limit(GPU_RESOURCE, str(container.gpus))
