"""The status of a SpecDecodeDeployment: conditions, plan, observed figures, acceptance."""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from specdecode_operator.api.base import ApiModel, Timestamp, TimeText, map_by
from specdecode_operator.api.deployment import PolicyStatus, ScheduleStatus
from specdecode_operator.enums import DraftUpdate
from specdecode_operator.problems import printable

Word = Annotated[str, StringConstraints(max_length=256), AfterValidator(printable)]
Sentence = Annotated[str, StringConstraints(max_length=32_768), AfterValidator(printable)]


class ConditionStatus(StrEnum):
    """Value of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """Condition of the object, following the Kubernetes API conventions."""

    type: str = Field(max_length=316)
    """Type of the condition: Accepted, Ready, Reconciling, Stalled, or one specific to the kind."""

    status: ConditionStatus
    """Value of the condition: True, False or Unknown."""

    reason: str = Field(max_length=1024)
    """Reason for the status as one CamelCase word, for programs."""

    message: str = Field(max_length=32_768)
    """Explanation of the status, for people."""

    observed_generation: int
    """Generation of the spec that this condition reflects."""

    last_transition_time: Timestamp
    """Time at which status last changed, RFC 3339."""


Conditions = Annotated[list[Condition], Field(max_length=32, json_schema_extra=map_by("type"))]


class GpuMemory(ApiModel):
    """Memory of one GPU (on CPU, of one replica) by use, in bytes."""

    total_bytes: int
    """Total memory that the device reports, in bytes."""

    requested_bytes: int
    """Memory that the engine may use, in bytes."""

    target_weights_bytes: int
    """Memory for the target's weights and other loaded buffers, in bytes."""

    draft_weights_bytes: int
    """Memory for the draft's weights, in bytes."""

    adapters_bytes: int | None = None
    """Memory for LoRA adapters, in bytes. Not set without adapters."""

    state_bytes: int
    """Memory for persistent sampler and drafter buffers, in bytes."""

    activation_bytes: int
    """Peak memory of one forward pass, in bytes."""

    cuda_graphs_bytes: int
    """Memory for CUDA graphs that vLLM charges to the budget, in bytes."""

    non_torch_bytes: int
    """Memory for NCCL and other allocations outside PyTorch, in bytes."""

    available_kv_bytes: int
    """Memory left for the KV cache, in bytes. Negative if the other terms exceed the budget."""

    margin_bytes: int
    """Safety margin for estimation errors that the verdict keeps free, in bytes."""


class SecondsRange(ApiModel):
    """Range of an estimated duration."""

    fastest_seconds: int
    """Lower end of the range, in seconds. It applies if models and compiled code are cached."""

    slowest_seconds: int
    """Upper end of the range, in seconds."""


class StartupEstimate(ApiModel):
    """Estimated time of a start, in wide ranges: it depends on the speed of storage, network and CPUs."""

    preparation: SecondsRange
    """Time until the engine's container starts: image pull and downloads."""

    engine: SecondsRange
    """Time from the start of the engine's container until vLLM serves."""

    deadline_seconds: int
    """Time after which the startup probe ends a container that is not ready."""


