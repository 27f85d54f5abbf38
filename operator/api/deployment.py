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
    HEADER_NAME,
    HEADER_VALUE,
    HOSTNAME,
    HTTP_URL,
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
from specdecode_operator.api.capture import Against, CaptureRun, Percent
from specdecode_operator.api.speculation import Adapter, AdapterSlots, Models, ShortText, Speculation, Target
from specdecode_operator.api.training import TrainingRun
from specdecode_operator.enums import (
    AcceleratorType,
    AutoscalingMetric,
    CudagraphMode,
    Dtype,
    KvCacheDtype,
    Objective,
    OnCrashLoop,
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
Hostname = Annotated[str, StringConstraints(max_length=253, pattern=HOSTNAME)]
HeaderName = Annotated[str, StringConstraints(max_length=256, pattern=HEADER_NAME)]
HeaderValue = Annotated[str, StringConstraints(max_length=1024, pattern=HEADER_VALUE)]
# The limit of label values, by which Kueue gets the name, and of names of namespaces.
ShortName = Annotated[str, StringConstraints(max_length=63, pattern=OBJECT_NAME)]


class Concurrency(StrEnum):
    """What happens when a capture is due while an earlier one of its schedule still runs."""

    FORBID = "Forbid"
    ALLOW = "Allow"
    REPLACE = "Replace"


class Retention(ApiModel):
    """Limits for keeping the claims of a schedule's captures. Claims beyond a limit are deleted with their files."""

    count: StrictInt | None = Field(default=None, ge=1, le=1000)
    """Number of claims of successful captures to keep, newest first. If not set, there is no limit."""

    failed_count: StrictInt | None = Field(default=None, ge=0, le=1000)
    """Number of claims of failed, cancelled or deleted captures to keep, newest first. Defaults to count."""

    days: StrictInt | None = Field(default=None, ge=1, le=3650)
    """Age in days after which a claim is deleted, whether or not its capture succeeded. Two checks at least an hour
    apart must find the claim over this age. If not set, claims do not expire."""


class Queue(ApiModel):
    """Kueue queue in which the captures of a schedule wait."""

    name: ShortName
    """Name of a LocalQueue in the same namespace."""

    priority_class: ShortName | None = None
    """Name of a WorkloadPriorityClass. If not set, the priority of the pods applies."""


class TrainWhen(StrEnum):
    """When a schedule trains a draft on its newest capture."""

    DECAYED = "Decayed"
    ALWAYS = "Always"


class ScheduledTraining(ApiModel):
    """Training on the newest capture of a schedule."""

    when: TrainWhen = TrainWhen.DECAYED
    """Decayed: train if fewer drafted tokens are accepted than before, or if prompts or answers became longer or
    shorter. Always: train on each successful capture."""

    gpu_hours_per_month: StrictInt = Field(ge=0, le=1_000_000)
    """Maximum number of GPU hours that the trainings of this schedule may use in a calendar month (UTC), with their
    measurements. A training starts only if its largest possible use fits. 0 is for deployments on CPUs."""

    from_served_head: StrictBool = True
    """Continue from the trained head that the deployment serves, if its kind is template.method. Otherwise,
    the training starts from template.from."""

    template: TrainingRun
    """Spec of the trainings. The schedule sets deployment and captures."""


class CaptureSchedule(ApiModel):
    """Schedule that creates captures of this deployment."""

    name: ScheduleName
    """Name of the schedule, which becomes part of the names of its captures."""

    schedule: CronLine
    """Cron expression with minute, hour, day of month, month and day of week, such as 0 3 * * 1-5."""

    time_zone: TimeZone = "UTC"
    """IANA time zone of the schedule, such as Europe/Berlin."""

    concurrency_policy: Concurrency = Concurrency.FORBID
    """What to do when a capture is due while an earlier one still runs. Forbid waits for the earlier one, for up to
    startingDeadlineSeconds; Allow starts a second one; Replace cancels the earlier one."""

    starting_deadline_seconds: StrictInt = Field(default=300, ge=30, le=86_400)
    """Maximum delay in seconds with which a capture may start. A later one is skipped and reported in an Event."""

    successful_history_limit: StrictInt = Field(default=3, ge=0, le=100)
    """Number of successful SpecDecodeCapture objects to keep. Their claims are subject to retention. Also the number of
    complete SpecDecodeTraining objects to keep, besides those whose head is served or offered."""

    failed_history_limit: StrictInt = Field(default=1, ge=0, le=100)
    """Number of failed or cancelled SpecDecodeCapture objects, and of failed SpecDecodeTraining objects, to keep."""

    retention: Retention = Retention()
    """Limits for keeping the claims that the captures create."""

    suspend: StrictBool = False
    """Start no further captures and trainings. Running ones continue."""

    queue: Queue | None = None
    """Kueue queue for the captures and trainings, which sets the label kueue.x-k8s.io/queue-name on them. If not set,
    they do not wait in a queue."""

    template: CaptureRun = CaptureRun()
    """Spec of the captures that the schedule creates."""

    training: ScheduledTraining | None = None
    """Training of a draft on the newest successful capture. If not set, captures are only recorded."""


class RunningTraining(ApiModel):
    """Unfinished training of a schedule."""

    name: ObjectName
    """Name of the SpecDecodeTraining."""

    capture: ObjectName
    """Name of the capture that it trains on."""

    gpus: int = Field(ge=0)
    """Number of GPUs that it uses."""

    reserved_gpu_seconds: int = Field(ge=0)
    """GPU seconds that it can use at most, with its measurement."""

    created_at: TimeText | None = None
    """Creation time of the SpecDecodeTraining. Not set until the operator has found it."""


class ScheduledTrainingStatus(ApiModel):
    """Trainings of one capture schedule."""

    month: Annotated[str, StringConstraints(max_length=7)]
    """Calendar month (UTC) of usedGpuSeconds, such as 2026-11."""

    used_gpu_seconds: int = Field(default=0, ge=0)
    """GPU seconds that ended trainings used in this month, with their measurements. A training counts in full in each
    month in which it ran."""

    limit_gpu_seconds: int = Field(default=0, ge=0)
    """GPU seconds that trainings may use in this month: gpuHoursPerMonth."""

    running: RunningTraining | None = None
    """Unfinished training. Its reservation counts towards the limit."""

    last_capture_time: TimeText
    """Scheduled time of the newest capture on which the operator has trained, or decided not to train."""

    trained_capture_time: TimeText | None = None
    """Scheduled time of the capture of the newest training. Earlier captures are not compared."""

    decayed: Annotated[str, StringConstraints(max_length=1024), AfterValidator(printable)] | None = None
    """Decline of acceptance that the operator has found in the serving engines since lastCaptureTime."""

    decayed_engine: Annotated[str, StringConstraints(max_length=64)] | None = None
    """Internal: digest of the spec of the engines in which it was found."""

    reason: Annotated[str, StringConstraints(max_length=256), AfterValidator(printable)]
    """Reason why a training runs or does not, as one CamelCase word."""

    message: Annotated[str, StringConstraints(max_length=1024), AfterValidator(printable)] = ""
    """Explanation of the reason, for people."""


class ScheduleStatus(ApiModel):
    """Status of one capture schedule."""

    name: ScheduleName
    """Name of the schedule."""

    schedule: str = Field(max_length=256)
    """Cron expression and time zone for which the times in this status were computed."""

    since: Timestamp
    """Time at which the operator first saw this schedule. Earlier scheduled times are not made up for."""

    last_schedule_time: TimeText | None = None
    """Most recent scheduled time, whether its capture was started or missed."""

    next_schedule_time: TimeText | None = None
    """Time at which the next capture is due. Not set while the schedule is suspended."""

    training: ScheduledTrainingStatus | None = None
    """Trainings of the schedule. Not set without spec.captures[].training."""


_SHORT_S = 600
_LONG_S = 604_800


class ReplayMode(StrEnum):
    """How the recording is replayed."""

    STEPS = "Steps"
    MODELLED = "Modelled"
    EMULATED = "Emulated"


class Matching(StrEnum):
    """How a request is matched with a recorded one."""

    ARRIVAL = "Arrival"
    REQUEST_ID = "RequestId"
    PREFIX = "Prefix"


class Unmatched(StrEnum):
    """How a request is answered if no recorded one is left for it."""

    REPEAT = "Repeat"
    REFUSE = "Refuse"
    MODELLED = "Modelled"


class RecordingSource(ApiModel):
    """Location of a recording."""

    config_map: ConfigMapRef | None = None
    """ConfigMap that holds the recording, for recordings of up to 1 MiB."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Claim that holds the recording, such as the claim of a capture. Engines mount it read-only."""

    path: FilePath
    """Path of a capture's folder or of a trace file in the ConfigMap or volume. Step statistics are read from the same
    folder. Mode Modelled also accepts a model made by `specdecode replay fit`; mode Emulated requires one."""


class AcceptanceFrom(ApiModel):
    """Acceptance that applies from a point in time on."""

    from_seconds: StrictInt = Field(default=0, ge=0, le=_LONG_S)
    """Time in seconds since the start of the engine."""

    percent: StrictInt = Field(ge=0, le=100)
    """Accepted share of the drafted tokens, in percent."""


class ReplayFailures(ApiModel):
    """Failures to inject, for testing how clients and the operator respond."""

    start_seconds: StrictInt = Field(default=0, ge=0, le=_SHORT_S)
    """Delay in seconds before the engine listens, which simulates loading a model."""

    error_percent: StrictInt = Field(default=0, ge=0, le=100)
    """Share of requests answered with HTTP status 500, in percent."""

    hang_after_seconds: StrictInt | None = Field(default=None, ge=0, le=_LONG_S)
    """Time in seconds after the start at which the engine stops sending tokens while /health still answers. If not set,
    it does not hang."""

    crash_after_seconds: StrictInt | None = Field(default=None, ge=0, le=_LONG_S)
    """Time in seconds after each start at which the process exits. If not set, it does not crash."""


class Replay(ApiModel):
    """Replay of a recording instead of running a model, without a GPU, weights or meaningful text."""

    trace: RecordingSource
    """Location of the recording: a ConfigMap or a claim, and a path."""

    mode: ReplayMode = ReplayMode.STEPS
    """Steps: each request gets the tokens and timing of a recorded one, independent of the load. Modelled: tokens are
    drawn from all records for the current load, with queues, preemption and the plan's KV cache. Emulated: vLLM itself
    runs on CPU without weights and only its steps are drawn; engine.image names its image."""

    match: Matching = Matching.ARRIVAL
    """How a request is matched with a record: in order of arrival (Arrival); by its id, or the number at the end of its
    id (RequestId); or by the longest common prefix, for records with block hashes (Prefix)."""

    unmatched: Unmatched = Unmatched.REPEAT
    """How a request without a matching record is answered: with the records again, from the first one (Repeat); with
    HTTP status 409 (Refuse); or with tokens as in mode Modelled (Modelled)."""

    acceptance: list[AcceptanceFrom] = Field(default=[], max_length=64, json_schema_extra=map_by("fromSeconds"))
    """Acceptance over time, which replaces the recorded one. The first entry must have fromSeconds 0."""

    time_scale_percent: StrictInt = Field(default=100, ge=1, le=10_000)
    """Scale of all times, in percent: 50 replays twice as fast."""

    load_factor: StrictInt = Field(default=1, ge=1, le=10_000)
    """Number of requests that each request counts as in the load metrics: running, waiting, KV cache usage."""

    seed: StrictInt = Field(default=0, ge=0, le=2**31 - 1)
    """Seed for everything that the replay draws at random."""

    failures: ReplayFailures = ReplayFailures()
    """Failures to inject, for testing how clients and the operator respond."""


MOST_DECISIONS: Final = 8
MOST_RESTARTS: Final = 24

_Name = Annotated[str, StringConstraints(max_length=253), AfterValidator(printable)]
_Text = Annotated[str, StringConstraints(max_length=1024), AfterValidator(printable)]
_Decimal = Annotated[str, StringConstraints(max_length=32), AfterValidator(printable)]


class AcceptanceRule(StrEnum):
    """Published rules of thumb for turning speculation off below an acceptance. They contradict each other."""

    BELOW_40_PERCENT = "Below40Percent"
    BELOW_50_PERCENT = "Below50Percent"
    BELOW_65_PERCENT = "Below65Percent"
    BELOW_80_PERCENT = "Below80Percent"

    @property
    def acceptance(self) -> float:
        """The acceptance, as a share."""
        return int(self.value.removeprefix("Below").removesuffix("Percent")) / 100


MOST_CANARIES: Final = 16
CanaryPrompt = Annotated[str, StringConstraints(min_length=1, max_length=2000)]


class Canaries(ApiModel):
    """Fixed prompts that each engine gets at a low rate, to check its answers against the target."""

    interval_seconds: StrictInt = Field(default=600, ge=60, le=86_400)
    """Time in seconds in which each engine gets every prompt once. The prompts are spread evenly over it."""

    max_tokens: StrictInt = Field(default=32, ge=1, le=256)
    """Length of each answer in tokens."""

    prompts: list[CanaryPrompt] = Field(default=[], max_length=MOST_CANARIES)
    """Prompts to send, each of up to 2,000 characters. Prompts like your users' prompts find more errors. Defaults to 5
    short prompts: facts, code, JSON, arithmetic and French."""


class Policy(ApiModel):
    """Policy that chooses among measured speculation settings by their goodput and the current load."""

    mode: PolicyMode = PolicyMode.OBSERVE
    """Observe reports recommendations in the status. Advise also reports them in a condition and in Events. Enforce
    applies them: the spec does not change, and status.policy shows the speculation that replaces spec.speculation."""

    on_crash_loop: OnCrashLoop | None = None
    """Reaction to engines that served and then crash 3 times within an hour while they speculate. Report sets the
    condition SpeculationEffective to False. ServeWithoutSpeculation also replaces the engines by ones without
    speculation, until the spec changes. Defaults to Report, and to ServeWithoutSpeculation in mode Enforce."""

    paused: StrictBool = False
    """Make no further changes. The setting in force stays."""

    evidence: ObjectName | None = None
    """SpecDecodeCapture in this namespace whose arms the policy may choose. Defaults to the newest capture of this
    deployment that compared arms."""

    canaries: Canaries | None = None
    """Check answers of the running engines. If engines answer other than the target, the condition
    SpeculationEffective becomes False with reason WrongAnswers; in mode Enforce, engines without speculation also
    replace them, until the spec changes. If not set, answers are not checked."""

    min_gain_percent: StrictInt = Field(default=3, ge=1, le=100)
    """Minimum gain in goodput that another setting must bring, in percent."""

    window_seconds: StrictInt = Field(default=900, ge=30, le=7200)
    """Time window in seconds over which the load is observed."""

    cooldown_seconds: StrictInt = Field(default=1800, ge=30, le=86_400)
    """Minimum time in seconds between two changes or restarts. Returning to the previous setting takes twice as long,
    unless it turns speculation off."""

    max_restarts_per_day: StrictInt = Field(default=6, ge=1, le=MOST_RESTARTS)
    """Maximum number of engine restarts by the policy in 24 hours. Replacing all engines counts as one."""

    acceptance_rule: AcceptanceRule | None = None
    """Published rule of thumb to recommend turning speculation off while no capture has compared arms. The policy never
    acts on it, because acceptance is a poor predictor of goodput. It does not apply with adaptiveVerification."""


class PolicyDecision(ApiModel):
    """Recommendation or action of the policy."""

    at: Timestamp
    """Time of the decision, RFC 3339."""

    action: PolicyAction
    """Action that was decided: Change, TurnOff, TryAgain or Restart."""

    outcome: PolicyOutcome
    """Outcome of the action, such as Advised, Done or Refused."""

    target: _Name | None = None
    """Arm that was chosen, or pod that was restarted."""

    message: _Text
    """Explanation of the decision, with the figures behind it."""


class PolicyStatus(ApiModel):
    """Current decision of the policy, with its internal state."""

    mode: PolicyMode
    """Mode in spec.policy: Observe, Advise or Enforce."""

    action: PolicyAction
    """Best action for the current load: Keep, Change, TurnOff, TryAgain or Restart."""

    outcome: PolicyOutcome
    """Outcome of the action: Kept, Observed, Advised or Done; or the obstacle: Paused, CoolingDown, BudgetSpent or
    Refused."""

    reason: Annotated[str, StringConstraints(max_length=64)]
    """Reason for the action as one CamelCase word, for programs."""

    message: _Text
    """Explanation of the action, with the figures behind it."""

    target: _Name | None = None
    """Arm to change to, or pod to restart."""

    evidence: _Name | None = None
    """Capture whose measurements the policy uses."""

    arm: _Name | None = None
    """Name of the arm in force, as in that capture; or "without speculation" after a crash loop or wrong
    answers."""

    since: Timestamp | None = None
    """Time since which the policy has had this arm in force. Not set while spec.speculation is in force."""

    speculation: Speculation | None = None
    """Speculation settings that replace spec.speculation. Not set while spec.speculation is in force."""

    asked: _Name | None = None
    """Internal: digest of the spec for which this was decided. The policy starts over when the spec changes."""

    left: _Name | None = None
    """Internal: arm that was in force before the current one."""

    acceptance_factor: _Decimal | None = None
    """Internal: acceptance when speculation was turned off, relative to the measured one, as a decimal."""

    tried_in_vain: StrictBool = False
    """Internal: whether speculation has been tried again and turned off again since then."""

    failed_arms: list[_Name] = Field(default=[], max_length=8)
    """Internal: arms whose engines never became ready here, as NAME@DIGEST of their speculation, newest last. The
    policy does not choose them again for this spec. An arm with changed settings has a new digest."""

    restarts: list[Timestamp] = Field(default=[], max_length=MOST_RESTARTS)
    """Internal: times at which the policy restarted engines in the last 24 hours."""

    decisions: list[PolicyDecision] = Field(default=[], max_length=MOST_DECISIONS)
    """Most recent recommendations and actions, newest first."""


KIND = "SpecDecodeDeployment"
PLURAL = "specdecodedeployments"

LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=LABEL_VALUE)]
EnvVarName = Annotated[str, StringConstraints(max_length=256, pattern=VARIABLE_NAME)]
EngineVersion = Annotated[str, StringConstraints(max_length=32, pattern=ENGINE_VERSION)]
ImageReference = Annotated[str, StringConstraints(min_length=1, max_length=512)]
ServedName = Annotated[str, StringConstraints(max_length=256, pattern=SERVED_NAME)]


