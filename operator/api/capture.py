"""The SpecDecodeCapture kind: workload, arms, storage, and the limits of golden comparisons.

One object describes one run. The fields that shape its Job are immutable; create a new object for each run.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StrictBool, StrictInt, StringConstraints

from specdecode_operator.api.base import (
    PHASE_NAME,
    RATE,
    SIZE,
    TEMPERATURE,
    ApiModel,
    ConfigMapRef,
    FilePath,
    ObjectName,
    PersistentVolumeClaimRef,
)
from specdecode_operator.api.speculation import BatchSizeRange, SpeculationSettings
from specdecode_operator.enums import KvCacheDtype, Quantization

TokenCount = Annotated[StrictInt, Field(ge=1, le=16_777_216)]
Seconds = Annotated[StrictInt, Field(ge=1, le=86_400)]
Rate = Annotated[str, StringConstraints(max_length=10, pattern=RATE)]
"""Requests a second as a decimal, from 0.001 up."""

Temperature = Annotated[str, StringConstraints(max_length=4, pattern=TEMPERATURE)]
PhaseName = Annotated[str, StringConstraints(max_length=40, pattern=PHASE_NAME)]
FieldName = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Pattern(StrEnum):
    """Arrival pattern of the requests of a phase."""

    CLOSED = "Closed"
    CONSTANT = "Constant"
    POISSON = "Poisson"
    BURST = "Burst"
    STAIRCASE = "Staircase"
    MULTITURN = "Multiturn"
    RECORDED = "Recorded"


class DatasetFormat(StrEnum):
    """File format of a dataset."""

    JSONL = "JSONL"
    GSM8K = "GSM8K"
    SHAREGPT = "ShareGPT"
    SPEED_BENCH = "SPEED-Bench"
    TRACE = "Trace"


class SyntheticPrompts(ApiModel):
    """Prompts of random tokens with an exact length."""

    prompt_tokens: TokenCount = 512
    """Length of each prompt in tokens."""

    output_tokens: TokenCount = 128
    """Length of each output in tokens. The model cannot end it earlier."""

    shared_prefix_tokens: StrictInt = Field(default=0, ge=0, le=16_777_216)
    """Length in tokens of a prefix that all prompts share."""


class Dataset(ApiModel):
    """Prompts from a file."""

    config_map: ConfigMapRef | None = None
    """ConfigMap that holds the dataset's file."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Claim that holds the file; mounted read-only."""

    path: FilePath
    """Path of the file in the ConfigMap or volume. For GSM8K, it can be the dataset's Hugging Face folder; for Trace,
    the folder of a capture."""

    format: DatasetFormat
    """JSONL: one JSON object per line. GSM8K: Parquet. ShareGPT: a JSON list of conversations. SPEED-Bench: a file
    prepared by the benchmark's own script. Trace: the trace of an earlier capture, which provides prompt and output
    lengths, common prefixes and arrival times; the tokens are random."""

    prompt_field: FieldName = "prompt"
    """Field of each JSONL object that holds the prompt: text, or a list of token ids."""

    output_tokens: TokenCount = 128
    """Maximum length of each output in tokens; the model may end it earlier. With format Trace, outputs are as long as
    the recorded ones."""


class Prompts(ApiModel):
    """Source of the prompts. Set exactly one field."""

    synthetic: SyntheticPrompts | None = None
    """Prompts of random tokens with an exact length."""

    dataset: Dataset | None = None
    """Prompts from a file in a ConfigMap or volume."""