class PlanStatus(ApiModel):
    """Plan in force, or the closest one if none fits."""

    verdict: Word
    """Verdict of the plan: Fits, Tight or DoesNotFit."""

    explanation: Sentence
    """Explanation of the choice in one sentence."""

    product: Word
    """GPU product, such as NVIDIA-H200, or CPU."""

    tensor: int
    """Tensor parallelism of the target: the number of GPUs that share each layer."""

    pipeline: int = 1
    """Number of pipeline stages."""

    data: int = 1
    """Number of data-parallel replicas. Figures for the KV cache and for requests are per data-parallel replica."""

    expert: bool = False
    """Whether whole experts are distributed over the GPUs of a stage."""

    draft_tensor: int | None = None
    """Tensor parallelism that the engine applies to the draft. Not set if the draft has no layers."""

    gpus_per_replica: int
    """Number of GPUs per replica."""

    nodes_per_replica: int = 1
    """Number of nodes per replica, with the same number of GPUs on each."""

    target_quantization: Word
    """Precision of the target's linear layers."""

    draft_quantization: Word | None = None
    """Precision of the draft's linear layers."""

    target_knowledge: Word | None = None
    """How the target's sizes are known: exact, estimated (from config.json and the headers of its files) or assumed."""

    draft_knowledge: Word | None = None
    """How the draft's sizes are known. Not set without a draft."""

    kv_cache_dtype: Word | None = None
    """Data type of the KV cache. It is fp8 also if only the checkpoint asks for it."""

    max_model_len: int
    """Maximum length of a sequence in tokens."""

    per_gpu: GpuMemory
    """Memory of one GPU (on CPU, of one replica) by use, in bytes."""

    kv_bytes_per_token: int
    """KV cache bytes per token on one GPU, for target and draft together."""

    kv_cache_tokens: int
    """Predicted capacity of the KV cache in tokens, per data-parallel replica."""

    max_concurrency: Word
    """Number of requests of length maxModelLen that fit at the same time, per data-parallel replica, as a decimal."""

    uncalibrated: Sentence | None = None
    """Note on the accuracy of the figures for a GPU without public start-up logs. Not set for other GPUs."""

    startup: StartupEstimate | None = None
    """Estimated time of a start. Not set on CPU and for a replay."""

    chosen_by: Sentence | None = None
    """Objective of the plan and the precisions that it chose from. The plan stays in force while this does not change
    and the plan fits."""

    fixes: list[Sentence] | None = Field(default=None, max_length=16)
    """Changes that would make the plan fit, smallest first. Not set if it fits."""

    advice: list[Sentence] | None = Field(default=None, max_length=16)
    """Recommendations that are not errors. The rules are described in docs/design/advice.md."""


class MeasuredStartup(ApiModel):
    """Measured time of the start of one engine, in seconds. Parts that are unknown are not set."""

    pod: Word
    """Pod of the engine."""

    preparation_seconds: int | None = None
    """Time from the scheduling of the pod until the engine's container started: image pull, volumes and downloads."""

    download_seconds: int | None = None
    """Part of the preparation in which the pod downloaded models."""

    engine_seconds: int | None = None
    """Time from the start of the engine's container until vLLM served, as logged by vLLM."""

    load_seconds: int | None = None
    """Time to load the weights of target and draft, as logged by vLLM."""

    compile_seconds: int | None = None
    """Time of torch.compile, as logged by vLLM."""

    warm_up_seconds: int | None = None
    """Time for memory profiling and the warm-up of kernels."""

    graphs_seconds: int | None = None
    """Time to capture CUDA graphs, as logged by vLLM."""


class ObservedStatus(ApiModel):
    """Figures that running engines report."""

    engines: int
    """Number of engines that answered."""

    engine_version: Word | None = None
    """vLLM version that the engines report, such as 0.33.0. Lists several while they differ."""

    kv_cache_tokens: int | None = None
    """Capacity in tokens of the smallest KV cache among all engines and their data-parallel replicas."""

    kv_cache_residual_bytes: int | None = None
    """Predicted minus reported KV cache on one GPU, in bytes. Positive if the engine got less than predicted."""

    kv_cache_residual: Word | None = None
    """Predicted minus reported KV cache as a share of the prediction, such as +1.5%."""

    max_concurrency: Word | None = None
    """Number of requests of length maxModelLen that fit in that KV cache at the same time, as a decimal."""

    startup: MeasuredStartup | None = None
    """Start of the engine that took longest to start, without engines whose container restarted. Not set for a
    replay."""

    num_speculative_tokens: int | None = None
    """Number of speculative tokens (K) in the spec. Engines may draft fewer at present."""

    draft_tokens: int | None = None
    """Number of tokens drafted since the engines started."""

    accepted_tokens: int | None = None
    """Number of drafted tokens that the target accepted."""

    acceptance: Word | None = None
    """Accepted share of the drafted tokens, for people: 71%."""

    acceptance_percent: int | None = None
    """Accepted share of the drafted tokens in percent."""

    mean_acceptance_length: Word | None = None
    """Mean number of tokens emitted per verification step, as a decimal."""

    mean_draft_length: Word | None = None
    """Mean number of tokens per draft, as a decimal: the K in effect."""

    drafted_steps_percent: int | None = None
    """Share of decoding steps that verified a draft, in percent."""


