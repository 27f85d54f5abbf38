"""Provide a value for every field of our kinds that changes the operator's output.

A new field of a CRD needs a line here, unless `_passed_on` has a value for it. Use `at(VALUE)` if the value changes the
operator's output for an object, and `refused(VALUE)` if the object is rejected for it. `on=` sets another object to
start from.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specdecode_operator.api.deployment import Serving
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.sizing.catalogue import find_entry
from specdecode_operator.vllm.arguments import ARGUMENTS, SERVING
from tests.support.devices import claiming
from tests.support.objects import H100, H200, TINY_CONFIG, Body, pair_70b, tiny_cpu

NODES = (NodeFacts("h200-0", H200, 8), NodeFacts("h100-0", H100, 8))
LLAMA_70B = "meta-llama/Llama-3.1-70B-Instruct"


@dataclass(frozen=True)
class FieldCase:
    """A value for one field.

    Attributes
    ----------
    value
        What is written there.
    on
        The spec that it is written into.
    nodes
        The cluster.
    refusal
        What the object is refused with for it; empty where it is not.
    deployment
        The deployment that a capture is of; the tiny pair where none is named.
    """

    value: Any
    on: Body
    nodes: tuple[NodeFacts, ...] = NODES
    refusal: str = ""
    deployment: Body | None = None

    def changed(self, field: str) -> Body:
        """Return the spec with the value; lists get it in their first element."""
        return _with(self.on, re.findall(r"\w+|\[\]", field), self.value)


def _with(place: Any, path: list[str], value: Any) -> Any:
    """Return what is there with a value further down."""
    if not path:
        return value
    step, *rest = path
    if step == "[]":
        first, *others = place or [None]
        return [_with(first, rest, value), *others]
    return {**(place or {}), step: _with((place or {}).get(step), rest, value)}


def at(value: Any, on: Body | None = None, nodes: tuple[NodeFacts, ...] = NODES) -> FieldCase:
    """Return a value that makes a difference."""
    return FieldCase(value, pair_70b() if on is None else on, nodes)


def refused(value: Any, sentence: str, on: Body | None = None) -> FieldCase:
    """Return a value that the object is refused for, with part of the sentence that says so."""
    return replace(at(value, on), refusal=sentence)


def _drafting(method: str, **fields: Any) -> Body:
    return pair_70b(speculation={"method": method, "numSpeculativeTokens": 4, **fields})


def _stored(model: str, name: str) -> Body:
    """An INT4 checkpoint of a model of the catalogue."""
    entry = find_entry(model)
    assert entry is not None
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    config = {**entry.config, "quantization_config": quantization}
    return {"quantization": "INT4", "model": name, "config": config}


def _wider(checkpoint: Body) -> Body:
    return {**checkpoint["config"], "hidden_size": 2 * checkpoint["config"]["hidden_size"]}


TINY = tiny_cpu()
NGRAM = _drafting("ngram", ngram={"promptLookupMin": 2, "promptLookupMax": 4})
SUFFIX = {**_drafting("suffix"), "engine": {"image": "localhost/engine-with-suffix:1"}}
MOE = pair_70b(
    target={"model": "Qwen/Qwen3-235B-A22B"}, speculation=NGRAM["speculation"], parallelism={"tensor": 2, "data": 2}
)
AUTO = pair_70b(target={"model": LLAMA_70B, "quantization": "Auto"}, parallelism={}, serving={"maxModelLen": 8192})
INT4_TARGET, INT4_DRAFT = _stored(LLAMA_70B, "org/target-awq"), _stored(LLAMA_70B.replace("70B", "8B"), "org/draft-awq")
STORED_TARGET = pair_70b(target={"model": LLAMA_70B, "quantization": "INT4", "checkpoints": [INT4_TARGET]})
STORED_DRAFT = pair_70b()
STORED_DRAFT["speculation"]["draft"] |= {"quantization": "INT4", "checkpoints": [INT4_DRAFT]}
OWN_CLAIM = tiny_cpu()
OWN_CLAIM["speculation"]["draft"] |= {"persistentVolumeClaim": {"claimName": "head"}}
TRAINED = tiny_cpu()
TRAINED["speculation"] |= {"trainedDrafts": True}
OWN_IMAGE = tiny_cpu()
OWN_IMAGE["speculation"]["draft"] |= {"image": {"reference": "registry/head:v1"}}
YARN = {"type": "yarn", "factor": "2"}
STRETCHED = {**NGRAM, "target": {"model": LLAMA_70B, "ropeScaling": YARN}}
RANGES = _drafting("draft_model", draft=pair_70b()["speculation"]["draft"])
RANGES["speculation"]["numSpeculativeTokensByBatchSize"] = [{"from": 1, "to": 8, "numSpeculativeTokens": 2}]
GATED = pair_70b(rollout={"gate": {"capture": "golden", "override": {"reason": "a fix"}}})
ROUTED = pair_70b(expose={"httpRoute": {"parentRefs": [{"name": "public"}]}})
SCALED = pair_70b(autoscaling={"maxReplicas": 4, "metric": "RunningRequests", "target": 64})
SCALED_BY_KEDA = pair_70b(
    autoscaling={**SCALED["autoscaling"], "keda": {"serverAddress": "http://one:9090", "wakeUpQuery": "vector(0)"}}
)
MATCHING = pair_70b(
    expose={"httpRoute": {"parentRefs": [{"name": "public"}], "matches": [{"headers": [{"name": "a", "value": "b"}]}]}}
)
POOLED = pair_70b(expose={"inferencePool": {"endpointPickerRef": {"name": "epp"}}})
EXPECTED = pair_70b(workload={"kind": "Chat", "promptTokens": 1000, "outputTokens": 200})
SECRET = {"name": "one", "key": "key"}
KEYED = pair_70b(serving={"maxModelLen": 8192, "apiKeySecret": SECRET}, models={"hubTokenSecret": SECRET})
WITH_VARIABLE = pair_70b(engine={"env": [{"name": "ONE", "value": "1"}]})
SOURCES: Mapping[str, Mapping[str, tuple[Any, Any]]] = {
    "secretKeyRef": {"name": ("one", "two"), "key": ("key", "other"), "optional": (False, True)},
    "configMapKeyRef": {"name": ("one", "two"), "key": ("key", "other"), "optional": (False, True)},
    "fieldRef": {"fieldPath": ("status.podIP", "metadata.name"), "apiVersion": ("v1", "v2")},
    "resourceFieldRef": {
        "resource": ("limits.memory", "limits.cpu"),
        "containerName": ("engine", "sidecar"),
        "divisor": ("1", "1Mi"),
    },
}
"""Sources of a variable's value: each field with two values."""


