"""The section ``donors``: recorded steps and bursts as pools from which others like them are drawn.

A step's duration is kept as its ratio to a trend, so that a pool stands in for steps that are a little larger or
smaller, too. A burst is kept with the pace of its step within the pool: gap and tokens are drawn together.
"""

from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from specdecode_operator.replay.emulated.step_time import step_time_from_json
from specdecode_operator.replay.fitted.ranges import Range

MOST_DONORS: Final = 256
"""Of a cell: so many are kept, evenly spread over its quantiles."""

Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
Small = Annotated[int, Meta(ge=0, le=2**20)]
Ratio = Annotated[float, Meta(gt=0, le=1e6)]


class Cell(Struct, kw_only=True, frozen=True):
    """Steps that are alike."""

    decoding: Small  # bucket of the requests that had their next tokens
    prefill: Small  # bucket of the tokens of prompts
    steps: Count
    ratios: Annotated[list[Ratio], Meta(min_length=1, max_length=MOST_DONORS)]  # measured by trend, ascending


class Bursts(Struct, kw_only=True, frozen=True):
    """How often a burst of so many tokens came where; a row of each list belongs together."""

    classes: list[Small]  # of the request, in the order of `Donors.classes`
    paces: list[Small]
    before: list[Small]  # bucket of the burst before
    decoding: list[Small]
    positions: list[Small]
    contexts: list[Small]
    tokens: list[Annotated[int, Meta(ge=1, le=2**27)]]
    counts: list[Annotated[int, Meta(ge=1, le=2**40)]]

    def __post_init__(self) -> None:
        """Refuse rows that are not whole."""
        lengths = {len(getattr(self, name)) for name in self.__struct_fields__}
        if len(lengths) > 1:
            raise ValueError("its lists differ in length")


class Stops(Struct, kw_only=True, frozen=True):
    """Requests that the model itself ended."""

    share: Share
    output_tokens: list[Count]  # ascending, evenly spread over quantiles


class Drafts(Struct, kw_only=True, frozen=True):
    """What was drafted, by the engine's own counters."""

    singles: Share  # bursts of one token that had a draft: ngram does not always find one
    tokens: Annotated[float, Meta(ge=0, le=4096)]  # of a draft, on average


class Donors(Struct, kw_only=True, frozen=True):
    """Steps, bursts, and what else is drawn of a capture."""

    num_speculative_tokens: Annotated[int, Meta(ge=0, le=4095)]
    trend: dict[str, Any]  # as a section `step_time`
    cells: Annotated[list[Cell], Meta(min_length=1, max_length=4096)]
    persistence: Annotated[float, Meta(ge=0, lt=1)]  # how much a step's pace tells of the next one's
    classes: Annotated[list[Share], Meta(min_length=1, max_length=64)]  # shares of easy and hard requests
    bursts: Bursts
    firsts: list[tuple[Annotated[int, Meta(ge=1, le=2**27)], Count]]  # tokens at the end of a prefill, how often
    drafts: Drafts
    stops: Stops
    ranges: dict[str, Range]

    def __post_init__(self) -> None:
        """Refuse a trend that is none."""
        step_time_from_json(self.trend)


class Ttft(Struct, kw_only=True, frozen=True):
    """What a first token takes beside the steps: from arrival until the scheduler sees a request."""

    lead_ms: list[Annotated[float, Meta(ge=0, le=3_600_000)]]  # ascending, evenly spread over quantiles


class Clients(Struct, kw_only=True, frozen=True):
    """Clients that wait for an answer before they ask again, where a capture has such."""

    turnarounds_ms: list[Annotated[float, Meta(ge=0, le=3_600_000)]]  # from the last token to the next request
