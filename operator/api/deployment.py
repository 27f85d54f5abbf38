"""The SpecDecodeDeployment kind: the spec, with replay, policy and capture schedules.

`specdecode crds` generates the CRD from these models, so each bound, default and description is defined once, here.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, StrictBool, StrictInt, StringConstraints

from specdecode_operator.api.base import (
    BOUNDED,
    CRON_LINE,
    DIVISOR,
    ENGINE_VERSION,
    FIELD_PATH,
    LABEL_VALUE,
    OBJECT_NAME,
    RESOURCE,
    SCHEDULE_NAME,
    SERVED_NAME,
    TEMPERATURE,
    TIME_ZONE,
    VARIABLE_NAME,
    ApiModel,
    ConfigMapRef,
    FilePath,
    ObjectName,
    PersistentVolumeClaimRef,
    SecretKey,
    SecretKeyName,
    Timestamp,
    TimeText,
    TlsSecret,
    map_by,
)
from specdecode_operator.api.capture import Against, CaptureRun
from specdecode_operator.api.speculation import Models, ShortText, Speculation, Target
from specdecode_operator.enums import (
    AcceleratorType,
    CudagraphMode,
    Dtype,
    KvCacheDtype,
    Objective,
    PolicyAction,
    PolicyMode,
    PolicyOutcome,
    RolloutStrategy,
    Slo,
    WorkloadKind,
)
from specdecode_operator.problems import printable

ScheduleName = Annotated[str, StringConstraints(max_length=20, pattern=SCHEDULE_NAME)]
CronLine = Annotated[str, StringConstraints(max_length=128, pattern=CRON_LINE)]
TimeZone = Annotated[str, StringConstraints(max_length=64, pattern=TIME_ZONE)]
# As long as a label's value may be, which is how Kueue is told.
QueueObject = Annotated[str, StringConstraints(max_length=63, pattern=OBJECT_NAME)]


class Concurrency(StrEnum):
    """What happens when a capture is due while an earlier one of its schedule runs."""

    FORBID = "Forbid"
    ALLOW = "Allow"
    REPLACE = "Replace"


class Retention(ApiModel):
    """Which claims of a schedule's captures are kept; others are deleted, and their files with them."""

    count: StrictInt | None = Field(default=None, ge=1, le=1000)
    """Claims with the files of captures that succeeded: the newest ones are kept. Absent: any number."""

    failed_count: StrictInt | None = Field(default=None, ge=0, le=1000)
    """Claims of captures that failed, were cancelled or deleted: the newest ones are kept. Absent: as many as count."""

    days: StrictInt | None = Field(default=None, ge=1, le=3650)
    """Age in days at which a claim is deleted, whatever is on it: when two looks, at least an hour apart, have found it
    older by the API server's time. Absent: never."""


class Queue(ApiModel):
    """The queue of Kueue that captures of a schedule wait in."""

    name: QueueObject
    """A LocalQueue of the namespace."""

    priority_class: QueueObject | None = None
    """A WorkloadPriorityClass. Absent: that of the pods."""


class CaptureSchedule(ApiModel):
    """Captures at certain times."""

    name: ScheduleName
    """Name of the schedule, part of the names of its captures."""

    schedule: CronLine
    """Minute, hour, day of month, month and day of week, as cron has them: 0 3 * * 1-5."""

    time_zone: TimeZone = "UTC"
    """Time zone of the schedule, such as Europe/Berlin."""

    concurrency_policy: Concurrency = Concurrency.FORBID
    """When an earlier capture still runs: Forbid waits for it, until startingDeadlineSeconds are over; Allow starts
    another; Replace cancels the earlier one."""

    starting_deadline_seconds: StrictInt = Field(default=300, ge=30, le=86_400)
    """How late a capture may start. One that is missed is left out, and an Event says so."""

    successful_history_limit: StrictInt = Field(default=3, ge=0, le=100)
    """Captures that succeeded and are kept as objects. Their claims follow retention."""

    failed_history_limit: StrictInt = Field(default=1, ge=0, le=100)
    """Captures that failed or were cancelled and are kept as objects."""

    retention: Retention = Retention()
    """Which claims of its captures are kept."""

    suspend: StrictBool = False
    """Start none until it is false again; those that run go on."""

    queue: Queue | None = None
    """The queue of Kueue that starts them, as label kueue.x-k8s.io/queue-name says it of a capture. Absent: none."""

    template: CaptureRun = CaptureRun()
    """The captures that are created."""


