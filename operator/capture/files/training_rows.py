"""Turn the requests of captures into rows for the training of a draft.

A row has the token ids of prompt and answer, and a mask with 1 for the tokens to learn. Rows are written once, split by
prompt: all rows of a held-out prompt stay out of the training file. The side of a prompt depends only on the prompt and
the seed, so it is the same in every capture and in every later export with this seed.
"""

import os
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from specdecode_operator.capture.files.trace_requests import ExportError, TraceRequests, count
from specdecode_operator.capture.recorder.segment_format import EMULATED
from specdecode_operator.capture.trace_reader import RecordedRequest
from specdecode_operator.problems import printable

NO_ANSWER_IDS: Final = "whose answer has no token ids"
NO_PROMPT_IDS: Final = "whose prompt has no token ids"
BROKEN_OFF: Final = "whose answer is broken off"
DUPLICATE: Final = "with the prompt and the answer of another request"

_BROKEN_OFF: Final = frozenset({"error", "repetition"})
_MOST_ROWS: Final = 2_000_000  # 200 bytes of memory each
_MOST_HELD_OUT_BYTES: Final = 2**28  # a quarter of the largest dataset of a capture
_DIGEST_BYTES: Final = 16
_ENCODER: Final = msgspec.json.Encoder()


class TrainingError(ExportError):
    """A draft cannot be trained with this input."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason  # one word in CamelCase, for conditions
        self.message = message  # one line with the input, the problem and the fix


@dataclass(frozen=True, slots=True)
class RebuiltPrompt:
    """Prompt of a request as it was sent, and its token ids if they are known."""

    content: str | Sequence[int]
    ids: Sequence[int] | None


RebuildPrompt = Callable[[RecordedRequest, int], RebuiltPrompt | None]
"""Returns a request's prompt, or None. The number is the size of the hashed blocks in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """Prompt and answer of one request."""

    prompt: str | Sequence[int]  # as it was sent
    prompt_ids: Sequence[int] | None  # None: the text is not tokenized yet
    prompt_tokens: int
    answer_ids: Sequence[int]
    answer_mask: Sequence[int] | None = None  # None: 1 for each token
    # The following fields verify the tokens of a text.
    block_hashes: Sequence[int] = ()
    block_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens of prompt and answer."""
        return self.prompt_tokens + len(self.answer_ids)

    def fields(self) -> dict[str, Any]:
        """Return the line of the training file; a row whose prompt is not tokenized is pending."""
        if self.prompt_ids is None:
            return {
                "prompt": self.prompt,
                "prompt_tokens": self.prompt_tokens,
                "block_hashes": list(self.block_hashes),
                "block_tokens": self.block_tokens,
                "output_ids": list(self.answer_ids),
            }
        answer_mask = [1] * len(self.answer_ids) if self.answer_mask is None else list(self.answer_mask)
        return {
            "input_ids": [*self.prompt_ids, *self.answer_ids],
            "loss_mask": [0] * len(self.prompt_ids) + answer_mask,
        }


@dataclass
class CaptureRows:
    """Rows of one capture, with counts of the requests that are left out."""

    source: TraceRequests
    rebuild: RebuildPrompt | None = None
    missing: Counter[str] = field(default_factory=Counter)

    def rows(self) -> Iterator[TrainingRow]:
        """Yield a row for each usable request, in the file's order."""
        place = printable(str(self.source.trace))
        for each in self.source.requests():
            if (self.source.meta.gpu or "").startswith(EMULATED):
                raise TrainingError(
                    "EmulatedAnswers",
                    f"{place}: an emulated engine computed no answers: use a capture of a real engine",
                )
            if each.token_ids is None:
                self.missing[NO_ANSWER_IDS] += 1
            elif each.finish_reason in _BROKEN_OFF:
                self.missing[BROKEN_OFF] += 1
            elif (prompt := self._prompt(each)) is None:
                self.missing[NO_PROMPT_IDS] += 1
            elif prompt.ids is not None and len(prompt.ids) != each.prompt_tokens:
                raise TrainingError(
                    "UnreadableCapture",
                    f"{place}: {printable(each.request_id or 'a request')}: prompt_token_ids: has {len(prompt.ids)} "
                    f"ids for prompt_tokens {each.prompt_tokens}: fetch the capture again",
                )
            else:
                yield TrainingRow(
                    prompt=prompt.content,
                    prompt_ids=prompt.ids,
                    prompt_tokens=each.prompt_tokens,
                    answer_ids=each.token_ids,
                    block_hashes=each.block_hashes if each.block_hashes is not None else (),
                    block_tokens=self.source.block_tokens,
                )

    def left_out(self) -> Counter[str]:
        """Return the number of requests without a row, by the reason."""
        return self.source.left_out() + self.missing

    def _prompt(self, request: RecordedRequest) -> RebuiltPrompt | None:
        ids = request.prompt_token_ids
        if ids is not None:
            return RebuiltPrompt(ids, ids)
        return self.rebuild(request, self.source.block_tokens) if self.rebuild else None


