"""Read servers from KServe's InferenceService and LLMInferenceService, with storage and speculation."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit

from specdecode_operator.importing.spec_builder import (
    ROLLS_OUT,
    SOURCE_KEYS,
    MigrationError,
    Object,
    Remarks,
    Workload,
    broken,
    kubectl,
    name_in,
    namespace_of,
    required,
)
from specdecode_operator.problems import MISSING, shown
from specdecode_operator.untrusted import mapping, name_of, objects, texts
from specdecode_operator.vllm.kv_transfer import ServingRole

MODEL_PATH: Final = "/mnt/models"
SECRET_ANNOTATION: Final = "serving.kserve.io/secretName"  # noqa: S105 (no password)
"""Names the Secret with the credentials of a model's storage (pkg/credentials of KServe)."""

_DRAFT_PATH: Final = "/mnt/speculator"
_ADAPTERS_PATH: Final = "/mnt/adapter"
_FETCH_IMAGE: Final = "kserve/storage-initializer"


def stored(pod: Object, uri: str) -> dict[str, Any]:
    """Return the pod with its model at an address: on the hub, on a claim, or elsewhere."""
    scheme, _, place = uri.partition("://")
    if scheme == "pvc":
        return _with_claim(pod, place, "kserve-model", MODEL_PATH)
    if scheme == "hf":
        model, _, revision = place.partition(":")
        command = ["hf", "download", model, "--local-dir", MODEL_PATH, *(["--revision", revision] if revision else [])]
        fetch = {"name": "storage-initializer", "image": _FETCH_IMAGE, "command": command}
        found = _mounted(pod, {"name": "kserve-model", "mountPath": MODEL_PATH}, {"emptyDir": {}})
        return {**found, "initContainers": [*objects(pod, "initContainers"), fetch]}
    # The operator takes models from no other place: named by its address, the model becomes a decision.
    address = urlsplit(uri)._replace(query="", fragment="").geturl() if "@" not in uri else f"{scheme}://…"
    containers = []
    for container in objects(pod, "containers"):
        named = dict(container)
        for key in ("command", "args"):
            if key in container:
                named[key] = [
                    address if word == MODEL_PATH else word.replace(f"={MODEL_PATH}", f"={address}")
                    for word in texts(container, key)
                ]
        containers.append(named)
    return {**pod, "containers": containers}


def _with_claim(pod: Object, place: str, name: str, path: str) -> dict[str, Any]:
    claim, _, folder = place.partition("/")
    mount = {"name": name, "mountPath": path} | ({"subPath": folder.strip("/")} if folder.strip("/") else {})
    return _mounted(pod, mount, {"persistentVolumeClaim": {"claimName": claim}})


def _mounted(pod: Object, mount: Object, volume: Object) -> dict[str, Any]:
    first, *rest = objects(pod, "containers")
    first = {**first, "volumeMounts": [*objects(first, "volumeMounts"), mount]}
    volumes = [*objects(pod, "volumes"), {**volume, "name": mount["name"]}]
    return {**pod, "containers": [first, *rest], "volumes": volumes}


def with_token(pod: dict[str, Any], body: Object, remarks: Remarks) -> dict[str, Any]:
    """Return the pod whose download reads the hub's token from the Secret that an annotation of the object names."""
    secret = mapping(mapping(body, "metadata"), "annotations").get(SECRET_ANNOTATION)
    fetches = [each for each in objects(pod, "initContainers") if each.get("image") == _FETCH_IMAGE]
    if secret and fetches:
        remarks.own(f"annotation {SECRET_ANNOTATION}", "its key HF_TOKEN is the hub's token")
        reference = {"secretKeyRef": {"name": str(secret), "key": "HF_TOKEN"}}
        fetches[-1]["env"] = [{"name": "HF_TOKEN", "valueFrom": reference}]
    elif secret:
        remarks.drop(f"annotation {SECRET_ANNOTATION}", "is for downloads, and the model is not downloaded")
    return pod


RUNTIMES: Final = ("ServingRuntime", "ClusterServingRuntime")
_PREDICTOR: Final = "spec.predictor"
_CONTAINER: Final = "kserve-container"
_KEYS: Final = SOURCE_KEYS["InferenceService"]


