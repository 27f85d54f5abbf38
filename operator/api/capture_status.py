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
    """Whether an arm performs better than the baseline on the same GPUs."""

    PAYS = "Pays"
    DOES_NOT_PAY = "DoesNotPay"
    DEPENDS_ON_LOAD = "DependsOnLoad"
    INCONCLUSIVE = "Inconclusive"
    INCORRECT = "Incorrect"


class Outputs(StrEnum):
    """Whether an arm's outputs match the baseline's."""

    EQUAL = "Equal"
    EXPLAINED = "Explained"
    DIFFERENT = "Different"
    LOSSY = "Lossy"
    NOT_CHECKED = "NotChecked"


class ComparedLoad(ApiModel):
    """Load step: a phase of the workload, with the results of both arms."""

    phase: Word
    """Name of the phase."""

    running: Word
    """Mean number of running requests in the baseline, as a decimal."""

    arm_running: Word | None = None
    """Mean number of running requests in this arm, as a decimal. At a given request rate, a faster arm has fewer. Not
    set if it equals the baseline's."""

    baseline_goodput: Word
    """Tokens per second of the baseline's requests within the SLO, as a decimal."""

    goodput: Word
    """Tokens per second of this arm's requests within the SLO, as a decimal."""

    verdict: ArmVerdict
    """Verdict at this load: Pays, DoesNotPay or Inconclusive."""

    ratio: Word | None = None
    """Goodput of the arm relative to the baseline's, as a decimal. Not set if it is unknown."""

    low: Word | None = None
    """Lower end of the confidence interval of the ratio: the lower one of the interval of blocks and the interval of
    starts. Not set until there is enough data."""

    high: Word | None = None
    """Upper end of the confidence interval of the ratio: the higher one of the same two intervals."""


class StepCost(StrEnum):
    """Cost of a step relative to the baseline, from method, K, precision and size of the draft."""

    EQUAL = "Equal"
    LOWER = "Lower"
    HIGHER = "Higher"
    UNKNOWN = "Unknown"


class TokensPerStep(ApiModel):
    """Tokens that a request gets from one step of the engine, on the same prompts in both arms."""

    arm: Word
    """Tokens per step of this arm, as a decimal."""

    baseline: Word
    """Tokens per step of the baseline, as a decimal."""

    ratio: Word
    """Tokens per step of this arm relative to the baseline's, as a decimal."""

    low: Word | None = None
    """Lower end of the 95 % confidence interval of the ratio. Not set with too few prompts."""

    high: Word | None = None
    """Upper end of the 95 % confidence interval of the ratio."""

    requests: int
    """Number of requests of this arm that were compared, over all repetitions."""

    step_cost: StepCost
    """Cost of a step relative to the baseline. Equal: method, K, precision and planned size of the draft are the same.
    Lower or Higher: only the size of the draft differs. Unknown: the arms differ in another way. If it is Equal or
    Lower, more tokens per step mean more tokens per second."""


class ComparedArm(ApiModel):
    """Comparison of one arm with the baseline."""

    name: Word
    """Name of the arm."""

    verdict: ArmVerdict
    """Overall verdict on all load steps and output checks."""

    message: ShortSentence
    """Summary of the verdict, with its figures."""

    outputs: Outputs
    """Equal: greedy outputs match the baseline's token for token. Explained: where they differ, both tokens were about
    equally likely. Different: they were not equally likely. Lossy: the arm's settings allow different outputs."""

    acceptance_percent: int | None = None
    """Accepted share of the drafted tokens in percent. Not set if the arm drafted no tokens."""

    tokens_per_step: TokensPerStep | None = None
    """Tokens per step in both arms, which do not depend on the load of the machine. Not set unless both arms draft."""

    loads: list[ComparedLoad] = Field(default=[], max_length=32)
    """Load steps that could be compared, in the order of the workload."""