class Parallelism(ApiModel):
    """Parallelism of one replica: how the model is split across GPUs."""

    tensor: StrictInt | None = Field(default=None, ge=1, le=64)
    """Tensor parallelism of the target and the draft. If not set, the plan picks the smallest that fits; on CPU, 1."""

    pipeline: StrictInt = Field(default=1, ge=1, le=64)
    """Number of pipeline stages. Each stage holds part of the layers on separate GPUs."""

    data: StrictInt = Field(default=1, ge=1, le=64)
    """Number of data-parallel replicas behind one endpoint. Each has its own KV cache; reported figures are per
    data-parallel replica. Experts are sharded across them."""

    expert: StrictBool = False
    """Distribute whole experts over the tensor x data GPUs of a stage, instead of splitting each expert."""

    draft_tensor: StrictInt | None = Field(default=None, ge=1, le=64)
    """Value passed to vLLM: 1, or the value of tensor. It has no effect, because vLLM always splits the draft like the
    target; status.plan.draftTensor shows the split in effect."""


class ResourceClaim(ApiModel):
    """GPUs that each pod of an engine claims through Dynamic Resource Allocation."""

    device_class_name: ObjectName
    """Name of the DeviceClass, such as gpu.nvidia.com or mig.nvidia.com."""

    selectors: list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]] = Field(default=[], max_length=16)
    """CEL expressions about a device, all of which must be true, such as
    device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('80Gi')) >= 0. The operator adds one for the GPU product
    of the plan."""

    count: StrictInt | None = Field(default=None, ge=1, le=32)
    """Number of devices per pod: all GPUs of a replica (tensor x pipeline x data), or an equal share on each of several
    nodes. If not set, it follows from the plan, which is recommended."""