def read_inference_service(body: Object, others: Sequence[Object]) -> Workload:
    """Return the server of a predictor; ``others`` are the other objects of the input, maybe its runtime."""
    predictor, remarks, containers = required(body, _PREDICTOR), Remarks(), tuple[str, ...]()
    for key in ("transformer", "explainer"):
        if mapping(body, "spec").get(key):
            message = "the operator only serves the predictor: keep the InferenceService"
            remarks.decide(f"spec.{key}", "is set", message)
    remarks.own_keys(predictor, _KEYS["own"])
    remarks.ask_for_rest(predictor, (*_KEYS["read"], *_KEYS["own"], *_KEYS["pod"]), _PREDICTOR)
    remarks.drop_metadata(body, read=(SECRET_ANNOTATION,))
    if objects(predictor, "containers"):
        pod = _of_pods(predictor) | {"containers": objects(predictor, "containers")}
    elif mapping(predictor, "model"):
        pod, containers = _of_model(body, predictor, others, remarks), (f"{_PREDICTOR}.model",)
    else:
        raise MigrationError(_PREDICTOR, "neither containers nor model", "set one of them")
    pod = with_token(pod, body, remarks)
    least, most = predictor.get("minReplicas"), predictor.get("maxReplicas")
    if most not in (None, least):
        message = "set spec.replicas, or spec.autoscaling with these bounds"
        remarks.decide("spec.replicas", f"minReplicas {least}, maxReplicas {most}", message)
    return Workload(
        kind="InferenceService",
        name=name_in(body),
        pod=pod,
        where=f"{_PREDICTOR}.containers",
        containers=containers,
        flag_fields={"": f"{_PREDICTOR}.model.storageUri", "--model": f"{_PREDICTOR}.model.storageUri"}
        if containers and mapping(predictor, "model").get("storageUri")
        else {},
        metadata={key: mapping(predictor, key) for key in ("labels", "annotations")},
        namespace=namespace_of(body),
        spec={"replicas": least} if least is not None else {},
        end=kubectl("delete", body),
        remarks=remarks,
    )


def runtime_of(body: Object) -> str | None:
    """Return the runtime that an InferenceService names."""
    name = mapping(mapping(mapping(body, "spec"), "predictor"), "model").get("runtime")
    return str(name) if name else None


def _of_pods(spec: Object) -> dict[str, Any]:
    return {key: spec[key] for key in _KEYS["pod"] if key in spec}


def _of_model(body: Object, predictor: Object, others: Sequence[Object], remarks: Remarks) -> dict[str, Any]:
    model, where, name = mapping(predictor, "model"), f"{_PREDICTOR}.model", name_in(body)
    remarks.ask_for_rest(model, (*_KEYS["model"], *_KEYS["container"]), where)
    container, pod, arguments = _find_runtime(body, others, remarks)
    given: dict[str, Any] = {key: model[key] for key in _KEYS["container"] if key in model}
    merged: dict[str, Any] = {"command": ["vllm", "serve"], **container, **given, "name": _CONTAINER}
    for key in ("env", "volumeMounts"):
        merged[key] = _merged(objects(container, key), objects(given, key))
    # KServe appends a model's arguments to its runtime's.
    merged["args"] = [
        word.replace("{{.Name}}", name).replace("{{ .Name }}", name) for word in (*texts(container, "args"), *arguments)
    ]
    if mapping(model, "storage"):
        message = "names a location in a Secret: put the model on a claim, or use the hub"
        remarks.decide(f"{where}.storage", "is set", message)
    volumes = _merged(objects(pod, "volumes"), objects(predictor, "volumes"))
    pod = {**pod, **_of_pods(predictor), "containers": [merged], "volumes": volumes}
    return stored(pod, str(model["storageUri"])) if model.get("storageUri") else pod


