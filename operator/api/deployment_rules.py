"""What one SpecDecodeDeployment can tell about itself beyond types and bounds.

The rules are CEL: the API server runs them before anything is stored. Each
stands with the innermost model that sees all the fields it compares.
Whether an engine takes K = 0, overlapping ranges and so on is not a matter of
taste: most rules repeat what vLLM 0.32 refuses, only hours earlier.
"""

from collections.abc import Mapping

from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.crd.cel import Reason, Rule
from specdecode_operator.api.crd.models_rules import (
    ASSUMED_MODEL,
    HAS_DRAFT,
    HOST_PATH,
    MODEL_VOLUME,
    MODELS,
    ROPE_SCALING,
    SOURCES,
)
from specdecode_operator.api.crd.policy_rules import POLICY
from specdecode_operator.api.crd.replay_rules import RECORDING_SOURCE, REPLAY, REPLAYING_SPEC
from specdecode_operator.api.crd.speculation_rules import NGRAM, SPECULATION, is_one_of
from specdecode_operator.api.deployment import Accelerator, Engine, Serving, SpecDecodeDeploymentSpec
from specdecode_operator.api.models import AssumedModel, HostPath, Models, ModelVolume, RopeScaling
from specdecode_operator.api.policy import Policy
from specdecode_operator.api.replay import RecordingSource, Replay
from specdecode_operator.api.speculation import Ngram, Speculation
from specdecode_operator.api.values import (
    METHODS_WITH_LAYERS,
)


def _only_for(accelerator_type: str, field: str) -> Rule:
    """Return the rule that a field belongs to one type of accelerator."""
    return Rule(
        field=field,
        holds=f"self.type == '{accelerator_type}' || !has(self.{field})",
        message=f"is for type {accelerator_type}: remove it, or use type: {accelerator_type}",
        reason=Reason.FORBIDDEN,
    )


def _needed_on_cpu(field: str, example: int, what: str) -> Rule:
    """Return the rule that type CPU needs a field."""
    return Rule(
        field=field,
        holds=f"self.type != 'CPU' || has(self.{field})",
        message=f"type CPU needs the {what}: set it, to {example} for example",
        reason=Reason.REQUIRED,
    )


ACCELERATOR = (
    _needed_on_cpu("cpuCores", 4, "cores of a replica"),
    _needed_on_cpu("memoryGiB", 16, "memory of a replica"),
    _needed_on_cpu("kvCacheGiB", 4, "KV cache of a replica"),
    _only_for("CPU", "cpuCores"),
    _only_for("CPU", "memoryGiB"),
    _only_for("CPU", "kvCacheGiB"),
    _only_for("GPU", "product"),
    _only_for("GPU", "perNode"),
    _only_for("GPU", "memoryGiBPerGPU"),
    Rule(
        field="product",
        holds="!has(self.memoryGiBPerGPU) || has(self.product) && size(self.product) > 0",
        message="memoryGiBPerGPU needs the products whose GPUs have so much: name their labels nvidia.com/gpu.product",
        reason=Reason.REQUIRED,
    ),
    Rule(
        field="kvCacheGiB",
        holds="!has(self.kvCacheGiB) || !has(self.memoryGiB) || self.kvCacheGiB < self.memoryGiB",
        message="is %d, which leaves nothing of memoryGiB %d for weights: lower it, or raise memoryGiB",
        values=("self.kvCacheGiB", "self.memoryGiB"),
    ),
    Rule(
        field="product",
        holds="!has(self.product) || self.product.all(p, self.product.exists_one(q, q == p))",
        message="names a product twice: remove one",
    ),
)

SERVING = (
    Rule(
        field="cudagraphMode",
        holds="!self.enforceEager || !has(self.cudagraphMode)",
        message="there are no CUDA graphs with enforceEager: remove one of the two",
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="maxCudagraphCaptureSize",
        holds="!has(self.maxCudagraphCaptureSize) || !has(self.cudagraphMode) || self.cudagraphMode != 'NONE'",
        message="there are no CUDA graphs with cudagraphMode NONE: remove one of the two",
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="maxCudagraphCaptureSize",
        holds="!self.enforceEager || !has(self.maxCudagraphCaptureSize)",
        message="there are no CUDA graphs with enforceEager: remove one of the two",
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="maxNumBatchedTokens",
        holds="self.maxNumBatchedTokens >= self.maxNumSeqs",
        message="is %d, below maxNumSeqs %d: raise it, or lower maxNumSeqs",
        values=("self.maxNumBatchedTokens", "self.maxNumSeqs"),
    ),
    Rule(
        field="minConcurrency",
        holds="self.minConcurrency <= self.maxNumSeqs",
        message="is %d, above maxNumSeqs %d, the requests that may run at once: lower it, or raise maxNumSeqs",
        values=("self.minConcurrency", "self.maxNumSeqs"),
    ),
    Rule(
        field="servedModelNames",
        holds="!has(self.servedModelNames)"
        " || self.servedModelNames.all(n, self.servedModelNames.exists_one(m, m == n))",
        message="has a name twice: remove one",
    ),
)

