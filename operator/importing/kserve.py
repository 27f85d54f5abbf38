"""Read servers from KServe's InferenceService and LLMInferenceService, with storage and speculation."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from specdecode_operator.importing.spec_builder import MigrationError, required
from specdecode_operator.importing.workload import Remarks, Workload, name_in, namespace_of, quoted_name, within
from specdecode_operator.problems import MISSING, shown
from specdecode_operator.untrusted import mapping, name_of, objects, texts

MODEL_PATH: Final = "/mnt/models"
SECRET_ANNOTATION: Final = "serving.kserve.io/secretName"  # noqa: S105 (no password)
"""Names the Secret with the credentials of a model's storage (pkg/credentials of KServe)."""

DRAFT_PATH: Final = "/mnt/speculator"
_FETCH_IMAGE: Final = "kserve/storage-initializer"
_TOKEN_KEY: Final = "HF_TOKEN"  # noqa: S105 (no password)
_VOLUME: Final = "kserve-model"
_DRAFT_VOLUME: Final = "kserve-speculator"


def stored(pod: Mapping[str, Any], uri: str) -> dict[str, Any]:
    """Return the pod with its model where an address says: on the hub, on a claim, or elsewhere."""
    scheme, _, place = uri.partition("://")
    mount: dict[str, Any] = {"name": _VOLUME, "mountPath": MODEL_PATH}
    if scheme == "hf":
        model, _, revision = place.partition(":")
        command = ["hf", "download", model, "--local-dir", MODEL_PATH, *(["--revision", revision] if revision else [])]
        fetch = {"name": "storage-initializer", "image": _FETCH_IMAGE, "command": command}
        found = _mounted(pod, mount, {"emptyDir": {}})
        return {**found, "initContainers": [*objects(pod, "initContainers"), fetch]}
    if scheme == "pvc":
        claim, _, folder = place.partition("/")
        volume = {"persistentVolumeClaim": {"claimName": claim}}
        return _mounted(pod, mount | ({"subPath": folder.strip("/")} if folder.strip("/") else {}), volume)
    # Nothing else is a place that models are taken from: named by its address, the model is asked for.
    address = urlsplit(uri)._replace(query="", fragment="").geturl() if "@" not in uri else f"{scheme}://…"
    containers = [_renamed(each, address) for each in objects(pod, "containers")]
    return {**pod, "containers": containers}


def draft_name(uri: str) -> str:
    """Return how the server names a draft at an address: a hub id, the path of a claim, or the address itself."""
    scheme, _, place = uri.partition("://")
    return {"hf": place, "pvc": DRAFT_PATH}.get(scheme, uri)


def stored_draft(pod: Mapping[str, Any], uri: str) -> dict[str, Any]:
    """Return the pod with the claim of a draft mounted; a draft elsewhere needs no volume."""
    scheme, _, place = uri.partition("://")
    if scheme != "pvc":
        return dict(pod)
    claim, _, folder = place.partition("/")
    mount = {"name": _DRAFT_VOLUME, "mountPath": DRAFT_PATH} | ({"subPath": folder.strip("/")} if folder else {})
    return _mounted(pod, mount, {"persistentVolumeClaim": {"claimName": claim}})


def _mounted(pod: Mapping[str, Any], mount: dict[str, Any], volume: dict[str, Any]) -> dict[str, Any]:
    first, *rest = objects(pod, "containers")
    first = {**first, "volumeMounts": [*objects(first, "volumeMounts"), mount]}
    return {
        **pod,
        "containers": [first, *rest],
        "volumes": [*objects(pod, "volumes"), {**volume, "name": mount["name"]}],
    }


def _renamed(container: Mapping[str, Any], address: str) -> dict[str, Any]:
    words = {
        key: [
            address if word == MODEL_PATH else word.replace(f"={MODEL_PATH}", f"={address}")
            for word in texts(container, key)
        ]
        for key in ("command", "args")
        if key in container
    }
    return {**container, **words}