class CanariesStatus(ApiModel):
    """Answers of running engines to the canary prompts since they started."""

    right: int
    """Number of answers that were the target's own. Written when an answer is not right, or when it has doubled."""

    wrong: int
    """Number of wrong answers that were confirmed by asking again."""

    unconfirmed: int
    """Number of wrong answers that were right when asked again."""

    failed: int
    """Number of questions that healthy engines did not answer."""

    unsupported: Annotated[str, StringConstraints(max_length=256), AfterValidator(printable)] | None = None
    """Reason why the engines are not asked, or why they reject the questions."""

    generated_tokens_per_hour: int
    """Tokens that each engine generates for canaries in an hour. Twice as many while its answers are wrong."""

    prompt_tokens_per_hour: int
    """Upper limit of the prompt tokens that each engine processes for canaries in an hour."""


class FiguresSource(StrEnum):
    """Source of the figures."""

    PODS = "Pods"
    PROMETHEUS = "Prometheus"


class FigureStatus(ApiModel):
    """Value of one figure."""

    name: Word
    """Name of the figure as defined in docs/reference/metrics.md, such as time_to_first_token_p99."""

    value: Word
    """Value as a decimal. Figures by position list one value per position."""


class FiguresStatus(ApiModel):
    """Recent figures of the engines, with the same definitions for all sources."""

    source: FiguresSource
    """Source of the figures: the engines' own /metrics (Pods), or the server in the operator's --prometheus
    (Prometheus)."""

    message: Annotated[str, StringConstraints(max_length=1024), AfterValidator(printable)] | None = None
    """Why the configured Prometheus is not the source. Not set if it is the source, or if the operator has none
    configured."""

    over_seconds: int
    """Length in seconds of the period that the figures cover."""

    values: list[FigureStatus] = Field(default=[], max_length=32, json_schema_extra=map_by("name"))
    """Figures that the source has data for."""


class SpeculationFeature(ApiModel):
    """Requested speculation feature, and whether the engines apply it."""

    feature: Word
    """Path of the spec field, either under spec.speculation, such as adaptiveVerification, or in full, such as
    parallelism.draftTensor."""

    asked: Word
    """Value that the spec requests for this feature."""

    in_force: ConditionStatus
    """Whether the engines apply the feature, according to their metrics and logs. Unknown if neither shows it."""

    message: Sentence
    """Evidence for inForce, and how to fix a problem."""


class AcceptanceStatus(ApiModel):
    """Last acceptance that engines with these models reported."""

    text: Word
    """Acceptance for people: 71%, or "was 71%" while no engine reports it."""

    percent: int
    """Accepted share of the drafted tokens in percent."""

    mean_length: Word | None = None
    """Mean number of tokens emitted per verification step, as a decimal."""

    measured_with: Word
    """Method, K and models with which it was measured."""

    said_until: TimeText | None = None
    """Time at which engines stopped reporting it, RFC 3339. Not set while they report it."""


class CanaryFigure(ApiModel):
    """One figure of both pools. A ratio above 1 means that the canary is worse."""

    name: Word
    """Name of the figure: tpot, ttft or errors."""

    verdict: Word
    """Verdict with the limit of this figure: Holds, Worse or Undecided."""

    ratio: Word | None = None
    """Value of the canary divided by that of the earlier engines, as a decimal."""

    low: Word | None = None
    """Lower end of the 95 % confidence interval of the ratio, as a decimal. Not set while it has no such end."""

    high: Word | None = None
    """Upper end of the 95 % confidence interval of the ratio, as a decimal. Not set while it has no such end."""


class CanaryStatus(ApiModel):
    """Comparison of a canary with the earlier engines."""

    engines: Word
    """Ready canary engines out of desired ones, such as 1/1."""

    blocks: int
    """Number of compared blocks of at least one minute. They start at zero when the operator restarts."""

    load_ratio: Word | None = None
    """Requests per canary engine divided by requests per earlier engine, as a decimal. Without a verdict if it is below
    0.8 or above 1.25."""

    tokens_per_step: Word | None = None
    """Tokens that a request gets from one step of a canary engine, as a decimal."""

    earlier_tokens_per_step: Word | None = None
    """Tokens that a request gets from one step of an earlier engine, as a decimal."""

    figures: list[CanaryFigure] = Field(default=[], max_length=8, json_schema_extra=map_by("name"))
    """Figures that are compared."""