ENGINE = (
    Rule(
        field="image",
        # After the last slash, or the port of a registry would pass for a tag.
        # [:space:] and not \s, which is ASCII for the API server and Unicode for the command line.
        holds=r"!has(self.image) || self.image.matches('^[^[:space:]/][^[:space:]]*$') &&"
        r" (self.image.matches(':[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$') || self.image.matches('@sha256:[0-9a-f]{64}$'))",
        message="is %s, which names no exact image: add a tag (:v1) or a digest (@sha256:…)",
        values=("self.image",),
    ),
)

_TENSOR = "self.parallelism.tensor"
_DRAFT_TENSOR = "self.parallelism.draftTensor"
_HAS_METHOD = "has(self.speculation)"
_METHOD = "self.speculation.method"
_DRAFT_LENGTH = "self.speculation.draft.maxModelLen"
_RANGES = "self.speculation.numSpeculativeTokensByBatchSize"

SPEC = (
    *SOURCES,
    *REPLAYING_SPEC,
    Rule(
        field="speculation.draft.maxModelLen",
        holds=f"!({HAS_DRAFT}) || !has({_DRAFT_LENGTH}) || !has(self.serving.maxModelLen)"
        f" || {_DRAFT_LENGTH} <= self.serving.maxModelLen",
        message="is %d, above serving.maxModelLen %d: lower it, or raise serving.maxModelLen",
        values=(_DRAFT_LENGTH, "self.serving.maxModelLen"),
    ),
    Rule(
        field="speculation.numSpeculativeTokensByBatchSize",
        holds=f"!has(self.speculation) || !has({_RANGES}) || {_RANGES}.all(r, r.to <= self.serving.maxNumSeqs)",
        message="a range goes beyond serving.maxNumSeqs %d, so many requests never run at once:"
        " lower its to, or raise serving.maxNumSeqs",
        values=("self.serving.maxNumSeqs",),
    ),
    Rule(
        field="serving.dtype",
        holds="self.target.quantization != 'BF16' || self.serving.dtype in ['auto', 'bfloat16']",
        message="is %s, and target.quantization BF16 asks for bfloat16: remove one of the two",
        values=("self.serving.dtype",),
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="parallelism",
        holds="self.accelerator.type != 'CPU'"
        " || self.parallelism.pipeline * self.parallelism.data == 1 && !self.parallelism.expert",
        message="a replica on CPU is split by tensor alone: remove the others",
    ),
    Rule(
        field="accelerator.kvCacheGiB",
        holds=f"!has(self.accelerator.kvCacheGiB) || !has({_TENSOR}) || self.accelerator.kvCacheGiB % {_TENSOR} == 0",
        message="is %d, of which each of the %d ranks of parallelism.tensor gets no whole number of GiB:"
        " make it a multiple",
        values=("self.accelerator.kvCacheGiB", _TENSOR),
    ),
    Rule(
        field="parallelism.draftTensor",
        holds=f"!has({_DRAFT_TENSOR}) || {_HAS_METHOD} && {is_one_of(METHODS_WITH_LAYERS, _METHOD)}",
        message="there is no draft to split: remove it, or choose a method with a draft",
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="parallelism.draftTensor",
        holds=f"!has({_DRAFT_TENSOR}) || {_DRAFT_TENSOR} == 1 || has({_TENSOR}) && {_DRAFT_TENSOR} == {_TENSOR}",
        message="is %d, but vLLM takes 1 or that of the target: write 1, or set parallelism.tensor to the same",
        values=(_DRAFT_TENSOR,),
    ),
    Rule(
        field="parallelism.pipeline",
        holds=f"self.parallelism.pipeline == 1 || !({_HAS_METHOD}) || {_METHOD} != 'draft_model'",
        message="is %d, but with method draft_model vLLM would build the draft from the layers of one stage:"
        " remove it, or use another method",
        values=("self.parallelism.pipeline",),
    ),
    Rule(
        field="speculation.numSpeculativeTokensByBatchSize",
        holds=f"self.parallelism.data == 1 || !({_HAS_METHOD}) || !has({_RANGES}) || {_RANGES}.size() == 0",
        message="vLLM ignores it with parallelism.data %d, whose copies must draft alike:"
        " remove it, or use replicas instead of data",
        values=("self.parallelism.data",),
    ),
)

NAME_MAX_LENGTH = 52
"""Longest name of an object. A Service's name ends at 63 (RFC 1035); as for a CronJob, 11 are left for suffixes."""

SERVICE_NAME = Rule(
    field="metadata.name",
    holds="self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')"
    f" && self.metadata.name.size() <= {NAME_MAX_LENGTH}",
    message="is %s, which cannot name a Service:"
    f" use at most {NAME_MAX_LENGTH} of a-z, 0-9 and -, beginning with a letter",
    values=("self.metadata.name",),
)
"""The rule on the name of a SpecDecodeDeployment."""

RULES: Mapping[type[ApiModel], tuple[Rule, ...]] = {
    SpecDecodeDeploymentSpec: SPEC,
    AssumedModel: ASSUMED_MODEL,
    RopeScaling: ROPE_SCALING,
    Speculation: SPECULATION,
    Ngram: NGRAM,
    Accelerator: ACCELERATOR,
    Serving: SERVING,
    Models: MODELS,
    ModelVolume: MODEL_VOLUME,
    HostPath: HOST_PATH,
    Engine: ENGINE,
    Policy: POLICY,
    Replay: REPLAY,
    RecordingSource: RECORDING_SOURCE,
}
"""The rules of each model."""
