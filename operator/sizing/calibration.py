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

_FORMAT: Final = 1
"""Version of the file's format."""

_LARGEST_RESIDUAL_BYTES: Final = 2**40
"""Largest residual. No GPU has 1 TiB, so a larger one is a mistake of units."""

_MOST_LEFT_OVER_BYTES: Final = 16 * GIB
"""All estimated terms together are smaller: an engine that left more over had smaller weights than predicted."""

_PRECISIONS: Final = tuple(precision.value for precision in Precision)
_VERSION: Final = re.compile(r"\d+\.\d+(\.\d+)?")


class CalibrationError(SizingError):
    """A calibration file that cannot be used."""


@dataclass(frozen=True)
class EngineKind:
    """The key of a correction."""

    # Kind of engine: a residual is valid for no other
    product: str
    engine_version: str
    runner: str
    tensor: int
    enforce_eager: bool  # Without CUDA graphs: its residual does not correct their estimate
    # Settings that the estimated terms grow with
    max_num_seqs: int
    max_num_batched_tokens: int
    method: str
    num_speculative_tokens: int
    model: str  # The target, and after `` + `` the draft
    target_precision: str
    draft_precision: str | None  # None if no model drafts


@dataclass(frozen=True)
class CalibrationEntry(EngineKind):
    """One measured start of an engine."""

    # KV cache predicted without a calibration minus the reported one, on one GPU: positive if the engine took more than
    # predicted
    residual_bytes: int


@dataclass(frozen=True)
class Correction:
    """Correction of a budget by measurements."""

    residual_bytes: int  # To be added to the non-torch term; negative only if this very engine was measured
    margin_bytes: int | None  # A smaller margin; None if another engine was measured and the usual one stays
    entries: tuple[CalibrationEntry, ...]

    @property
    def sentence(self) -> str:
        """Source of the correction in words."""
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
        """Return the correction for a kind of engine; None if no such engine was measured.

        Product, version, runner, tensor parallelism and enforce_eager must be equal. The nearest of these measurements
        is used: first by method, then by the ratio of each setting. If several are equally near, with different models
        or precisions, the most pessimistic is used. A correction that promises more than the estimate (a negative
        residual, a smaller margin) needs a measurement of these models and precisions with these settings.
        """
        alike = self._by_kind.get(_kind(kind))
        if alike is None:
            return None
        nearest = min(_distance(entry, kind) for entry in alike)
        chosen = tuple(entry for entry in alike if _distance(entry, kind) == nearest)
        same = any(_identity(entry) == _identity(kind) for entry in chosen)
        residual = max(entry.residual_bytes for entry in chosen)
        return Correction(
            residual_bytes=residual if same else max(0, residual),
            margin_bytes=gib_to_bytes(read_data("calibration.json")["margin_gib"]["same_settings"]) if same else None,
            entries=chosen,
        )

    @cached_property
    def _by_kind(self) -> Mapping[tuple[object, ...], list[CalibrationEntry]]:
        """Entries by kind of engine, because plans look up hundreds of rows."""
        found: defaultdict[tuple[object, ...], list[CalibrationEntry]] = defaultdict(list)
        for entry in self.entries:
            found[_kind(entry)].append(entry)
        return found

    def with_entries(self, entries: Iterable[CalibrationEntry]) -> "Calibration":
        """Return the calibration with more entries; a newer one of the same engine replaces the old."""
        merged = {_identity(entry): entry for entry in (*self.entries, *entries)}
        return Calibration(tuple(merged[identity] for identity in sorted(merged)))


UNCALIBRATED: Final = Calibration()


def parse_calibration(text: str) -> Calibration:
    """Return the calibration that a file holds, or raise CalibrationError for the first field that is wrong."""
    try:
        content = parse_json(text)
    except UnreadableTextError as error:
        raise CalibrationError("calibration", clip(text, 40), str(error)) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        found = content.get("format") if isinstance(content, dict) else content
        raise CalibrationError("format", found, f"must be {_FORMAT}: rewrite the file with specdecode calibrate")
    entries = content.get("entries")
    if not isinstance(entries, list):
        raise CalibrationError("entries", entries, "must be a list of measurements")
    names = {known.name: known.type for known in fields(CalibrationEntry)}
    for index, entry in enumerate(entries):
        field = f"entries[{index}]"
        if not isinstance(entry, dict) or entry.keys() != names.keys():
            raise CalibrationError(field, entry, f"must have exactly the keys {', '.join(names)}")
        for name, kind in names.items():
            if (name, entry[name]) != ("draft_precision", None):
                _check(f"{field}.{name}", entry[name], kind)
    return Calibration().with_entries(CalibrationEntry(**entry) for entry in entries)


def serialize_calibration(calibration: Calibration) -> str:
    """Return the text of the file; equal calibrations give equal texts."""
    entries = [asdict(entry) for entry in Calibration().with_entries(calibration.entries).entries]
    return json.dumps({"format": _FORMAT, "entries": entries}, indent=2) + "\n"


def _check(field: str, value: Any, kind: object) -> None:
    name = field.rpartition(".")[2]
    known = {"runner": ("V1", "V2"), "target_precision": _PRECISIONS, "draft_precision": _PRECISIONS}.get(name)
    message = None
    if kind is bool:
        message = None if isinstance(value, bool) else "must be true or false"
    elif kind is int:
        least = 0 if name == "num_speculative_tokens" else 1
        if not isinstance(value, int) or isinstance(value, bool):
            message = "must be a whole number"
        elif name == "residual_bytes" and not -_MOST_LEFT_OVER_BYTES <= value <= _LARGEST_RESIDUAL_BYTES:
            message = (
                f"must be bytes of one GPU between {-_MOST_LEFT_OVER_BYTES} and {_LARGEST_RESIDUAL_BYTES}: "
                "measure again, its engine was not the one that was predicted"
            )
        elif name != "residual_bytes" and not least <= value < 2**31:
            message = f"must be {least} or more, and less than 2^31"
    elif not isinstance(value, str) or not value:
        message = "must be a text that is not empty"
    elif known is not None and value not in known:
        message = f"must be one of {', '.join(known)}"
    elif name == "engine_version" and not _VERSION.fullmatch(value):
        message = "must be a version such as 0.32"
    if message is not None:
        raise CalibrationError(field, value, message)


def _kind(of: EngineKind) -> tuple[str | int, ...]:
    # 0.32 and 0.32.0 are the same to sizing, whose rules change with minor versions.
    minor_version = ".".join(of.engine_version.split(".")[:2])
    return (of.product, minor_version, of.runner, of.tensor, of.enforce_eager)


def _identity(of: EngineKind) -> tuple[str | int, ...]:
    settings = (of.max_num_seqs, of.max_num_batched_tokens, of.method, of.num_speculative_tokens)
    return (*_kind(of), *settings, of.model, of.target_precision, of.draft_precision or "")


def _distance(entry: CalibrationEntry, kind: EngineKind) -> tuple[int, float]:
    """Return the difference of the settings: another method first, then the factors between the sizes."""
    factors = (
        entry.max_num_seqs / kind.max_num_seqs,
        entry.max_num_batched_tokens / kind.max_num_batched_tokens,
        (entry.num_speculative_tokens + 1) / (kind.num_speculative_tokens + 1),
    )
    return int(entry.method != kind.method), sum(abs(math.log2(factor)) for factor in factors)