@dataclass(frozen=True, kw_only=True)
class Split:
    """How rows are divided between the training file and the file of held-out prompts."""

    seed: int = 0
    holdout_percent: int = 0  # share of the prompts
    max_tokens: int | None = None  # of the training file; the seed chooses the rows if there are more
    rows_held_out: bool = False  # whether lines of held-out prompts also have the tokens of an answer


WHOLE: Final = Split()


@dataclass(frozen=True, kw_only=True)
class WrittenRows:
    """Counts of written rows."""

    rows: int  # in the training file
    tokens: int  # of these rows
    held_out: int  # prompts that are not in the training file
    duplicates: int
    left_out: Counter[str]  # usable requests that are not in the files for other reasons


class RowFiles:
    """Writes rows to a training file and a file of held-out prompts: each row once, and each prompt to one of them.

    Rows first go to a scratch file, because the cap of the tokens applies to a choice from all rows.
    """

    def __init__(self, scratch: BinaryIO, split: Split) -> None:
        self._scratch, self._split = scratch, split
        self._key = split.seed.to_bytes(8, "little")
        self._limit = (split.holdout_percent << 8 * _DIGEST_BYTES) // 100
        self._seen = set[bytes]()
        self._training, self._held_out = _Lines(), _Lines()
        self._left_out = Counter[str]()
        self._duplicates = 0
        self._end = 0  # of the scratch file

    def add(self, row: TrainingRow) -> None:
        """Add a row, unless an equal one was added."""
        prompt = self._digest(b"prompt", _bytes_of(row.prompt))
        held_out = int.from_bytes(prompt, "little") < self._limit
        answer = b"".join(_bytes_of(each) for each in (row.answer_ids, row.answer_mask or ()))
        identity = self._digest(b"row", prompt + answer)
        if identity in self._seen:
            self._duplicates += 1
            return
        if len(self._seen) >= _MOST_ROWS:
            self._left_out[f"after the first {_MOST_ROWS:,}"] += 1
            return
        self._seen.add(identity)
        if not held_out:
            self._training.add(self._append(row.fields()), identity, row.tokens)
        elif prompt not in self._seen:
            self._seen.add(prompt)
            self._held_out.add(self._append(self._held_out_fields(row)), prompt, row.tokens)

    def write(self, training: BinaryIO, held_out: BinaryIO | None) -> WrittenRows:
        """Write the rows in the order in which they were added, and the held-out prompts in random order."""
        chosen, tokens = self._training.chosen(self._split.max_tokens)
        if over := len(self._training) - len(chosen):
            limit = f"{self._split.max_tokens:,} tokens"
            self._left_out[f"over the limit of {limit}, chosen at random by the seed"] = over
        training.writelines(self._training.read(self._scratch, each) for each in chosen)
        written = 0
        if held_out is not None:
            held_out_bytes = 0
            for each in self._held_out.shuffled():
                line = self._held_out.read(self._scratch, each)
                held_out_bytes += len(line)
                if held_out_bytes > _MOST_HELD_OUT_BYTES:
                    break
                held_out.write(line)
                written += 1
            if over := len(self._held_out) - written:
                limit = f"{_MOST_HELD_OUT_BYTES >> 20} MiB"
                self._left_out[f"with held-out prompts over the limit of {limit}"] = over
        return WrittenRows(
            rows=len(chosen),
            tokens=tokens,
            held_out=written,
            duplicates=self._duplicates,
            left_out=self._left_out,
        )

    def _append(self, fields: dict[str, Any]) -> int:
        offset = self._end
        self._end += self._scratch.write(_ENCODER.encode(fields) + b"\n")
        return offset

    def _held_out_fields(self, row: TrainingRow) -> dict[str, Any]:
        if self._split.rows_held_out and row.prompt_ids is not None:
            return {"prompt": list(row.prompt_ids), **row.fields()}
        return {"prompt": row.prompt if isinstance(row.prompt, str) else list(row.prompt)}

    def _digest(self, purpose: bytes, content: bytes) -> bytes:
        return blake2b(content, digest_size=_DIGEST_BYTES, key=self._key, person=purpose).digest()


