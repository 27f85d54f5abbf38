"""The status of a SpecDecodeDeployment: conditions, plan, observed figures, acceptance."""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from specdecode_operator.api.base import ApiModel, Timestamp, TimeText, map_by
from specdecode_operator.api.deployment import PolicyStatus, ScheduleStatus
from specdecode_operator.problems import printable

Word = Annotated[str, StringConstraints(max_length=256), AfterValidator(printable)]
Sentence = Annotated[str, StringConstraints(max_length=32_768), AfterValidator(printable)]


class ConditionStatus(StrEnum):
    """Value of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """One aspect of the object, as Kubernetes conventions have it."""

    type: str = Field(max_length=316)
    """What it speaks of: Accepted, Ready, Reconciling, Stalled and what else its kind has."""

    status: ConditionStatus
    """True, False or Unknown."""

    reason: str = Field(max_length=1024)
    """One CamelCase word for programs."""

    message: str = Field(max_length=32_768)
    """A sentence for people."""

    observed_generation: int
    """Generation of the spec that this speaks of."""

    last_transition_time: Timestamp
    """When status last changed, RFC 3339."""


Conditions = Annotated[list[Condition], Field(max_length=32, json_schema_extra=map_by("type"))]


class GpuMemory(ApiModel):
    """Memory of one GPU (or, on CPU, of one replica) by term, in bytes."""

    total_bytes: int
    """What the device reports in all."""

    requested_bytes: int
    """Share that the engine may use."""

    target_weights_bytes: int
    """Target weights and other loaded buffers."""

    draft_weights_bytes: int
    """Draft weights."""

    state_bytes: int
    """Persistent sampler and drafter buffers."""

    activation_bytes: int
    """Peak of one forward pass."""

    cuda_graphs_bytes: int
    """CUDA graphs charged to the budget."""

    non_torch_bytes: int
    """NCCL and other memory outside torch."""

    available_kv_bytes: int
    """What is left for the KV cache; negative when the rest alone is too much."""

    margin_bytes: int
    """What the verdict keeps back because estimates err."""


class PlanStatus(ApiModel):
    """The plan that holds, or the nearest one when none fits."""

    verdict: Word
    """Fits, Tight or DoesNotFit."""

    explanation: Sentence
    """The choice in one sentence."""

    product: Word
    """GPU product, or CPU."""

    tensor: int
    """Tensor parallelism of the target."""

    pipeline: int = 1
    """Stages of layers."""

    data: int = 1
    """Copies of the model in a replica; figures of the KV cache and of requests are those of one."""

    expert: bool = False
    """Whether whole experts are spread over the GPUs of a stage."""

    draft_tensor: int | None = None
    """Tensor parallelism that the engine really gives the draft; absent where the draft has no layers."""

    gpus_per_replica: int
    """GPUs that one replica takes."""

    nodes_per_replica: int = 1
    """Nodes that these GPUs lie on, the same number on each."""

    target_quantization: Word
    """Precision of the target's linear layers."""

    draft_quantization: Word | None = None
    """Precision of the draft's linear layers."""

    target_knowledge: Word | None = None
    """How well the target is known: exact, estimated (from config.json and the headers of its files) or assumed."""

    draft_knowledge: Word | None = None
    """How well the draft is known; absent without a draft."""

    kv_cache_dtype: Word | None = None
    """Element type that the KV cache has: fp8 also where only the checkpoint asks for it."""

    max_model_len: int
    """Longest sequence in tokens."""

    per_gpu: GpuMemory
    """Memory of one GPU by term."""

    kv_bytes_per_token: int
    """KV cache bytes a token on one GPU, target and draft."""

    kv_cache_tokens: int
    """Tokens that the KV cache of each copy is predicted to hold."""

    max_concurrency: Word
    """Requests of maxModelLen that fit at once in each copy, as a decimal."""

    uncalibrated: Sentence | None = None
    """What to know of the figures on a GPU without public start-up logs; absent for one that has them."""

    chosen_by: Sentence | None = None
    """What the plan chose by and from; a plan in force is kept while this stays the same and it fits."""

    fixes: list[Sentence] | None = Field(default=None, max_length=16)
    """When it does not fit: what would help, smallest change first."""

    advice: list[Sentence] | None = Field(default=None, max_length=16)
    """What is worth knowing although it is no error; docs/design/advice.md tells where each rule comes from."""


