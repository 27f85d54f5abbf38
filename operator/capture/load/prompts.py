"""Generate the prompts of a workload: synthetic, from a dataset, or in the shapes of a trace.

With the same seed, request N of a phase always gets the same prompt. Prompts of a trace have the lengths of the
recorded prompts, share the prefixes that their block hashes show, and are sent at the recorded times.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import shake_128
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated, Final, Protocol

import msgspec
from msgspec import Meta, Struct

from specdecode_operator.api.capture import CaptureWorkload, DatasetFormat, Pattern, SyntheticPrompts
from specdecode_operator.capture.files.formats import GZIP_SUFFIX, TRACE, BrokenGzipError, NoTrailerError, read_lines
from specdecode_operator.capture.load.datasets import (
    DATASET_MOUNT,
    BadDatasetError,
    Part,
    inside,
    parts_of,
    read_dataset,
)
from specdecode_operator.capture.load.run_settings import WARMUP_PHASE, RunSettings, needed
from specdecode_operator.problems import printable

_SPECIAL_PERCENT = 1
"""Share of the ids at either end of a vocabulary that no prompt uses, in percent.

Special tokens lie there: at most 1000 of 131072 at the beginning (Mistral's Tekken), and 1090 of 201088 at the end
(gpt-oss).
"""
_LEAST_SPECIAL = 8


class TokenIds:
    """The ids of a vocabulary that prompts are made of: no special ones."""

    def __init__(self, vocab_size: int) -> None:
        special = max(_LEAST_SPECIAL, vocab_size * _SPECIAL_PERCENT // 100)
        self._lowest, self._count = special, vocab_size - 2 * special

    def of(self, random_bytes: bytes) -> list[int]:
        """Return a token for each four bytes."""
        # 32 random bits a token and the rest of a division: several times faster than a choice for each token,
        # and the ids are still even to one in 10,000.
        lowest, count = self._lowest, self._count
        return [lowest + draw % count for draw in memoryview(random_bytes).cast("I")]


@dataclass(frozen=True)
class Prompt:
    """What a request asks: token ids, or text where it comes from a dataset."""

    content: list[int] | str

    @property
    def tokens(self) -> int | None:
        """How many tokens it has; None for text, which the engine's tokenizer splits."""
        return None if isinstance(self.content, str) else len(self.content)

    def followed_by(self, answer: "Prompt", message: "Prompt") -> "Prompt":
        """Return the prompt of a conversation's next turn: all that was said, then what is said now."""
        parts = [self.content, answer.content, message.content]
        texts = [part for part in parts if isinstance(part, str)]
        ids = [part for part in parts if not isinstance(part, str)]
        if texts and ids:
            raise TypeError("token ids and text cannot be joined")
        return Prompt("\n".join(texts) if texts else [token for part in ids for token in part])


_RANDOM_BYTES = 4
"""Of each token."""


class PromptShape(Protocol):
    """What is known of a prompt that nobody kept."""

    @property
    def prompt_tokens(self) -> int:
        """Its length."""

    @property
    def block_hashes(self) -> Sequence[int] | None:
        """Chained hashes of its full blocks, where they are known."""


@dataclass(frozen=True)
class Said:
    """Prompt and answer of a turn."""

    tokens: Sequence[int] = ()
    blocks: int = 0  # full ones of the prompt: their tokens follow from their hashes


@dataclass
class BlockPrompts:
    """Makes prompts block by block: equal hashes give equal tokens, and another seed gives others.

    Chained hashes say the whole prompt up to a block's end, so whatever stands for a block may depend on its hash
    alone. Blocks of answers are the answers' own tokens, as far as they were told.
    """

    token_ids: TokenIds
    block_size: int
    seed: int | str
    _answered: dict[int, Sequence[int]] = field(default_factory=dict)

    def make(self, shape: PromptShape, place: int, said: Said) -> list[int]:
        """Return a prompt of a shape for the request at a place, which goes on from what was said."""
        prompt = list(said.tokens[: shape.prompt_tokens])
        # What others wrote may name more blocks than there are tokens.
        blocks = shape.prompt_tokens // self.block_size
        for number, block in enumerate(islice(shape.block_hashes or (), blocks)):
            end = (number + 1) * self.block_size
            have = len(prompt) - (end - self.block_size)
            if have < self.block_size:
                prompt += self._block(block)[max(have, 0) :]
            if have > 0 and number >= said.blocks:
                self._answered.setdefault(block, array("I", prompt[end - self.block_size : end]))
        return prompt + self._drawn(f"end/{place}", shape.prompt_tokens - len(prompt))

    def _block(self, block: int) -> Sequence[int]:
        return self._answered.get(block) or self._drawn(f"block/{block}", self.block_size)

    def _drawn(self, purpose: str, tokens: int) -> list[int]:
        return self.token_ids.of(shake_128(f"{self.seed}/{purpose}".encode()).digest(_RANDOM_BYTES * max(tokens, 0)))


_USUAL_BLOCK_TOKENS: Final = 16
"""vLLM's, for a trace whose header does not say it."""

_MOST_HELD_BYTES: Final = 2**29
"""Of all shapes: a quarter of the memory that the containers with the operator's image have."""

_SHAPE_BYTES: Final = 256
"""Of one without its hashes."""

_AFTER_ONE_MOMENT_S: Final = 1.0
"""When a trace begins again whose requests all came at once."""

_NOTHING_SAID: Final = Said()

_Tokens = Annotated[int, Meta(ge=1, le=2**24)]
_Moment = Annotated[float, Meta(ge=-1e13, le=1e13)]


class Shape(Struct, frozen=True):
    """What a load takes of a record."""

    prompt_tokens: _Tokens
    output_tokens: _Tokens
    arrival_ms: _Moment | None = None
    block_hashes: Sequence[Annotated[int, Meta(ge=0)]] | None = None


class _Header(Struct):
    block_size: Annotated[int, Meta(ge=1, le=2**16)] | None = None


class _FirstLine(Struct):
    meta: _Header


@dataclass(frozen=True)
class Shapes:
    """Those of one trace, in order of arrival; the ones without a moment last."""

    path: Path
    block_size: int
    requests: Sequence[Shape]


_SHAPE: Final = msgspec.json.Decoder(Shape)
_FIRST_LINE: Final = msgspec.json.Decoder(_FirstLine)


def read_shapes(path: str, mount: Path) -> Shapes:
    """Return the shapes of a trace, or of the one in a capture's folder.

    Raises
    ------
    BadDatasetError
        It is not there, is no trace, or has no request.
    """
    trace = _trace(inside(mount, path))
    try:
        shapes = _read(trace)
    except OSError as error:
        raise BadDatasetError(f"{trace}: cannot be read: {error.strerror or error}") from error
    except (NoTrailerError, BrokenGzipError) as error:
        raise BadDatasetError(f"{trace}: {error}: copy it again") from error
    if not shapes.requests:
        raise BadDatasetError(f"{trace}: has no request: name the trace of another capture")
    return shapes


def _trace(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in (TRACE, TRACE + GZIP_SUFFIX):
        if (path / name).is_file():
            return path / name
    raise BadDatasetError(f"{path}: holds no {TRACE}: name a capture's folder, as its status.path says it")


def _read(trace: Path) -> Shapes:
    block_size, held_bytes, found = _USUAL_BLOCK_TOKENS, 0, list[Shape]()
    for line in read_lines(trace):
        if line.number == 1 and (header := _header(line.text)) is not None:
            block_size = header.block_size or block_size
            continue
        try:
            shape = _SHAPE.decode(line.text)
            hashes = None if shape.block_hashes is None else array("Q", shape.block_hashes)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            why = printable(str(error))
            raise BadDatasetError(f"{trace}: line {line.number}: is no record of a trace ({why}): mend it") from error
        held_bytes += _SHAPE_BYTES + (0 if hashes is None else len(hashes) * hashes.itemsize)
        if held_bytes > _MOST_HELD_BYTES:
            raise BadDatasetError(
                f"{trace}: more than {_MOST_HELD_BYTES >> 20} MiB of lengths and hashes after {len(found)} requests:"
                " name a shorter trace"
            )
        found.append(Shape(shape.prompt_tokens, shape.output_tokens, shape.arrival_ms, hashes))
    found.sort(key=lambda each: float("inf") if each.arrival_ms is None else each.arrival_ms)
    return Shapes(trace, block_size, found)


def _header(text: bytes) -> _Header | None:
    try:
        return _FIRST_LINE.decode(text).meta
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class TraceSource:
    """Random tokens in the shapes of a trace, one request after the other.

    Prompts have in common the blocks that they had in common in the trace, within one run through it: a phase, or
    what comes after its end, meets no prompt of an earlier one, which the engine's prefix cache would know.
    """

    def __init__(self, shapes: Mapping[Part, Shapes], workload: CaptureWorkload, ids: TokenIds, seed: int) -> None:
        self._shapes = {phase: shapes[part] for phase, part in parts_of(workload).items()}
        for phase in workload.phases:
            if phase.pattern == Pattern.RECORDED:
                _refuse_without_moments(self._shapes[phase.name])
        self._ids, self._seed = ids, seed
        self._prompts = lru_cache(maxsize=8)(self._of_one_run)

    def first(self, phase: str, index: int) -> Prompt:
        """Return a prompt of the next shape."""
        run, place = divmod(index, len(self._shapes[phase].requests))
        return Prompt(self._prompts(phase, run).make(self._shapes[phase].requests[place], place, _NOTHING_SAID))

    def message(self, phase: str, index: int) -> Prompt:
        """Return a prompt of the next shape; the CRD's rules let no conversation ask."""
        return self.first(phase, index)

    def output_tokens(self, phase: str, index: int) -> int:
        """Return as many as the recorded answer had."""
        requests = self._shapes[phase].requests
        return requests[index % len(requests)].output_tokens

    def recorded_s(self, phase: str) -> Sequence[float]:
        """Return when each came after the first, and at the end when the trace begins again."""
        moments_ms = [each.arrival_ms for each in self._shapes[phase].requests if each.arrival_ms is not None]
        offsets_s = [(moment_ms - moments_ms[0]) / 1000 for moment_ms in moments_ms]
        # After the last one it waits as long as between two others on average.
        last_s, gaps = offsets_s[-1], len(offsets_s) - 1
        return [*offsets_s, last_s + (last_s / gaps if last_s else _AFTER_ONE_MOMENT_S)]

    def _of_one_run(self, phase: str, run: int) -> BlockPrompts:
        return BlockPrompts(self._ids, self._shapes[phase].block_size, f"{self._seed}/{phase}/{run}")


def _refuse_without_moments(shapes: Shapes) -> None:
    if any(each.arrival_ms is None for each in shapes.requests):
        raise BadDatasetError(
            f"{shapes.path}: has requests without arrival_ms, and a phase of pattern Recorded sends at their moments:"
            " name a capture's trace, or take another pattern"
        )


class PromptSource(Protocol):
    """Where prompts come from; the same arguments always give the same prompt."""

    def first(self, phase: str, index: int) -> Prompt:
        """Return the prompt of a request, or of a conversation's first turn."""

    def message(self, phase: str, index: int) -> Prompt:
        """Return what the user of a conversation says in a later turn."""

    def output_tokens(self, phase: str, index: int) -> int:
        """Return how many tokens the answer to a request may have."""

    def recorded_s(self, phase: str) -> Sequence[float]:
        """Return the moments of a phase of pattern Recorded, in seconds from the first; of another source, none."""


def prompt_source(settings: RunSettings, mount: Path = DATASET_MOUNT) -> PromptSource:
    """Return where the prompts of a run come from; what is in files is read.

    Raises
    ------
    BadDatasetError
        A file is not what the workload says that it is.
    """
    workload, seed = settings.workload, settings.seed
    if workload.prompts.synthetic is not None:
        return SyntheticSource(workload, settings.engine.vocab_size, seed)
    dataset = needed(workload.prompts.dataset)
    parts = set(parts_of(workload).values())
    if dataset.format == DatasetFormat.TRACE:
        shapes = {part: read_shapes(part.path, mount) for part in parts}
        return TraceSource(shapes, workload, TokenIds(settings.engine.vocab_size), seed)
    return DatasetSource({part: read_dataset(dataset, mount, part) for part in parts}, workload, seed)


class _AnswerLengths:
    """Tokens that the answers of each phase are asked for."""

    def __init__(self, workload: CaptureWorkload, usual: int) -> None:
        self._usual = usual
        self._of_phases = {phase.name: phase.output_tokens or usual for phase in workload.phases}

    def output_tokens(self, phase: str, index: int) -> int:  # noqa: ARG002 - other sources have one for each request
        """Return how many tokens the answer to a request may have."""
        return self._of_phases.get(phase, self._usual)

    def recorded_s(self, phase: str) -> Sequence[float]:  # noqa: ARG002 - the rules let no other phase ask
        """Return nothing: its requests were never recorded."""
        return ()


class SyntheticSource(_AnswerLengths):
    """Random token ids: every prompt of exact length, and nothing in common but the prefix that was asked for."""

    def __init__(self, workload: CaptureWorkload, vocab_size: int, seed: int) -> None:
        settings: SyntheticPrompts = needed(workload.prompts.synthetic)
        super().__init__(workload, settings.output_tokens)
        self._usual_length = settings.prompt_tokens
        self._lengths = {phase.name: phase.prompt_tokens or settings.prompt_tokens for phase in workload.phases}
        self._seed = seed
        self._ids = TokenIds(vocab_size)
        self._prefix = self._tokens("prefix", settings.shared_prefix_tokens)

    def first(self, phase: str, index: int) -> Prompt:
        """Return the shared prefix and fresh tokens, ``promptTokens`` in all."""
        return Prompt(self._prefix + self._fresh(phase, index))

    def message(self, phase: str, index: int) -> Prompt:
        """Return as many fresh tokens as a first turn has after the prefix."""
        return Prompt(self._fresh(phase, index))

    def _fresh(self, phase: str, index: int) -> list[int]:
        length = self._lengths.get(phase, self._usual_length) - len(self._prefix)
        return self._tokens(f"{phase}/{index}", length)

    def _tokens(self, purpose: str, length: int) -> list[int]:
        random = Random(f"{self._seed}/{purpose}/prompt")  # noqa: S311 - not for secrets
        return self._ids.of(random.randbytes(4 * length))


class DatasetSource(_AnswerLengths):
    """Prompts of a dataset in an order that the seed shuffles.

    Phases that ask the same prompts begin at other places of that order, so
    that a phase meets prompts of an earlier one, which the engine's prefix
    cache may know, as late as possible. A phase with more requests than
    prompts begins again.
    """

    def __init__(self, texts: Mapping[Part, Sequence[str]], workload: CaptureWorkload, seed: int) -> None:
        super().__init__(workload, needed(workload.prompts.dataset).output_tokens)
        self._texts = texts
        self._parts = parts_of(workload)
        self._orders = {part: _shuffled(len(each), seed) for part, each in texts.items()}
        self._starts = {WARMUP_PHASE: -workload.warmup_requests}
        for part, each in texts.items():
            sharing = [phase.name for phase in workload.phases if self._parts[phase.name] == part]
            self._starts |= {phase: number * len(each) // len(sharing) for number, phase in enumerate(sharing)}

    def __len__(self) -> int:
        return sum(map(len, self._texts.values()))

    def first(self, phase: str, index: int) -> Prompt:
        """Return the phase's next prompt."""
        part = self._parts[phase]
        order = self._orders[part]
        return Prompt(self._texts[part][order[(self._starts[phase] + index) % len(order)]])

    def message(self, phase: str, index: int) -> Prompt:
        """Return the phase's next prompt."""
        return self.first(phase, index)


def _shuffled(length: int, seed: int) -> list[int]:
    order = list(range(length))
    Random(f"{seed}/dataset").shuffle(order)  # noqa: S311 - not for secrets
    return order