class ComparisonStatus(ApiModel):
    """Comparison of a capture's arms with the first arm."""

    baseline: Word
    """Name of the first arm, with which the other arms are compared."""

    level_percent: int
    """Confidence level in percent: the probability that the intervals of all loads of an arm contain the true ratios.
    It is not corrected for the number of arms."""

    baseline_acceptance_percent: int | None = None
    """Accepted share of the tokens that the baseline drafted, in percent. Not set if it drafted no tokens."""

    arms: list[ComparedArm] = Field(max_length=8, json_schema_extra=map_by("name"))
    """Comparison of each further arm with the baseline."""

    crossover_running: Word | None = None
    """Number of running requests above which the second arm no longer pays, as a decimal. Not set if there is no such
    number. For other arms, see their message."""


Path = Annotated[str, StringConstraints(max_length=1024)]


class CapturePhase(StrEnum):
    """Progress of a capture, for people. Programs read the conditions."""

    PENDING = "Pending"
    WAITING_FOR_GPUS = "WaitingForGPUs"
    STARTING = "Starting"
    LOADING = "Loading"
    RECORDING = "Recording"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"


class RequestCounts(ApiModel):
    """Number of requests by outcome."""

    sent: int
    """Number of requests sent, without warm-up."""

    completed: int
    """Number of requests answered completely."""

    http_rejected: int = 0
    """Number of requests that the engine rejected with an HTTP status, for example because a prompt is too long."""

    disconnected: int = 0
    """Number of requests that the engine disconnected."""

    timed_out: int = 0
    """Number of requests that exceeded workload.timeoutSeconds."""

    cancelled: int = 0
    """Number of requests that the load generator stopped because of the deadline or a cancellation."""

    not_sent: int = 0
    """Number of requests that were due but not sent."""


class Quantiles(ApiModel):
    """Quantiles of a time, in milliseconds as decimals."""

    p50: Word
    """Median, in milliseconds."""

    p90: Word
    """90th percentile, in milliseconds."""

    p95: Word
    """95th percentile, in milliseconds."""

    p99: Word
    """99th percentile, in milliseconds."""


class LiveCounts(ApiModel):
    """What a live capture recorded."""

    sample_percent: int
    """Share of the requests that were recorded, in percent."""

    window_seconds: Word
    """Length of the window in seconds, as a decimal."""

    pods: int
    """Number of engine pods that were recorded."""

    missing_pods: int = 0
    """Number of engine pods that should have been recorded but were not. The notes of the manifest name them."""

    recorded: int
    """Number of recorded requests."""

    sampled_out: int = 0
    """Number of requests in the window that are not in the sample, including canary prompts."""

    gaps: int = 0
    """Number of gaps in the recording, for example because an engine restarted."""

    lost_requests: int | None = None
    """Number of requests that the engines finished in the gaps. Not set if it is unknown."""


class PublishedFile(ApiModel):
    """File on the volume."""

    name: Word
    """Name of the file in the folder status.summary.path."""

    bytes: int
    """Size of the file in bytes."""

    lines: int | None = None
    """Number of lines in the file."""

    sha256: Word
    """SHA-256 checksum of the file."""


