"""Generate the prompts of a workload: synthetic, from a dataset, or in the shapes of a trace.

With the same seed, request N of a phase always gets the same prompt. Prompts of a trace have the lengths of the
recorded prompts, share the prefixes that their block hashes show, and are sent at the recorded times.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import shake_128
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from specdecode_operator.api.capture import CaptureWorkload, DatasetFormat, Pattern, SyntheticPrompts
from specdecode_operator.capture.files.formats import GZIP_SUFFIX, TRACE, BrokenGzipError, NoTrailerError, read_lines
from specdecode_operator.capture.load import datasets
from specdecode_operator.capture.load.run_settings import WARMUP_PHASE, RunSettings, needed
from specdecode_operator.capture.trace_reader import RecordedRequest
from specdecode_operator.problems import printable


class TokenIds:
    """Generator of token ids without special tokens.

    1 % of the ids at either end of the vocabulary are not used, because these are special tokens: at most 1000 of
    131072 at the beginning (Mistral's Tekken), and 1090 of 201088 at the end (gpt-oss).
    """

    def __init__(self, vocab_size: int) -> None:
        special = max(8, vocab_size // 100)
        self._lowest, self._count = special, vocab_size - 2 * special

    def of(self, random_bytes: bytes) -> list[int]:
        """Return a token for each four bytes."""
        # 32 random bits modulo the count: several times faster than a choice for each token, and even to 1 in 10,000.
        lowest, count = self._lowest, self._count
        return [lowest + draw % count for draw in memoryview(random_bytes).cast("I")]


@dataclass(frozen=True)
class Prompt:
    """Prompt of a request: token ids, or text from a dataset."""

    content: list[int] | str

    @property
    def tokens(self) -> int | None:
        """Number of tokens; None for text, which the engine tokenizes."""
        return None if isinstance(self.content, str) else len(self.content)

    def followed_by(self, answer: "Prompt", message: "Prompt") -> "Prompt":
        """Return the prompt of a conversation's next turn."""
        parts = [self.content, answer.content, message.content]
        texts = [part for part in parts if isinstance(part, str)]
        ids = [part for part in parts if not isinstance(part, str)]
        if texts and ids:
            raise TypeError("token ids and text cannot be joined")
        return Prompt("\n".join(texts) if texts else [token for part in ids for token in part])


@dataclass(frozen=True)
class Said:
    """Prompt and answer of earlier turns."""

    tokens: Sequence[int] = ()
    blocks: int = 0  # full blocks of the prompt, whose tokens follow from their hashes


@dataclass
class BlockPrompts:
    """Generator of prompts by block: equal hashes give equal tokens, and another seed gives other tokens.

    A chained hash identifies the whole prompt up to the block's end, so the tokens of a block may depend only on its
    hash. Blocks of answers are the answers' own tokens, if known.
    """

    token_ids: TokenIds
    block_size: int
    seed: int | str
    _answered: dict[int, Sequence[int]] = field(default_factory=dict)

    def make(self, shape: "Shape | RecordedRequest", place: int, said: Said) -> list[int]:
        """Return a prompt of a shape for the request at a place, which continues the conversation."""
        prompt = list(said.tokens[: shape.prompt_tokens])
        # An untrusted trace may have more hashes than full blocks.
        blocks = shape.prompt_tokens // self.block_size
        for number, block in enumerate(islice(shape.block_hashes or (), blocks)):
            end = (number + 1) * self.block_size
            have = len(prompt) - (end - self.block_size)
            if have < self.block_size:
                tokens = self._answered.get(block) or self._drawn(f"block/{block}", self.block_size)
                prompt += tokens[max(have, 0) :]
            if have > 0 and number >= said.blocks:
                self._answered.setdefault(block, array("I", prompt[end - self.block_size : end]))
        return prompt + self._drawn(f"end/{place}", shape.prompt_tokens - len(prompt))

    def _drawn(self, purpose: str, tokens: int) -> list[int]:
        # Four bytes a token.
        return self.token_ids.of(shake_128(f"{self.seed}/{purpose}".encode()).digest(4 * max(tokens, 0)))


_USUAL_BLOCK_TOKENS: Final = 16  # vLLM's default, for a trace without block_size
# Limit of all shapes: a quarter of the memory of the containers with the operator's image.
_MOST_HELD_BYTES: Final = 2**29
_SHAPE_BYTES: Final = 256  # memory of a shape without its hashes
_NOTHING_SAID: Final = Said()

_Tokens = Annotated[int, Meta(ge=1, le=2**24)]
_Time = Annotated[float, Meta(ge=-1e13, le=1e13)]


class Shape(Struct, frozen=True):
    """Fields of a trace record that a load uses."""

    prompt_tokens: _Tokens
    output_tokens: _Tokens
    arrival_ms: _Time | None = None
    block_hashes: Sequence[Annotated[int, Meta(ge=0)]] | None = None


class _Header(Struct):
    block_size: Annotated[int, Meta(ge=1, le=2**16)] | None = None


class _FirstLine(Struct):
    meta: _Header


@dataclass(frozen=True)
class Shapes:
    """Shapes of one trace, in order of arrival; those without a time come last."""

    path: Path
    block_size: int
    requests: Sequence[Shape]


_SHAPE: Final = msgspec.json.Decoder(Shape)
_FIRST_LINE: Final = msgspec.json.Decoder(_FirstLine)


def read_shapes(path: str, mount: Path) -> Shapes:
    """Return the shapes of a trace, or of the one in a capture's folder."""
    trace = datasets.inside(mount, path)
    if trace.is_dir():
        found = next((each for name in (TRACE, TRACE + GZIP_SUFFIX) if (each := trace / name).is_file()), None)
        if found is None:
            raise datasets.BadDatasetError(f"{trace}: holds no {TRACE}: name a capture's folder, as in its status.path")
        trace = found
    try:
        shapes = _read(trace)
    except OSError as error:
        raise datasets.BadDatasetError(f"{trace}: cannot be read: {error.strerror or error}") from error
    except (NoTrailerError, BrokenGzipError) as error:
        raise datasets.BadDatasetError(f"{trace}: {error}: copy it again") from error
    if not shapes.requests:
        raise datasets.BadDatasetError(f"{trace}: has no request: name the trace of another capture")
    return shapes


def _read(trace: Path) -> Shapes:
    block_size, held_bytes, found = _USUAL_BLOCK_TOKENS, 0, list[Shape]()
    for line in read_lines(trace):
        if line.number == 1:
            try:
                block_size = _FIRST_LINE.decode(line.text).meta.block_size or block_size
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass  # a trace without a header
            else:
                continue
        try:
            shape = _SHAPE.decode(line.text)
            hashes = None if shape.block_hashes is None else array("Q", shape.block_hashes)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            why = printable(str(error))
            raise datasets.BadDatasetError(
                f"{trace}: line {line.number}: is not a record of a trace ({why}): correct it"
            ) from error
        held_bytes += _SHAPE_BYTES + (0 if hashes is None else len(hashes) * hashes.itemsize)
        if held_bytes > _MOST_HELD_BYTES:
            raise datasets.BadDatasetError(
                f"{trace}: more than {_MOST_HELD_BYTES >> 20} MiB of lengths and hashes after {len(found)} requests:"
                " name a shorter trace"
            )
        found.append(Shape(shape.prompt_tokens, shape.output_tokens, shape.arrival_ms, hashes))
    found.sort(key=lambda each: float("inf") if each.arrival_ms is None else each.arrival_ms)
    return Shapes(trace, block_size, found)


class PromptSource(ABC):
    """Deterministic source of prompts."""

    # The answer to random tokens has no meaningful end; the answer to a real question has.
    ignore_eos = True

    def __init__(self, workload: CaptureWorkload, usual: int = 0) -> None:
        self._usual = usual
        self._of_phases = {phase.name: phase.output_tokens or usual for phase in workload.phases}

    @abstractmethod
    def first(self, phase: str, index: int) -> Prompt:
        """Return the prompt of a request, or of a conversation's first turn."""

    def message(self, phase: str, index: int) -> Prompt:
        """Return the user's message in a later turn of a conversation."""
        return self.first(phase, index)

    def output_tokens(self, phase: str, index: int) -> int:  # noqa: ARG002 - a trace has one for each request
        """Return the output limit of a request in tokens."""
        return self._of_phases.get(phase, self._usual)

    def recorded_s(self, phase: str) -> Sequence[float]:  # noqa: ARG002 - the CRD's rules exclude Recorded phases
        """Return the arrival times of a trace relative to the first, followed by the time at which it repeats."""
        return ()


def prompt_source(settings: RunSettings, mount: Path = datasets.DATASET_MOUNT) -> PromptSource:
    """Return the prompts of a run, and read their files."""
    workload, seed = settings.workload, settings.seed
    if workload.prompts.synthetic is not None:
        return SyntheticSource(workload, settings.engine.vocab_size, seed)
    dataset = needed(workload.prompts.dataset)
    parts = set(datasets.parts_of(workload).values())
    if dataset.format == DatasetFormat.TRACE:
        shapes = {part: read_shapes(part.path, mount) for part in parts}
        return TraceSource(shapes, workload, TokenIds(settings.engine.vocab_size), seed)
    return DatasetSource({part: datasets.read_dataset(dataset, mount, part) for part in parts}, workload, seed)


class TraceSource(PromptSource):
    """Source of random tokens in the shapes of a trace, one request after the other.

    Within one pass through the trace, prompts share the blocks that they shared when recorded. Each phase, and each
    repeated pass, starts with new tokens, which no prefix cache holds.
    """

    def __init__(
        self, shapes: Mapping[datasets.Part, Shapes], workload: CaptureWorkload, ids: TokenIds, seed: int
    ) -> None:
        super().__init__(workload)
        self._shapes = {phase: shapes[part] for phase, part in datasets.parts_of(workload).items()}
        for phase in workload.phases:
            found = self._shapes[phase.name]
            if phase.pattern == Pattern.RECORDED and any(each.arrival_ms is None for each in found.requests):
                raise datasets.BadDatasetError(
                    f"{found.path}: has requests without arrival_ms, which a phase with pattern Recorded needs: "
                    "name a capture's trace, or use another pattern"
                )
        self._ids, self._seed = ids, seed
        self._prompts = lru_cache(maxsize=8)(self._of_one_run)

    def first(self, phase: str, index: int) -> Prompt:
        """Return a prompt of the next shape."""
        run, place = divmod(index, len(self._shapes[phase].requests))
        return Prompt(self._prompts(phase, run).make(self._shapes[phase].requests[place], place, _NOTHING_SAID))

    def output_tokens(self, phase: str, index: int) -> int:
        """Return the length of the recorded answer."""
        requests = self._shapes[phase].requests
        return requests[index % len(requests)].output_tokens

    def recorded_s(self, phase: str) -> Sequence[float]:
        """Return the arrival times, and the end of the last gap."""
        times_ms = [each.arrival_ms for each in self._shapes[phase].requests if each.arrival_ms is not None]
        offsets_s = [(time_ms - times_ms[0]) / 1000 for time_ms in times_ms]
        # The last gap is the average one; a second if all requests came at once.
        last_s, gaps = offsets_s[-1], len(offsets_s) - 1
        return [*offsets_s, last_s + (last_s / gaps if last_s else 1.0)]

    def _of_one_run(self, phase: str, run: int) -> BlockPrompts:
        return BlockPrompts(self._ids, self._shapes[phase].block_size, f"{self._seed}/{phase}/{run}")


class SyntheticSource(PromptSource):
    """Source of random token ids: prompts of exact length that share only the configured prefix."""

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


class DatasetSource(PromptSource):
    """Source of a dataset's prompts, shuffled by the seed.

    Phases with the same prompts start at different places of the order, so that a phase repeats prompts of an earlier
    one, which the prefix cache may hold, as late as possible. A phase with more requests than prompts wraps around.
    """

    ignore_eos = False

    def __init__(
        self,
        texts: Mapping[datasets.Part, Sequence[datasets.DatasetPrompt]],
        workload: CaptureWorkload,
        seed: int,
    ) -> None:
        super().__init__(workload, needed(workload.prompts.dataset).output_tokens)
        self._texts = texts
        self._parts = datasets.parts_of(workload)
        self._orders: dict[datasets.Part, list[int]] = {}
        self._starts = {WARMUP_PHASE: -workload.warmup_requests}
        for part, each in texts.items():
            self._orders[part] = order = list(range(len(each)))
            Random(f"{seed}/dataset").shuffle(order)  # noqa: S311 - not for secrets
            sharing = [phase.name for phase in workload.phases if self._parts[phase.name] == part]
            self._starts |= {phase: number * len(each) // len(sharing) for number, phase in enumerate(sharing)}
        for phase in workload.phases:
            kinds = {isinstance(each, str) for each in texts[self._parts[phase.name]]}
            if phase.pattern == Pattern.MULTITURN and len(kinds) > 1:
                raise datasets.BadDatasetError(
                    f"{self._parts[phase.name].path}: has prompts as text and as token ids, which a conversation cannot"
                    f" join: write all in one form, or use another pattern than Multiturn for phase {phase.name}"
                )

    def first(self, phase: str, index: int) -> Prompt:
        """Return the phase's next prompt."""
        part = self._parts[phase]
        order = self._orders[part]
        prompt = self._texts[part][order[(self._starts[phase] + index) % len(order)]]
        return Prompt(prompt if isinstance(prompt, str) else prompt.tolist())