class Accelerator(ApiModel):
    """Hardware that one replica runs on."""

    type: AcceleratorType = AcceleratorType.GPU
    """Type of accelerator. Use CPU to try out the operator without a GPU."""

    products: list[LabelValue] = Field(default=[], max_length=16)
    """Allowed values of the node label nvidia.com/gpu.product, such as NVIDIA-H200. If empty, any supported GPU that
    fits."""

    per_node: StrictInt | None = Field(default=None, ge=1, le=64)
    """Number of GPUs per node, for planning when the operator sees no matching node: a pool that scales from zero, or
    an operator for selected namespaces without fleet.nodes. Existing nodes take precedence."""

    memory_gib_per_gpu: StrictInt | None = Field(default=None, alias="memoryGiBPerGPU", ge=1, le=4096)
    """Memory of each GPU in whole GiB, as CUDA reports it, for products whose memory the operator does not know.
    Estimates for them are uncalibrated and use a wider margin. For known products, the known memory size takes
    precedence."""

    resource_claim: ResourceClaim | None = None
    """Claim GPUs through Dynamic Resource Allocation (Kubernetes 1.34 or newer, with a DRA driver) instead of
    nvidia.com/gpu of the device plugin. The plan reads the GPUs from the ResourceSlices of the driver. products
    then selects among these devices; it is only needed if the operator finds none or cannot evaluate a selector."""

    cpu_cores: StrictInt | None = Field(default=None, ge=1, le=1024)
    """Number of CPU cores per replica, for type CPU."""

    memory_gib: StrictInt | None = Field(default=None, alias="memoryGiB", ge=1, le=65_536)
    """Memory per replica in GiB, for type CPU. The replica's ranks share it."""

    kv_cache_gib: StrictInt | None = Field(default=None, alias="kvCacheGiB", ge=1, le=65_536)
    """Size of the KV cache per replica in GiB, for type CPU. The ranks share it, so it must be a multiple of
    parallelism.tensor."""


