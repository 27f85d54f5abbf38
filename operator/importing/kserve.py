"""KServe's InferenceService: a predictor by its containers, or by a model and the runtime that serves it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specdecode_operator.kube.untyped import mapping, name_of, objects, texts
from specdecode_operator.migration.builder import MigrationError, required
from specdecode_operator.migration.sources.model_storage import MODEL_PATH, SECRET_ANNOTATION, stored, with_token
from specdecode_operator.migration.sources.workload import Remarks, Workload, name_in, namespace_of, quoted_name, within
from specdecode_operator.problems import MISSING

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
