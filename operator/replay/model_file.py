"""Schema of a model file: the JSON document that describes an engine, fitted to its captures.

Each section can be used without the others. The section `donors` holds the recorded steps, and bursts of tokens, from
which a modelled replay draws. Both are grouped into buckets of similar load. If a group is too large for the file, its
values are reduced to evenly spaced quantiles. Ranges of the fitted values serve to warn about extrapolation.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from specdecode_operator.capture.files.formats import MANIFEST_SCHEMA, TraceMeta
from specdecode_operator.problems import printable, shown
from specdecode_operator.replay.emulated.engine_model import acceptance_from_json, step_time_from_json
from specdecode_operator.untrusted import UnreadableTextError, parse_json

# Inclusive upper bounds of buckets. The last bucket takes all larger values.
DECODING: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # requests
PREFILL_TOKENS: Final = (0, 64, 256, 1024, 2048, 4096, 8192, 16384)
POSITION: Final = (16, 64, 256)  # output tokens so far
CONTEXT: Final = (512, 2048, 8192, 32768)  # attended tokens
BURST: Final = (0, 1, 2, 3, 4, 5, 8, 16)  # tokens of the burst before; 0 for the one that ended the prefill
PACES: Final = 5  # classes of a cell's steps, from the shortest fifth to the longest


def thinned(values: Sequence[float], most: int) -> list[float]:
    """Return at most this many of the values: ascending, each the middle of an equal share of them."""
    ordered = sorted(values)
    if len(ordered) > most:
        ordered = [ordered[int((index + 0.5) * len(ordered) / most)] for index in range(most)]
    return [round(float(value), 5) for value in ordered]


def value_at(ascending: Sequence[float], share: float) -> float:
    """Return the quantile at a share, with linear interpolation."""
    place = share * len(ascending) - 0.5
    if place <= 0:
        return ascending[0]
    below = int(place)
    if below + 1 >= len(ascending):
        return ascending[-1]
    return ascending[below] + (place - below) * (ascending[below + 1] - ascending[below])


_NEAR: Final = 1.05  # tolerance for a value outside a range: two loads of the same lengths differ by that


class Range(Struct, frozen=True):
    """The least and the largest observed value."""

    least: float
    most: float

    def outside(self, name: str, value: float) -> str | None:
        """Return a message if a value is more than 5 % outside the range, or None."""
        if self.least / _NEAR <= value <= self.most * _NEAR:
            return None
        bound, word = (self.most, "most") if value > self.most else (self.least, "least")
        times = f", {value / bound:.1f} times that" if bound > 0 else ""
        return f"{name} {value:g} is outside of the range of the fit: {bound:g} at {word}{times}"


MOST_DONORS: Final = 256
"""Ratios kept of a cell, evenly spread over its quantiles."""

Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
Small = Annotated[int, Meta(ge=0, le=2**20)]
Ratio = Annotated[float, Meta(gt=0, le=1e6)]


class Cell(Struct, kw_only=True, frozen=True):
    """Steps with similar numbers of decoding requests and of prompt tokens."""

    decoding: Small  # bucket of the decoding requests
    prefill: Small  # bucket of the prompt tokens
    steps: Count
    # Measured duration divided by the duration that the trend predicts, ascending
    ratios: Annotated[list[Ratio], Meta(min_length=1, max_length=MOST_DONORS)]


class Bursts(Struct, kw_only=True, frozen=True):
    """Counts of bursts by size and circumstances; entries at one index of all lists belong together."""

    classes: list[Small]  # of the request, in the order of `Donors.classes`
    paces: list[Small]
    before: list[Small]  # bucket of the burst before
    decoding: list[Small]
    positions: list[Small]
    contexts: list[Small]
    tokens: list[Annotated[int, Meta(ge=1, le=2**27)]]
    counts: list[Annotated[int, Meta(ge=1, le=2**40)]]

    def __post_init__(self) -> None:
        """Reject lists of different lengths."""
        lengths = {len(getattr(self, name)) for name in self.__struct_fields__}
        if len(lengths) > 1:
            raise ValueError("its lists differ in length")


class Stops(Struct, kw_only=True, frozen=True):
    """Requests that the model itself ended."""

    share: Share
    output_tokens: list[Count]  # ascending, evenly spread over quantiles


class Drafts(Struct, kw_only=True, frozen=True):
    """Drafts, by the engine's own counters."""

    singles: Share  # of bursts of one token that had a draft: ngram does not always find one
    tokens: Annotated[float, Meta(ge=0, le=4096)]  # of a draft, on average