class Serving(ApiModel):
    """Serving settings of the engine. The operator always passes each value explicitly."""

    max_model_len: StrictInt | None = Field(default=None, ge=1, le=16_777_216)
    """Maximum length of a sequence in tokens, prompt and output together. Defaults to the maximum of the model."""

    max_num_seqs: StrictInt = Field(default=256, ge=1, le=65_536)
    """Maximum number of requests that run at the same time, per data-parallel replica. If a model with recurrent state
    (Mamba, linear attention) has fewer than 256 KV cache blocks, the plan lowers the default to 128, 64 or less so that
    vLLM can start."""

    max_num_batched_tokens: StrictInt = Field(default=8192, ge=1, le=16_777_216)
    """Maximum number of tokens scheduled in one step, per data-parallel replica."""

    dtype: Dtype = Dtype.AUTO
    """Data type of all unquantized parts of target and draft. auto uses the target's own type, or bfloat16 if that is
    float32."""

    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO
    """Data type of the KV cache. auto uses the model's own type."""

    block_size: StrictInt | None = Field(default=None, ge=1, le=1024)
    """Number of tokens per KV cache block. Defaults to vLLM's value for the accelerator: 16 on GPU, 128 on CPU."""

    gpu_memory_utilization_percent: StrictInt = Field(default=92, ge=1, le=100)
    """Share of each GPU's memory that the engine may use, in percent (vLLM's gpu_memory_utilization)."""

    enforce_eager: StrictBool = False
    """Run without CUDA graphs and without compilation."""

    cudagraph_mode: CudagraphMode | None = None
    """Steps that run as CUDA graphs. NONE: no steps. PIECEWISE: all steps, with attention outside the graphs. FULL: all
    steps as one graph. FULL_DECODE_ONLY: only decode steps, as one graph. FULL_AND_PIECEWISE: decode steps as one
    graph, other steps piecewise. Defaults to vLLM's choice, usually FULL_AND_PIECEWISE."""

    max_cudagraph_capture_size: StrictInt | None = Field(default=None, ge=1, le=65_536)
    """Maximum number of tokens in a step that runs as a CUDA graph. A lower value saves memory and start-up time.
    Defaults to vLLM's value: twice the tokens that a step of maxNumSeqs requests verifies, at most 512."""

    min_concurrency: StrictInt = Field(default=1, ge=1, le=65_536)
    """Number of requests of length maxModelLen that must fit in the KV cache at the same time, per data-parallel
    replica."""

    served_model_names: list[ServedName] = Field(default=[], max_length=16)
    """Model names that clients can request. If empty, the last part of target.model."""

    api_key_secret: SecretKey | None = None
    """Key of a Secret with the API key that clients must send to the engine."""

    tls_secret: TlsSecret | None = None
    """Secret with the certificate for HTTPS. If not set, the engine serves plain HTTP."""

    port: StrictInt = Field(default=8000, ge=1024, le=65_535)
    """Port of the engine and the Service. Ports below 1024 would require root and are rejected."""


