"""Read and write the calibration file: measured against predicted KV cache space of real engines.

Weights and KV cache are computed exactly; activations, CUDA graphs and non-torch memory are estimates. A residual
measured on the same kind of engine corrects these estimates.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Final

from specdecode_operator.enums import Precision
from specdecode_operator.redaction import clip
from specdecode_operator.sizing.arithmetic import GIB, gib_to_bytes
from specdecode_operator.sizing.data_files import read_data
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.untrusted import UnreadableTextError, parse_json

FORMAT: Final = 1
"""Version of the file's format."""

_LARGEST_RESIDUAL_BYTES: Final = 2**40
"""No GPU has a TiB: a larger residual is a mistake of units."""

_MOST_LEFT_OVER_BYTES: Final = 16 * GIB
"""No estimated terms are so large together: an engine that left more over had smaller weights than predicted."""

_RUNNERS: Final = ("V1", "V2")

_PRECISIONS: Final = tuple(precision.value for precision in Precision)

_VERSION: Final = re.compile(r"\d+\.\d+(\.\d+)?")

_Kind = tuple[str, str, str, int, bool]
"""Product, minor version, runner, tensor parallelism and enforce_eager."""


class CalibrationError(SizingError):
    """A calibration file that cannot be used."""


@dataclass(frozen=True)
class EngineKind:
    """What a correction is looked up for."""

    # Kind of engine: a residual says nothing about another
    product: str
    engine_version: str
    runner: str
    tensor: int
    enforce_eager: bool  # Whether it runs without CUDA graphs: if so, its residual says nothing about their estimate
    # Settings that the estimated terms grow with
    max_num_seqs: int
    max_num_batched_tokens: int
    method: str
    num_speculative_tokens: int
    model: str  # What is served: the target, and after `` + `` the draft
    # What they are served at; None where nothing of a model drafts
    target_precision: str
    draft_precision: str | None


@dataclass(frozen=True)
class CalibrationEntry(EngineKind):
    """One measured start of an engine."""

    # KV cache that is predicted without a calibration, less what was reported, on one GPU: positive where the engine
    # took more than predicted
    residual_bytes: int

    def is_of(self, kind: EngineKind) -> bool:
        """Whether this very engine was measured: the same settings, models and precisions."""
        return _identity(self) == _identity(kind)


@dataclass(frozen=True)
class Correction:
    """What a measurement changes in a budget."""

    residual_bytes: int  # To be added to the non-torch term; negative only where this very engine was measured
    # The margin that is enough with it; None where another engine was measured and the usual one stays
    margin_bytes: int | None
    entries: tuple[CalibrationEntry, ...]  # Measurements that it rests on

    @property
    def sentence(self) -> str:
        """Where the correction comes from."""
        entry = self.entries[0]
        starts = f"{len(self.entries)} measured starts" if len(self.entries) > 1 else "a measured start"
        eager = ", eager" if entry.enforce_eager else ""
        tokens = f" K={entry.num_speculative_tokens}" if entry.num_speculative_tokens else ""
        return (
            f"{starts} of vLLM {entry.engine_version} ({entry.runner}, tensor {entry.tensor}{eager},"
            f" {entry.max_num_seqs} sequences, {entry.max_num_batched_tokens} batched tokens, {entry.method}{tokens})"
            f" on {entry.product}"
        )


@dataclass(frozen=True)
class Calibration:
    """All measurements of a calibration file."""

    entries: tuple[CalibrationEntry, ...] = ()

    def find(self, kind: EngineKind) -> Correction | None:
        """Return the correction for a kind of engine; None when no like engine was measured.

        Product, version, runner, tensor parallelism and enforce_eager must be
        equal. Of those measurements the nearest counts: same method first, then
        the settings least apart, each by its factor. Of several equally near
        ones, and they may differ by model and precision, the most pessimistic. To
        promise more than the estimate (a negative residual, a smaller margin)
        takes a measurement of these models and precisions with these settings.
        """
        alike = self._by_kind.get(_kind(kind))
        if alike is None:
            return None
        nearest = min(_distance(entry, kind) for entry in alike)
        chosen = tuple(entry for entry in alike if _distance(entry, kind) == nearest)
        same = any(entry.is_of(kind) for entry in chosen)
        residual = max(entry.residual_bytes for entry in chosen)
        return Correction(
            residual_bytes=residual if same else max(0, residual),
            margin_bytes=_measured_margin_bytes() if same else None,
            entries=chosen,
        )

    @cached_property
    def _by_kind(self) -> Mapping[_Kind, list[CalibrationEntry]]:
        """The entries of each kind of engine: plans look hundreds of rows up."""
        found: defaultdict[_Kind, list[CalibrationEntry]] = defaultdict(list)
        for entry in self.entries:
            found[_kind(entry)].append(entry)
        return found

    def with_entries(self, entries: Iterable[CalibrationEntry]) -> "Calibration":
        """Return the calibration with more entries; a newer one of the same engine replaces the old."""
        merged = {_identity(entry): entry for entry in (*self.entries, *entries)}
        return Calibration(tuple(merged[identity] for identity in sorted(merged)))