class Phase(ApiModel):
    """Part of the load with one arrival pattern."""

    name: PhaseName
    """Name of the phase, used in request ids and in the files."""

    pattern: Pattern
    """Closed: a number of clients that each wait for the answer before the next request. Constant, Poisson: a request
    rate, with even or random intervals. Burst: groups of simultaneous requests. Staircase: a rate that increases in
    steps. Multiturn: sessions of several turns, each with the whole conversation so far. Recorded: the arrival times of
    a dataset of format Trace, repeated until the phase ends."""

    concurrency: StrictInt | None = Field(default=None, ge=1, le=4096)
    """For Closed, the number of clients; for Multiturn, the number of concurrent sessions."""

    requests_per_second: Rate | None = None
    """For Constant and Poisson, the request rate; for Staircase, the rate of the first step. A quoted decimal such as
    '0.5'."""

    duration_seconds: Seconds | None = None
    """Time in seconds during which new requests are sent. The phase then waits for running requests. Set either this or
    requests."""

    requests: StrictInt | None = Field(default=None, ge=1, le=10_000_000)
    """Number of requests to send. Set either this or durationSeconds."""

    burst_size: StrictInt | None = Field(default=None, ge=1, le=4096)
    """For Burst, the number of requests sent at the same time."""

    burst_interval_seconds: Seconds | None = None
    """For Burst, the time in seconds between the starts of two bursts."""

    step_seconds: Seconds | None = None
    """For Staircase, the duration of each step in seconds."""

    step_requests_per_second: Rate | None = None
    """For Staircase, the increase of the rate with each step. A quoted decimal such as '0.5'."""

    turns: StrictInt | None = Field(default=None, ge=1, le=1024)
    """For Multiturn, the number of requests per session."""

    think_seconds: StrictInt | None = Field(default=None, ge=0, le=3600)
    """For Multiturn, the pause in seconds between an answer and the next turn. Defaults to 0."""

    temperature: Temperature | None = None
    """Sampling temperature of all requests in this phase. If not set, workload.temperatures applies."""

    prompt_tokens: TokenCount | None = None
    """Length of each synthetic prompt in tokens. Defaults to prompts.synthetic.promptTokens."""

    output_tokens: TokenCount | None = None
    """Length of each output, in tokens: exact for synthetic prompts, the maximum for a dataset. Defaults to
    outputTokens of the prompts."""

    path: FilePath | None = None
    """File with the prompts, in the same ConfigMap or volume. Defaults to prompts.dataset.path."""

    category: FieldName | None = None
    """SPEED-Bench category of the prompts, such as coding. If not set, all categories are used."""

    @property
    def asks(self) -> str | None:
        """Fields in which its requests differ from the workload, as text; None if they do not."""
        said = {
            "temperature": self.temperature,
            "prompt tokens": self.prompt_tokens,
            "output tokens": self.output_tokens,
            "file": self.path,
            "category": self.category,
        }
        return ", ".join(f"{name} {value}" for name, value in said.items() if value is not None) or None


class TemperatureShare(ApiModel):
    """Sampling temperature for a share of the requests."""

    temperature: Temperature
    """Sampling temperature as a quoted decimal such as '0.7'. '0.0' is greedy sampling."""

    share_percent: StrictInt = Field(ge=1, le=100)
    """Share of the requests in percent. All shares must add up to 100."""


def _default_phases() -> list[Phase]:
    return [
        Phase(name="single", pattern=Pattern.CLOSED, concurrency=1, duration_seconds=60),
        Phase(name="closed-16", pattern=Pattern.CLOSED, concurrency=16, duration_seconds=120),
    ]


def _default_temperatures() -> list[TemperatureShare]:
    return [TemperatureShare(temperature="0.0", share_percent=100)]


class CaptureWorkload(ApiModel):
    """Load that the load generator sends to the engine."""

    prompts: Prompts = Prompts(synthetic=SyntheticPrompts())
    """Source of the prompts, which are sent to /v1/completions without a chat template. Defaults to synthetic prompts
    of 512 tokens with outputs of 128 tokens."""

    phases: list[Phase] = Field(default_factory=_default_phases, min_length=1, max_length=32)
    """Phases of the load, sent one after another. Defaults to one client for 60 s, then 16 clients for 120 s."""

    temperatures: list[TemperatureShare] = Field(default_factory=_default_temperatures, min_length=1, max_length=16)
    """Sampling temperatures with the share of requests for each, in random order. Defaults to 0.0 (greedy) for all
    requests. Other sampling parameters are the engine's defaults."""

    warmup_requests: StrictInt = Field(default=4, ge=0, le=10_000)
    """Number of requests before the first phase, which are not counted in any result."""

    timeout_seconds: StrictInt = Field(default=600, ge=1, le=86_400)
    """Timeout of each request in seconds."""


Percent = Annotated[StrictInt, Field(ge=1, le=90)]


class LossLimits(ApiModel):
    """Largest losses that pass, in percent.

    A figure counts as regressed if its loss is statistically significant and exceeds half of its limit.
    """

    goodput: Percent = 5
    """Limit for the loss of goodput (tokens per second) in each phase, in percent."""

    acceptance: Percent = 10
    """Limit for the loss of accepted tokens per step and of acceptance at each draft position, in percent."""

    step_time: Percent = 5
    """Limit for the increase of the time per step, in percent."""

    latency: Percent = 20
    """Limit for the increase of TTFT and TPOT, in percent."""


class Against(ApiModel):
    """Golden capture to compare with, and the largest losses that pass."""

    capture: ObjectName
    """Successful SpecDecodeCapture with one arm in this namespace, with the same workload and seed as this capture."""

    max_loss_percent: LossLimits = LossLimits()
    """Largest losses that pass, in percent. A figure counts as regressed if its loss is statistically significant and
    exceeds half of its limit."""


