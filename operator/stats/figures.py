"""Define each figure of running engines once, for recording rules, dashboard, status and docs.

`SampleBuffer` keeps the scrapes of one object's engines for as long as a figure looks back.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from specdecode_operator.stats.measures import (
    DEPLOYMENT_LEVEL,
    POD_LEVEL,
    Difference,
    Gauge,
    Measure,
    Page,
    Quantile,
    Rate,
    Ratio,
    Scope,
    UnreadablePageError,
    Values,
    Within,
    growth_between,
    page_of,
)
from specdecode_operator.vllm.engine_metrics import ANSWERED_REASONS, Exposition
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile

WINDOW: Final = Scope().window
"""Window of a recorded figure: ten scrapes at the usual interval."""

ANSWERED: Final = "|".join(ANSWERED_REASONS)
"""Finish reasons of answered requests, as a regular expression."""

TTFT_LIMIT: Final = "$ttft_limit"
TPOT_LIMIT: Final = "$tpot_limit"
"""Placeholders for the limits of an SLO, which the user provides."""

_NAMES: Final = find_profile(KNOWN_VERSIONS[-1]).metrics
"""Metric names, which are equal in all known versions (tested), so that one rule serves engines of several versions."""

_DRAFTS: Final = Rate(_NAMES.drafts)
_DRAFTED: Final = Rate(_NAMES.draft_tokens)
_ACCEPTED: Final = Rate(_NAMES.accepted_tokens)
_FINISHED: Final = Rate(_NAMES.finished_requests, {_NAMES.finished_reason_label: ANSWERED})


@dataclass(frozen=True)
class Figure:
    """One figure: its meaning, its computation, and its pitfalls."""

    name: str
    title: str
    unit: str
    """Unit as displayed."""
    grafana_unit: str
    definition: str
    measure: Measure
    caveat: str = ""
    levels: tuple[tuple[str, ...], ...] = (DEPLOYMENT_LEVEL,)
    """Levels at which it is recorded; empty if it needs a limit."""

    def promql(self, scope: Scope = Scope()) -> str:  # noqa: B008  it is frozen
        """Return the expression."""
        return self.measure.promql(scope)

    def recorded(self, level: tuple[str, ...] = DEPLOYMENT_LEVEL) -> str:
        """Return the name of the recorded series, in the form level:figure:window; a gauge has no window."""
        prefix = "specdecode_pod" if level == POD_LEVEL else "specdecode_deployment"
        return f"{prefix}:{self.name}" if isinstance(self.measure, Gauge) else f"{prefix}:{self.name}:{WINDOW}"


_TRIMMED: Final = (
    "With adaptive verification, this value reads low while throughput rises, because unverified tokens count as"
    " drafted."
)
_MEAN_TIME: Final = (
    "An answer of one token counts as 0 s. TPOT is the mean of a request. The metric"
    " `vllm:inter_token_latency_seconds`, which some tools also call TPOT, is the time between two steps, each of which"
    " can yield several tokens."
)

FIGURES: Final[tuple[Figure, ...]] = (
    Figure(
        "output_tokens_per_second",
        "Output tokens",
        "tokens/s",
        "short",
        "Generated tokens, including first tokens.",
        Rate(_NAMES.generation_tokens),
        "Includes tokens of aborted requests.",
    ),
    Figure(
        "answered_requests_per_second",
        "Answered requests",
        "requests/s",
        "reqps",
        f"Requests that ended with `{ANSWERED.replace('|', '` or `')}`.",
        _FINISHED,
        "Requests that the server rejected with an HTTP status are not counted, because they never reached the engine.",
    ),
    Figure(
        "time_to_first_token_within_limit",
        "TTFT within the limit",
        "share",
        "percentunit",
        "Share of requests whose first token arrived within the limit.",
        Within(_NAMES.time_to_first_token, TTFT_LIMIT),
        "The limit must be a bucket boundary of the histogram in the same notation: `0.5`, `1.0`. Engines do not export"
        " goodput. The share of requests within both limits is at least the sum of both shares minus 1, and at most the"
        " smaller share.",
        levels=(),
    ),
    Figure(
        "time_per_output_token_within_limit",
        "TPOT within the limit",
        "share",
        "percentunit",
        "Share of requests whose time per output token was within the limit.",
        Within(_NAMES.time_per_output_token, TPOT_LIMIT),
        f"The limit must be a bucket boundary of the histogram. {_MEAN_TIME}",
        levels=(),
    ),
    Figure(
        "time_to_first_token_p50",
        "TTFT P50",
        "s",
        "s",
        "Median time from the arrival of a request in the API server of vLLM to its first token, including queueing.",
        Quantile(_NAMES.time_to_first_token, 0.5),
        "The value is interpolated within a bucket of the histogram.",
    ),
    Figure(
        "time_to_first_token_p99",
        "TTFT P99",
        "s",
        "s",
        "99 % of requests got their first token within this time.",
        Quantile(_NAMES.time_to_first_token, 0.99),
        "The value is interpolated within a bucket of the histogram, and needs a few hundred requests in the window.",
    ),
    Figure(
        "time_per_output_token_p50",
        "TPOT P50",
        "s",
        "s",
        "Median of the time per output token (TPOT): time from the first to the last token, divided by the number of"
        " tokens after the first.",
        Quantile(_NAMES.time_per_output_token, 0.5),
        _MEAN_TIME,
    ),
    Figure(
        "time_per_output_token_p99",
        "TPOT P99",
        "s",
        "s",
        "99 % of requests had a time per output token within this value.",
        Quantile(_NAMES.time_per_output_token, 0.99),
        f"vLLM observes it when a request ends. {_MEAN_TIME}",
    ),
    Figure(
        "time_per_output_token_spread",
        "TPOT P99/P50",
        "",
        "short",
        "Ratio of the P99 to the median of the time per output token.",
        Quantile(_NAMES.time_per_output_token, 0.99, over_median=True),
        "Speculation increases it, because requests whose drafts are rejected wait for longer steps.",
    ),
    Figure(
        "acceptance_rate",
        "Acceptance rate",
        "share",
        "percentunit",
        "Accepted draft tokens divided by draft tokens.",
        Ratio(_ACCEPTED, _DRAFTED),
        f"{_TRIMMED} With `rejectionSampling: fly`, it includes tokens that the target would have rejected. It does not"
        " show whether speculation pays off.",
    ),
    Figure(
        "mean_acceptance_length",
        "Mean acceptance length",
        "tokens",
        "short",
        "1 + accepted tokens divided by drafts: the tokens that a request gets from one verification, including the"
        " token of the target.",
        Ratio(_ACCEPTED, _DRAFTS, plus=1),
        "Other engines omit the 1. Steps of a request without a draft are not counted.",
        levels=(DEPLOYMENT_LEVEL, POD_LEVEL),
    ),
    Figure(
        "acceptance_rate_by_position",
        "Acceptance by position",
        "share",
        "percentunit",
        "Share of drafts whose tokens up to this position, counted from 0, were all accepted.",
        Ratio(Rate(_NAMES.accepted_tokens_per_position), _DRAFTS, by=_NAMES.position_label),
        "To get the conditional share, divide by the value of the previous position. Drafts shorter than K count as not"
        f" accepted at the missing positions. {_TRIMMED}",
    ),
    Figure(
        "drafted_tokens_per_draft",
        "K in force",
        "tokens",
        "short",
        "Draft tokens divided by drafts: the K in force.",
        Ratio(_DRAFTED, _DRAFTS),
        "Tokens that a grammar excludes are not counted. With `numSpeculativeTokensByBatchSize`, it varies with the"
        " load. Adaptive verification does not change it.",
    ),
    Figure(
        "rejected_draft_tokens_per_second",
        "Rejected drafted tokens",
        "tokens/s",
        "short",
        "Draft tokens minus accepted tokens: wasted verification.",
        Difference(_DRAFTED, _ACCEPTED),
        "With adaptive verification, it includes tokens that were drafted but never verified.",
    ),
    Figure(
        "prefix_cache_hit_rate",
        "Prefix cache hit rate",
        "share",
        "percentunit",
        "Prompt tokens found in the prefix cache of the engine, divided by prompt tokens looked up.",
        Ratio(Rate(_NAMES.prefix_cache_hits), Rate(_NAMES.prefix_cache_queries)),
        "Methods that read hidden states of the target discard the last matching block up to vLLM 0.32."
        " Requests that resume after a preemption and hits of a KV connector are not counted.",
    ),
    Figure(
        "kv_cache_usage",
        "KV cache in use",
        "share",
        "percentunit",
        "Share of KV cache blocks that running requests hold, in the engine with the highest share.",
        Gauge(_NAMES.kv_cache_usage, largest=True),
        "Value at the time of the scrape. Blocks that only the prefix cache holds count as free.",
    ),
    Figure(
        "preemptions_per_second",
        "Preemptions",
        "1/s",
        "short",
        "Requests preempted because the KV cache was full. Their tokens are computed again.",
        Rate(_NAMES.preemptions),
    ),
    Figure(
        "running_requests",
        "Running requests",
        "requests",
        "short",
        "Requests in the current batch.",
        Gauge(_NAMES.requests_running),
        "Value at the time of the scrape.",
    ),
    Figure(
        "waiting_requests",
        "Waiting requests",
        "requests",
        "short",
        "Requests that were accepted but not yet scheduled.",
        Gauge(_NAMES.requests_waiting),
        "Value at the time of the scrape.",
    ),
)


def find_figure(name: str) -> Figure:
    """Return the figure of a name."""
    return next(figure for figure in FIGURES if figure.name == name)


WINDOW_S: Final = 300
SAMPLE_INTERVAL_S: Final = 60
"""Minimum time between two kept pages of an engine, in seconds."""

FIGURES_WITHOUT_LIMIT: Final[tuple[Figure, ...]] = tuple(
    figure for figure in FIGURES if not isinstance(figure.measure, Within)
)
"""Figures that need no limit from the user."""

_MOST_SERIES_SETS: Final = 2
"""Most sets of series that are kept per engine.

