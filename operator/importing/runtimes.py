"""Read VLLMRuntime of vLLM's production-stack operator, and RayService with the LLM configs of Ray Serve."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from specdecode_operator.cluster.nodes import GPU_RESOURCE
from specdecode_operator.importing.spec_builder import (
    MigrationError,
    Object,
    Remarks,
    Workload,
    broken,
    kubectl,
    name_in,
    namespace_of,
    plain_text,
    required,
)
from specdecode_operator.problems import MISSING, shown, shown_or_missing
from specdecode_operator.untrusted import UnreadableTextError, mapping, objects, texts
from specdecode_operator.untrusted_yaml import parse_yaml_or_json
from specdecode_operator.vllm.kv_transfer import ServingRole

_RUNTIME_FLAGS: Final[Mapping[str, tuple[str, str]]] = {
    "--max-model-len": ("model", "maxModelLen"),
    "--dtype": ("model", "dtype"),
    "--max-num-seqs": ("model", "maxNumSeqs"),
    "--tensor-parallel-size": ("vllmConfig", "tensorParallelSize"),
    "--gpu-memory-utilization": ("vllmConfig", "gpuMemoryUtilization"),
    "--max-loras": ("vllmConfig", "maxLoras"),
}
"""Flags that the controller writes, with their fields (operator/internal/controller of production-stack)."""
_RUNTIME_SWITCHES: Final = {
    "--enable-lora": ("model", "enableLoRA"),
    "--enable-auto-tool-choice": ("model", "enableTool"),
}
_NO_PREFIX: Final = {"enableChunkedPrefill": "enable-chunked-prefill", "enablePrefixCaching": "enable-prefix-caching"}
_LMCACHE: Final = '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'


def read_vllm_runtime(body: Object) -> Workload:
    """Return the server that the controller starts for a VLLMRuntime; raise MigrationError if it names no model."""
    spec = required(body, "spec")
    model, config = required(body, "spec.model"), mapping(spec, "vllmConfig")
    deployment = mapping(spec, "deploymentConfig")
    if not model.get("modelURL"):
        raise MigrationError("spec.model.modelURL", shown_or_missing(model.get("modelURL")), "must name the model")
    args, fields = [str(model["modelURL"])], {"": "spec.model.modelURL"}
    for flag, (section, key) in _RUNTIME_SWITCHES.items():
        if mapping(spec, section).get(key):
            args.append(flag)
    for key, switch in _NO_PREFIX.items():
        args.append(f"--{switch}" if config.get(key) else f"--no-{switch}")
        fields[f"--{switch}"] = f"spec.vllmConfig.{key}"
    for flag, (section, key) in _RUNTIME_FLAGS.items():
        if value := mapping(spec, section).get(key):
            args += (flag, plain_text(value))
            fields[flag] = f"spec.{section}.{key}"
    args += texts(config, "extraArgs")
    if mapping(spec, "lmCacheConfig").get("enabled"):
        args += ("--kv-transfer-config", _LMCACHE)
        fields["--kv-transfer-config"] = "spec.lmCacheConfig"
    resources, image = mapping(deployment, "resources"), mapping(deployment, "image")
    limits = {key: plain_text(resources[key]) for key in ("cpu", "memory") if resources.get(key)}
    if resources.get("gpu"):
        limits[str(resources.get("gpuType") or GPU_RESOURCE)] = plain_text(resources["gpu"])
    container = {
        "name": "vllm",
        "image": "/".join(str(image[key]) for key in ("registry", "name") if image.get(key)),
        "command": ["vllm", "serve"],
        "args": args,
        "env": objects(config, "env"),
        "resources": {"limits": limits},
    }
    terms = objects(deployment, "nodeSelectorTerms")
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    pod = {"containers": [container], "tolerations": objects(deployment, "toleration")}
    return Workload(
        kind="production-stack runtime",
        name=name_in(body),
        pod={**pod, "affinity": affinity} if terms else pod,
        where="spec.vllmConfig",
        containers=("spec.vllmConfig",),
        flag_fields=fields,
        namespace=namespace_of(body),
        spec={"replicas": deployment["replicas"]} if deployment.get("replicas") is not None else {},
        end=kubectl("delete", body),
        remarks=Remarks(),
    )


ACCELERATOR_TYPE: Final = "ray.io/accelerator-type"
_CONFIG: Final = "spec.serveConfigV2"
_CONFIG_KEYS: Final = {"prefill_config": ServingRole.PREFILL, "decode_config": ServingRole.DECODE}


def read_ray_service(body: Object) -> list[Workload]:
    """Return a server for each LLM config of a RayService's applications; empty if they serve no LLM.

    The configs are those of ``ray.serve.llm`` (LLMConfig): ``engine_kwargs`` are vLLM's arguments.
    """
    text = required(body, "spec").get("serveConfigV2")
    if not isinstance(text, str):
        raise MigrationError(_CONFIG, MISSING if text is None else shown(text), "must be the YAML text of applications")
    try:
        documents = list(parse_yaml_or_json(text, is_json=False))
    except UnreadableTextError as error:
        raise MigrationError(_CONFIG, "the text", str(error)) from error
    config = documents[0] if documents and isinstance(documents[0], dict) else {}
    found = []
    for number, application in enumerate(objects(config, "applications")):
        arguments = mapping(application, "args")
        given = arguments.get("llm_configs")
        configs: list[tuple[str, Any, ServingRole | None]] = [
            (f"llm_configs[{index}]", each, None) for index, each in enumerate(given if isinstance(given, list) else [])
        ]
        configs += [(key, arguments[key], role) for key, role in _CONFIG_KEYS.items() if key in arguments]
        for key, each, role in configs:
            where = f"{_CONFIG}: applications[{number}].args.{key}"
            try:
                found.append(_of_llm_config(body, each, where, role))
            except MigrationError as error:
                found.append(broken("RayService", f"{name_in(body)}-{len(found)}", where, error, namespace_of(body)))
    return found


def _of_llm_config(body: Object, given: Any, where: str, role: ServingRole | None) -> Workload:
    if not isinstance(given, dict):
        raise MigrationError(where, shown_or_missing(given), "must be an inline LLM config, not a path")
    loading, engine = mapping(given, "model_loading_config"), mapping(given, "engine_kwargs")
    source = loading.get("model_source") or loading.get("model_id")
    if not isinstance(source, str):
        raise MigrationError(f"{where}.model_loading_config", shown_or_missing(source), "must name a model_id")
    served = str(loading.get("model_id") or source)
    accelerator = given.get("accelerator_type")
    replicas = mapping(given, "deployment_config").get("num_replicas")
    container = {
        "name": "vllm",
        "command": ["vllm", "serve"],
        "args": [source, "--served-model-name", served, *_as_flags(engine)],
    }
    selector = {ACCELERATOR_TYPE: str(accelerator)} if accelerator else {}
    return Workload(
        kind="Ray Serve LLM",
        name=f"{name_in(body)}-{served.rpartition('/')[2]}".lower() + (f"-{role}" if role else ""),
        pod={"containers": [container], "nodeSelector": selector},
        where=f"{where}.engine_kwargs",
        containers=(f"{where}.engine_kwargs",),
        flag_fields={"": f"{where}.model_loading_config"},
        namespace=namespace_of(body),
        spec={"replicas": replicas} if type(replicas) is int else {},
        says_gpus=False,
        end=kubectl("delete", body),
        role=role,
        role_field=where if role else "",
    )


def _as_flags(arguments: Object) -> Iterator[str]:
    """Yield keyword arguments of vLLM's engine as its flags."""
    for key, value in arguments.items():
        name = str(key).replace("_", "-")
        if value is True:
            yield f"--{name}"
        elif value is False:
            yield f"--no-{name}"
        elif value is not None:
            text = json.dumps(value, default=str) if isinstance(value, dict | list) else plain_text(value)
            yield f"--{name}={text}"