class Regressed(StrEnum):
    """Whether an engine performs as well as the engine of the golden capture."""

    HOLDS = "Holds"
    REGRESSED = "Regressed"
    INCONCLUSIVE = "Inconclusive"
    NOT_COMPARABLE = "NotComparable"


Figure = Annotated[str, StringConstraints(max_length=64)]


class JudgedFigure(ApiModel):
    """Figure of both captures, formatted for people."""

    name: Annotated[str, StringConstraints(max_length=96)]
    """Name of the figure, such as goodput in phase chat."""

    golden: Figure
    """Value in the golden capture, with its unit."""

    found: Figure
    """Value in this capture, with its unit."""

    change: Figure
    """Change from the golden capture to this one, with its confidence interval."""

    verdict: Regressed
    """Verdict on this figure: Holds, Regressed or Inconclusive."""


class RegressionStatus(ApiModel):
    """Comparison of a capture with its golden capture."""

    against: Annotated[str, StringConstraints(max_length=253)]
    """Name of the golden capture."""

    verdict: Regressed
    """Overall verdict on all figures."""

    message: Annotated[str, StringConstraints(max_length=1024)]
    """Summary of the verdict, with the figures that decide it."""

    figures: list[JudgedFigure] = Field(default=[], max_length=12)
    """Figures that decide the verdict, followed by further ones, at most 12 in total."""


KIND = "SpecDecodeCapture"
PLURAL = "specdecodecaptures"

Milliseconds = Annotated[StrictInt, Field(ge=1, le=86_400_000)]
Quantity = Annotated[str, StringConstraints(max_length=16, pattern=SIZE)]
DEFAULT_SIZE = "20Gi"


class DuringCapture(StrEnum):
    """What happens to the deployment's engines during a capture."""

    KEEP = "Keep"
    SUSPEND = "Suspend"


class Source(StrEnum):
    """Origin of the requests that a capture records."""

    LOAD = "Load"
    LIVE = "Live"


class LiveRecording(ApiModel):
    """Extent of a recording of users' requests."""

    duration_seconds: Seconds | None = None
    """Duration of the recording in seconds. Set either this or requests."""

    requests: StrictInt | None = Field(default=None, ge=1, le=10_000_000)
    """Number of requests to record. The recording also ends after spec.deadlineSeconds. Set either this or
    durationSeconds."""

    sample_percent: StrictInt = Field(default=100, ge=1, le=100)
    """Share of the requests to record, in percent. The choice is random per request."""

    pods: list[ObjectName] = Field(default=[], max_length=64)
    """Names of the engine pods to record. If not set, all ready engine pods of the deployment are recorded."""


class Record(ApiModel):
    """Data to record in addition to times and counts. Text is not recorded, but token ids can be turned into text."""

    token_ids: StrictBool = False
    """Record the token ids of the outputs. With source Live, the namespace needs permission
    (liveCapture.tokenIds in the values of the chart)."""

    prompt_token_ids: StrictBool = False
    """Record the token ids of the prompts. Only with source Live, and only if the namespace has permission
    (liveCapture.tokenIds in the values of the chart)."""

    step_stats: StrictBool = True
    """Record the scheduler's statistics for each step."""


class Storage(ApiModel):
    """Volume for the capture's files."""

    size: Quantity | None = None
    """Size of the claim to create. Defaults to 20Gi, unless persistentVolumeClaim is set."""

    storage_class_name: ObjectName | None = None
    """Storage class of the claim to create. Defaults to the cluster's default class."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Existing claim to write to, instead of creating one. Several captures can share it."""

    retain: StrictBool = True
    """Keep the created claim when this object is deleted."""

    @property
    def existing_claim(self) -> str | None:
        """Name of the existing claim; None if the capture creates one."""
        return self.persistent_volume_claim.claim_name if self.persistent_volume_claim else None


class ArmSpeculation(SpeculationSettings):
    """Speculation method and settings of the arm."""

    # Fewer than in a deployment: of 8 arms in 8 schedules, the API server would refuse to judge more.
    num_speculative_tokens_by_batch_size: list[BatchSizeRange] = Field(default=[], max_length=16)
    """K by number of running requests. Outside these ranges, numSpeculativeTokens applies."""


class Arm(ApiModel):
    """Variant of the deployment's settings, measured against other variants on the same GPUs."""

    name: PhaseName
    """Name of the arm and of its folder on the volume."""

    speculation: ArmSpeculation | None = None
    """Speculation settings that replace the deployment's whole spec.speculation. Use method none to turn speculation
    off. If not set, the arm speculates as deployed."""

    target_quantization: Quantization | None = None
    """Precision that replaces the deployment's spec.target.quantization. Defaults to the precision that the
    deployment's plan chose."""

    kv_cache_dtype: KvCacheDtype | None = None
    """Data type that replaces the deployment's spec.serving.kvCacheDtype. Defaults to the deployment's."""