class ScheduleStatus(ApiModel):
    """What the operator knows of one schedule."""

    name: ScheduleName
    """Name of the schedule."""

    schedule: str = Field(max_length=256)
    """Schedule and time zone that the times speak of."""

    since: Timestamp
    """When the operator first saw this schedule; earlier times are not made up for."""

    last_schedule_time: TimeText | None = None
    """The last time that was due, whether a capture was started for it or it was missed."""

    next_schedule_time: TimeText | None = None
    """When the next capture is due; absent while suspended."""


_SHORT_S = 600
_LONG_S = 604_800


class ReplayMode(StrEnum):
    """What is made of a recording."""

    STEPS = "Steps"
    MODELLED = "Modelled"
    EMULATED = "Emulated"


class Matching(StrEnum):
    """How a request finds the record that it is answered with."""

    ARRIVAL = "Arrival"
    REQUEST_ID = "RequestId"
    PREFIX = "Prefix"


class Unmatched(StrEnum):
    """What a request gets for which no record is left."""

    REPEAT = "Repeat"
    REFUSE = "Refuse"
    MODELLED = "Modelled"


class RecordingSource(ApiModel):
    """Where a recording lies."""

    config_map: ConfigMapRef | None = None
    """ConfigMap that holds it, for small ones: at most 1 MiB."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Claim that holds it, such as that of a capture; mounted read-only."""

    path: FilePath
    """Folder of a capture, or a trace, inside the ConfigMap or the volume; step statistics are read from beside it. For
    mode Modelled also a model that `specdecode replay fit` made, for Emulated nothing else."""


class AcceptanceFrom(ApiModel):
    """An acceptance, and from when it holds."""

    from_seconds: StrictInt = Field(default=0, ge=0, le=_LONG_S)
    """Seconds since the engine's start."""

    percent: StrictInt = Field(ge=0, le=100)
    """Accepted share of the drafted tokens in percent."""


class ReplayFailures(ApiModel):
    """What goes wrong on purpose, to see what is done about it."""

    start_seconds: StrictInt = Field(default=0, ge=0, le=_SHORT_S)
    """How long a start takes before the engine listens, as loading a model would."""

    error_percent: StrictInt = Field(default=0, ge=0, le=100)
    """Share of requests that are answered with 500, in percent."""

    hang_after_seconds: StrictInt | None = Field(default=None, ge=0, le=_LONG_S)
    """Seconds from the start until no token comes any more, though /health answers. Absent: never."""

    crash_after_seconds: StrictInt | None = Field(default=None, ge=0, le=_LONG_S)
    """Seconds from each start until the process dies. Absent: never."""


class Replay(ApiModel):
    """A recording that is replayed in place of running a model: no GPU, no weights, and text that means nothing."""

    trace: RecordingSource
    """The recording."""

    mode: ReplayMode = ReplayMode.STEPS
    """Steps: each request gets the tokens of a recorded one, in its bursts and at its gaps, whatever the load.
    Modelled: tokens are drawn from all records, as the load is, with queues, preemption and the plan's KV cache.
    Emulated: vLLM itself serves, on CPU and without weights, and only its steps are drawn; engine.image names its
    image."""

    match: Matching = Matching.ARRIVAL
    """How a request finds its record: in the order of arrival; by the number at the end of its id; or by the longest
    common prefix, of records with block hashes."""

    unmatched: Unmatched = Unmatched.REPEAT
    """What comes when no record is left: the first again, an answer of 409, or tokens as in mode Modelled."""

    acceptance: list[AcceptanceFrom] = Field(default=[], max_length=64, json_schema_extra=map_by("fromSeconds"))
    """Acceptance over time in place of the recorded one; the first holds from second 0."""

    time_scale_percent: StrictInt = Field(default=100, ge=1, le=10_000)
    """Factor of every time in percent: 50 is twice as fast."""

    load_factor: StrictInt = Field(default=1, ge=1, le=10_000)
    """Requests that each one stands for in the metrics of load: running, waiting, KV cache in use."""

    seed: StrictInt = Field(default=0, ge=0, le=2**31 - 1)
    """Seed of everything that is drawn."""

    failures: ReplayFailures = ReplayFailures()
    """What goes wrong on purpose."""