def _find_runtime(
    body: Object, others: Sequence[Object], remarks: Remarks
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    model = mapping(mapping(mapping(body, "spec"), "predictor"), "model")
    name, arguments = runtime_of(body), texts(model, "args")
    found = next((each for each in others if each.get("kind") in RUNTIMES and name_in(each) == name), None)
    if found is not None:
        spec = required(found, "spec")
        containers = objects(spec, "containers")
        if not containers:
            raise MigrationError("spec.containers", MISSING, f"the runtime {name_in(found)} must have a container")
        chosen = next((each for each in containers if name_of(each) == _CONTAINER), containers[0])
        return chosen, _of_pods(spec), arguments
    form = str(mapping(model, "modelFormat").get("name") or "nothing").lower()
    if form == "huggingface" and name in (None, "kserve-huggingfaceserver"):
        arguments = _as_vllm(arguments, remarks)
    elif name is not None:
        message = "is not in the input: put its ServingRuntime into the file, or read it from the cluster, without -f"
        remarks.decide(f"{_PREDICTOR}.model.runtime", name, message)
    elif form != "vllm":
        fix = "the operator only supports vLLM: use a runtime of vLLM, or modelFormat vLLM or huggingface"
        raise MigrationError(f"{_PREDICTOR}.model.modelFormat", form, fix)
    given = {word.partition("=")[0].replace("_", "-") for word in arguments}
    before = {"--model": MODEL_PATH, "--served-model-name": name_in(body)}
    return {"args": [f"{flag}={value}" for flag, value in before.items() if flag not in given]}, {}, arguments


def _as_vllm(words: Sequence[str], remarks: Remarks) -> list[str]:
    found: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-") if name.startswith("--") else name
        if flag in _KEYS["server_flags"]:
            value = value if equals else rest.pop(0) if rest and not rest[0].startswith("-") else ""
            if (flag, value) == ("--backend", "huggingface"):
                raise MigrationError(f"{_PREDICTOR}.model.args", "--backend=huggingface", "it does not run vLLM")
            remarks.drop(flag, "only applies to KServe's own server")
        else:
            # The server passes other flags on to vLLM (python/huggingfaceserver of KServe).
            found.append(_KEYS["vllm_flags"][flag] + equals + value if flag in _KEYS["vllm_flags"] else word)
    return found


def _merged(below: Sequence[Object], above: Sequence[Object]) -> list[Object]:
    names = {name_of(each) for each in above}
    return [*(each for each in below if name_of(each) not in names), *above]


def _read_speculator(spec: Object, remarks: Remarks) -> tuple[list[str], str | None]:
    """Return the arguments that the controller writes for speculation, and the address of the draft if it has one."""
    field = next((each for each in ("speculator", "speculativeDecoding") if mapping(spec, each)), None)
    if field is None:
        return [], None
    config: dict[str, Any] = {}
    uri = None
    for key, value in mapping(spec, field).items():
        if key in ("model", "draftModel", "speculatorModel"):
            model = value if isinstance(value, dict) else {"uri": value}
            uri = str(model.get("uri") or "") or None
            remarks.ask_for_rest(model, ("uri", "name"), f"spec.{field}.{key}")
        elif key in ("config", "ngram", "suffix") and isinstance(value, dict):
            # The keys of these are vLLM's.
            config |= {_snake(str(name)): part for name, part in value.items()}
        else:
            config[_snake(key)] = value
    if config.get("method") in ("draft-target", "draft_target"):
        config["method"] = "draft_model"
    if uri:
        scheme, _, place = uri.partition("://")
        config["model"] = {"hf": place, "pvc": _DRAFT_PATH}.get(scheme, uri)
    remarks.own(
        f"spec.{field}", "becomes spec.speculation, because the controller creates --speculative-config from it"
    )
    return ["--speculative-config", json.dumps(config)], uri


def _read_adapters(model: Object, remarks: Remarks) -> tuple[list[str], dict[str, str]]:
    """Return the arguments that the controller writes for LoRA adapters, and their claims by mount path."""
    modules, claims = list[str](), dict[str, str]()
    given = mapping(model, "lora")
    remarks.ask_for_rest(given, ("adapters",), "spec.model.lora")
    for index, adapter in enumerate(objects(given, "adapters")):
        where, uri = f"spec.model.lora.adapters[{index}]", str(adapter.get("uri") or "")
        remarks.ask_for_rest(adapter, ("uri", "name"), where)
        scheme, _, place = uri.partition("://")
        path = {"hf": place, "pvc": f"{_ADAPTERS_PATH}-{index}"}.get(scheme, uri)
        if not path:
            remarks.decide(f"{where}.uri", MISSING, "must name the adapter, such as hf://org/name")
            continue
        if scheme == "pvc":
            claims[path] = place
        modules.append(json.dumps({"name": str(adapter.get("name") or place), "path": path}))
    if modules:
        remarks.own("spec.model.lora", "becomes spec.adapters, because the controller creates --lora-modules from it")
    return (["--enable-lora", "--lora-modules", *modules] if modules else []), claims


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()


_KEEP: Final = "the object has no such field: keep the LLMInferenceService"
_LLM: Final = SOURCE_KEYS["LLMInferenceService"]
_MORE: Final = "VLLM_ADDITIONAL_ARGS"


_BASE: Final = "LLMInferenceServiceConfig"
_OF_WORKLOAD: Final = (
    *("annotations", "kvCacheOffloading", "labels", "parallelism", "prefill", "replicas", "rolloutStrategy", "scaling"),
    *("template", "worker", "baseRefs"),
)
"""Keys that decode engines and prefill engines have each (WorkloadSpec of KServe), and those of the whole object."""


def read_llm_inference_service(body: Object, others: Sequence[Object] = ()) -> list[Workload]:
    """Return the server that the controller starts for a model, and the server of ``spec.prefill`` if there is one.

    ``others`` are the other objects of the input, maybe the configurations that ``baseRefs`` name. Raise MigrationError
    if the object names no model.
    """
    body = {**body, "spec": _with_bases(required(body, "spec"), others)}
    spec = required(body, "spec")
    if spec.get("prefill") is None:
        return [_read_part(body)]
    decode = replace(_read_part(body), role=ServingRole.DECODE, role_field="spec.prefill")
    name = f"{name_in(body)}-prefill"
    try:
        shared = {key: value for key, value in spec.items() if key not in _OF_WORKLOAD}
        part = {**shared, **required(body, "spec.prefill")}
        metadata = {**mapping(body, "metadata"), "name": name}
        prefill = _read_part({**body, "metadata": metadata, "spec": part}, "prefill.")
        end = kubectl("delete", body)
        prefill = replace(prefill, role=ServingRole.PREFILL, role_field="spec.prefill", end=end)
    except MigrationError as error:
        prefill = broken("LLMInferenceService", name, "spec.prefill", error, namespace_of(body))
    return [decode, prefill]


def _with_bases(spec: dict[str, Any], others: Sequence[Object]) -> dict[str, Any]:
    """Return the spec merged into the configurations that it names; unchanged if the input does not contain all."""
    found = {name_in(each): mapping(each, "spec") for each in others if each.get("kind") == _BASE}
    names = [name_of(each) for each in objects(spec, "baseRefs")]
    if not names or not all(name in found for name in names):
        return spec
    merged: dict[str, Any] = {}
    for part in (*(found[name] for name in names), spec):
        merged = _merge(merged, {key: value for key, value in part.items() if key != "baseRefs"})
    return merged


def _merge(below: Any, above: Any) -> Any:
    """Merge as KServe does, by strategic merge: objects by key, lists of named objects by name."""
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{key: _merge(below.get(key), value) for key, value in above.items()}}
    if isinstance(below, list) and isinstance(above, list) and _named(below) and _named(above):
        by_name = {name_of(each): each for each in below}
        return [*({**by_name, **{name_of(each): _merge(by_name.get(name_of(each)), each) for each in above}}.values())]
    return above


