"""The fitted model of an engine: one JSON document whose sections are used independently.

The section `donors` holds pools of recorded steps and bursts. `buckets` says which of them count as alike;
quantiles thin a pool, and ranges say how far a value lies outside the fitted ones.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import msgspec
from msgspec import Meta, Struct

from specdecode_operator.problems import printable, shown
from specdecode_operator.replay.emulated.engine_model import acceptance_from_json, step_time_from_json
from specdecode_operator.untrusted import UnreadableTextError, parse_json

DECODING: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Requests that have their next tokens in a step; each bucket ends with its number, included."""
PREFILL_TOKENS: Final = (0, 64, 256, 1024, 2048, 4096, 8192, 16384)
POSITION: Final = (16, 64, 256)
"""Tokens of the output that a request has already."""
CONTEXT: Final = (512, 2048, 8192, 32768)
"""Tokens that a request attends to."""
BURST: Final = (0, 1, 2, 3, 4, 5, 8, 16)
"""Tokens of the burst before; 0 stands for the one that ended the prefill."""
PACES: Final = 5
"""Steps of a cell, from the shortest fifth to the longest."""


def bucket(value: float, ends: Sequence[int]) -> int:
    """Return in which bucket a value is; what is beyond the last end has one of its own."""
    return bisect_left(ends, value)


def buckets(ends: Sequence[int]) -> int:
    """Return how many there are."""
    return len(ends) + 1


def thinned(values: Sequence[float], most: int, digits: int = 5) -> list[float]:
    """Return so many of some values at most: ascending, each the middle of an equal share of them."""
    ordered = sorted(values)
    if len(ordered) > most:
        ordered = [ordered[int((index + 0.5) * len(ordered) / most)] for index in range(most)]
    return [round(float(value), digits) for value in ordered]


def value_at(ascending: Sequence[float], share: float) -> float:
    """Return the value below which a share of them lies, with straight lines between them."""
    place = share * len(ascending) - 0.5
    if place <= 0:
        return ascending[0]
    below = int(place)
    if below + 1 >= len(ascending):
        return ascending[-1]
    return ascending[below] + (place - below) * (ascending[below + 1] - ascending[below])


_NEAR: Final = 1.05
"""So much farther is no farther: two loads of the same lengths differ by that."""


class Range(Struct, frozen=True):
    """The least and the largest value that was seen."""

    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Return the range of some values, of which there is one at least."""
        sorted_values = sorted(values)
        return cls(sorted_values[0], sorted_values[-1])

    def outside(self, name: str, value: float) -> str | None:
        """Say how far a value lies outside; nothing where it does not, or hardly."""
        if self.least / _NEAR <= value <= self.most * _NEAR:
            return None
        bound, word = (self.most, "most") if value > self.most else (self.least, "least")
        times = f", {value / bound:.1f} times that" if bound > 0 else ""
        return f"{name} {value:g} is outside of what the model was fitted on: {bound:g} at {word}{times}"


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


SCHEMA: Final = 1

MAX_BYTES: Final = 8 * 2**20
"""Of a model file: fitting writes 2 MiB at most."""

Positive = Annotated[int, Meta(ge=1, le=2**40)]


class FittedCapture(Struct, kw_only=True, frozen=True):
    """A capture that a model was fitted to."""

    name: str  # of its folder
    config_hash: str | None = None
    requests: Count = 0
    steps: Count = 0


class Limits(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What an engine takes at once, in vLLM's words; null where the capture does not say it."""

    max_num_seqs: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    max_model_len: Positive | None = None
    block_size: Positive | None = None
    num_gpu_blocks: Positive | None = None  # of the KV cache
    enable_prefix_caching: bool | None = None
    async_scheduling: bool | None = None  # the next step is planned while one runs
    draft_slots: Count | None = (
        None  # of a step's tokens, taken by each request in it beside its own: drafting needs them
    )


class Origin(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Whose behaviour it is."""

    model: str | None = None
    gpu: str | None = None
    tp: Positive | None = None
    vllm_version: str | None = None
    speculative: dict[str, Any] | None = None  # as a trace's header has it; absent without speculation
    limits: Limits = Limits()
    captures: list[FittedCapture] = []


class FittedModel(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """All that is known of an engine."""

    schema: Literal[1]
    origin: Origin
    donors: Donors | None = None
    ttft: Ttft | None = None
    clients: Clients | None = None
    step_time: dict[str, Any] | None = None  # as replay/emulated/engine_model.py evaluates it
    acceptance: dict[str, Any] | None = None  # as replay/emulated/engine_model.py evaluates it


class ModelFileError(Exception):
    """A model file that cannot be used: the file, what is wrong, and what to do, in one line."""


def read_model(path: Path) -> FittedModel:
    """Return the model in a file.

    Raises
    ------
    ModelFileError
        It is not there, is none, or says what no model can.
    """
    name = printable(str(path))
    try:
        if path.is_fifo() and path.parts[1:2] not in (("dev",), ("proc",)):
            # Who never writes would keep us waiting; a shell's <(command) lies below /dev or /proc.
            raise ModelFileError(f"{name}: is a FIFO: name a file that `specdecode replay fit` wrote")
        with path.open("rb") as stream:
            text = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ModelFileError(f"{name}: {error.strerror}: name a file that `specdecode replay fit` wrote") from error
    try:
        return decode_model(text)
    except UnreadableTextError as error:
        raise ModelFileError(f"{name}: {printable(str(error))}") from error


def decode_model(text: bytes) -> FittedModel:
    """Return the model that a text says.

    Raises
    ------
    UnreadableTextError
        When it says none.
    """
    document = parse_json(text, MAX_BYTES)
    if not isinstance(document, dict) or "origin" not in document:
        raise UnreadableTextError("is no fitted model: name a file that `specdecode replay fit` wrote")
    if document.get("schema") != SCHEMA:
        found = shown(document.get("schema"))
        raise UnreadableTextError(f"schema: {found}: this specdecode reads {SCHEMA}: fit it again")
    try:
        model = msgspec.convert(document, FittedModel)
        if model.step_time is not None:
            step_time_from_json(model.step_time)
        if model.acceptance is not None:
            acceptance_from_json(model.acceptance)
    except (msgspec.ValidationError, ValueError) as error:
        raise UnreadableTextError(f"{error}: fit it again") from error
    return model


def encode_model(model: FittedModel) -> bytes:
    """Return the document of a model, with a line for each of its sections."""
    sections = msgspec.to_builtins(model)
    lines = (f'"{name}": '.encode() + msgspec.json.encode(section) for name, section in sections.items())
    return b"{\n" + b",\n".join(lines) + b"\n}\n"