An engine adds some series when it starts to work, and a hostile one may change its series on each page.
"""

_LOOKS_NAMES: Final = frozenset().union(*(figure.measure.series() for figure in FIGURES_WITHOUT_LIMIT))


class SampleBuffer:
    """The last pages of one object's engines."""

    def __init__(self) -> None:
        self._pages: dict[str, list[Page]] = {}

    def names_due(self, engine: str, at_s: float) -> frozenset[str]:
        """Return the names to read on a page scraped now; empty within `SAMPLE_INTERVAL_S` of the last one."""
        pages = self._pages.get(engine)
        return frozenset() if pages and at_s - pages[-1].at_s < SAMPLE_INTERVAL_S else _LOOKS_NAMES

    def hear(self, engine: str, page: Exposition, at_s: float) -> None:
        """Keep a page that was read for the names that were due; ignore an implausible one."""
        pages = self._pages.setdefault(engine, [])
        try:
            pages.append(page_of(page, _LOOKS_NAMES, at_s))
        except UnreadablePageError:
            return
        while len(pages) > 1 and at_s - pages[1].at_s >= WINDOW_S:
            del pages[0]
        while len({id(page.names) for page in pages}) > _MOST_SERIES_SETS:
            del pages[0]

    def retain(self, engines: Collection[str]) -> None:
        """Forget all other engines."""
        self._pages = {name: pages for name, pages in self._pages.items() if name in engines}

    def figures(self, now_s: float) -> tuple[dict[str, Values], float] | None:
        """Return the figures and their window in seconds; None before an engine was scraped twice."""
        looks = [
            (pages[0], pages[-1])
            for pages in self._pages.values()
            if len(pages) > 1 and now_s - pages[-1].at_s < WINDOW_S
        ]
        if not looks:
            return None
        growth = growth_between(looks)
        values = {figure.name: figure.measure.values(growth) for figure in FIGURES_WITHOUT_LIMIT}
        return values, max(after.at_s - before.at_s for before, after in looks)
