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
from specdecode_operator.api.speculation import BatchSizeRange, Speculation
from specdecode_operator.enums import KvCacheDtype, Quantization

TokenCount = Annotated[StrictInt, Field(ge=1, le=16_777_216)]
Seconds = Annotated[StrictInt, Field(ge=1, le=86_400)]
Rate = Annotated[str, StringConstraints(max_length=10, pattern=RATE)]
"""Requests a second as a decimal, from 0.001 up."""

Temperature = Annotated[str, StringConstraints(max_length=4, pattern=TEMPERATURE)]
PhaseName = Annotated[str, StringConstraints(max_length=40, pattern=PHASE_NAME)]
FieldName = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Pattern(StrEnum):
    """When the requests of a phase are sent."""

    CLOSED = "Closed"
    CONSTANT = "Constant"
    POISSON = "Poisson"
    BURST = "Burst"
    STAIRCASE = "Staircase"
    MULTITURN = "Multiturn"
    RECORDED = "Recorded"


class DatasetFormat(StrEnum):
    """What a dataset looks like."""

    JSONL = "JSONL"
    GSM8K = "GSM8K"
    SHAREGPT = "ShareGPT"
    SPEED_BENCH = "SPEED-Bench"
    TRACE = "Trace"


class SyntheticPrompts(ApiModel):
    """Prompts made of random tokens, of an exact length."""

    prompt_tokens: TokenCount = 512
    """Tokens of each prompt."""

    output_tokens: TokenCount = 128
    """Tokens that each answer is asked for."""

    shared_prefix_tokens: StrictInt = Field(default=0, ge=0, le=16_777_216)
    """Tokens at the beginning that all prompts have in common."""