class SecretKeySelector(SecretKey):
    """Key of a Secret in the same namespace."""

    optional: StrictBool | None = None
    """Start the container without the variable if the Secret or the key does not exist."""


class ConfigMapKeySelector(ApiModel):
    """Key of a ConfigMap in the same namespace."""

    name: ObjectName
    """Name of the ConfigMap, in the namespace of this object."""

    key: SecretKeyName
    """Key in the ConfigMap that holds the value."""

    optional: StrictBool | None = None
    """Start the container without the variable if the ConfigMap or the key does not exist."""


class ObjectFieldSelector(ApiModel):
    """Field of the pod."""

    field_path: Annotated[str, StringConstraints(max_length=512, pattern=FIELD_PATH)]
    """Path of the field, such as status.podIP or metadata.labels['team']."""

    api_version: Annotated[str, StringConstraints(max_length=64)] | None = None
    """API version that the path is written for. Defaults to v1."""


class ResourceFieldSelector(ApiModel):
    """Resource limit or request of a container in the pod."""

    resource: Annotated[str, StringConstraints(max_length=128, pattern=RESOURCE)]
    """Resource to read, such as limits.memory."""

    container_name: LabelValue | None = None
    """Name of the container. Defaults to the engine container."""

    divisor: Annotated[str, StringConstraints(max_length=4, pattern=DIVISOR)] | None = None
    """Unit of the value, such as 1Mi. Defaults to 1."""