def _with_source(source: str) -> Body:
    first = {field: value for field, (value, _) in SOURCES[source].items()}
    return pair_70b(engine={"env": [{"name": "ONE", "valueFrom": {source: first}}]})


ADAPTED = pair_70b(adapters=[{"name": "sql", "model": "org/sql", "rank": 8}], adapterSlots={"gpu": 1, "host": 2})
STORED_ADAPTER = pair_70b(
    adapters=[{"name": "sql", "model": "sql", "rank": 8, "persistentVolumeClaim": {"claimName": "adapters"}}]
)

TOO_LARGE = pair_70b(
    accelerator={"products": [H100]}, override={"ignorePlan": True, "reason": "to see the engine's own error"}
)
MYSTERY = pair_70b(accelerator={"products": ["NVIDIA-T1000"], "memoryGiBPerGPU": 70})
MYSTERIES = (NodeFacts("mystery", "NVIDIA-T1000", 8),)
CLAIMING = pair_70b(accelerator=claiming())
TWO_H200 = (NodeFacts("h200-0", H200, 8), NodeFacts("h200-1", H200, 8))
UNSEEN = pair_70b(accelerator={"products": [H200]})

ASSUMPTION = {"weightsGiB": "16", "kvBytesPerToken": 131_072}
ASSUMED = {**NGRAM, "target": {"model": "org/unknown", "assume": ASSUMPTION}}
ASSUMED_DRAFT = pair_70b()
ASSUMED_DRAFT["speculation"]["draft"] = {"model": "org/unknown", "assume": ASSUMPTION | {"weightsGiB": "2"}}