def with_token(pod: dict[str, Any], body: Mapping[str, Any], remarks: Remarks) -> dict[str, Any]:
    """Return the pod whose download reads the hub's token from the Secret that an annotation of the object names."""
    secret = mapping(mapping(body, "metadata"), "annotations").get(SECRET_ANNOTATION)
    if not secret:
        return pod
    fetches = [each for each in objects(pod, "initContainers") if each.get("image") == _FETCH_IMAGE]
    if not fetches:
        remarks.drop(f"annotation {SECRET_ANNOTATION}", "is for a download, and the model is not downloaded")
        return pod
    remarks.own(f"annotation {SECRET_ANNOTATION}", f"its key {_TOKEN_KEY} is the hub's token")
    reference = {"secretKeyRef": {"name": str(secret), "key": _TOKEN_KEY}}
    fetches[-1]["env"] = [{"name": _TOKEN_KEY, "valueFrom": reference}]
    return pod


RUNTIMES: Final = ("ServingRuntime", "ClusterServingRuntime")
_PREDICTOR: Final = "spec.predictor"
_CONTAINER: Final = "kserve-container"
_OWN_SERVER: Final = "huggingface"
_AUTOSCALED: Final = "say in spec.replicas how many there are, and point an autoscaler at the new object, or remove it"
_OF_KSERVE: Final = {
    "containerConcurrency": "vLLM queues what it does not run: spec.serving.maxNumSeqs",
    "deploymentStrategy": "an old engine ends before its successor starts",
    "timeout": "clients and gateways have their own",
}
_READ: Final = ("model", "containers", "minReplicas", "maxReplicas", "labels", "annotations", *_OF_KSERVE)
_OF_PODS: Final = (
    "affinity", "automountServiceAccountToken", "dnsConfig", "dnsPolicy", "hostAliases", "imagePullSecrets",
    "initContainers", "nodeSelector", "priorityClassName", "runtimeClassName", "schedulerName", "securityContext",
    "serviceAccountName", "terminationGracePeriodSeconds", "tolerations", "topologySpreadConstraints", "volumes",
)  # fmt: skip
_MODEL_READ: Final = ("args", "modelFormat", "name", "protocolVersion", "runtime", "storageUri", "storage")
_OF_CONTAINERS: Final = (
    "command", "env", "envFrom", "image", "imagePullPolicy", "lifecycle", "livenessProbe", "ports", "readinessProbe",
    "resources", "securityContext", "startupProbe", "volumeMounts", "workingDir",
)  # fmt: skip
_HUGGINGFACE_FLAGS: Final = {
    "--model-name": "--served-model-name",
    "--model-id": "--model",
    "--model-dir": "--model",
    "--model-revision": "--revision",
    "--max-length": "--max-model-len",
}
"""python/huggingfaceserver of KServe: its own names for what vLLM has; all others go to vLLM as they are."""

_HUGGINGFACE_ONLY: Final = ("--backend", "--http-port", "--workers", "--enable-docs-url", "--max-threads")


@dataclass(frozen=True)
class _Runtime:
    """What serves a model: the container and pod of its runtime, and the model's own arguments as it reads them."""

    container: Mapping[str, Any]
    pod: Mapping[str, Any]
    arguments: Sequence[str]


