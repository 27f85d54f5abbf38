"""Write the requests of a capture as input of other tools: load generators, simulators, and training of drafts.

A load has one line per request in order of arrival: time since the first request, lengths, and ``hash_ids``. Requests
with the same first N ids share the first N blocks of their prompts. The tools draw random tokens for each id, as a
capture has no text. Training data has one line per request with the tokens of prompt and answer.

The formats are those of vLLM 0.32 (``TimedTrace`` in vllm/benchmarks/datasets/datasets.py), guidellm 0.8.1
(guidellm/data/deserializers/trace_mooncake.py), aiperf 0.13.0 (``MooncakeTrace`` in aiperf/dataset/loader/models.py),
Mooncake's traces (FAST25-release), and speculators 0.9.0 (speculators/data_generation/preprocessing.py).
"""

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from specdecode_operator.capture.files import formats
from specdecode_operator.capture.files.trace_requests import ExportError, TraceRequests, count, notes_of
from specdecode_operator.capture.files.training_rows import (
    NO_PROMPT_IDS,
    WHOLE,
    CaptureRows,
    RebuildPrompt,
    Split,
    duplicates_note,
    reject_untrainable,
    write_split,
)
from specdecode_operator.capture.trace_reader import MOST_HELD_BYTES, find_trace
from specdecode_operator.problems import printable, some_of

MOONCAKE_BLOCK_TOKENS: Final = 512
_ARRIVAL_BYTES: Final = 512  # memory of a request without its blocks
_BLOCK_BYTES: Final = 256  # memory of a block, with its number
_ENCODER: Final = msgspec.json.Encoder()