def _passed_on() -> Iterator[tuple[str, FieldCase]]:
    """Yield a value for each switch and number of spec.serving that an argument of vLLM passes on."""
    schema = Serving.model_json_schema()["properties"]
    for argument in ARGUMENTS:
        if argument.field is not None and argument.computed is None:
            name = argument.field.removeprefix(SERVING)
            kinds, default = schema[name].get("anyOf", [schema[name]]), schema[name].get("default")
            if kinds[0].get("type") == "boolean":
                yield f"serving.{name}", at(not default)
            elif kinds[0].get("type") == "integer":
                yield f"serving.{name}", at(kinds[0]["minimum"] if default is None else default + 1)


DEPLOYMENT_FIELDS: Mapping[str, FieldCase] = {
    **dict(_passed_on()),
    "target.model": at("meta-llama/Llama-3.1-8B-Instruct"),
    "target.revision": at("v2"),
    "target.quantization": at("FP8"),
    "target.checkpoints[].quantization": refused("INT8", "has precision INT4; write INT4", on=STORED_TARGET),
    "target.checkpoints[].model": at("org/other-awq", on=STORED_TARGET),
    "target.checkpoints[].revision": at("v2", on=STORED_TARGET),
    "target.checkpoints[].config": refused(_wider(INT4_TARGET), "is not a checkpoint of", on=STORED_TARGET),
    "target.config": at({**TINY_CONFIG, "num_hidden_layers": 8}, on=TINY),
    "target.assume.weightsGiB": at("20", on=ASSUMED),
    "target.assume.kvBytesPerToken": at(65_536, on=ASSUMED),
    "target.assume.stateMiBPerRequest": at(64, on=ASSUMED),
    "target.ropeScaling.type": at("linear", on=STRETCHED),
    "target.ropeScaling.factor": at("3", on=STRETCHED),
    "target.ropeScaling.originalMaxPositionEmbeddings": at(65_536, on=STRETCHED),
    "speculation.method": at("ngram_gpu", on=NGRAM),
    "speculation.numSpeculativeTokens": at(4),
    "speculation.trainedDrafts": at(value=True),
    "speculation.draftUpdate": at("InPlace", on=TRAINED),
    "speculation.numSpeculativeTokensByBatchSize[].from": refused(9, "from must be", on=RANGES),
    "speculation.numSpeculativeTokensByBatchSize[].to": at(16, on=RANGES),
    "speculation.numSpeculativeTokensByBatchSize[].numSpeculativeTokens": at(0, on=RANGES),
    "speculation.draft.model": at("meta-llama/Llama-3.2-1B-Instruct"),
    "speculation.draft.revision": at("v2"),
    "speculation.draft.quantization": at("FP8"),
    "speculation.draft.assume.weightsGiB": at("4", on=ASSUMED_DRAFT),
    "speculation.draft.assume.kvBytesPerToken": at(1_073_741_824, on=ASSUMED_DRAFT),
    "speculation.draft.assume.stateMiBPerRequest": at(1_048_576, on=ASSUMED_DRAFT),
    "speculation.draft.checkpoints[].quantization": refused("INT8", "has precision INT4; write INT4", on=STORED_DRAFT),
    "speculation.draft.checkpoints[].model": at("org/other-awq", on=STORED_DRAFT),
    "speculation.draft.checkpoints[].revision": at("v2", on=STORED_DRAFT),
    "speculation.draft.checkpoints[].config": refused(_wider(INT4_DRAFT), "is not a checkpoint of", on=STORED_DRAFT),
    "speculation.draft.config": at({**TINY_CONFIG, "num_hidden_layers": 2}, on=TINY),
    "speculation.draft.persistentVolumeClaim.claimName": at("other", on=OWN_CLAIM),
    "speculation.draft.maxModelLen": at(4096),
    "speculation.ngram.promptLookupMin": at(3, on=NGRAM),
    "speculation.ngram.promptLookupMax": at(3, on=NGRAM),
    "speculation.suffix.maxTreeDepth": at(8, on=SUFFIX),
    "speculation.suffix.maxCachedRequests": at(0, on=SUFFIX),
    "speculation.suffix.maxSpecFactorPercent": at(150, on=SUFFIX),
    "speculation.suffix.minTokenProbabilityPercent": at(20, on=SUFFIX),
    "speculation.rejectionSampling": at("block"),
    "speculation.lossy": refused(True, "only applies to rejectionSampling fly"),
    "speculation.draftSampling": at("probabilistic"),
    "speculation.adaptiveVerification": at(value=True),
    "speculation.useHeterogeneousVocab": at(value=True),
    "speculation.draftLmHeadQuantization": refused("fp8", "has no copy of the target's output head"),
    "speculation.xpressTopC": refused(64, "has no XPress refiner"),
    "speculation.extraConfig": at({"enforce_eager": True}),
    "adapters[].name": at("legal", on=ADAPTED),
    "adapters[].model": at("org/other", on=ADAPTED),
    "adapters[].revision": at("v2", on=ADAPTED),
    "adapters[].persistentVolumeClaim.claimName": at("other", on=STORED_ADAPTER),
    "adapters[].rank": at(9, on=ADAPTED),
    "adapters[].targetModules[]": at("q_proj", on=ADAPTED),
    "adapterSlots.gpu": at(2, on=ADAPTED),
    "adapterSlots.host": at(4, on=ADAPTED),
    "adapterSlots.maxRank": at(16, on=ADAPTED),
    "parallelism.tensor": at(4),
    "parallelism.pipeline": at(2, on=NGRAM),
    "parallelism.data": at(2),
    "parallelism.expert": at(value=True, on=MOE),
    "parallelism.draftTensor": at(1),
    "accelerator.type": at("GPU", on=TINY),
    "accelerator.products[]": at(H100),
    "accelerator.perNode": at(8, on=UNSEEN, nodes=()),
    "accelerator.memoryGiBPerGPU": at(80, on=MYSTERY, nodes=MYSTERIES),
    "accelerator.resourceClaim.deviceClassName": at("gpu.nvidia.com"),
    "accelerator.resourceClaim.selectors[]": at("device.driver != ''", on=CLAIMING),
    "accelerator.resourceClaim.count": at(1, on=CLAIMING, nodes=TWO_H200),
    "accelerator.cpuCores": at(2, on=TINY),
    "accelerator.memoryGiB": at(9, on=TINY),
    "accelerator.kvCacheGiB": at(2, on=TINY),
    "serving.maxModelLen": at(4096),
    "serving.maxNumSeqs": at(128),
    "serving.maxNumBatchedTokens": at(4096),
    "serving.dtype": at("float32"),
    "serving.kvCacheDtype": at("fp8"),
    "serving.blockSize": at(32),
    "serving.gpuMemoryUtilizationPercent": at(90),
    "serving.cudagraphMode": at("PIECEWISE"),
    "serving.maxCudagraphCaptureSize": at(64),
    "serving.minConcurrency": at(200),
    "serving.servedModelNames[]": at("llama"),
    "serving.apiKeySecret.name": at("other", on=KEYED),
    "serving.apiKeySecret.key": at("other", on=KEYED),
    "serving.tlsSecret.name": at("certificate"),
    "objective": at("Cost", on=AUTO),
    "workload.kind": at("Summarization", on=EXPECTED),
    "workload.temperature": at("1.0", on=EXPECTED),
    "workload.primarySlo": at("TTFT", on=EXPECTED),
    "workload.promptTokens": refused(8000, "more than maxModelLen", on=EXPECTED),
    "workload.outputTokens": refused(8000, "more than maxModelLen", on=EXPECTED),
    "replicas": at(2),
    "autoscaling.minReplicas": at(2, on=SCALED),
    "autoscaling.maxReplicas": at(8, on=SCALED),
    "autoscaling.metric": at("WaitingRequests", on=SCALED),
    "autoscaling.target": at(32, on=SCALED),
    "autoscaling.scaleDownStabilizationSeconds": at(60, on=SCALED),
    "autoscaling.keda.serverAddress": at("http://two:9090", on=SCALED_BY_KEDA),
    "autoscaling.keda.authentication": at("prometheus", on=SCALED_BY_KEDA),
    "autoscaling.keda.wakeUpQuery": at("vector(1)", on=SCALED_BY_KEDA),
    "rollout.strategy": at("Surge"),
    "rollout.gate.capture": at("other", on=GATED),
    "rollout.gate.maxLossPercent.goodput": at(9, on=GATED),
    "rollout.gate.maxLossPercent.acceptance": at(9, on=GATED),
    "rollout.gate.maxLossPercent.stepTime": at(9, on=GATED),
    "rollout.gate.maxLossPercent.latency": at(9, on=GATED),
    "rollout.gate.override.reason": at("because", on=GATED),
    "rollout.paused": at(value=True),
    "expose.httpRoute.parentRefs[].name": at("other", on=ROUTED),
    "expose.httpRoute.parentRefs[].namespace": at("other", on=ROUTED),
    "expose.httpRoute.parentRefs[].sectionName": at("https", on=ROUTED),
    "expose.httpRoute.parentRefs[].port": at(443, on=ROUTED),
    "expose.httpRoute.hostnames[]": at("llm.example.com", on=ROUTED),
    "expose.httpRoute.requestTimeoutSeconds": at(600, on=ROUTED),
    "expose.httpRoute.matches[].headers[].name": at("x", on=MATCHING),
    "expose.httpRoute.matches[].headers[].value": at("x", on=MATCHING),
    "expose.inferencePool.endpointPickerRef.name": at("other", on=POOLED),
    "expose.inferencePool.endpointPickerRef.port": at(9003, on=POOLED),
    "expose.inferencePool.endpointPickerRef.failureMode": at("FailOpen", on=POOLED),
    "models.volume.persistentVolumeClaim.claimName": at("other", on=TINY),
    "models.volume.image.reference": at("registry/models:v2", on=tiny_cpu(models={"volume": {}})),
    "speculation.draft.image.reference": at("registry/head:v2", on=OWN_IMAGE),
    "models.volume.hostPath.path": refused("/srv", "--allow-host-path=/srv", on=tiny_cpu(models={"volume": {}})),
    "models.cache.persistentVolumeClaim.claimName": at("cache"),
    "models.hubTokenSecret.name": at("other", on=KEYED),
    "models.hubTokenSecret.key": at("other", on=KEYED),
    "engine.version": at("0.31"),
    "engine.image": at("localhost/engine:2"),
    "engine.extraArgs[]": at("--enable-prefix-caching"),
    "engine.recorder": at(False),
    "engine.env[].name": at("TWO", on=WITH_VARIABLE),
    "engine.env[].value": at("2", on=WITH_VARIABLE),
    **{
        f"engine.env[].valueFrom.{source}.{field}": at(value, on=_with_source(source))
        for source, fields in SOURCES.items()
        for field, (_, value) in fields.items()
    },
    "suspend": at(value=True),
    "override.ignorePlan": at(value=True, on=pair_70b(accelerator={"products": [H100]}, override={"reason": "a test"})),
    "override.reason": at("to measure it", on=TOO_LARGE),
    "podTemplate.metadata": at({"labels": {"team": "one"}}),
    "podTemplate.spec": at({"priorityClassName": "high"}),
}
"""Fields of a SpecDecodeDeployment's spec."""
