"""KServe's LLMInferenceService: a model, how it is split, and what the template of its pods adds."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from specdecode_operator.kube.untyped import mapping, name_of, objects, texts
from specdecode_operator.migration.builder import MigrationError, required
from specdecode_operator.migration.sources.model_storage import (
    MODEL_PATH,
    SECRET_ANNOTATION,
    stored,
    stored_draft,
    with_token,
)
from specdecode_operator.migration.sources.speculator import read_speculator
from specdecode_operator.migration.sources.workload import Remarks, Workload, name_in, namespace_of, quoted_name, within
from specdecode_operator.problems import MISSING, shown

_MAIN: Final = "main"
_MORE: Final = "VLLM_ADDITIONAL_ARGS"
_KEEP: Final = "no field of the object means it: keep the LLMInferenceService"
_READ: Final = (
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
    remarks.ask_for_rest(spec, (*_READ, *_ASKED, "worker"), "spec")
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