def _bytes_of(content: str | Sequence[int]) -> bytes:
    """Return bytes that differ for each text and for each list of token ids."""
    if isinstance(content, str):
        return b"t" + content.encode(errors="surrogatepass")
    words = array("I", content)
    if sys.byteorder == "big":
        words.byteswap()
    return b"i" + len(words).to_bytes(8, "little") + words.tobytes()


@dataclass
class _Lines:
    """Places of lines in a scratch file, with a random number and the tokens of each."""

    orders: "array[int]" = field(default_factory=lambda: array("Q"))
    tokens: "array[int]" = field(default_factory=lambda: array("Q"))
    offsets: "array[int]" = field(default_factory=lambda: array("Q"))

    def __len__(self) -> int:
        return len(self.orders)

    def add(self, offset: int, identity: bytes, tokens: int) -> None:
        self.orders.append(int.from_bytes(identity[8:], "little"))
        self.tokens.append(tokens)
        self.offsets.append(offset)

    def read(self, scratch: BinaryIO, number: int) -> bytes:
        scratch.seek(self.offsets[number])
        return scratch.readline()

    def shuffled(self) -> list[int]:
        return sorted(range(len(self)), key=self.orders.__getitem__)

    def chosen(self, max_tokens: int | None) -> tuple[list[int], int]:
        """Return the lines that fit, in the file's order, and their tokens."""
        total = sum(self.tokens)
        if max_tokens is None or total <= max_tokens:
            return list(range(len(self))), total
        chosen, total = list[int](), 0
        for each in self.shuffled():
            if total + self.tokens[each] > max_tokens:
                break
            chosen.append(each)
            total += self.tokens[each]
        return sorted(chosen), total


def create(path: Path) -> BinaryIO:
    """Return a new file that only its owner can read; an old file or link at the path is removed."""
    path.unlink(missing_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "w+b")


def write_split(rows: Iterable[TrainingRow], training: Path, held_out: Path | None, split: Split) -> WrittenRows:
    """Write rows to files that the caller renames when both are complete."""
    with ExitStack() as stack:
        place = training.with_name(f"{training.name}.scratch")
        scratch = stack.enter_context(create(place))
        place.unlink()
        files = RowFiles(scratch, split)
        for row in rows:
            files.add(row)
        out = [stack.enter_context(create(path)) for path in (training, held_out) if path is not None]
        return files.write(out[0], out[1] if held_out else None)


def reject_untrainable(place: str, left_out: Counter[str]) -> None:
    """Raise the error for a capture without a usable request."""
    if left_out[NO_PROMPT_IDS]:
        raise TrainingError("NoTokenIds", f"{place}: no request has the token ids of its prompt")
    if left_out[NO_ANSWER_IDS]:
        raise TrainingError(
            "NoTokenIds",
            f"{place}: no request has the token ids of its answer: capture again with record.tokenIds: true",
        )
    raise TrainingError("TooFewRows", f"{place}: no answer is complete: use another capture")


def duplicates_note(duplicates: int) -> str:
    """Return the note about requests that were left out as duplicates."""
    return f"{count(duplicates, 'request')} {DUPLICATE}"