MOST_DECISIONS: Final = 8
MOST_RESTARTS: Final = 24

_Name = Annotated[str, StringConstraints(max_length=253), AfterValidator(printable)]
_Text = Annotated[str, StringConstraints(max_length=1024), AfterValidator(printable)]
_Decimal = Annotated[str, StringConstraints(max_length=32), AfterValidator(printable)]


class AcceptanceRule(StrEnum):
    """Public rules that speculation below an acceptance be turned off; they contradict each other."""

    BELOW_40_PERCENT = "Below40Percent"
    BELOW_50_PERCENT = "Below50Percent"
    BELOW_65_PERCENT = "Below65Percent"
    BELOW_80_PERCENT = "Below80Percent"

    @property
    def acceptance(self) -> float:
        """The acceptance, as a share."""
        return int(self.value.removeprefix("Below").removesuffix("Percent")) / 100


class Policy(ApiModel):
    """What is done about speculation by the goodput that a capture measured, and the load now."""

    mode: PolicyMode = PolicyMode.OBSERVE
    """Observe: say in the status what would be done. Advise: as a condition and in Events, too. Enforce: do it; the
    spec stays as it is, and status.policy says what is in force in the place of spec.speculation."""

    paused: StrictBool = False
    """Change nothing more until it is false again; what is in force stays."""

    evidence: ObjectName | None = None
    """SpecDecodeCapture of this namespace whose arms may be chosen. Absent: the newest of this deployment that compared
    arms."""

    min_gain_percent: StrictInt = Field(default=3, ge=1, le=100)
    """Goodput that another setting must bring more, in percent."""

    window_seconds: StrictInt = Field(default=900, ge=30, le=7200)
    """How long the load is looked at."""

    cooldown_seconds: StrictInt = Field(default=1800, ge=30, le=86_400)
    """How long nothing more is done after something was; before a setting is taken again that was left last, twice as
    long."""

    max_restarts_per_day: StrictInt = Field(default=6, ge=1, le=MOST_RESTARTS)
    """How often in 24 hours engines may be started anew: a change of all of them counts once."""

    acceptance_rule: AcceptanceRule | None = None
    """A public rule to advise by where no capture compared arms, never to act by: acceptance says little about goodput,
    and nothing with adaptiveVerification."""


class PolicyDecision(ApiModel):
    """Something that was advised or done."""

    at: Timestamp
    """When, RFC 3339."""

    action: PolicyAction
    """What."""

    outcome: PolicyOutcome
    """What became of it."""

    target: _Name | None = None
    """The arm that was changed to, or the pod that was started anew."""

    message: _Text
    """Why, with the figures."""


class PolicyStatus(ApiModel):
    """What the policy does, and the internal state that it needs."""

    mode: PolicyMode
    """As the spec has it."""

    action: PolicyAction
    """What is best now: Keep, Change, TurnOff, TryAgain or Restart."""

    outcome: PolicyOutcome
    """What comes of it: Kept, Observed, Advised, Done, or what holds it back: Paused, CoolingDown,
    BudgetSpent, Refused."""

    reason: Annotated[str, StringConstraints(max_length=64)]
    """One CamelCase word for programs."""

    message: _Text
    """The same in a sentence with its figures."""

    target: _Name | None = None
    """The arm that would be changed to, or the pod that would be started anew."""

    evidence: _Name | None = None
    """The capture that it rests on."""

    arm: _Name | None = None
    """The arm in force, by its name there."""

    since: Timestamp | None = None
    """Since when it is, by the policy; absent where it is what the spec says."""

    speculation: Speculation | None = None
    """What is in force in the place of spec.speculation; absent where that is."""

    asked: _Name | None = None
    """Internal: digest of the spec that this was decided for. The policy starts again for another spec."""

    left: _Name | None = None
    """Internal: the arm that was in force before."""

    acceptance_factor: _Decimal | None = None
    """Internal: acceptance when speculation was turned off, as a share of the measured one, as a decimal."""

    tried_in_vain: StrictBool = False
    """Internal: whether speculation was tried again since and turned off again."""

    failed_arms: list[_Name] = Field(default=[], max_length=8)
    """Internal: arms whose engines never served here, as NAME@DIGEST of their speculation, the newest last. The policy
    does not choose them again for this spec. A changed arm counts as another one."""

    restarts: list[Timestamp] = Field(default=[], max_length=MOST_RESTARTS)
    """Internal: when engines were restarted in the last 24 hours."""

    decisions: list[PolicyDecision] = Field(default=[], max_length=MOST_DECISIONS)
    """What was advised or done last, newest first."""