class EnvVarSource(ApiModel):
    """Source of a variable's value. Set exactly one field."""

    secret_key_ref: SecretKeySelector | None = None
    """Key of a Secret in the same namespace."""

    config_map_key_ref: ConfigMapKeySelector | None = None
    """Key of a ConfigMap in the same namespace."""

    field_ref: ObjectFieldSelector | None = None
    """Field of the pod, such as its name or IP address."""

    resource_field_ref: ResourceFieldSelector | None = None
    """Resource limit or request of a container."""


class EnvVar(ApiModel):
    """Environment variable of the engine container, as in a pod spec."""

    name: EnvVarName
    """Name of the environment variable, such as VLLM_LOGGING_LEVEL."""

    value: str = Field(default="", max_length=4096)
    """Value as plain text. Cannot be combined with valueFrom."""

    value_from: EnvVarSource | None = None
    """Source of the value. The plan cannot take such a value into account, and a change of the Secret or ConfigMap does
    not restart engines."""


class Engine(ApiModel):
    """vLLM version, image and additional arguments."""

    version: EngineVersion = "0.33"
    """Major and minor version of vLLM, such as 0.32."""

    image: ImageReference | None = None
    """Engine image with a tag or digest. Defaults to the project's image for that version."""

    extra_args: list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]] = Field(
        default=[], max_length=256
    )
    """Additional vLLM command-line arguments that have no field here."""

    env: list[EnvVar] = Field(default=[], max_length=256, json_schema_extra=map_by("name"))
    """Additional environment variables of the engine container."""

    recorder: StrictBool = True
    """Whether engine pods carry a recorder for live captures. A live capture records the traffic of users instead of a
    generated load. The recorder is loaded into vLLM and sleeps until a live capture starts it. A sidecar connects it
    with the capture. Without it, this deployment cannot be captured live. A change of this field replaces the engines.
    Engines with VLLM_USE_RUST_FRONTEND, and replays without vLLM, have no recorder."""

    replay: Replay | None = None
    """Recording to replay instead of running vLLM, on any node and without a GPU, for testing clients, autoscalers and
    policies. The rest of the spec is still validated and planned, for nodes that need not exist, but no model is
    loaded."""


class Workload(ApiModel):
    """Description of the expected requests. It affects advice only, not the plan."""

    kind: WorkloadKind | None = None
    """Type of most requests, such as Chat or Code."""

    temperature: Annotated[str, StringConstraints(max_length=4, pattern=TEMPERATURE)] | None = None
    """Sampling temperature of most requests, as a quoted decimal such as '0.7'."""

    primary_slo: Slo | None = None
    """Most important service objective: time to first token (TTFT), time per further output token (TPOT), or
    Throughput."""

    prompt_tokens: StrictInt | None = Field(default=None, ge=1, le=16_777_216)
    """Typical length of a prompt, in tokens."""

    output_tokens: StrictInt | None = Field(default=None, ge=1, le=16_777_216)
    """Typical length of an output, in tokens."""


class Override(ApiModel):
    """Override of the plan's verdict, with a reason that the status shows."""

    ignore_plan: StrictBool = False
    """Start engines even if the plan's verdict is DoesNotFit."""

    reason: ShortText
    """Reason for the override, which the status shows."""


class GateOverride(ApiModel):
    """Override of the rollout gate, with a reason that the status shows."""

    reason: ShortText
    """Reason for the override, which the status shows."""


class Gate(Against):
    """Golden capture that engines of a new spec must match before they roll out."""

    capture: ObjectName
    """Successful SpecDecodeCapture with one arm in this namespace, taken from engines that served well. Engines of a
    new spec get the same workload with the same seed."""

    override: GateOverride | None = None
    """Roll out without the comparison for as long as this field is set."""


class CanaryLimits(ApiModel):
    """Largest losses that pass, in percent.

    A figure counts as worse if its loss is statistically significant and exceeds half of its limit.
    """

    tpot: Percent = 10
    """Limit for the increase of the time per output token (TPOT), in percent."""

    ttft: Percent = 20
    """Limit for the increase of the time to first token (TTFT) per prompt token, in percent."""

    errors: Percent = 1
    """Limit for the increase of the ratio of ended to answered requests, in percent. Ended requests include responses
    with an HTTP status of 500 or more. Answered requests ended with a stop or at the length limit."""