def _named(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(each, dict) and "name" in each for each in values)


def _read_part(body: Object, part: str = "") -> Workload:
    """Return the server of the object, or of the part of its spec that ``part`` names."""
    spec, remarks = required(body, "spec"), Remarks()
    model = required(body, "spec.model")
    if not model.get("uri"):
        raise MigrationError("spec.model.uri", MISSING, "must name the model, such as hf://org/name")
    _ask(spec, remarks, part)
    remarks.drop_metadata(body, read=(SECRET_ANNOTATION,))
    speculation, draft = _read_speculator(spec, remarks)
    adapters, claims = _read_adapters(model, remarks)
    given, where = objects(mapping(spec, "template"), "containers"), f"spec.{part}template.containers"
    ordered = _main_first(given)
    flag_fields = {"": "spec.model.uri", "--model": "spec.model.uri"}
    for key in ("tensor", "pipeline", "data"):
        flag_fields[f"--{key}-parallel-size"] = f"spec.{part}parallelism.{key}"
    if speculation:
        flag_fields["--speculative-config"] = f"spec.{'speculator' if 'speculator' in spec else 'speculativeDecoding'}"
    if adapters:
        flag_fields["--lora-modules"] = "spec.model.lora"
    containers = _containers(body, spec, [*speculation, *adapters], remarks, f"spec.{part}template", flag_fields)
    pod = {**mapping(spec, "template"), "containers": containers}
    for path, place in claims.items():
        pod = _with_claim(pod, place, path.strip("/").replace("/", "-"), path)
    if draft and draft.startswith("pvc://"):
        pod = _with_claim(pod, draft.removeprefix("pvc://"), "kserve-speculator", _DRAFT_PATH)
    pod = with_token(stored(pod, str(model["uri"])), body, remarks)
    return Workload(
        kind="LLMInferenceService",
        name=name_in(body),
        pod=pod,
        where=where,
        containers=tuple(
            f"{where}[{position}]" if position is not None else f"spec.{part}template"
            for position in (next((at for at, other in enumerate(given) if other is each), None) for each in ordered)
        ),
        flag_fields=flag_fields,
        metadata={key: mapping(spec, key) for key in ("labels", "annotations")},
        namespace=namespace_of(body),
        spec={"replicas": spec["replicas"]} if spec.get("replicas") is not None else {},
        nodes=_nodes(spec, remarks, part),
        end=kubectl("delete", body),
        remarks=remarks,
    )