KIND = "SpecDecodeDeployment"
PLURAL = "specdecodedeployments"

LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=LABEL_VALUE)]
EnvVarName = Annotated[str, StringConstraints(max_length=256, pattern=VARIABLE_NAME)]
EngineVersion = Annotated[str, StringConstraints(max_length=32, pattern=ENGINE_VERSION)]
ImageReference = Annotated[str, StringConstraints(min_length=1, max_length=512)]
ServedName = Annotated[str, StringConstraints(max_length=256, pattern=SERVED_NAME)]


class Parallelism(ApiModel):
    """Over how many GPUs one replica spreads."""

    tensor: StrictInt | None = Field(default=None, ge=1, le=64)
    """Tensor parallelism of the target, and so of the draft. Absent: the smallest that fits; on CPU: 1."""

    pipeline: StrictInt = Field(default=1, ge=1, le=64)
    """Stages of layers, each on GPUs of its own."""

    data: StrictInt = Field(default=1, ge=1, le=64)
    """Copies of the model behind one endpoint, each with a KV cache and requests of its own, of which all figures are;
    experts are not copied."""

    expert: StrictBool = False
    """Spread whole experts over the tensor x data GPUs of a stage, instead of slicing each."""

    draft_tensor: StrictInt | None = Field(default=None, ge=1, le=64)
    """What the engine is told of the draft's tensor parallelism: 1, or tensor. The draft is split like the target
    either way; status.plan.draftTensor says so."""


class Accelerator(ApiModel):
    """What one replica runs on."""

    type: AcceleratorType = AcceleratorType.GPU
    """GPU, or CPU for trying things out without one."""

    products: list[LabelValue] = Field(default=[], max_length=16)
    """Allowed values of the node label nvidia.com/gpu.product. If empty, any supported GPU that fits."""

    per_node: StrictInt | None = Field(default=None, ge=1, le=64)
    """GPUs a node, where nodes cannot be asked."""

    memory_gib_per_gpu: StrictInt | None = Field(default=None, alias="memoryGiBPerGPU", ge=1, le=4096)
    """Memory of each GPU in whole GiB, as CUDA reports it, for products whose memory the operator does not know.
    Estimates for them are uncalibrated, with a wider margin. Known products keep their own figure."""

    cpu_cores: StrictInt | None = Field(default=None, ge=1, le=1024)
    """Cores a replica, for type CPU."""

    memory_gib: StrictInt | None = Field(default=None, alias="memoryGiB", ge=1, le=65_536)
    """Memory a replica in GiB, for type CPU; its ranks share it."""

    kv_cache_gib: StrictInt | None = Field(default=None, alias="kvCacheGiB", ge=1, le=65_536)
    """KV cache a replica in GiB, for type CPU: a multiple of parallelism.tensor, whose ranks share it."""