class ObservedStatus(ApiModel):
    """What running engines report."""

    engines: int
    """Engines that answered."""

    engine_version: Word | None = None
    """Version of vLLM, as the engines say it of themselves: 0.33.0; several while they differ."""

    kv_cache_tokens: int | None = None
    """Tokens that the smallest KV cache holds, of all engines and of each copy in them."""

    kv_cache_residual_bytes: int | None = None
    """Predicted less reported KV cache on one GPU: positive where the engine got less than predicted."""

    kv_cache_residual: Word | None = None
    """The same as a share of what was predicted: +1.5%."""

    max_concurrency: Word | None = None
    """Requests of maxModelLen that fit in it at once, as a decimal."""

    num_speculative_tokens: int | None = None
    """The spec's number; what is drafted at present may be less."""

    draft_tokens: int | None = None
    """Tokens proposed since the engines started."""

    accepted_tokens: int | None = None
    """Proposed tokens that the target accepted."""

    acceptance: Word | None = None
    """Accepted share of the proposed tokens, as people read it: 71%."""

    acceptance_percent: int | None = None
    """Accepted share of the proposed tokens in percent."""

    mean_acceptance_length: Word | None = None
    """Tokens emitted a verification step on average, as a decimal."""

    mean_draft_length: Word | None = None
    """Tokens of a draft on average, as a decimal: K in force."""

    drafted_steps_percent: int | None = None
    """Share of decoding steps that verified a draft, in percent; the rest had none."""


class FiguresSource(StrEnum):
    """Who was asked for figures."""

    PODS = "Pods"
    PROMETHEUS = "Prometheus"


class FigureStatus(ApiModel):
    """One figure."""

    name: Word
    """As docs/reference/metrics.md defines it: time_to_first_token_p99."""

    value: Word
    """As a decimal; of figures by position one after the other."""


class FiguresStatus(ApiModel):
    """What engines did lately, by one definition whoever is asked."""

    source: FiguresSource
    """Pods: the engines' own /metrics. Prometheus: the operator's --prometheus."""

    message: Annotated[str, StringConstraints(max_length=1024), AfterValidator(printable)] | None = None
    """Why it is not the Prometheus that the operator was given; absent where it is, and where there is none."""

    over_seconds: int
    """Time that they are of."""

    values: list[FigureStatus] = Field(default=[], max_length=32, json_schema_extra=map_by("name"))
    """Figures that engines say something of."""


class SpeculationFeature(ApiModel):
    """One thing that was asked of speculation, and whether engines do it."""

    feature: Word
    """Field of the spec, below speculation or as it stands: adaptiveVerification, parallelism.draftTensor."""

    asked: Word
    """What it asks for."""

    in_force: ConditionStatus
    """Whether engines do so by their own counters and words; Unknown while neither tells."""

    message: Sentence
    """How that is known, and what helps."""


class AcceptanceStatus(ApiModel):
    """Accepted share of the proposed tokens, the last that engines of these models reported."""

    text: Word
    """As people read it: 71%, or was 71% when no engine says it at present."""

    percent: int
    """The same in percent."""

    mean_length: Word | None = None
    """Tokens emitted a verification step on average, as a decimal."""

    measured_with: Word
    """Method, K and models that it is of."""

    said_until: TimeText | None = None
    """When engines last said so, RFC 3339; absent while they do."""


class KeptEntry(ApiModel):
    """Internal: digest of an entry of a ConfigMap, or of a child, as the operator wrote it."""

    entry: str = Field(max_length=512)
    """ConfigMap/entry, or Kind/name of a child."""

    sha256: str = Field(max_length=256)
    """Of an entry's text, or of a child's content as the API server made it: another is not believed, or repaired."""


class SpecDecodeDeploymentStatus(ApiModel):
    """What the operator knows about one SpecDecodeDeployment."""

    observed_generation: int | None = None
    """Generation of the spec that this status speaks of."""

    conditions: Conditions = Field(default=[])
    """Aspects of the object, a type each."""

    plan: PlanStatus | None = None
    """The plan."""

    observed: ObservedStatus | None = None
    """What running engines report."""

    acceptance: AcceptanceStatus | None = None
    """Acceptance as it is, or as it last was: engines that ended or began anew report none."""

    speculation: list[SpeculationFeature] = Field(default=[], max_length=32, json_schema_extra=map_by("feature"))
    """What was asked of speculation, and whether it is in force."""

    figures: FiguresStatus | None = None
    """Tokens, latencies, acceptance, prefix cache and load of the last minutes.

    Taken every five minutes, or each time that engines are asked where that is more rarely; written where one moved.
    """

    policy: PolicyStatus | None = None
    """What the policy does about speculation, and why."""

    captures: list[ScheduleStatus] = Field(default=[], max_length=8, json_schema_extra=map_by("name"))
    """Schedules of captures."""

    ready: Word | None = None
    """Ready engines out of those wanted, as `kubectl get` prints them: 1/2."""

    kept: list[KeptEntry] = Field(default=[], max_length=64)
    """Internal: digests of the ConfigMap entries that the operator reads back, and of its children."""

    replicas: int | None = None
    """Engine pods that exist."""

    ready_replicas: int | None = None
    """Engine pods that serve."""

    selector: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """Label selector of the engine pods, for autoscalers."""