def _ask(spec: Object, remarks: Remarks, part: str) -> None:
    """Report what the operator does itself, and ask for the settings that the object cannot have."""
    for key, message in _LLM["asked"].items():
        if spec.get(key) is not None and spec[key] != []:
            remarks.decide(f"spec.{part if key in _OF_WORKLOAD else ''}{key}", "is set", message)
    if spec.get("router") is not None:
        remarks.own("router", "routes and scheduler select pods: point them at the new Service")
    if spec.get("rolloutStrategy"):
        remarks.own("rolloutStrategy", ROLLS_OUT)
    remarks.ask_for_rest(spec, (*_LLM["read"], *_LLM["asked"]), "spec")


def _nodes(spec: Object, remarks: Remarks, part: str) -> int:
    """Return the number of nodes of a replica; ask if it is not clear how they share the work."""
    parallelism = mapping(spec, "parallelism")
    pipeline, copies, local = (parallelism.get(key) for key in ("pipeline", "data", "dataLocal"))
    if mapping(spec, "worker") and type(copies) is int and type(local) is int and 0 < local <= copies:
        # Each node runs dataLocal of the copies.
        return -(-copies // local)
    if mapping(spec, "worker") and (parallelism.get("data") is not None or "pipeline" not in parallelism):
        message = "import does not read how its pods share GPUs for one server: " + _KEEP
        remarks.decide(f"spec.{part}worker", "is set", message)
    elif mapping(spec, "worker") and isinstance(pipeline, int) and pipeline > 0:
        return pipeline
    return 1


def _main_first(given: Sequence[Object]) -> list[Object]:
    """Return the containers of a template with ``main``, which the controller adds if it is missing, first."""
    main = next((each for each in given if name_of(each) == "main"), {"name": "main"})
    return [main, *(each for each in given if each is not main)]


def _containers(  # noqa: PLR0913, PLR0917  one part each
    body: Object,
    spec: Object,
    speculation: Sequence[str],
    remarks: Remarks,
    template: str,
    flag_fields: dict[str, str],
) -> list[Object]:
    """Return the containers of a pod, with the arguments of the engine; add fields of flags to ``flag_fields``."""
    main, *others = _main_first(objects(mapping(spec, "template"), "containers"))
    if main.get("command"):
        return [main, *others]
    more: list[str] | None = None
    for each in objects(main, "env"):
        if name_of(each) != _MORE:
            continue
        try:
            more = shlex.split(str(each.get("value") or "")) if "valueFrom" not in each else None
        except ValueError:
            more = None
        if more is None:
            message = "contains arguments that import does not read: write them into args, and import again"
            remarks.decide(f"{template}.containers[main].env", _MORE, message)
        for word in more or []:
            if word.startswith("--"):
                name = word.partition("=")[0].partition(".")[0].replace("_", "-")
                flag_fields[name] = f"{template}.containers[main].env[{_MORE}]"
    served = str(mapping(spec, "model").get("name") or name_in(body))
    args = [MODEL_PATH, "--served-model-name", served, "--port", "8000", *_sizes(spec, remarks, template), *speculation]
    args += [*(more or []), *(word for word in texts(main, "args") if word != "--")]
    env = [each for each in objects(main, "env") if name_of(each) != _MORE]
    return [{**main, "command": ["vllm", "serve"], "args": args, "env": env}, *others]


def _sizes(spec: Object, remarks: Remarks, template: str) -> Iterator[str]:
    parallelism = mapping(spec, "parallelism")
    for key in ("tensor", "pipeline", "data"):
        value = parallelism.get(key)
        if type(value) is int:
            yield from (f"--{key}-parallel-size", str(value))
        elif value is not None:
            fix = "must be a whole number without quotes, as Kubernetes requires: correct it, and import again"
            remarks.decide(f"{template.removesuffix('template')}parallelism.{key}", shown(value), fix)
    if parallelism.get("expert") is True:
        yield "--enable-expert-parallel"
    if spec.get("trustRemoteCode") is True:
        yield "--trust-remote-code"
