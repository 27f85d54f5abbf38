"""The SpecDecodeCapture kind: traces and step statistics of a deployment's engine on a volume.

One object is one run. Everything that feeds its Job is immutable: another run
is another object.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StrictBool, StrictInt, StringConstraints

from specdecode_operator.api.base import ApiModel, ObjectName
from specdecode_operator.api.capture_workload import CaptureWorkload, PhaseName
from specdecode_operator.api.golden import Against
from specdecode_operator.api.patterns import SIZE
from specdecode_operator.api.speculation import BatchSizeRange, Speculation
from specdecode_operator.api.values import Quantization
from specdecode_operator.vocabulary import KvCacheDtype

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
    """Size of the claim that is created. Absent: 20Gi, unless existingClaim is given."""

    storage_class_name: ObjectName | None = None
    """Storage class of the claim that is created. Absent: the cluster's default."""

    existing_claim: ObjectName | None = None
    """A claim of this namespace to write to, instead of one that is created. Captures may share it."""

    retain: StrictBool = True
    """Keep the claim that was created when this object is deleted."""


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