class Slo(ApiModel):
    """Service level objective (SLO) of each request: goodput counts only the requests that meet all limits."""

    ttft_ms: Milliseconds | None = None
    """Maximum time to first token (TTFT) in milliseconds."""

    tpot_ms: Milliseconds | None = None
    """Maximum mean time per further output token (TPOT) of a request, in milliseconds."""

    latency_ms: Milliseconds | None = None
    """Maximum time to the last token, in milliseconds."""


class Checks(ApiModel):
    """Requests that compare the outputs of the arms. They are sent one at a time, outside the measured load."""

    greedy_prompts: StrictInt = Field(default=8, ge=0, le=64)
    """Number of prompts to answer at temperature 0. All arms should return the same tokens."""

    structured_requests: StrictInt = Field(default=8, ge=0, le=64)
    """Number of requests for JSON that follows a schema, and of as many requests for a tool call. All arms should
    return parsable answers equally often."""


class CaptureRun(ApiModel):
    """Load, recording and storage, which captures and the templates of schedules share."""

    source: Source = Source.LOAD
    """Load: a Job starts an engine like the deployment's, and sends a load to it. Live: the deployment's running
    engines serve users, and some or all of these requests are recorded. No engine is started or restarted, and no load
    is sent."""

    live: LiveRecording | None = None
    """With source Live: the extent of the recording. Required there."""

    arms: list[Arm] = Field(default=[], max_length=8)
    """Variants to measure one after another on the same GPUs with the same load. The first one is the baseline for the
    others. If not set, only the deployment's own settings are measured."""

    repetitions: StrictInt | None = Field(default=None, ge=1, le=20)
    """Number of times to start and measure each arm. Repetitions form pairs: the first of a pair has a random order of
    the arms, and the second the reverse order. Several arms need at least 2. Defaults to 2 with several arms, otherwise
    to 1."""

    slo: Slo | None = None
    """Limits that a request must meet to count towards goodput. If not set, all completed requests count."""

    checks: Checks | None = None
    """Requests that compare the outputs of several arms. Defaults to 8 prompts and 8 structured requests."""

    against: Against | None = None
    """Golden capture with the same workload, with which the engine is compared at the end."""

    deployment_during_capture: DuringCapture = DuringCapture.KEEP
    """Suspend: the deployment's engines give their GPUs to the capture and return after it, whether or not it succeeds.
    Keep: the engines continue, and the capture waits for free GPUs."""

    borrow_timeout_seconds: StrictInt = Field(default=120, ge=10, le=1800)
    """With Suspend, the time in seconds that borrowed GPUs may stay idle before the engines get them back. GPUs are
    idle while the capture's engine does not run: its pod has no node, waits for a volume or an image, or has
    crashed."""

    workload: CaptureWorkload = CaptureWorkload()
    """Load that the load generator sends to the engine."""

    seed: StrictInt = Field(default=0, ge=0, le=2_147_483_647)
    """Seed for everything random: prompts, arrival times, temperatures."""

    record: Record = Record()
    """Data to record in addition to times and counts. Text is not recorded, but token ids can be turned into text."""

    storage: Storage = Storage()
    """Volume for the capture's files: a claim to create, or an existing one."""

    deadline_seconds: StrictInt = Field(default=3600, ge=30, le=604_800)
    """Time limit in seconds for the load, counted from when the engine serves. It applies to each repetition of each
    arm and to each attempt. Engine start has the deployment's own limit; merging and validation have 15 minutes plus a
    tenth of this value. With source Live, it limits a recording with live.requests."""

    backoff_limit: StrictInt = Field(default=0, ge=0, le=10)
    """Number of retries after a failed attempt."""

    @property
    def starts(self) -> int:
        """How often each arm is started."""
        return self.repetitions or (2 if len(self.arms) > 1 else 1)

    @property
    def window_s(self) -> int:
        """Longest duration of the recording of a live capture, in seconds."""
        return (self.live.duration_seconds if self.live else None) or self.deadline_seconds


class SpecDecodeCaptureSpec(CaptureRun):
    """Deployment to capture, load, recording and storage."""

    deployment: ObjectName
    """Name of the SpecDecodeDeployment in this namespace whose engine is captured. It may be suspended, except with
    source Live."""

    suspend: StrictBool = False
    """Stop the engine and the load, or with source Live the recording, and keep the data recorded so far as partial
    files. When set to false again, the capture starts over."""

    ttl_seconds_after_finished: StrictInt | None = Field(default=None, ge=0, le=31_536_000)
    """Time in seconds after which a finished capture is deleted, counted from when the operator saw it finish. Its
    claim stays unless storage.retain is false. If not set, the capture is kept."""