class Dataset(ApiModel):
    """Prompts from a file."""

    config_map: ConfigMapRef | None = None
    """ConfigMap that holds the file."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """Claim that holds the file; mounted read-only."""

    path: FilePath
    """The file inside the ConfigMap or the volume; for GSM8K also its Hugging Face folder, for Trace also that of a
    capture."""

    format: DatasetFormat
    """JSONL: one object a line. GSM8K: parquet. ShareGPT: a JSON list of conversations. SPEED-Bench: one of its files
    as its own script prepares them. Trace: the trace of an earlier capture, of which lengths of prompts and answers,
    common prefixes and moments are taken; the tokens are random."""

    prompt_field: FieldName = "prompt"
    """Field of a JSONL line that holds the prompt."""

    output_tokens: TokenCount = 128
    """Tokens that each answer is asked for; of a Trace, answers are as long as they were."""


class Prompts(ApiModel):
    """Where prompts come from: one of its fields."""

    synthetic: SyntheticPrompts | None = None
    """Random tokens."""

    dataset: Dataset | None = None
    """A file of prompts."""


class Phase(ApiModel):
    """A part of the load."""

    name: PhaseName
    """Name of the phase, in the ids of its requests and in the files."""

    pattern: Pattern
    """Closed: so many clients, each waiting for its answer. Constant, Poisson: a rate, even or random. Burst: so many
    at once, again and again. Staircase: a rate that climbs. Multiturn: sessions of several turns, each with all that
    was said before. Recorded: at the moments of a dataset of format Trace, over and over."""

    concurrency: StrictInt | None = Field(default=None, ge=1, le=4096)
    """Closed: clients. Multiturn: sessions at once."""

    requests_per_second: Rate | None = None
    """Constant, Poisson: the rate. Staircase: the rate of its first step. A decimal such as 4 or 0.5."""

    duration_seconds: Seconds | None = None
    """How long new requests are sent; those that run are waited for. Either this or requests."""

    requests: StrictInt | None = Field(default=None, ge=1, le=10_000_000)
    """How many requests are sent. Either this or durationSeconds."""

    burst_size: StrictInt | None = Field(default=None, ge=1, le=4096)
    """Burst: requests at once."""

    burst_interval_seconds: Seconds | None = None
    """Burst: time from one burst to the next."""

    step_seconds: Seconds | None = None
    """Staircase: how long a step lasts."""

    step_requests_per_second: Rate | None = None
    """Staircase: how much the rate grows with each step."""

    turns: StrictInt | None = Field(default=None, ge=1, le=1024)
    """Multiturn: requests of one session."""

    think_seconds: StrictInt | None = Field(default=None, ge=0, le=3600)
    """Multiturn: pause between an answer and the next turn. Absent: none."""

    temperature: Temperature | None = None
    """Sampling temperature of all its requests. Absent: as workload.temperatures mixes them."""

    prompt_tokens: TokenCount | None = None
    """Tokens of each of its synthetic prompts, instead of prompts.synthetic.promptTokens."""

    output_tokens: TokenCount | None = None
    """Tokens that each of its answers is asked for, instead of outputTokens of the prompts."""

    path: FilePath | None = None
    """File that its prompts are from, instead of prompts.dataset.path; in the same ConfigMap or volume."""

    category: FieldName | None = None
    """Category of SPEED-Bench that its prompts are of, coding for example. Absent: all."""

    @property
    def asks(self) -> str | None:
        """What its requests ask otherwise than the workload says, in words; None where that is nothing."""
        said = {
            "temperature": self.temperature,
            "prompt tokens": self.prompt_tokens,
            "output tokens": self.output_tokens,
            "file": self.path,
            "category": self.category,
        }
        return ", ".join(f"{name} {value}" for name, value in said.items() if value is not None) or None


class TemperatureShare(ApiModel):
    """A sampling temperature, and how many requests ask for it."""

    temperature: Temperature
    """The temperature as a decimal: 0.7. 0.0 is greedy."""

    share_percent: StrictInt = Field(ge=1, le=100)
    """Share of the requests in percent; all shares add up to 100."""


def _default_phases() -> list[Phase]:
    return [
        Phase(name="single", pattern=Pattern.CLOSED, concurrency=1, duration_seconds=60),
        Phase(name="closed-16", pattern=Pattern.CLOSED, concurrency=16, duration_seconds=120),
    ]


def _default_temperatures() -> list[TemperatureShare]:
    return [TemperatureShare(temperature="0.0", share_percent=100)]


class CaptureWorkload(ApiModel):
    """What the load generator sends to the engine."""

    prompts: Prompts = Prompts(synthetic=SyntheticPrompts())
    """Where prompts come from. Absent: synthetic, 512 tokens each, with answers of 128."""

    phases: list[Phase] = Field(default_factory=_default_phases, min_length=1, max_length=32)
    """What is sent when, one phase after the other. Absent: one client for 60 s, then 16 for 120 s."""

    temperatures: list[TemperatureShare] = Field(default_factory=_default_temperatures, min_length=1, max_length=16)
    """Sampling temperatures, mixed at random. Absent: 0.0 for all."""

    warmup_requests: StrictInt = Field(default=4, ge=0, le=10_000)
    """Requests before the first phase, which count for nothing."""

    timeout_seconds: StrictInt = Field(default=600, ge=1, le=86_400)
    """How long a request may take."""


Percent = Annotated[StrictInt, Field(ge=1, le=90)]


class LossLimits(ApiModel):
    """The largest losses that pass, in percent. Half of one is an alarm where chance does not explain it."""

    goodput: Percent = 5
    """Of tokens a second, in each phase."""

    acceptance: Percent = 10
    """Of the accepted tokens, in all and at each position of the draft."""

    step_time: Percent = 5
    """By how much a step may take longer."""

    latency: Percent = 20
    """By how much TTFT and TPOT may be longer."""


class Against(ApiModel):
    """A golden capture, and how much worse than it an engine may be."""

    capture: ObjectName
    """A SpecDecodeCapture of one arm in this namespace that succeeded, with the workload and seed that this one has."""

    max_loss_percent: LossLimits = LossLimits()
    """The largest losses that pass."""


class Regressed(StrEnum):
    """Whether an engine serves as well as the one of the golden capture."""

    HOLDS = "Holds"
    REGRESSED = "Regressed"
    INCONCLUSIVE = "Inconclusive"
    NOT_COMPARABLE = "NotComparable"


Figure = Annotated[str, StringConstraints(max_length=64)]


class JudgedFigure(ApiModel):
    """One figure of both captures, as people read it."""

    name: Annotated[str, StringConstraints(max_length=96)]
    """Goodput in phase chat, for example."""

    golden: Figure
    """In the golden capture, with its unit."""

    found: Figure
    """In this one."""

    change: Figure
    """From the golden capture to this one, with its interval."""

    verdict: Regressed
    """Holds, Regressed or Inconclusive."""


class RegressionStatus(ApiModel):
    """A capture against its golden one."""

    against: Annotated[str, StringConstraints(max_length=253)]
    """Name of the golden capture."""

    verdict: Regressed
    """What all figures come to."""

    message: Annotated[str, StringConstraints(max_length=1024)]
    """The same in a sentence with the figures that decide."""

    figures: list[JudgedFigure] = Field(default=[], max_length=12)
    """The figures that decide, and others as far as there is room."""


KIND = "SpecDecodeCapture"
PLURAL = "specdecodecaptures"

Milliseconds = Annotated[StrictInt, Field(ge=1, le=86_400_000)]
Quantity = Annotated[str, StringConstraints(max_length=16, pattern=SIZE)]
DEFAULT_SIZE = "20Gi"


class DuringCapture(StrEnum):
    """What becomes of the deployment's engines while the capture has one of its own."""

    KEEP = "Keep"
    SUSPEND = "Suspend"


class Record(ApiModel):
    """What is recorded beside times and counts. Prompts never are."""

    token_ids: StrictBool = False
    """Record the tokens of the answers."""

    step_stats: StrictBool = True
    """Record the scheduler's statistics of each step."""