class Serving(ApiModel):
    """What the engine is told; every value is rendered explicitly."""

    max_model_len: StrictInt | None = Field(default=None, ge=1, le=16_777_216)
    """Longest sequence in tokens, prompt and output. Absent: the model's own."""

    max_num_seqs: StrictInt = Field(default=256, ge=1, le=65_536)
    """Requests that may run at once, in each copy of parallelism.data. A model with states (Mamba, linear attention)
    whose KV cache has fewer than 256 blocks runs 128, 64 or fewer in place of the default, so that vLLM starts."""

    max_num_batched_tokens: StrictInt = Field(default=8192, ge=1, le=16_777_216)
    """Tokens scheduled in one step, in each copy of parallelism.data."""

    dtype: Dtype = Dtype.AUTO
    """Element type of all that is not quantized, in target and draft; auto is the target's own, or bfloat16 where that
    is float32."""

    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO
    """Element type of the KV cache; auto is the model's."""

    block_size: StrictInt | None = Field(default=None, ge=1, le=1024)
    """Tokens in one KV cache block. Absent: vLLM's own on that accelerator, 16 on GPU and 128 on CPU."""

    gpu_memory_utilization_percent: StrictInt = Field(default=92, ge=1, le=100)
    """Share of each GPU's memory that the engine may use, in percent (vLLM's gpu_memory_utilization)."""

    enforce_eager: StrictBool = False
    """Run without CUDA graphs and compilation."""

    cudagraph_mode: CudagraphMode | None = None
    """Which steps run as CUDA graphs: none; all in pieces, attention outside (PIECEWISE); all as a whole (FULL); decode
    as a whole and the rest without (FULL_DECODE_ONLY) or in pieces (FULL_AND_PIECEWISE). Absent: the engine's own,
    mostly the last."""

    max_cudagraph_capture_size: StrictInt | None = Field(default=None, ge=1, le=65_536)
    """Most tokens of a step that runs as a CUDA graph; larger steps run without, which saves memory and start-up time.
    Absent: the engine's, twice the tokens that a step of maxNumSeqs requests verifies, at most 512."""

    min_concurrency: StrictInt = Field(default=1, ge=1, le=65_536)
    """Requests of maxModelLen that must fit at once, in each copy of parallelism.data."""

    served_model_names: list[ServedName] = Field(default=[], max_length=16)
    """Names that clients may ask for. Empty: the last part of target.model."""

    api_key_secret: SecretKey | None = None
    """Key that clients of the OpenAI API must send."""

    tls_secret: TlsSecret | None = None
    """Certificate to serve HTTPS with. Absent: plain HTTP."""

    port: StrictInt = Field(default=8000, ge=1024, le=65_535)
    """Port of the engine and of the Service; below 1024 the engine would need root."""


class SecretKeySelector(SecretKey):
    """One key of a Secret in the same namespace."""

    optional: StrictBool | None = None
    """Start the container without the variable if the Secret or the key does not exist."""


class ConfigMapKeySelector(ApiModel):
    """One key of a ConfigMap in the same namespace."""

    name: ObjectName
    """Name of the ConfigMap."""

    key: SecretKeyName
    """Key in it."""

    optional: StrictBool | None = None
    """Start the container without the variable if the ConfigMap or the key does not exist."""


class ObjectFieldSelector(ApiModel):
    """One field of the pod."""

    field_path: Annotated[str, StringConstraints(max_length=512, pattern=FIELD_PATH)]
    """Path of the field, such as status.podIP or metadata.labels['team']."""

    api_version: Annotated[str, StringConstraints(max_length=64)] | None = None
    """Version of the API that the path is written for. Absent: v1."""


class ResourceFieldSelector(ApiModel):
    """One resource limit or request of a container of the pod."""

    resource: Annotated[str, StringConstraints(max_length=128, pattern=RESOURCE)]
    """The resource, such as limits.memory."""

    container_name: LabelValue | None = None
    """Name of the container. Absent: the engine container."""

    divisor: Annotated[str, StringConstraints(max_length=4, pattern=DIVISOR)] | None = None
    """Unit of the value, such as 1Mi. Absent: 1."""


class EnvVarSource(ApiModel):
    """Where the value of a variable comes from. Exactly one field must be set."""

    secret_key_ref: SecretKeySelector | None = None
    """A key of a Secret."""

    config_map_key_ref: ConfigMapKeySelector | None = None
    """A key of a ConfigMap."""

    field_ref: ObjectFieldSelector | None = None
    """A field of the pod."""

    resource_field_ref: ResourceFieldSelector | None = None
    """A resource limit or request of a container."""


class EnvVar(ApiModel):
    """An environment variable of the engine container, as in a pod."""

    name: EnvVarName
    """Name of the variable."""

    value: str = Field(default="", max_length=4096)
    """Its value, as plain text."""

    value_from: EnvVarSource | None = None
    """Where its value comes from. The plan does not know such a value. A change of the Secret or ConfigMap does not
    restart engines."""


class Engine(ApiModel):
    """Which vLLM runs, and what is passed to it as is."""

    version: EngineVersion = "0.33"
    """vLLM version, major and minor, such as 0.32."""

    image: ImageReference | None = None
    """Engine image with a tag or a digest. Absent: the project's image of that version."""

    extra_args: list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]] = Field(
        default=[], max_length=256
    )
    """Further vLLM arguments, for what has no field here."""

    env: list[EnvVar] = Field(default=[], max_length=256, json_schema_extra=map_by("name"))
    """Further environment variables of the engine container."""

    replay: Replay | None = None
    """A recording to replay in place of vLLM, on any node and without a GPU: to test clients, autoscalers and policies.
    What else the spec says is checked and planned as ever, for nodes that need not exist, but no model is loaded."""


