"""Define ``comparison.json``, the result of comparing the arms of a capture.

docs/reference/comparison-figures.md defines every figure.
"""

from typing import Final

from msgspec import Struct

from specdecode_operator.capture.files.totals import Quantiles

COMPARISON: Final = "comparison.json"
SCHEMA: Final = 1


class Slo(Struct, kw_only=True, frozen=True, rename="camel"):
    """Limits in milliseconds for a request to count as goodput; null means no limit."""

    ttft_ms: int | None = None
    tpot_ms: int | None = None
    latency_ms: int | None = None

    @property
    def given(self) -> bool:
        """Whether any limit is set."""
        return (self.ttft_ms, self.tpot_ms, self.latency_ms) != (None, None, None)


class LoadVerdict(Struct, kw_only=True, frozen=True):
    """One arm against the baseline in one phase."""

    verdict: str  # Pays, DoesNotPay or Inconclusive
    blocks: int  # pairs of blocks
    ratio: float | None  # goodput of the arm to that of the baseline, of usual blocks
    # The interval: the wider of the next two at each end; null where it has no such end.
    low: float | None
    high: float | None
    # The confidence sequence of the blocks
    blocks_low: float | None
    blocks_high: float | None
    # The interval of how far starts of an engine differ
    starts_low: float | None
    starts_high: float | None
    # What would decide, if the ratio is as measured; null where that is not known, or much more than is sensible.
    blocks_needed: int | None
    repetitions_needed: int | None
    predicted_ratio: float | None  # by acceptance and measured step times


class Load(Struct, kw_only=True, frozen=True):
    """One phase of one arm, over all repetitions."""

    phase: str
    pattern: str
    asks: str | None = None  # what its requests ask otherwise than those of other phases: a temperature, a length
    requests: dict[str, int]  # sent, and by outcome
    within_slo: int  # completed requests within the SLO
    seconds: float  # from first sending to last end, summed over repetitions
    running: float | None  # requests running at once, on average
    output_tokens: int
    throughput: float | None  # tokens of whole answers, a second
    goodput: float | None  # those of requests within the SLO, a second
    ttft_ms: Quantiles | None
    tpot_ms: Quantiles | None
    latency_ms: Quantiles | None
    decode_step_ms: float | None  # mean time of a step without prefill
    tokens_per_step: float | None  # that a request gets from such a step
    acceptance: float | None  # share of drafted tokens
    speculation_overhead: float | None  # how much longer such a step takes than the baseline's, as a share
    gpu_seconds_per_1000_tokens: float | None  # of goodput
    cost_per_1000_tokens: float | None = None  # in the currency of the given price
    compared: LoadVerdict | None = None  # null for the baseline, and where nothing can be compared
    not_compared: str | None = None  # why


class AcceptanceOf(Struct, kw_only=True, frozen=True):
    """Acceptance of some of the requests, as their chunks tell."""

    requests: int
    tokens_per_step: float  # tokens of a chunk, without first and last ones
    acceptance: float  # as if every step had drafted K


class PerRequest(Struct, kw_only=True, frozen=True):
    """Acceptance request by request, as if every step had drafted K."""

    requests: int
    p10: float
    p50: float
    p90: float
    histogram: list[int]  # requests by tenths of acceptance


class Drafting(Struct, kw_only=True, frozen=True):
    """Effect of speculation, by the engine's own counters unless noted."""

    k: int | None
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    acceptance: float
    per_position: list[float]
    block_efficiency: float  # tau: tokens that a verification gives
    largest_block_efficiency: int | None  # K + 1
    draft_efficiency: float | None  # tokens gained per step, by what the step takes longer; above 1 it pays
    memory_bound_speed_up: float | None
    by_temperature: dict[str, AcceptanceOf]
    by_context: dict[str, AcceptanceOf]  # by tokens of the prompt
    per_request: PerRequest | None


class TokensPerStep(Struct, kw_only=True, frozen=True):
    """Tokens that a request gets from a step, on the same prompts as the baseline's, where both arms draft."""

    arm: float
    baseline: float
    ratio: float
    # The 95 % interval of the ratio, by a jackknife over groups of prompts; null with too few.
    low: float | None
    high: float | None
    requests: int  # of this arm, over all repetitions
    step_cost: str  # Equal, Lower, Higher or Unknown: method, K and precision are equal, and how large the draft is


class PrefixCache(Struct, kw_only=True, frozen=True):
    """Hits of the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    hit_rate: float | None
    tax_tokens: int | None  # that the baseline found on the same prompts and this arm did not; null for the baseline
    tax_percent: float | None  # of the prompt tokens


class KvCache(Struct, kw_only=True, frozen=True):
    """How the KV cache was used."""

    tokens: int | None  # that it holds, as the engine says; the smallest of all starts
    mean_usage: float | None
    largest_usage: float | None
    preemptions: int


class Difference(Struct, kw_only=True, frozen=True):
    """The first token in which an answer differs from the baseline's."""

    prompt_sha256: str
    position: int  # from 0
    baseline_margin: float | None  # difference of log probability between the baseline's two likeliest tokens there
    explained: bool


class OutputsFound(Struct, kw_only=True, frozen=True):
    """Whether an arm answers like the baseline."""

    outputs: str  # Equal, Explained, Different, Lossy or NotChecked
    prompts: int  # that both answered
    equal: int
    explained: int
    different: int
    first_difference: Difference | None
    # Share that could be parsed, of this arm and of the baseline; null where it was not asked.
    structured: tuple[float, float] | None
    tool_calls: tuple[float, float] | None
    parses_less: bool  # than the baseline, by more than chance
    not_measured: list[str]


class Engine(Struct, kw_only=True, frozen=True):
    """The engine of an arm, as it reports itself."""

    vllm: str
    model: str | None
    gpu: str | None
    gpu_uuids: list[str]
    gpus: int  # on CPU one machine
    method: str | None  # of speculation
    k: int | None
    async_scheduling: bool | None
    enforce_eager: bool | None
    enable_prefix_caching: bool | None


class Arm(Struct, kw_only=True, frozen=True):
    """One arm over all its repetitions."""

    name: str
    verdict: str | None  # null for the baseline
    message: str
    lossy: str | None  # why it may answer otherwise by its settings
    repetitions: list[int]  # those that are there
    engine: Engine | None  # null where none is there
    loads: list[Load]
    crossover_running: float | None
    drafting: Drafting | None  # null where nothing was drafted
    tokens_per_step: TokensPerStep | None = None  # null for the baseline, and where one of the two arms does not draft
    prefix_cache: PrefixCache | None
    kv_cache: KvCache | None
    outputs: OutputsFound | None  # null for the baseline


class Comparison(Struct, kw_only=True, frozen=True):
    """All arms of a capture against the first one."""

    schema: int = SCHEMA
    specdecode: str
    namespace: str
    capture: str
    baseline: str
    level: float
    repetitions: int  # asked for
    slo: Slo
    price_per_gpu_hour: float | None
    arms: list[Arm]  # the baseline first
    notes: list[str]  # confounds, and what else to know before believing a figure

    def arm(self, name: str) -> Arm:
        """Return an arm."""
        return next(each for each in self.arms if each.name == name)