class CaptureSummary(ApiModel):
    """Results of the capture."""

    requests: RequestCounts
    """Number of requests by outcome. In a live capture, sent is the number of requests that arrived in the window, and
    completed the number of recorded ones with a complete answer."""

    live: LiveCounts | None = None
    """What a live capture recorded. Not set for a load."""

    engine_version: Word | None = None
    """vLLM version that the engine reports, such as 0.33.0."""

    engine_notes: list[Sentence] | None = Field(default=None, max_length=4)
    """Notes on the vLLM version: that the recorder is untested with it, or that the plan was made for another
    version."""

    prompt_notes: list[Sentence] | None = Field(default=None, max_length=4)
    """Notes on the prompts: that acceptance with random prompts is not representative."""

    output_tokens: int | None = None
    """Number of tokens in all outputs."""

    acceptance: Word | None = None
    """Accepted share of the drafted tokens, for people: 71%."""

    acceptance_percent: int | None = None
    """Accepted share of the drafted tokens in percent. Not set if no tokens were drafted."""

    mean_acceptance_length: Word | None = None
    """Mean number of tokens emitted per verification step, as a decimal."""

    per_position_percent: list[int] | None = Field(default=None, max_length=32)
    """Accepted share of the drafted tokens at each draft position, in percent."""

    ttft_ms: Quantiles | None = None
    """Time to first token (TTFT) as measured by the client; in a live capture, by the engine."""

    tpot_ms: Quantiles | None = None
    """Time per further output token (TPOT) of a request."""

    latency_ms: Quantiles | None = None
    """Time to the last token as measured by the client; in a live capture, by the engine."""

    late_ms: Quantiles | None = None
    """Delay between the due time of requests and their sending, for the phase with the largest delays."""

    requests_per_second: Word | None = None
    """Completed requests per second, as a decimal."""

    output_tokens_per_second: Word | None = None
    """Output tokens per second, as a decimal."""

    bytes: int | None = None
    """Total size of the files in bytes."""

    files: list[PublishedFile] | None = Field(default=None, max_length=16)
    """Files in the folder path."""

    path: Path | None = None
    """Folder of the files on the volume."""


class BorrowStatus(ApiModel):
    """GPUs that the deployment's engines give to the capture, with deploymentDuringCapture: Suspend."""

    since: TimeText | None = None
    """Time at which the engines last made room for the capture, RFC 3339."""

    idle_since: TimeText | None = None
    """Time since which the GPUs have been idle, with no engine of the deployment or the capture running on them, RFC
    3339. Not set while either runs."""

    returned_at: TimeText | None = None
    """Time at which the capture last returned the GPUs, RFC 3339. Not set while it has them."""

    served_at: TimeText | None = None
    """Time at which an engine of the deployment first served after the GPUs were returned, RFC 3339."""

    seconds_without_serving: int = 0
    """Time in seconds that the deployment had no serving engine because of the capture: from since to servedAt, summed
    over all attempts."""

    failed_attempts: int = 0
    """Number of times that the capture returned the GPUs because it had not started."""

    last_failure: Sentence | None = None
    """Reason and message of the last failed start."""

    next_attempt_at: TimeText | None = None
    """Earliest time at which the capture may borrow the GPUs again, RFC 3339. The deployment must serve by then."""


class SpecDecodeCaptureStatus(ApiModel):
    """Observed state of a SpecDecodeCapture."""

    observed_generation: int | None = None
    """Generation of the spec that this status reflects."""

    phase: CapturePhase | None = None
    """Progress of the capture, for people. Programs read the conditions."""

    conditions: Conditions = Field(default=[])
    """Conditions Accepted, WaitingForGPUs, Succeeded, Ready, Reconciling and Stalled; also Pays with several arms, and
    Holds with spec.against."""

    job: Word | None = None
    """Name of the Job that runs the capture."""

    operator_image: Path | None = None
    """Operator image that the Job runs. `specdecode capture fetch` uses the same image to read the volume."""

    claim: Word | None = None
    """Name of the claim that holds the files. It can outlive this object."""

    path: Path | None = None
    """Folder of the files on the volume, set once they are validated. Partial files are stored in a folder next to
    it."""

    started_at: TimeText | None = None
    """Time at which the capture's pod started, RFC 3339."""

    finished_at: TimeText | None = None
    """Time at which the capture finished, RFC 3339."""

    borrow: BorrowStatus | None = None
    """GPUs that the capture borrows from its deployment."""

    engine: Word | None = None
    """Internal: digest of the spec and the placement of the captured engines, for the policy."""

    summary: CaptureSummary | None = None
    """Results of a successful capture. With several arms: the last repetition of the second arm."""

    comparison: ComparisonStatus | None = None
    """Comparison of the arms with the first one, for a successful capture with several arms."""

    regression: RegressionStatus | None = None
    """Comparison with the golden capture in spec.against, for a successful capture."""