class Storage(ApiModel):
    """The volume that the files are written to."""

    size: Quantity | None = None
    """Size of the claim that is created. Absent: 20Gi, unless persistentVolumeClaim is set."""

    storage_class_name: ObjectName | None = None
    """Storage class of the claim that is created. Absent: the cluster's default."""

    persistent_volume_claim: PersistentVolumeClaimRef | None = None
    """An existing claim to write to, instead of one that is created. Captures may share it."""

    retain: StrictBool = True
    """Keep the claim that was created when this object is deleted."""

    @property
    def existing_claim(self) -> str | None:
        """Name of the existing claim; None if the capture creates one."""
        return self.persistent_volume_claim.claim_name if self.persistent_volume_claim else None


class ArmSpeculation(Speculation):
    """How the engine of an arm speculates."""

    # Fewer than in a deployment: of 8 arms in 8 schedules, the API server would refuse to judge more.
    num_speculative_tokens_by_batch_size: list[BatchSizeRange] = Field(default=[], max_length=16)
    """K by the number of running requests, from 1 up. Where no range applies, numSpeculativeTokens holds."""


class Arm(ApiModel):
    """One way to serve, to be measured against others on the same GPUs."""

    name: PhaseName
    """Name of the arm, and of the folder of its files."""

    speculation: ArmSpeculation | None = None
    """In the place of the deployment's spec.speculation, all of it; method none is no speculation. Absent: as
    deployed."""

    target_quantization: Quantization | None = None
    """In the place of the deployment's spec.target.quantization. Absent: what its plan chose."""

    kv_cache_dtype: KvCacheDtype | None = None
    """In the place of the deployment's spec.serving.kvCacheDtype. Absent: as deployed."""


class Slo(ApiModel):
    """What clients are promised: goodput counts the tokens of requests that keep all of it."""

    ttft_ms: Milliseconds | None = None
    """Longest time to the first token."""

    tpot_ms: Milliseconds | None = None
    """Longest time for each further token, on average of a request."""

    latency_ms: Milliseconds | None = None
    """Longest time to the last token."""


class Checks(ApiModel):
    """Requests to each arm, one at a time and outside of what is measured, by which its answers are compared."""

    greedy_prompts: StrictInt = Field(default=8, ge=0, le=64)
    """Prompts answered at temperature 0, whose tokens should be the same in all arms."""

    structured_requests: StrictInt = Field(default=8, ge=0, le=64)
    """Requests for JSON by a schema, and as many for a call of a tool, whose answers should parse as often."""


class CaptureRun(ApiModel):
    """Which load, and where the files go: what a capture and the template of a schedule have in common."""

    arms: list[Arm] = Field(default=[], max_length=8)
    """Ways to serve, one after another on the same GPUs under the same load. The first is the baseline, which the
    others are compared with. Absent: the deployment's own alone."""

    repetitions: StrictInt | None = Field(default=None, ge=1, le=20)
    """How often each arm is started and measured, in an order drawn anew each time. Several arms need two or more.
    Absent: 2 with several arms, else 1."""

    slo: Slo | None = None
    """Which requests count as goodput. Absent: all that are answered to the end."""

    checks: Checks | None = None
    """How the answers of several arms are compared. Absent: with 8 prompts and 8 requests for JSON."""

    against: Against | None = None
    """An earlier capture of the same workload, by whose record this engine is judged at the end."""

    deployment_during_capture: DuringCapture = DuringCapture.KEEP
    """Suspend: its engines give their GPUs to the capture and come back after it, however it ends. Keep: the capture
    waits for GPUs that no engine wants."""

    borrow_timeout_seconds: StrictInt = Field(default=120, ge=10, le=1800)
    """With Suspend: how long borrowed GPUs may stay idle before the engines get them back. They are idle while the
    capture's engine does not run on them: its pod has no node, waits for a volume or an image, or crashed."""

    workload: CaptureWorkload = CaptureWorkload()
    """What the load generator sends."""

    seed: StrictInt = Field(default=0, ge=0, le=2_147_483_647)
    """Seed of all that is random: prompts, arrivals, temperatures."""

    record: Record = Record()
    """What is recorded."""

    storage: Storage = Storage()
    """The volume that the files are written to."""

    deadline_seconds: StrictInt = Field(default=3600, ge=30, le=604_800)
    """How long the load may take once the engine serves. On top of it the engine has as long to start as in its
    deployment, and merging and validation have 15 minutes and a tenth of it. Each attempt has all of these, for each
    repetition of each arm."""

    backoff_limit: StrictInt = Field(default=0, ge=0, le=10)
    """How often a run that failed is begun anew."""

    @property
    def starts(self) -> int:
        """How often each arm is started."""
        return self.repetitions or (2 if len(self.arms) > 1 else 1)


class SpecDecodeCaptureSpec(CaptureRun):
    """Whose engine, which load, and where the files go."""

    deployment: ObjectName
    """The SpecDecodeDeployment of this namespace whose engine is captured; it may be suspended."""

    suspend: StrictBool = False
    """No engine and no load; what was recorded so far is kept as partial files. Once it is false again, the capture
    begins anew."""

    ttl_seconds_after_finished: StrictInt | None = Field(default=None, ge=0, le=31_536_000)
    """When a finished capture is deleted, counted from when the operator noticed its end; its claim stays unless
    storage.retain is false. Absent: never."""
