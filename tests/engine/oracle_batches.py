"""What sizing and the real vLLM are asked about, by subject, and vLLM's answers."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from specdecode_operator.enums import Method
from specdecode_operator.sizing.version_rules import NEWEST_VERSION
from tests.engine.oracle_cases import TENSORS, Case, distinct_targets, representatives, splits, why_unsized
from tests.engine.oracle_process import Oracle
from tests.engine.oracle_rules import set_apart
from tests.engine.quantized_models import QUANTIZED_MODELS
from tests.engine.run_oracle import Asked

PROCESSES = 2
"""Copies of one vLLM that answer at the same time."""

SPECFORGE = "sgl-project/SpecForge:configs/"
PAIRS = (
    ("meta-llama/Llama-3.1-70B", "draft_model", "meta-llama/Llama-3.1-8B", 5),
    ("meta-llama/Llama-3.1-8B", "draft_model", "meta-llama/Llama-3.2-1B", 4),
    ("Qwen/Qwen3-32B", "draft_model", "Qwen/Qwen3-0.6B", 5),
    ("google/gemma-2-27b", "draft_model", "google/gemma-2-2b-it", 3),
    ("nvidia/Llama-3.1-70B-Instruct-FP8", "draft_model", "meta-llama/Llama-3.2-1B", 4),
    ("meta-llama/Llama-3.1-8B", "eagle", "yuhuili/EAGLE-LLaMA3-Instruct-8B", 3),
    ("meta-llama/Llama-3.1-8B", "eagle3", f"{SPECFORGE}llama3-8B-eagle3.json", 3),
    ("meta-llama/Llama-3.1-70B", "eagle3", f"{SPECFORGE}llama3-70B-ealge3.json", 3),
    ("openai/gpt-oss-120b", "eagle3", f"{SPECFORGE}gpt-oss-120B-eagle3.json", 3),
    ("Qwen/Qwen3-30B-A3B", "eagle3", f"{SPECFORGE}qwen3-30B-A3B-eagle3.json", 3),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "eagle3", f"{SPECFORGE}llama4-scout-17B-16E-eagle3.json", 3),
    ("Qwen/Qwen3-8B", "dflash", f"{SPECFORGE}qwen3-8b-dflash.json", 7),
    ("Qwen/Qwen3-4B", "dflash", f"{SPECFORGE}qwen3-4b-dflash.json", 15),
    ("Qwen/Qwen3.5-27B", "dflash", f"{SPECFORGE}qwen3.6-27b-dflash.json", 15),
    ("Qwen/Qwen3-8B", "dflash", "XPress for Qwen3-8B", 7),
    ("Qwen/Qwen3-8B", "eagle3", "P-EAGLE for Qwen3-8B", 4),
    ("meta-llama/Llama-3.1-8B", "draft_model", "PARD of Llama-3.2-1B", 8),
    ("Qwen/Qwen3-8B", "eagle3", "Eagle3 for Qwen3-8B", 3),
    ("meta-llama/Llama-3.1-8B", "eagle3", "EAGLE-3 with a window for Llama-3.1-8B", 3),
    ("meta-llama/Llama-3.1-8B", "eagle3", "speculators' EAGLE-3 for Llama-3.1-8B", 3),
    ("meta-llama/Llama-3.1-8B", "eagle3", "speculators' P-EAGLE for Llama-3.1-8B", 4),
    ("Qwen/Qwen3-8B", "eagle3", "speculators' EAGLE-3 on Qwen3 for Qwen3-8B", 3),
    ("Qwen/Qwen3-8B", "dflash", "speculators' DFlash for Qwen3-8B", 7),
    ("moonshotai/Kimi-K2.5", "eagle3", "MLA head for Kimi-K2.5", 3),
    ("Qwen/Qwen3.5-27B", "dflash", "DFlash 2 for Qwen3.5-27B", 7),
    ("google/gemma-4-26B-A4B", Method.MTP.value, "assistant of Gemma-4-26B-A4B", 4),
    ("deepseek-ai/DeepSeek-V3", Method.MTP.value, None, 1),
    ("deepseek-ai/DeepSeek-V3.2", Method.MTP.value, None, 1),
    ("zai-org/GLM-5.2", Method.MTP.value, None, 3),
    ("zai-org/GLM-5-FP8", Method.MTP.value, None, 1),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", Method.MTP.value, None, 3),
    ("Qwen/Qwen3.5-27B", Method.MTP.value, None, 3),
)
"""Target, method, draft, tokens proposed a step."""

EXPERT_PARALLEL = (
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-30B-A3B-FP8",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Qwen/Qwen3.5-35B-A3B",
    "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-ai/DeepSeek-V3",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "mistralai/Mixtral-8x7B-v0.1",
    "nvidia/Qwen3-30B-A3B-NVFP4",
    "openai/gpt-oss-120b",
    "qwen3-moe, awq g128",
    "qwen3-moe, compressed fp8 tensor static",
    "qwen3-moe, compressed w4a16 g128",
    "qwen3-moe, fp8 block",
    "qwen3-moe, gptq g128",
)


@dataclass(frozen=True)
class Batch:
    """Cases of one subject.

    Attributes
    ----------
    name
        What they have in common.
    cases
        The questions.
    quick
        Whether they belong to the normal run.
    """

    name: str
    cases: tuple[Case, ...]
    quick: bool


def divided(name: str, cases: Iterable[Case], quick: set[tuple[int, int]]) -> list[Batch]:
    """Return the cases in up to two batches: those with a quick tensor and pipeline, and the others."""
    parts: dict[bool, list[Case]] = {True: [], False: []}
    for case in cases:
        parts[(case.tensor, case.pipeline) in quick].append(case)
    return [Batch(name, tuple(part), is_quick) for is_quick, part in parts.items() if part]


def target_batches() -> list[Batch]:
    """Return the models of the catalogue by themselves, and the small quantized ones."""
    known = [model for model, why in distinct_targets().items() if not why]
    quick = representatives(known)
    batches = []
    for model in known:
        cases = [Case(model, tensor, pipeline) for tensor, pipeline in splits(model)]
        batches += divided(model, cases, {(1, 1), (4, 2)} if model in quick else set())
    for model in QUANTIZED_MODELS:
        batches += divided(model, [Case(model, tensor) for tensor in TENSORS], {(1, 1), (4, 1)})
    return batches


def expert_parallel_batches() -> list[Batch]:
    """Return models whose experts are spread whole."""
    return [
        batch
        for model in EXPERT_PARALLEL
        for batch in divided(model, [Case(model, tensor, expert_parallel=True) for tensor in TENSORS[1:]], {(4, 1)})
    ]


def pair_batches() -> list[Batch]:
    """Return the pairs that sizing knows; drafts with pipeline stages are refused elsewhere."""
    batches = []
    for target, method, draft, tokens in PAIRS:
        if why_unsized(target) or why_unsized(draft, method):
            continue
        cases = [Case(target, tensor, 1, method, draft, tokens) for tensor in TENSORS]
        batches += divided(f"{target} {method} {draft}", cases, {(1, 1)})
    return batches


@dataclass(frozen=True)
class Subjects:
    """All batches of one kind of run.

    Attributes
    ----------
    targets, spread, drafted
        Models by themselves, models whose experts are spread whole, and pairs.
    """

    targets: tuple[Batch, ...]
    spread: tuple[Batch, ...]
    drafted: tuple[Batch, ...]

    @property
    def all(self) -> tuple[Batch, ...]:
        """Every batch."""
        return (*self.targets, *self.spread, *self.drafted)


@cache
def subjects(*, quick: bool, version: str = NEWEST_VERSION) -> Subjects:
    """Return what is asked of a version in every run, or the rest."""
    kinds = (target_batches(), expert_parallel_batches(), pair_batches())
    return Subjects(*(tuple(_of(batch, version) for batch in kind if batch.quick is quick) for kind in kinds))


def _of(batch: Batch, version: str) -> Batch:
    cases = (replace(case, version=version) for case in batch.cases)
    return replace(batch, cases=tuple(case for case in cases if not set_apart(case)))


class Truth:
    """What a version of vLLM answers, asked for together with all others of the same kind of run."""

    def __init__(self, oracle: Oracle, folder: Path, version: str = NEWEST_VERSION) -> None:
        """Ask nothing yet."""
        self._oracle, self._folder, self.version = oracle, folder, version
        self._asked: dict[bool, list[tuple[list[Case], Asked]]] = {}
        self._answers: dict[Case, Any] = {}

    def ask(self, *, quick: bool) -> None:
        """Ask for the answers of one kind of run, and do not wait for them."""
        if quick in self._asked:
            return
        batches = subjects(quick=quick, version=self.version).all
        # All of a model in one process, which then imports its module once.
        parts = [[case for batch in batches[first::PROCESSES] for case in batch.cases] for first in range(PROCESSES)]
        self._asked[quick] = [
            (part, Asked(self._oracle, self._folder / f"{quick}-{number}", [case.question() for case in part]))
            for number, part in enumerate(parts)
        ]

    def of(self, batch: Batch) -> dict[Case, Any]:
        """Return the answers to the cases of a batch."""
        if not self._answers.keys() >= set(batch.cases):
            self.ask(quick=batch.quick)
            parts = self._asked[batch.quick]
            self._answers |= chain.from_iterable(zip(part, asked.get(), strict=True) for part, asked in parts)
        return {case: self._answers[case] for case in batch.cases}