class Workload(ApiModel):
    """What is known of the requests. It changes no plan, only the advice."""

    kind: WorkloadKind | None = None
    """What most requests are."""

    temperature: Annotated[str, StringConstraints(max_length=4, pattern=TEMPERATURE)] | None = None
    """Sampling temperature that most requests ask for, as a decimal: 0.7."""

    primary_slo: Slo | None = None
    """What the service promises first of all: time to the first token, time for each further one, or throughput."""

    prompt_tokens: StrictInt | None = Field(default=None, ge=1, le=16_777_216)
    """Tokens of a usual prompt."""

    output_tokens: StrictInt | None = Field(default=None, ge=1, le=16_777_216)
    """Tokens of a usual answer."""


class Override(ApiModel):
    """A person goes on against the plan, visibly."""

    ignore_plan: StrictBool = False
    """Launch engines even if the plan's verdict is DoesNotFit."""

    reason: ShortText
    """Why; shown in the status."""


class GateOverride(ApiModel):
    """A person goes on without a judgement, visibly."""

    reason: ShortText
    """Why; shown in the status."""


class Gate(Against):
    """A golden capture that the engines of a new spec are judged by before they roll out."""

    capture: ObjectName
    """A SpecDecodeCapture of one arm in this namespace that succeeded, of engines that served well. The engines of a
    new spec are sent its workload once more, with its seed."""

    override: GateOverride | None = None
    """Roll out without being judged, as long as this is here."""


class Rollout(ApiModel):
    """How engines of a new spec take the place of the old ones."""

    strategy: RolloutStrategy = RolloutStrategy.REPLACE
    """Replace: an old engine ends before its successor starts, so no more GPUs are needed. Surge: one engine more
    than replicas is started first, so none is missing meanwhile."""

    gate: Gate | None = None
    """Engines that differ from those that serve are first captured with the workload of a golden capture, and roll out
    only if they serve as well. Absent: they roll out at once."""

    paused: StrictBool = False
    """Change nothing in the running engines but their number until it is false again."""


class PodTemplate(ApiModel):
    """What is merged into the engine pods."""

    metadata: Annotated[dict[str, Any], Field(max_length=16), BOUNDED] | None = None
    """Labels and annotations to add."""

    spec: Annotated[dict[str, Any], Field(max_length=64), BOUNDED] | None = None
    """Pod spec to merge: tolerations, volumes, priorityClassName, …"""


class SpecDecodeDeploymentSpec(ApiModel):
    """A target model, how to speculate for it, and where."""

    target: Target
    """The model whose outputs are served."""

    speculation: Speculation | None = None
    """How the engine speculates. Absent: it does not."""

    parallelism: Parallelism = Parallelism()
    """Over how many GPUs one replica spreads."""

    accelerator: Accelerator = Accelerator()
    """What one replica runs on."""

    serving: Serving = Serving()
    """What the engine is told."""

    objective: Objective = Objective.QUALITY
    """What the plan aims at where it may choose: the least quantized target, the most KV cache tokens for each GPU,
    or the fewest GPUs."""

    workload: Workload | None = None
    """What is known of the requests, for advice."""

    replicas: StrictInt = Field(default=1, ge=0, le=1000)
    """Engine replicas; leave it out when an autoscaler owns it."""

    rollout: Rollout = Rollout()
    """How engines of a new spec take the place of the old ones."""

    models: Models = Models()
    """Where models come from."""

    engine: Engine = Engine()
    """Which vLLM runs."""

    suspend: StrictBool = False
    """Zero pods, everything else kept."""

    override: Override | None = None
    """Go on against a plan that does not fit."""

    policy: Policy | None = None
    """What is done about speculation by measured goodput and the load now. Absent: nothing."""

    captures: list[CaptureSchedule] = Field(default=[], max_length=8, json_schema_extra=map_by("name"))
    """Captures of this deployment that are started by the clock."""

    pod_template: PodTemplate | None = None
    """Merged into the engine pods, lists by the names of their elements: the engine's container is called engine, any
    other is a further container and needs an image."""


@dataclass(frozen=True, order=True)
class Key:
    """Namespace, name and kind of one object of ours."""

    namespace: str
    name: str
    kind: str = KIND

    def __str__(self) -> str:
        """Namespace and name, as kubectl users write them."""
        return f"{self.namespace}/{self.name}"
