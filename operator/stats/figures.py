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
from specdecode_operator.vllm.engine_metrics import Exposition
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile

WINDOW: Final = Scope().window
"""Window of a recorded figure: ten scrapes at the usual interval."""

ANSWERED: Final = "stop|length"
"""Finished reasons of requests that got their answer; the others are abort, error and repetition."""

TTFT_LIMIT: Final = "$ttft_limit"
TPOT_LIMIT: Final = "$tpot_limit"
"""Stand for limits of an SLO, which only its owner knows."""

_NAMES: Final = find_profile(KNOWN_VERSIONS[-1]).metrics
"""The same in every version that is known (a test asks them), or one rule could not serve engines of several."""

_DRAFTS: Final = Rate(_NAMES.drafts)
_DRAFTED: Final = Rate(_NAMES.draft_tokens)
_ACCEPTED: Final = Rate(_NAMES.accepted_tokens)
_FINISHED: Final = Rate(_NAMES.finished_requests, {_NAMES.finished_reason_label: ANSWERED})


@dataclass(frozen=True)
class Figure:
    """One figure: what it means, how it is taken, and where it misleads."""

    name: str
    title: str
    unit: str
    """As people read it."""
    grafana_unit: str
    definition: str
    measure: Measure
    caveat: str = ""
    levels: tuple[tuple[str, ...], ...] = (DEPLOYMENT_LEVEL,)
    """Levels that it is recorded for; empty if it needs a limit first."""

    def promql(self, scope: Scope = Scope()) -> str:  # noqa: B008  it is frozen
        """Return the expression."""
        return self.measure.promql(scope)

    def recorded(self, level: tuple[str, ...] = DEPLOYMENT_LEVEL) -> str:
        """Return the name of the recorded series, in the form level:figure:window; a gauge has no window."""
        prefix = "specdecode_pod" if level == POD_LEVEL else "specdecode_deployment"
        return f"{prefix}:{self.name}" if isinstance(self.measure, Gauge) else f"{prefix}:{self.name}:{WINDOW}"


_TRIMMED: Final = (
    "Adaptive verification leaves drafted tokens unverified after they were counted, so it reads low while throughput"
    " rises."
)
_MEAN_TIME: Final = (
    "An answer of one token counts as 0 s. It is a mean of each request; `vllm:inter_token_latency_seconds`, which"
    " others call TPOT too, is the time between two steps, each of which may bring several tokens."
)