def read_inference_service(body: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> Workload:
    """Return the server of a predictor; ``others`` are the objects beside it, of which one may be its runtime.

    Raises
    ------
    MigrationError
        When it has neither containers nor a model.
    """
    predictor, remarks = required(body, _PREDICTOR), Remarks()
    for key in ("transformer", "explainer"):
        if mapping(body, "spec").get(key):
            remarks.decide(
                f"spec.{key}", "is set", "the operator serves the predictor alone: keep the InferenceService"
            )
    for key in (key for key in predictor if key in _OF_KSERVE):
        remarks.own(key, _OF_KSERVE[key])
    remarks.ask_for_rest(predictor, (*_READ, *_OF_PODS), _PREDICTOR)
    remarks.drop_metadata(body, read=(SECRET_ANNOTATION,))
    if objects(predictor, "containers"):
        pod = _pod(predictor, objects(predictor, "containers"))
    elif mapping(predictor, "model"):
        pod = _of_model(body, predictor, others, remarks)
    else:
        raise MigrationError(_PREDICTOR, "neither containers nor model", "must say what serves: one of them")
    pod = with_token(pod, body, remarks)
    least, most = predictor.get("minReplicas"), predictor.get("maxReplicas")
    if most not in (None, least):
        remarks.decide("spec.replicas", f"minReplicas {least}, maxReplicas {most}", _AUTOSCALED)
    return Workload(
        kind="InferenceService",
        name=name_in(body),
        pod=pod,
        where=f"{_PREDICTOR}.containers",
        metadata={key: mapping(predictor, key) for key in ("labels", "annotations")},
        namespace=namespace_of(body),
        spec={"replicas": least} if least is not None else {},
        end=f"kubectl delete inferenceservice/{quoted_name(body)}{within(body)}",
        remarks=remarks,
    )


def runtime_of(body: Mapping[str, Any]) -> str | None:
    """Return the runtime that an InferenceService names."""
    name = mapping(mapping(mapping(body, "spec"), "predictor"), "model").get("runtime")
    return str(name) if name else None


def _pod(predictor: Mapping[str, Any], containers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: predictor[key] for key in _OF_PODS if key in predictor} | {"containers": list(containers)}


def _of_model(
    body: Mapping[str, Any], predictor: Mapping[str, Any], others: Sequence[Mapping[str, Any]], remarks: Remarks
) -> dict[str, Any]:
    model = mapping(predictor, "model")
    where = f"{_PREDICTOR}.model"
    remarks.ask_for_rest(model, (*_MODEL_READ, *_OF_CONTAINERS), where)
    runtime = _find_runtime(body, others, remarks)
    given: dict[str, Any] = {key: model[key] for key in _OF_CONTAINERS if key in model}
    merged: dict[str, Any] = {**runtime.container, **given, "name": _CONTAINER}
    for key in ("env", "volumeMounts"):
        merged[key] = _merged(objects(runtime.container, key), objects(given, key))
    # KServe puts a model's arguments behind those of its runtime.
    name = name_in(body)
    merged["args"] = [
        word.replace("{{.Name}}", name).replace("{{ .Name }}", name)
        for word in (*texts(runtime.container, "args"), *runtime.arguments)
    ]
    if "command" not in merged:
        merged["command"] = ["vllm", "serve"]
    if mapping(model, "storage"):
        remarks.decide(
            f"{where}.storage", "is set", "names a place by a Secret: put the model on a claim, or use the hub"
        )
    pod = {**runtime.pod, **_pod(predictor, [merged])}
    pod["volumes"] = _merged(objects(runtime.pod, "volumes"), objects(predictor, "volumes"))
    uri = model.get("storageUri")
    return stored(pod, str(uri)) if uri else pod


def _find_runtime(body: Mapping[str, Any], others: Sequence[Mapping[str, Any]], remarks: Remarks) -> _Runtime:
    """Return the runtime that a model names, by its object or by what KServe ships."""
    model = mapping(mapping(mapping(body, "spec"), "predictor"), "model")
    name, arguments = runtime_of(body), texts(model, "args")
    found = next((each for each in others if each.get("kind") in RUNTIMES and name_in(each) == name), None)
    if found is not None:
        return _read_runtime(found, arguments)
    form = str(mapping(model, "modelFormat").get("name") or "nothing").lower()
    if form == _OWN_SERVER and name in (None, "kserve-huggingfaceserver"):
        arguments = _as_vllm(arguments, remarks)
    elif name is not None:
        message = "is not beside it: put its ServingRuntime into the file, or read it from the cluster, without -f"
        remarks.decide(f"{_PREDICTOR}.model.runtime", name, message)
    elif form != "vllm":
        fix = "only vLLM is served: a runtime of vLLM, modelFormat vLLM or huggingface"
        raise MigrationError(f"{_PREDICTOR}.model.modelFormat", form, fix)
    given = {word.partition("=")[0].replace("_", "-") for word in arguments}
    before = {"--model": MODEL_PATH, "--served-model-name": name_in(body)}
    return _Runtime({"args": [f"{flag}={value}" for flag, value in before.items() if flag not in given]}, {}, arguments)


def _read_runtime(body: Mapping[str, Any], arguments: Sequence[str]) -> _Runtime:
    """Return the one container of a runtime, with its pod.

    Raises
    ------
    MigrationError
        When it has none.
    """
    spec = required(body, "spec")
    containers = objects(spec, "containers")
    if not containers:
        raise MigrationError("spec.containers", MISSING, f"the runtime {name_in(body)} must have a container")
    chosen = next((each for each in containers if name_of(each) == _CONTAINER), containers[0])
    return _Runtime(chosen, {key: spec[key] for key in _OF_PODS if key in spec}, arguments)


def _as_vllm(words: Sequence[str], remarks: Remarks) -> list[str]:
    """Return the arguments of KServe's own server as vLLM has them."""
    found: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-") if name.startswith("--") else name
        if flag in _HUGGINGFACE_ONLY:
            value = value if equals else rest.pop(0) if rest and not rest[0].startswith("-") else ""
            if (flag, value) == ("--backend", "huggingface"):
                raise MigrationError(f"{_PREDICTOR}.model.args", "--backend=huggingface", "it does not run vLLM")
            remarks.drop(flag, "is for KServe's own server: vLLM is started without it")
        elif flag in _HUGGINGFACE_FLAGS:
            found.append(_HUGGINGFACE_FLAGS[flag] + equals + value)
        else:
            found.append(word)
    return found


def _merged(below: Sequence[Mapping[str, Any]], above: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return two lists of named things as one; the second counts where both have a name."""
    names = {name_of(each) for each in above}
    return [*(dict(each) for each in below if name_of(each) not in names), *(dict(each) for each in above)]


_FIELDS: Final = ("speculator", "speculativeDecoding")
_MODELS: Final = ("model", "draftModel", "speculatorModel")
_SPECULATOR_READ: Final = ("uri", "name")
_CONFIGS: Final = ("config", "ngram", "suffix")
"""Maps whose keys are vLLM's."""

_KSERVE_METHODS: Final = {"draft-target": "draft_model", "draft_target": "draft_model"}


@dataclass(frozen=True)
class Speculator:
    """How a server speculates, and where its draft is stored."""

    words: tuple[str, ...] = ()
    """Arguments of the server; empty without speculation."""

    uri: str | None = None
    """Address of the draft; None for methods without one."""


def read_speculator(spec: Mapping[str, Any], remarks: Remarks) -> Speculator:
    """Return the arguments that the controller writes for the speculation of a spec."""
    field = next((each for each in _FIELDS if mapping(spec, each)), None)
    if field is None:
        return Speculator()
    given = mapping(spec, field)
    config: dict[str, Any] = {}
    uri = None
    for key, value in given.items():
        if key in _MODELS:
            model = value if isinstance(value, dict) else {"uri": value}
            uri = str(model.get("uri") or "") or None
            remarks.ask_for_rest(model, _SPECULATOR_READ, f"spec.{field}.{key}")
        elif key in _CONFIGS and isinstance(value, dict):
            config |= {_snake(str(name)): part for name, part in value.items()}
        else:
            config[_snake(key)] = value
    if "method" in config:
        config["method"] = _KSERVE_METHODS.get(str(config["method"]), config["method"])
    if uri:
        config["model"] = draft_name(uri)
    remarks.own(f"spec.{field}", "becomes spec.speculation, as the controller writes --speculative-config of it")
    return Speculator(("--speculative-config", json.dumps(config)), uri)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()


_MAIN: Final = "main"
_MORE: Final = "VLLM_ADDITIONAL_ARGS"
_KEEP: Final = "no field of the object means it: keep the LLMInferenceService"
_LLM_READ: Final = (
    "annotations", "labels", "model", "parallelism", "replicas", "rolloutStrategy", "router", "speculativeDecoding",
    "speculator", "storageInitializer", "template", "trustRemoteCode",
)  # fmt: skip
_ASKED: Final = {
    "baseRefs": "holds settings that are not read here: write them into the object, and import again",
    "kvCacheOffloading": "no field means it: say it by --kv-transfer-config in extraArgs",
    "prefill": _KEEP,
    "runtime": "holds settings that are not read here: write image and arguments into template, and import again",
    "scaling": "say in spec.replicas how many there are, and point an autoscaler at the new object",
    "tracing": "say it by --otlp-traces-endpoint in extraArgs",
}
_SIZES: Final = {
    "tensor": "--tensor-parallel-size",
    "pipeline": "--pipeline-parallel-size",
    "data": "--data-parallel-size",
}


def read_llm_inference_service(body: Mapping[str, Any]) -> Workload:
    """Return the server that the controller starts for a model.

    Raises
    ------
    MigrationError
        When it names no model.
    """
    spec, remarks = required(body, "spec"), Remarks()
    model = required(body, "spec.model")
    if not model.get("uri"):
        raise MigrationError("spec.model.uri", MISSING, "must name the model, such as hf://org/name")
    for key in (key for key in _ASKED if spec.get(key) is not None and spec[key] != []):
        remarks.decide(f"spec.{key}", "is set", _ASKED[key])
    if mapping(model, "lora"):
        remarks.decide("spec.model.lora", "is set", "say the adapters by --enable-lora and --lora-modules in extraArgs")
    if spec.get("router") is not None:
        remarks.own("router", "routes and scheduler select pods: point them at the new Service")
    if spec.get("rolloutStrategy"):
        remarks.own("rolloutStrategy", "an old engine ends before its successor starts")
    remarks.ask_for_rest(spec, (*_LLM_READ, *_ASKED, "worker"), "spec")
    remarks.drop_metadata(body, read=(SECRET_ANNOTATION,))
    template = mapping(spec, "template")
    speculator = read_speculator(spec, remarks)
    pod = {**template, "containers": _containers(body, spec, template, speculator.words, remarks)}
    if speculator.uri:
        pod = stored_draft(pod, speculator.uri)
    return Workload(
        kind="LLMInferenceService",
        name=name_in(body),
        pod=with_token(stored(pod, str(model["uri"])), body, remarks),
        where="spec.template.containers",
        metadata={key: mapping(spec, key) for key in ("labels", "annotations")},
        namespace=namespace_of(body),
        spec={"replicas": spec["replicas"]} if spec.get("replicas") is not None else {},
        nodes=_nodes(spec, remarks),
        end=f"kubectl delete llminferenceservice/{quoted_name(body)}{within(body)}",
        remarks=remarks,
    )


def _containers(
    body: Mapping[str, Any],
    spec: Mapping[str, Any],
    template: Mapping[str, Any],
    speculation: Sequence[str],
    remarks: Remarks,
) -> list[dict[str, Any]]:
    """Return the containers, the one that the controller starts vLLM in first."""
    given = objects(template, "containers")
    main = next((each for each in given if name_of(each) == _MAIN), {"name": _MAIN})
    others = [each for each in given if each is not main]
    if main.get("command"):
        return [main, *others]
    env, more = [], []
    for each in objects(main, "env"):
        if name_of(each) == _MORE:
            more = _split(each, remarks)
        else:
            env.append(each)
    words = [word for word in texts(main, "args") if word != "--"]
    served = str(mapping(spec, "model").get("name") or name_in(body))
    args = [
        MODEL_PATH,
        "--served-model-name",
        served,
        "--port",
        "8000",
        *_sizes(spec, remarks),
        *speculation,
        *more,
        *words,
    ]
    return [{**main, "command": ["vllm", "serve"], "args": args, "env": env}, *others]


def _split(variable: Mapping[str, Any], remarks: Remarks) -> list[str]:
    """Return the arguments in a variable, which a shell of the controller's puts behind its own."""
    try:
        if "valueFrom" not in variable:
            return shlex.split(str(variable.get("value") or ""))
    except ValueError:
        pass
    message = "holds arguments that are not read here: write them into args, and import again"
    remarks.decide("spec.template.containers[main].env", _MORE, message)
    return []


def _sizes(spec: Mapping[str, Any], remarks: Remarks) -> Iterator[str]:
    parallelism = mapping(spec, "parallelism")
    for key, flag in _SIZES.items():
        value = parallelism.get(key)
        if type(value) is int:
            yield from (flag, str(value))
        elif value is not None:
            fix = "must be a whole number without quotes, as Kubernetes refuses all else: correct it, and import again"
            remarks.decide(f"spec.parallelism.{key}", shown(value), fix)
    if parallelism.get("expert") is True:
        yield "--enable-expert-parallel"
    if spec.get("trustRemoteCode") is True:
        yield "--trust-remote-code"


def _nodes(spec: Mapping[str, Any], remarks: Remarks) -> int:
    """Return over how many pods one server is spread, as the controller counts them."""
    if not mapping(spec, "worker"):
        return 1
    parallelism = mapping(spec, "parallelism")
    if parallelism.get("data") is not None or "pipeline" not in parallelism:
        remarks.decide("spec.worker", "is set", "which GPUs its pods lend to one server is not read here: " + _KEEP)
        return 1
    pipeline = parallelism["pipeline"]
    return pipeline if isinstance(pipeline, int) and pipeline > 0 else 1
