"""Prompts of a workload: what each request of each phase asks, the same for the same seed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

from specdecode_operator.api.capture_workload import CaptureWorkload, DatasetFormat, SyntheticPrompts
from specdecode_operator.capture.load.prompts.datasets import DATASET_MOUNT, Part, parts_of, read_dataset
from specdecode_operator.capture.load.prompts.prompt import Prompt, TokenIds
from specdecode_operator.capture.load.prompts.trace import TraceSource, read_shapes
from specdecode_operator.capture.load.workload import WARMUP_PHASE, RunSettings, needed


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