UNCALIBRATED: Final = Calibration()
"""No measurement: estimates stay as they are."""


def parse_calibration(text: str) -> Calibration:
    """Return the calibration that a file holds.

    Raises
    ------
    CalibrationError
        With the field that is wrong, what stands there and what should.
    """
    try:
        content = parse_json(text)
    except UnreadableTextError as error:
        raise CalibrationError("calibration", clip(text, 40), str(error)) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else content
        raise CalibrationError("format", found, f"must be {FORMAT}: write the file anew with specdecode calibrate")
    entries = content.get("entries")
    if not isinstance(entries, list):
        raise CalibrationError("entries", entries, "must be a list of measurements")
    return Calibration().with_entries(_entry(f"entries[{index}]", entry) for index, entry in enumerate(entries))


def serialize_calibration(calibration: Calibration) -> str:
    """Return the text of the file; equal calibrations give equal texts."""
    entries = [asdict(entry) for entry in Calibration().with_entries(calibration.entries).entries]
    return json.dumps({"format": FORMAT, "entries": entries}, indent=2) + "\n"


def _entry(field: str, content: object) -> CalibrationEntry:
    names = {known.name: known.type for known in fields(CalibrationEntry)}
    if not isinstance(content, dict) or content.keys() != names.keys():
        raise CalibrationError(field, content, f"must have exactly the keys {', '.join(names)}")
    for name, kind in names.items():
        _check(f"{field}.{name}", content[name], kind)
    return CalibrationEntry(**content)


def _check(field: str, value: Any, kind: object) -> None:
    name = field.rpartition(".")[2]
    if name == "draft_precision" and value is None:
        return
    if name == "residual_bytes":
        _check_residual(field, value)
    elif kind is bool:
        if not isinstance(value, bool):
            raise CalibrationError(field, value, "must be true or false")
    elif kind is int:
        _check_count(field, value, least=0 if name == "num_speculative_tokens" else 1)
    else:
        _check_text(field, value)


def _check_count(field: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise CalibrationError(field, value, "must be a whole number")
    if not least <= value < 2**31:
        raise CalibrationError(field, value, f"must be {least} or more, and less than 2^31")


def _check_residual(field: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise CalibrationError(field, value, "must be a whole number")
    if not -_MOST_LEFT_OVER_BYTES <= value <= _LARGEST_RESIDUAL_BYTES:
        raise CalibrationError(
            field,
            value,
            f"must be bytes of one GPU between {-_MOST_LEFT_OVER_BYTES} and {_LARGEST_RESIDUAL_BYTES}: "
            "measure again, its engine was not the one that was predicted",
        )


def _check_text(field: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise CalibrationError(field, value, "must be a text that is not empty")
    if field.endswith("_precision") and value not in _PRECISIONS:
        raise CalibrationError(field, value, f"must be one of {', '.join(_PRECISIONS)}")
    if field.endswith(".runner") and value not in _RUNNERS:
        raise CalibrationError(field, value, f"must be one of {', '.join(_RUNNERS)}")
    if field.endswith(".engine_version") and not _VERSION.fullmatch(value):
        raise CalibrationError(field, value, "must be a version such as 0.32")


def _kind(of: EngineKind) -> _Kind:
    # 0.32 and 0.32.0 are the same to sizing, whose rules change with minor versions.
    minor_version = ".".join(of.engine_version.split(".")[:2])
    return (of.product, minor_version, of.runner, of.tensor, of.enforce_eager)


def _distance(entry: CalibrationEntry, kind: EngineKind) -> tuple[int, float]:
    """How unlike the settings are: another method first, then the factors between the sizes."""
    sequences = abs(math.log2(entry.max_num_seqs / kind.max_num_seqs))
    tokens = abs(math.log2(entry.max_num_batched_tokens / kind.max_num_batched_tokens))
    rows = abs(math.log2((entry.num_speculative_tokens + 1) / (kind.num_speculative_tokens + 1)))
    return int(entry.method != kind.method), sequences + tokens + rows


def _identity(of: EngineKind) -> tuple[str | int, ...]:
    settings = (of.max_num_seqs, of.max_num_batched_tokens, of.method, of.num_speculative_tokens)
    return (*_kind(of), *settings, of.model, of.target_precision, of.draft_precision or "")


def _measured_margin_bytes() -> int:
    return gib_to_bytes(read_data("calibration.json")["margin_gib"]["same_settings"])