class OnUndecided(StrEnum):
    """What happens to a canary that cannot be judged in time."""

    ROLL_BACK = "RollBack"
    PROMOTE = "Promote"


class Canary(ApiModel):
    """Engines of a new spec that serve a share of the traffic until they are judged."""

    replicas: StrictInt = Field(default=1, ge=1, le=1000)
    """Number of canary engines, in addition to replicas. Their share of the traffic follows from it: 1 next to 3
    engines gets about a quarter of the connections."""

    max_loss_percent: CanaryLimits = CanaryLimits()
    """Largest losses against the earlier engines that pass, in percent."""

    max_seconds: StrictInt = Field(default=3600, ge=300, le=604_800)
    """Maximum time in seconds of the comparison, counted from the first ready canary engine. It starts again when the
    operator restarts."""

    on_undecided: OnUndecided = OnUndecided.ROLL_BACK
    """What to do after maxSeconds if the canary is neither worse nor proven to be within all limits. Promote still
    rolls back if fewer than 7 blocks were compared, or if status.canary.loadRatio is below 0.8 or above 1.25."""


class Rollout(ApiModel):
    """How engines of a new spec replace the running ones."""

    strategy: RolloutStrategy = RolloutStrategy.REPLACE
    """Replace stops an old engine before its successor starts and needs no extra GPUs. Surge first starts one engine
    more than replicas, so that capacity does not drop during the rollout. Canary first compares additional engines of
    the new spec with the running ones under production traffic, and then continues like Surge or rolls back."""

    canary: Canary | None = None
    """Settings of strategy Canary. If not set, their defaults apply."""

    gate: Gate | None = None
    """Compare changed engines with a golden capture, and roll them out only if they perform as well. If not set,
    changes roll out immediately."""

    paused: StrictBool = False
    """Hold rollouts: running engines are not changed, only their number."""


class ParentRef(ApiModel):
    """Gateway that a route attaches to."""

    name: ObjectName
    """Name of the Gateway."""

    namespace: ShortName | None = None
    """Namespace of the Gateway. Defaults to the namespace of this object. The listeners of a Gateway in another
    namespace must allow routes from this one."""

    section_name: ObjectName | None = None
    """Listener of the Gateway. If neither sectionName nor port is set, the route attaches to all listeners that allow
    it."""

    port: StrictInt | None = Field(default=None, ge=1, le=65_535)
    """Port of the Gateway's listeners to attach to."""


class HeaderMatch(ApiModel):
    """Header that a request must have."""

    name: HeaderName
    """Name of the header. Gateways ignore its case."""

    value: HeaderValue
    """Exact value of the header."""


class RouteMatch(ApiModel):
    """Condition on the requests that a route takes."""

    headers: list[HeaderMatch] = Field(min_length=1, max_length=16, json_schema_extra=map_by("name"))
    """Headers that a request must have. All of them must match."""


class HttpRoute(ApiModel):
    """HTTPRoute of the Gateway API to the engines' Service, or to their InferencePool if there is one."""

    parent_refs: list[ParentRef] = Field(min_length=1, max_length=8)
    """Gateways that the route attaches to."""

    hostnames: list[Hostname] = Field(default=[], max_length=16)
    """Hostnames that the route serves. If empty, it serves all hostnames of the listeners."""

    matches: list[RouteMatch] = Field(default=[], max_length=8)
    """Take only requests that meet at least one of these conditions. If several routes have the same hostname, Gateways
    prefer the one with more matching headers. If empty, the route takes all requests."""

    request_timeout_seconds: StrictInt = Field(default=0, ge=0, le=86_400)
    """Time in seconds after which the gateway ends a request. 0 sets no limit, because a long answer can take minutes
    and many gateways end requests after 15 seconds by default."""


class EndpointPickerFailureMode(StrEnum):
    """What a gateway does with requests while the endpoint picker does not answer."""

    FAIL_OPEN = "FailOpen"
    FAIL_CLOSE = "FailClose"


class EndpointPickerRef(ApiModel):
    """Service of an endpoint picker in the same namespace, which the operator does not install."""

    name: ObjectName
    """Name of the Service."""

    port: StrictInt = Field(default=9002, ge=1, le=65_535)
    """Port of the Service that answers the gateway (ext_proc)."""

    failure_mode: EndpointPickerFailureMode = EndpointPickerFailureMode.FAIL_CLOSE
    """What the gateway does while the picker does not answer: reject requests (FailClose), or choose an engine itself
    (FailOpen)."""


class InferencePool(ApiModel):
    """InferencePool of the Gateway API Inference Extension, which selects the engine pods."""

    endpoint_picker_ref: EndpointPickerRef
    """Endpoint picker, which chooses an engine for each request."""


class Expose(ApiModel):
    """How clients outside the cluster reach the engines."""

    http_route: HttpRoute | None = None
    """Create an HTTPRoute with the name of this object. It forwards the API for clients, but not metrics and health
    checks. If not set, no route is created."""

    inference_pool: InferencePool | None = None
    """Create an InferencePool with the name of this object. The HTTPRoute then forwards to it instead of the Service.
    If not set, no pool is created."""