class ExportFormat(StrEnum):
    """Format of the written file."""

    SPECULATORS = "speculators"
    VLLM_BENCH = "vllm-bench"
    GUIDELLM = "guidellm"
    AIPERF = "aiperf"
    MOONCAKE = "mooncake"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export."""

    requests: int  # lines in the file
    block_tokens: int | None  # tokens per entry of ``hash_ids``; None for training data
    left_out: Sequence[str]  # what the file does not have, each with the reason
    held_out: int = 0  # prompts of training data in the second file


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """A request as a load sends it."""

    arrival_ms: float
    duration_ms: float  # from arrival to the last token
    prompt_tokens: int
    output_tokens: int
    temperature: float | None
    stopped: bool  # the answer ended before its limit
    block_hashes: Sequence[int]


def _vllm_bench(request: _Arrival, at_ms: float) -> dict[str, Any]:
    return {"timestamp": _seconds(at_ms), **_lengths(request)}


def _guidellm(request: _Arrival, at_ms: float) -> dict[str, Any]:
    return {"timestamp": _seconds(at_ms), **_lengths(request), "duration": _seconds(request.duration_ms)}


def _aiperf(request: _Arrival, at_ms: float) -> dict[str, Any]:
    # aiperf merges ``extra`` into the body of the request.
    extra = {} if request.temperature is None else {"extra": {"temperature": request.temperature}}
    return {"timestamp": round(at_ms, 4), **_lengths(request), **extra}


def _mooncake(request: _Arrival, at_ms: float) -> dict[str, Any]:
    return {"timestamp": round(at_ms), **_lengths(request)}


def _lengths(request: _Arrival) -> dict[str, Any]:
    return {"input_length": request.prompt_tokens, "output_length": request.output_tokens}


def _seconds(time_ms: float) -> float:
    return round(time_ms / 1000, 7)


@dataclass(frozen=True)
class _Load:
    row: Callable[[_Arrival, float], dict[str, Any]]  # without ``hash_ids``; times in ms since the first request
    block_tokens: int | None = None  # tokens per entry of ``hash_ids``; None for those of the capture
    has_temperature: bool = False


_LOADS: Final[Mapping[ExportFormat, _Load]] = {
    ExportFormat.VLLM_BENCH: _Load(_vllm_bench),
    ExportFormat.GUIDELLM: _Load(_guidellm),
    ExportFormat.AIPERF: _Load(_aiperf, has_temperature=True),
    ExportFormat.MOONCAKE: _Load(_mooncake, block_tokens=MOONCAKE_BLOCK_TOKENS),
}


def held_out_file(out: Path) -> Path:
    """Return the file for held-out prompts next to a file of training data."""
    return out.with_name(f"{out.stem}.holdout{out.suffix}")


def export_capture(  # noqa: PLR0913
    capture: Path,
    form: ExportFormat,
    out: Path,
    *,
    phases: Collection[str] = (),
    rebuild: RebuildPrompt | None = None,
    split: Split = WHOLE,
) -> Exported:
    """Write the requests of a capture to a file, atomically. An existing file is replaced.

    Parameters
    ----------
    capture
        Folder of a capture, or a trace.
    phases
        Phases to export; all if empty.
    rebuild
        Finds the prompts of training data that the capture does not have.
    split
        Division of training data. Held-out prompts go to a second file (`held_out_file`).

    Raises
    ------
    ExportError
        If the capture lacks data that the format needs.
    RecordingError
        If the trace cannot be read.
    """
    source = TraceRequests(find_trace(capture), frozenset(phases))
    load = _LOADS.get(form)
    files = [out] if load or not split.holdout_percent else [out, held_out_file(out)]
    parts = [each.with_name(f"{each.name}{formats.PART_SUFFIX}") for each in files]
    try:
        if load is None:
            exported = _write_training(source, rebuild, split, parts)
        else:
            with parts[0].open("wb") as stream:
                exported = _write_load(source, load, stream)
        for part, file in zip(parts, files, strict=True):
            part.replace(file)
    except BaseException:
        for part in parts:
            with suppress(OSError):
                part.unlink()
        raise
    return exported


def _write_load(source: TraceRequests, load: _Load, stream: BinaryIO) -> Exported:
    """Write one line per request, in order of arrival."""
    arrivals, left_out = _arrivals(source)
    blocks = _Blocks(source.block_tokens, load.block_tokens or source.block_tokens)
    for each in arrivals:
        row = load.row(each, each.arrival_ms - arrivals[0].arrival_ms)
        row["hash_ids"] = blocks.ids(each.prompt_tokens, each.block_hashes)
        stream.write(_ENCODER.encode(row) + b"\n")
    left_out += _lost_in_load(arrivals, load, blocks)
    return Exported(requests=len(arrivals), block_tokens=blocks.exported_tokens, left_out=left_out)


def _arrivals(source: TraceRequests) -> tuple[list[_Arrival], list[str]]:
    """Return the requests that a load can send, in order of arrival, and a note for each omission."""
    held, held_bytes, unusable = list[_Arrival](), 0, Counter[str]()
    for each in source.requests():
        if each.arrival_ms is None:
            unusable["without arrival_ms"] += 1
            continue
        if each.prompt_tokens == 0:
            unusable["with an empty prompt"] += 1
            continue
        hashes = each.block_hashes if each.block_hashes is not None else array("Q")
        held_bytes += _ARRIVAL_BYTES + len(hashes) * _BLOCK_BYTES
        if held_bytes > MOST_HELD_BYTES:
            raise ExportError(
                f"{printable(str(source.trace))}: more than {MOST_HELD_BYTES >> 20} MiB of blocks after "
                f"{len(held)} requests: export single phases with --phase"
            )
        held.append(
            _Arrival(
                arrival_ms=each.arrival_ms,
                duration_ms=each.ttft_ms + sum(each.gaps_ms),
                prompt_tokens=each.prompt_tokens,
                output_tokens=each.output_tokens,
                temperature=each.temperature,
                stopped=each.finish_reason not in {None, "length"},
                block_hashes=hashes,
            )
        )
    left_out = notes_of(source.left_out() + unusable)
    if not held:
        raise ExportError(
            f"{printable(str(source.trace))}: no request has arrival_ms and a prompt, which a load needs: "
            "use the trace of a capture"
        )
    held.sort(key=lambda request: request.arrival_ms)
    return held, left_out


def _lost_in_load(arrivals: Sequence[_Arrival], load: _Load, blocks: "_Blocks") -> Iterator[str]:
    """Yield the properties of the requests that the format cannot hold."""
    temperatures = sorted({each.temperature for each in arrivals if each.temperature is not None})
    if temperatures and not load.has_temperature:
        values = some_of(f"{each:g}" for each in temperatures)
        yield f"temperature ({values}): the format has no field for it; set it in the tool"
    if stopped := sum(each.stopped for each in arrivals):
        yield f"why {count(stopped, 'answer')} ended early: the tool requests the recorded length"
    if not any(len(each.block_hashes) for each in arrivals):
        yield "shared prefixes: the capture has no block hashes, so no two prompts share a block"
    elif blocks.lost_tokens:
        yield (
            f"{blocks.lost_tokens:,} of {blocks.shared_tokens:,} tokens in shared prefixes: the capture has blocks of "
            f"{blocks.captured_tokens} tokens, the format blocks of {blocks.exported_tokens}"
        )
    yield "text: the tool sends random tokens of the recorded lengths"
    yield "time of each token: the tool measures it"


@dataclass
class _Blocks:
    """Numbers blocks of prompts, so that equal prefixes get equal numbers.

    The hash of a captured block identifies the prompt up to the end of that block. An exported block is identified by
    the first captured block that ends at or after its end. If this is missing, as at the end of most prompts, the
    exported block gets a new number. So prompts never share more than they did, and may share less.
    """

    captured_tokens: int  # per block
    exported_tokens: int  # per block
    shared_tokens: int = 0  # in captured blocks that an earlier prompt had
    lost_tokens: int = 0  # of these, in exported blocks that no earlier prompt had
    _seen: set[int] = field(default_factory=set)
    _ids: dict[int | tuple[int, int], int] = field(default_factory=dict)
    _next: int = 0

    def ids(self, prompt_tokens: int, hashes: Sequence[int]) -> list[int]:
        """Return one number per exported block; the last block may be partial."""
        # An untrusted trace may have more hashes than full blocks.
        known = hashes[: prompt_tokens // self.captured_tokens]
        ids, shared_tokens = list[int](), 0
        for end in (*range(self.exported_tokens, prompt_tokens, self.exported_tokens), prompt_tokens):
            place = -(-end // self.captured_tokens)
            new = self._next
            if place <= len(known):
                # The size of a block is part of its identity: aiperf rejects an id with two sizes.
                exact = end == place * self.captured_tokens and end % self.exported_tokens == 0
                key = known[place - 1] if exact else (end, known[place - 1])
                ids.append(self._ids.setdefault(key, new))
            else:
                ids.append(new)
            self._next += ids[-1] == new
            shared_tokens = end if ids[-1] != new else shared_tokens
        captured = sum(self.captured_tokens for each in known if each in self._seen)
        self._seen.update(known)
        self.shared_tokens += captured
        self.lost_tokens += max(captured - shared_tokens, 0)
        return ids


def _write_training(
    source: TraceRequests, rebuild: RebuildPrompt | None, split: Split, parts: Sequence[Path]
) -> Exported:
    """Write the tokens of each request, with a mask of 0 for the prompt and 1 for the answer, in the file's order."""
    place, capture = printable(str(source.trace)), CaptureRows(source, rebuild)
    held_out = parts[1] if len(parts) > 1 else None
    written = write_split(capture.rows(), parts[0], held_out, replace(split, rows_held_out=True))
    left_out = capture.left_out()
    if not written.rows and not written.held_out:
        if left_out[NO_PROMPT_IDS] and rebuild is None:
            raise ExportError(
                f"{place}: no request has the token ids of its prompt: for a capture with prompts from a dataset, "
                "add --dataset and --tokenizer-url"
            )
        reject_untrainable(place, left_out)
    if split.holdout_percent and not (written.rows and written.held_out):
        side = "no prompt" if written.rows else "every prompt"
        raise ExportError(
            f"--holdout-percent: {split.holdout_percent}: holds out {side}: use another share, or another --seed"
        )
    notes = [*notes_of(left_out + written.left_out), "temperatures and times"]
    if written.duplicates:
        notes.insert(0, duplicates_note(written.duplicates))
    return Exported(requests=written.rows, block_tokens=None, left_out=notes, held_out=written.held_out)