class TrainedDraftStatus(ApiModel):
    """Trained head that replaces the draft of the spec."""

    training: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Name of the SpecDecodeTraining whose head is in force. Not set while the draft of the spec is in force."""

    claim: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Claim that holds the head."""

    path: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """Folder of the head in the claim."""

    sha256: Word | None = None
    """SHA-256 checksum of the head's model.safetensors."""

    since: Timestamp | None = None
    """Time at which the head replaced the draft of the spec."""

    update: DraftUpdate | None = None
    """How engines get this head: by new pods (Restart), or without a restart (InPlace)."""

    update_message: Sentence | None = None
    """Progress of an update without a restart, or why engines are restarted although draftUpdate is InPlace."""

    start_training: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Training of the head that engines load when they start, before they get the head in force without a restart. Not
    set if they start with the head in force."""

    start_sha256: Word | None = None
    """SHA-256 checksum of that head's model.safetensors."""

    reason: Word | None = None
    """Reason for what is in force, as one CamelCase word. Promoted if all engines serve the head. Explained with the
    condition Promoted of a SpecDecodeTraining."""

    message: Sentence | None = None
    """Explanation of the reason, for people."""

    failed: list[Word] = Field(default=[], max_length=16)
    """Internal: hashes of heads and settings whose rollout was rolled back. They are not offered again."""


class KeptEntry(ApiModel):
    """Internal: digest of a ConfigMap entry or child object as the operator wrote it."""

    entry: str = Field(max_length=512)
    """Name as ConfigMap/entry, or as Kind/name for a child object."""

    sha256: str = Field(max_length=256)
    """Digest of the entry's text, or of the child's content as stored by the API server. An entry with another digest
    is not trusted; a child with another digest is repaired."""


class SpecDecodeDeploymentStatus(ApiModel):
    """Observed state of a SpecDecodeDeployment."""

    observed_generation: int | None = None
    """Generation of the spec that this status reflects."""

    conditions: Conditions = Field(default=[])
    """Conditions of the object, one per type."""

    plan: PlanStatus | None = None
    """Plan in force, or the closest one if none fits."""

    observed: ObservedStatus | None = None
    """Figures that running engines report."""

    acceptance: AcceptanceStatus | None = None
    """Current or last known acceptance. Engines that stopped or restarted report none."""

    speculation: list[SpeculationFeature] = Field(default=[], max_length=32, json_schema_extra=map_by("feature"))
    """Requested speculation features, and whether the engines apply them."""

    figures: FiguresStatus | None = None
    """Tokens, latencies, acceptance, prefix cache and load of the last minutes. Read every five minutes, or whenever
    the engines are queried if that is less often; written only if a figure changed."""

    policy: PolicyStatus | None = None
    """Current decision of the policy, and its reason."""

    canaries: CanariesStatus | None = None
    """Answers to the canary prompts of spec.policy.canaries, and what they cost."""

    canary: CanaryStatus | None = None
    """Comparison of the canary with the earlier engines. Not set without a canary."""

    trained_draft: TrainedDraftStatus | None = None
    """Trained head that replaces the draft of the spec. Not set without speculation.trainedDrafts."""

    captures: list[ScheduleStatus] = Field(default=[], max_length=8, json_schema_extra=map_by("name"))
    """Status of the capture schedules."""

    ready: Word | None = None
    """Ready engines out of desired engines, as `kubectl get` prints them: 1/2."""

    kept: list[KeptEntry] = Field(default=[], max_length=64)
    """Internal: digests of the ConfigMap entries that the operator reads back, and of its child objects."""

    replicas: int | None = None
    """Number of engine pods that exist or are being created."""

    ready_replicas: int | None = None
    """Number of ready engine pods."""

    selector: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """Label selector of the engine pods, for autoscalers."""