class Donors(Struct, kw_only=True, frozen=True):
    """Steps, bursts and other observations of a capture to draw from."""

    num_speculative_tokens: Annotated[int, Meta(ge=0, le=4095)]
    trend: dict[str, Any]  # as a section `step_time`
    cells: Annotated[list[Cell], Meta(min_length=1, max_length=4096)]
    persistence: Annotated[float, Meta(ge=0, lt=1)]  # correlation of the paces of consecutive steps
    classes: Annotated[list[Share], Meta(min_length=1, max_length=64)]  # shares of easy and hard requests
    bursts: Bursts
    firsts: list[tuple[Annotated[int, Meta(ge=1, le=2**27)], Count]]  # tokens at the end of a prefill, how often
    drafts: Drafts
    stops: Stops
    ranges: dict[str, Range]

    def __post_init__(self) -> None:
        """Reject an invalid trend."""
        step_time_from_json(self.trend)


class Ttft(Struct, kw_only=True, frozen=True):
    """Time to the first token before the first step: from the arrival of a request until the scheduler sees it."""

    lead_ms: list[Annotated[float, Meta(ge=0, le=3_600_000)]]  # ascending, evenly spread over quantiles


class Clients(Struct, kw_only=True, frozen=True):
    """Closed-loop clients, if a capture has such."""

    turnarounds_ms: list[Annotated[float, Meta(ge=0, le=3_600_000)]]  # from the last token to the next request


SCHEMA: Final = 1

MAX_BYTES: Final = 8 * 2**20
"""Size limit of a model file: fitting writes 2 MiB at most."""

Positive = Annotated[int, Meta(ge=1, le=2**40)]


class FittedCapture(Struct, kw_only=True, frozen=True):
    """A capture that a model was fitted to."""

    name: str  # of its folder
    config_hash: str | None = None
    requests: Count = 0
    steps: Count = 0


BLOCK_TOKENS: Final = 16
"""Tokens of a block if a capture does not tell: the default of vLLM and of vllm-vcr."""


class Limits(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Limits of an engine, in vLLM's words; null if the capture does not have them."""

    max_num_seqs: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    max_model_len: Positive | None = None
    block_size: Positive | None = None
    num_gpu_blocks: Positive | None = None  # of the KV cache
    enable_prefix_caching: bool | None = None
    async_scheduling: bool | None = None  # the next step is planned while one runs
    draft_slots: Count | None = None  # tokens of a step that each request reserves for drafting

    @property
    def kv_cache_tokens(self) -> int | None:
        """Tokens of the KV cache; None if its blocks are unknown."""
        return None if self.num_gpu_blocks is None else self.num_gpu_blocks * (self.block_size or BLOCK_TOKENS)


class Origin(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The engine that the model describes."""

    model: str | None = None
    gpu: str | None = None
    tp: Positive | None = None
    vllm_version: str | None = None
    speculative: dict[str, Any] | None = None  # as in a trace's header; absent without speculation
    limits: Limits = Limits()
    captures: list[FittedCapture] = []

    def header(self, **more: Any) -> TraceMeta:
        """Return the header of a trace of this engine."""
        known = {name: getattr(self, name) for name in ("model", "gpu", "tp", "vllm_version", "speculative")}
        limits = {name: getattr(self.limits, name) for name in ("max_num_seqs", "block_size")}
        return TraceMeta(**known | limits | {"schema": MANIFEST_SCHEMA} | more)


class FittedModel(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Fitted model of an engine."""

    schema: Literal[1]
    origin: Origin
    donors: Donors | None = None
    ttft: Ttft | None = None
    clients: Clients | None = None
    step_time: dict[str, Any] | None = None  # as replay/emulated/engine_model.py evaluates it
    acceptance: dict[str, Any] | None = None  # as replay/emulated/engine_model.py evaluates it


class ModelFileError(Exception):
    """A model file that cannot be used: the file, the reason and the fix, in one line."""


def read_model(path: Path) -> FittedModel:
    """Read a model file, or raise ModelFileError."""
    name = printable(str(path))
    try:
        if path.is_fifo() and path.parts[1:2] not in (("dev",), ("proc",)):
            # Opening a FIFO without a writer blocks; a shell's <(command) is below /dev or /proc.
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
    """Parse a model, or raise UnreadableTextError."""
    document = parse_json(text, MAX_BYTES)
    if not isinstance(document, dict) or "origin" not in document:
        raise UnreadableTextError("is not a fitted model: name a file that `specdecode replay fit` wrote")
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
    """Return the JSON document of a model, with a line for each section."""
    sections = msgspec.to_builtins(model)
    lines = (f'"{name}": '.encode() + msgspec.json.encode(section) for name, section in sections.items())
    return b"{\n" + b",\n".join(lines) + b"\n}\n"