class Keda(ApiModel):
    """Prometheus that KEDA asks for the metric."""

    server_address: Annotated[str, StringConstraints(max_length=512, pattern=HTTP_URL)]
    """URL of the Prometheus server, such as http://prometheus.monitoring:9090."""

    authentication: ObjectName | None = None
    """TriggerAuthentication in this namespace with which KEDA signs in to Prometheus. If not set, KEDA sends no
    credentials."""

    wake_up_query: Annotated[str, StringConstraints(min_length=1, max_length=2048)] | None = None
    """PromQL query whose result is above 0 while requests wait at your gateway. KEDA then starts the first engine.
    Required with minReplicas 0, because without engines there are no metrics of engines."""


class Autoscaling(ApiModel):
    """Autoscaler that sets the number of engine replicas by load: a HorizontalPodAutoscaler or KEDA."""

    min_replicas: StrictInt = Field(default=1, ge=0, le=1000)
    """Minimum number of replicas. 0 requires keda.wakeUpQuery."""

    max_replicas: StrictInt = Field(ge=1, le=1000)
    """Maximum number of replicas."""

    metric: AutoscalingMetric
    """RunningRequests: requests that an engine processes. WaitingRequests: requests in its queue. KvCacheUsage: used
    share of its KV cache. PredictedUtilization: running and waiting requests as a share of the number at which goodput
    was highest in the newest capture with arms of these engines."""

    target: StrictInt = Field(ge=1, le=1_000_000)
    """Value of the metric per replica that the autoscaler aims at: a number of requests, or for KvCacheUsage and
    PredictedUtilization a percentage."""

    scale_down_stabilization_seconds: StrictInt = Field(default=600, ge=0, le=3600)
    """Time in seconds for which the load must allow fewer replicas before any is removed. Engines take minutes to start
    again."""

    keda: Keda | None = None
    """Create a ScaledObject of KEDA instead of a HorizontalPodAutoscaler. It reads Prometheus itself, so the cluster
    needs no other metrics adapter."""


class PodTemplate(ApiModel):
    """Metadata and pod spec to merge into the engine pods."""

    metadata: Annotated[dict[str, Any], Field(max_length=16), BOUNDED] | None = None
    """Labels and annotations to add to the engine pods."""

    spec: Annotated[dict[str, Any], Field(max_length=64), BOUNDED] | None = None
    """Pod spec fields to merge, such as tolerations, volumes or priorityClassName."""


class SpecDecodeDeploymentSpec(ApiModel):
    """Desired state of the deployment: models, speculation, hardware and serving settings."""

    target: Target
    """Target model, which produces the served output."""

    speculation: Speculation | None = None
    """Speculation method and its settings. If not set, the engine does not speculate."""

    adapters: list[Adapter] = Field(default=[], max_length=64, json_schema_extra=map_by("name"))
    """LoRA adapters of the target. The draft is not adapted, so acceptance is usually lower for requests to them."""

    adapter_slots: AdapterSlots | None = None
    """Memory that engines reserve for adapters. If not set, engines reserve enough for all adapters at once."""

    parallelism: Parallelism = Parallelism()
    """Parallelism of one replica: how the model is split across GPUs."""

    accelerator: Accelerator = Accelerator()
    """Hardware that one replica runs on."""

    serving: Serving = Serving()
    """Serving settings of the engine: lengths, batch sizes, KV cache, API access."""

    objective: Objective = Objective.QUALITY
    """Objective of the plan when several options fit. Quality picks the least quantized target, Capacity the most KV
    cache tokens per GPU, Cost the fewest GPUs."""

    workload: Workload | None = None
    """Description of the expected requests. It affects advice only, not the plan."""

    replicas: StrictInt = Field(default=1, ge=0, le=1000)
    """Number of engine replicas. An autoscaler changes this field, so leave it out of manifests with autoscaling."""

    autoscaling: Autoscaling | None = None
    """Let an autoscaler set replicas by load. If not set, the operator creates no autoscaler."""

    rollout: Rollout = Rollout()
    """How engines of a new spec replace the running ones."""

    expose: Expose = Expose()
    """How clients outside the cluster reach the engines."""

    models: Models = Models()
    """Source of the model files: a volume that already holds them, or the Hugging Face Hub with an optional cache."""

    engine: Engine = Engine()
    """vLLM version, image, and additional arguments and environment variables."""

    suspend: StrictBool = False
    """Scale the engines to zero pods and keep all other objects."""

    override: Override | None = None
    """Start engines although the plan's verdict is DoesNotFit. Requires a reason."""

    policy: Policy | None = None
    """Policy that chooses among measured speculation settings by their goodput and the current load. If not set,
    speculation follows the spec."""

    captures: list[CaptureSchedule] = Field(default=[], max_length=8, json_schema_extra=map_by("name"))
    """Schedules that create captures of this deployment, like a CronJob."""

    pod_template: PodTemplate | None = None
    """Template that is merged into the engine pods; list elements are merged by name. The engine container is named
    engine. Any other container is added to the pod and needs an image."""


@dataclass(frozen=True, order=True)
class Key:
    """Namespace, name and kind of a SpecDecodeDeployment or SpecDecodeCapture."""

    namespace: str
    name: str
    kind: str = KIND

    def __str__(self) -> str:
        """Namespace and name, as kubectl users write them."""
        return f"{self.namespace}/{self.name}"
