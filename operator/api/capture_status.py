"""The status of a SpecDecodeCapture: phase, counts, published files, and the comparison of its arms.

Each arm is compared with the baseline at each load step.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from specdecode_operator.api.base import ApiModel, TimeText, map_by
from specdecode_operator.api.capture import RegressionStatus
from specdecode_operator.api.deployment_status import Conditions, Sentence, Word

ShortSentence = Annotated[str, StringConstraints(max_length=1024)]


class ArmVerdict(StrEnum):
    """Whether an arm brings more than the baseline on the same GPUs."""

    PAYS = "Pays"
    DOES_NOT_PAY = "DoesNotPay"
    DEPENDS_ON_LOAD = "DependsOnLoad"
    INCONCLUSIVE = "Inconclusive"
    INCORRECT = "Incorrect"


class Outputs(StrEnum):
    """Whether an arm answers what the baseline answers."""

    EQUAL = "Equal"
    EXPLAINED = "Explained"
    DIFFERENT = "Different"
    LOSSY = "Lossy"
    NOT_CHECKED = "NotChecked"


class ComparedLoad(ApiModel):
    """One load step: the phase of the workload, and what both arms did in it."""

    phase: Word
    """Name of the phase."""

    running: Word
    """Requests running at once in the baseline on average, as a decimal."""

    arm_running: Word | None = None
    """The same of this arm: where requests come at a given rate, one that is faster has fewer; absent where it is the
    baseline's number."""

    baseline_goodput: Word
    """Tokens a second of the baseline's requests within the SLO, as a decimal."""

    goodput: Word
    """The same of this arm."""

    verdict: ArmVerdict
    """Pays, DoesNotPay or Inconclusive at this load."""

    ratio: Word | None = None
    """Goodput of the arm to that of the baseline, as a decimal; absent where nothing is known."""

    low: Word | None = None
    """Lower end of the interval of that ratio; absent where it has none yet."""

    high: Word | None = None
    """Upper end of it."""


class ComparedArm(ApiModel):
    """One arm against the baseline."""

    name: Word
    """Name of the arm."""

    verdict: ArmVerdict
    """What all load steps and the checks of its outputs come to."""

    message: ShortSentence
    """The same in a sentence with its figures."""

    outputs: Outputs
    """Equal: greedy outputs are the baseline's, token for token. Explained: where they part, both tokens were about
    equally likely. Different: they were not. Lossy: the arm may answer otherwise by its settings."""

    acceptance_percent: int | None = None
    """Accepted share of the drafted tokens in percent; absent where nothing was drafted."""

    loads: list[ComparedLoad] = Field(default=[], max_length=32)
    """Its load steps that could be compared, in the order of the workload."""


class ComparisonStatus(ApiModel):
    """The arms of a capture against its first one."""

    baseline: Word
    """Name of the arm that the others are compared with."""

    level_percent: int
    """Probability, in percent, that no interval of an arm misses the true ratio, however often they were looked at."""

    baseline_acceptance_percent: int | None = None
    """Accepted share of the tokens that the baseline drafted in percent; absent where it drafted none."""

    arms: list[ComparedArm] = Field(max_length=8, json_schema_extra=map_by("name"))
    """The other arms."""

    crossover_running: Word | None = None
    """Requests running at once above which the first of them stops paying, as a decimal; absent where it does not."""


Path = Annotated[str, StringConstraints(max_length=1024)]


class CapturePhase(StrEnum):
    """How far a capture is, for people; programs read the conditions."""

    PENDING = "Pending"
    WAITING_FOR_GPUS = "WaitingForGPUs"
    STARTING = "Starting"
    LOADING = "Loading"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"


class RequestCounts(ApiModel):
    """Requests by what became of them."""

    sent: int
    """Requests that were sent, without warm-up."""

    completed: int
    """Answered to the end."""

    http_rejected: int = 0
    """Refused by the engine with an HTTP status, a prompt that is too long for example."""

    disconnected: int = 0
    """Cut off by the engine."""

    timed_out: int = 0
    """Given up after workload.timeoutSeconds."""

    cancelled: int = 0
    """Cut off by the load generator: deadline or cancellation."""

    not_sent: int = 0
    """Due, but never sent."""


class Quantiles(ApiModel):
    """Quantiles of a time, in milliseconds as decimals."""

    p50: Word
    """Median."""

    p90: Word
    """90 % are not above it."""

    p95: Word
    """95 % are not above it."""

    p99: Word
    """99 % are not above it."""