FIGURES: Final[tuple[Figure, ...]] = (
    Figure(
        "output_tokens_per_second",
        "Output tokens",
        "tokens/s",
        "short",
        "Tokens that requests got, first tokens too.",
        Rate(_NAMES.generation_tokens),
        "Of requests that were aborted, too.",
    ),
    Figure(
        "answered_requests_per_second",
        "Answered requests",
        "requests/s",
        "reqps",
        f"Requests that ended with `{ANSWERED.replace('|', '` or `')}`.",
        _FINISHED,
        "What was refused with an HTTP status never reached the engine.",
    ),
    Figure(
        "time_to_first_token_within_limit",
        "TTFT within the limit",
        "share",
        "percentunit",
        "Requests whose first token came within the limit.",
        Within(_NAMES.time_to_first_token, TTFT_LIMIT),
        "The limit must be a bucket of the histogram, written as there: `0.5`, `1.0`. No engine tells goodput: it lies"
        " between the sum of this share and that of TPOT less 1, and the smaller of both, times output tokens.",
        levels=(),
    ),
    Figure(
        "time_per_output_token_within_limit",
        "TPOT within the limit",
        "share",
        "percentunit",
        "Requests whose time per output token was within the limit.",
        Within(_NAMES.time_per_output_token, TPOT_LIMIT),
        f"As above. {_MEAN_TIME}",
        levels=(),
    ),
    Figure(
        "time_to_first_token_p50",
        "TTFT P50",
        "s",
        "s",
        "Median of the time from a request's arrival in the API server to its first token, queueing included.",
        Quantile(_NAMES.time_to_first_token, 0.5),
        "Interpolated within a bucket, so it is no finer than the buckets.",
    ),
    Figure(
        "time_to_first_token_p99",
        "TTFT P99",
        "s",
        "s",
        "99 % of requests had their first token within it.",
        Quantile(_NAMES.time_to_first_token, 0.99),
        "As above; it takes some hundred requests in the window to mean anything.",
    ),
    Figure(
        "time_per_output_token_p50",
        "TPOT P50",
        "s",
        "s",
        "Median over requests of the time from first to last token, over their tokens without the first.",
        Quantile(_NAMES.time_per_output_token, 0.5),
        _MEAN_TIME,
    ),
    Figure(
        "time_per_output_token_p99",
        "TPOT P99",
        "s",
        "s",
        "99 % of requests had a time per output token within it.",
        Quantile(_NAMES.time_per_output_token, 0.99),
        "As above; observed when a request ends.",
    ),
    Figure(
        "time_per_output_token_spread",
        "TPOT P99/P50",
        "",
        "short",
        "How much slower the slowest 1 % of requests get their tokens than the median.",
        Quantile(_NAMES.time_per_output_token, 0.99, over_median=True),
        "Speculation widens it: requests whose drafts are rejected pay for the others'.",
    ),
    Figure(
        "acceptance_rate",
        "Acceptance rate",
        "share",
        "percentunit",
        "Accepted drafted tokens over drafted tokens.",
        Ratio(_ACCEPTED, _DRAFTED),
        f"{_TRIMMED} With `rejectionSampling: fly` it counts tokens that the target would have rejected. It says not"
        " whether speculation pays.",
    ),
    Figure(
        "mean_acceptance_length",
        "Mean acceptance length",
        "tokens",
        "short",
        "1 + accepted tokens over drafts: tokens that a request gets from one verification, the target's own included.",
        Ratio(_ACCEPTED, _DRAFTS, plus=1),
        "Other engines leave out the 1. A step of a request without a drafted token is no draft, and not in it.",
        levels=(DEPLOYMENT_LEVEL, POD_LEVEL),
    ),
    Figure(
        "acceptance_rate_by_position",
        "Acceptance by position",
        "share",
        "percentunit",
        "Drafts of which the token at this position, counted from 0, was accepted, and so all before it.",
        Ratio(Rate(_NAMES.accepted_tokens_per_position), _DRAFTS, by=_NAMES.position_label),
        "Not conditional: the share among drafts that were right so far is this over the position before. Drafts"
        f" shorter than K count as not accepted at the positions they lack. {_TRIMMED}",
    ),
    Figure(
        "drafted_tokens_per_draft",
        "K in force",
        "tokens",
        "short",
        "Drafted tokens over drafts: the K that engines really draft with.",
        Ratio(_DRAFTED, _DRAFTS),
        "Tokens that a grammar rules out are left out. K by batch size moves it with the load; adaptive verification"
        " does not.",
    ),
    Figure(
        "rejected_draft_tokens_per_second",
        "Rejected drafted tokens",
        "tokens/s",
        "short",
        "Drafted tokens less accepted ones: verified for nothing.",
        Difference(_DRAFTED, _ACCEPTED),
        "With adaptive verification, tokens that were drafted and never verified are in it.",
    ),
    Figure(
        "prefix_cache_hit_rate",
        "Prefix cache hit rate",
        "share",
        "percentunit",
        "Prompt tokens found in the engine's own prefix cache over prompt tokens that were looked up.",
        Ratio(Rate(_NAMES.prefix_cache_hits), Rate(_NAMES.prefix_cache_queries)),
        "Methods that read the target's hidden states throw the last matching block away. Requests that come back after"
        " a preemption, and hits of a KV connector, are not in it.",
    ),
    Figure(
        "kv_cache_usage",
        "KV cache in use",
        "share",
        "percentunit",
        "Share of the KV cache's blocks that running requests hold, of the fullest engine.",
        Gauge(_NAMES.kv_cache_usage, largest=True),
        "At the moment of the scrape. Blocks that only the prefix cache keeps count as free.",
    ),
    Figure(
        "preemptions_per_second",
        "Preemptions",
        "1/s",
        "short",
        "Requests put back because the KV cache was full; their tokens are computed again.",
        Rate(_NAMES.preemptions),
    ),
    Figure(
        "running_requests",
        "Running requests",
        "requests",
        "short",
        "Requests in the batch.",
        Gauge(_NAMES.requests_running),
        "At the moment of the scrape.",
    ),
    Figure(
        "waiting_requests",
        "Waiting requests",
        "requests",
        "short",
        "Requests that were taken and not yet scheduled.",
        Gauge(_NAMES.requests_waiting),
        "At the moment of the scrape.",
    ),
)


def find_figure(name: str) -> Figure:
    """Return the figure of a name."""
    return next(figure for figure in FIGURES if figure.name == name)


WINDOW_S: Final = 300
SAMPLE_INTERVAL_S: Final = 60
"""Pages that lie closer than this tell no more."""

FIGURES_WITHOUT_LIMIT: Final[tuple[Figure, ...]] = tuple(
    figure for figure in FIGURES if not isinstance(figure.measure, Within)
)
"""Figures that need no limit of an owner's."""

_MOST_SERIES_SETS: Final = 2
"""On the pages of an engine: it has some series more once it works, and a hostile one other series on each page."""

_LOOKS_NAMES: Final = frozenset().union(*(figure.measure.series() for figure in FIGURES_WITHOUT_LIMIT))


class SampleBuffer:
    """The last pages of one object's engines."""

    def __init__(self) -> None:
        self._pages: dict[str, list[Page]] = {}

    def names_due(self, engine: str, at_s: float) -> frozenset[str]:
        """Return the names to read on a page scraped now; none within `SAMPLE_INTERVAL_S` of the last one."""
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