class PublishedFile(ApiModel):
    """One file on the volume."""

    name: Word
    """Its name in status.summary.path."""

    bytes: int
    """Its size."""

    lines: int | None = None
    """Its lines."""

    sha256: Word
    """Its checksum."""


class CaptureSummary(ApiModel):
    """What was captured."""

    requests: RequestCounts
    """Requests by what became of them."""

    engine_version: Word | None = None
    """Version of vLLM, as the engine itself reports it: 0.33.0."""

    engine_notes: list[Sentence] | None = Field(default=None, max_length=4)
    """What to know of that version: that nobody tried the recorder with it, or that the plan was made for another."""

    prompt_notes: list[Sentence] | None = Field(default=None, max_length=4)
    """What to know of the prompts: that random ones say nothing of acceptance."""

    output_tokens: int | None = None
    """Tokens of all answers."""

    acceptance: Word | None = None
    """Accepted share of the proposed tokens, as people read it: 71%."""

    acceptance_percent: int | None = None
    """Accepted share of the proposed tokens in percent; absent where nothing was proposed."""

    mean_acceptance_length: Word | None = None
    """Tokens emitted a verification step on average, as a decimal."""

    per_position_percent: list[int] | None = Field(default=None, max_length=32)
    """Share of the proposals of each position that was accepted, in percent."""

    ttft_ms: Quantiles | None = None
    """Time to the first token, as the client saw it."""

    tpot_ms: Quantiles | None = None
    """Time for each further token of a request."""

    latency_ms: Quantiles | None = None
    """Time to the last token, as the client saw it."""

    late_ms: Quantiles | None = None
    """How much later than they were due requests were sent, in the phase that kept its times worst."""

    requests_per_second: Word | None = None
    """Requests that were answered, a second, as a decimal."""

    output_tokens_per_second: Word | None = None
    """Tokens that came back, a second, as a decimal."""

    bytes: int | None = None
    """Size of all files."""

    files: list[PublishedFile] | None = Field(default=None, max_length=16)
    """The files, all below path."""

    path: Path | None = None
    """Folder of the files on the volume."""


class BorrowStatus(ApiModel):
    """The GPUs that the deployment's engines give to the capture, with deploymentDuringCapture: Suspend."""

    since: TimeText | None = None
    """When the engines last made room for the capture, RFC 3339."""

    idle_since: TimeText | None = None
    """Since when the GPUs have been free of engines without the capture's engine running on them, RFC 3339. Absent
    while either runs."""

    returned_at: TimeText | None = None
    """When the capture last gave the GPUs back, RFC 3339. Absent while it has them."""

    served_at: TimeText | None = None
    """When an engine of the deployment first served after that, RFC 3339."""

    seconds_without_serving: int = 0
    """How long the deployment was without a serving engine because of the capture, in seconds: from since to
    servedAt, summed over all attempts."""

    failed_attempts: int = 0
    """How often the capture gave the GPUs back because it had not started."""

    last_failure: Sentence | None = None
    """Why it had not started the last time: reason and message."""

    next_attempt_at: TimeText | None = None
    """When it may borrow the GPUs again, RFC 3339. The deployment must serve by then."""


class SpecDecodeCaptureStatus(ApiModel):
    """What the operator knows about one SpecDecodeCapture."""

    observed_generation: int | None = None
    """Generation of the spec that this status speaks of."""

    phase: CapturePhase | None = None
    """How far it is, for people."""

    conditions: Conditions = Field(default=[])
    """Accepted, WaitingForGPUs, Succeeded, Ready, Reconciling, Stalled; with several arms Pays, with spec.against
    Holds."""

    job: Word | None = None
    """The Job that runs it."""

    operator_image: Path | None = None
    """The operator image that its Job runs; `specdecode capture fetch` reads the volume with it."""

    claim: Word | None = None
    """The claim that holds its files, also when this object is gone."""

    path: Path | None = None
    """Folder of its files on the volume, from when they are validated; partial files are beside it."""

    started_at: TimeText | None = None
    """When its pod began, RFC 3339."""

    finished_at: TimeText | None = None
    """When it ended, RFC 3339."""

    borrow: BorrowStatus | None = None
    """The GPUs that it borrows from its deployment."""

    engine: Word | None = None
    """Internal: digest of the spec and the place of the engines that were captured, for the policy."""

    summary: CaptureSummary | None = None
    """What was captured; of a run that succeeded. With several arms: by the second one, the last time."""

    comparison: ComparisonStatus | None = None
    """What the arms brought, compared with the first; of a run with several that succeeded."""

    regression: RegressionStatus | None = None
    """How its engine serves beside that of spec.against; of a run that succeeded."""
