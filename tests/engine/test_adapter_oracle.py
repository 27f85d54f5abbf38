"""Memory of LoRA adapters against the real vLLM, to the byte.

vLLM's own manager wraps the layers of models on the meta device (see adapter_oracle.py), for tensor parallelism,
pipeline stages, restricted layers, fully sharded adapters, and experts that are spread or stored as one. The normal run
compares the first layers of each model, because vLLM takes 10 ms to build a layer. `./just test-all` also compares
whole models.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.sizing.data_files import read_data
from specdecode_operator.sizing.memory.adapters import LoraSupport, adapter_bytes, adapters_are_exact, lora_support
from specdecode_operator.sizing.pair import AdapterSlots
from tests.engine.contract_checks import Vllm
from tests.engine.differences import assert_none
from tests.engine.engine_versions import NEWEST
from tests.engine.oracle_cases import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, Case, shortened

FEWEST_CLASSES = 200
OLDER = (8 * MAX_NUM_BATCHED_TOKENS, 10)
"""How far older versions may differ: bytes that sizing is below, for another index of each token, and percent above."""

USUAL = AdapterSlots(gpu=3, host=3, rank=16)


@dataclass(frozen=True)
class Adapted:
    """A model with slots for adapters, in the words of both sides."""

    target: str
    tensor: int = 1
    pipeline: int = 1
    slots: AdapterSlots = USUAL
    spread: bool = False
    whole: bool = False
    case: Case = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Derive the case of the other comparisons."""
        target = self.target if self.whole else shortened(self.target)
        case = Case(target, self.tensor, self.pipeline, expert_parallel=self.spread)
        object.__setattr__(self, "case", case)

    def question(self) -> dict[str, Any]:
        """Return it in the words of adapter_oracle.py."""
        slots = self.slots
        argv = ["--enable-lora", "--max-loras", str(slots.gpu), "--max-lora-rank", str(slots.rank)]
        argv += ["--lora-target-modules", *sorted(slots.modules)] if slots.modules else []
        argv += ["--fully-sharded-loras"] if slots.fully_sharded else []
        limits = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
        return self.case.question() | limits | {"argv": argv}

    def ours(self) -> list[int]:
        """Return what sizing says a rank of each stage reserves."""
        return [
            adapter_bytes(
                self.case.geometry,
                self.slots,
                self.case.split.layer_split,
                stage=stage,
                tokens=MAX_NUM_BATCHED_TOKENS,
                requests=MAX_NUM_SEQS,
            )
            for stage in self.case.stages
        ]


ATTENTION = AdapterSlots(gpu=2, host=2, rank=8, modules=frozenset({"q_proj", "v_proj"}))
SHARDED = AdapterSlots(gpu=2, host=2, rank=32, fully_sharded=True)
LLAMA, QWEN, EXPERTS = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"
EXACT = (
    *(Adapted(LLAMA, tensor) for tensor in (1, 2, 8)),
    Adapted(LLAMA, 2, 2),
    Adapted(LLAMA, 2, slots=SHARDED),
    Adapted(LLAMA, slots=ATTENTION),
    Adapted(QWEN, 2, slots=AdapterSlots(gpu=1, host=1, rank=8, modules=frozenset({"gate_up_proj", "lm_head"}))),
    Adapted("meta-llama/Llama-3.2-1B", 2),
    Adapted("Qwen/Qwen2.5-7B-Instruct", 2),
    Adapted(EXPERTS, 1),
    Adapted(EXPERTS, 4),
    Adapted(EXPERTS, 2, slots=SHARDED),
    Adapted(EXPERTS, 2, spread=True),
    Adapted("openai/gpt-oss-20b", 2),
    Adapted("mistralai/Mixtral-8x7B-v0.1", 2),
    Adapted("google/gemma-2-2b-it", 2),
    Adapted("google/gemma-3-12b-it", 2),
    Adapted("microsoft/Phi-3.5-mini-instruct", 2),
    Adapted("Qwen/Qwen3-VL-2B-Instruct", 2),
    Adapted("meta-llama/Llama-4-Scout-17B-16E-Instruct", 2),
    Adapted("zai-org/GLM-4.5", 2),
    Adapted("deepseek-ai/DeepSeek-V2-Lite", 2),
    Adapted("deepseek-ai/DeepSeek-V3", 8),
    Adapted("Qwen/Qwen3-Next-80B-A3B-Instruct", 2),
    Adapted("Qwen/Qwen3.5-27B", 2),
    Adapted("Qwen/Qwen3.5-122B-A10B", 2),
)
ESTIMATED = (
    Adapted("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 2),
    Adapted("deepseek-ai/DeepSeek-V3.2", 8),
)
REFUSED = (Adapted("XiaomiMiMo/MiMo-V2-Flash", 8), Adapted("moonshotai/Kimi-K2.5", 8))


Answers = dict[Adapted, Any]


@pytest.fixture(
    scope="session",
    params=[pytest.param(False, id="first layers"), pytest.param(True, id="whole", marks=pytest.mark.long)],
)
def adapter_answers(request: pytest.FixtureRequest, vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Return what a version of vLLM reserves in each case."""
    folder = tmp_path_factory.mktemp("adapters")
    cases = [replace(case, whole=request.param) for case in (*EXACT, *ESTIMATED, *REFUSED)]
    answers = folder / "answers.json"
    given = json.dumps([case.question() for case in cases])
    vllm.h100.begin("adapter_oracle", folder, answers, given=given).wait()
    return dict(zip(cases, json.loads(answers.read_text(encoding="utf-8")), strict=True))


def answers_to(answers: Answers, cases: Collection[Adapted]) -> Answers:
    """Return the answers to some of the cases."""
    return {case: answer for case, answer in answers.items() if replace(case, whole=False) in cases}


def theirs(answer: dict[str, Any]) -> list[int]:
    """Return the bytes of vLLM's tensors, by stage."""
    return [sum(stage["by_module"].values()) + stage["table_bytes"] for stage in answer["stages"]]


def differs(case: Adapted, answer: dict[str, Any], least: int, most_percent: int) -> bool:
    """Return whether sizing is below vLLM by more than some bytes a stage, or above by more than some percent."""
    pairs = zip(case.ours(), theirs(answer), strict=True)
    return any(not its - least <= own <= its * (100 + most_percent) / 100 for own, its in pairs)


def test_adapter_memory_equals_vllm(adapter_answers: Answers, vllm: Vllm) -> None:
    answers = answers_to(adapter_answers, EXACT)
    least, most_percent = (0, 0) if vllm.profile.version == NEWEST else OLDER
    assert_none(f"{case}: {answer['error']}" for case, answer in answers.items() if "error" in answer)
    assert_none(
        f"{case}: {case.ours()} ours, {theirs(answer)} theirs: {answer['stages']}"
        for case, answer in answers.items()
        if differs(case, answer, least, most_percent)
    )
    assert len(answers) == len(EXACT)
    assert [case for case in answers if not adapters_are_exact(case.case.geometry)] == []


def test_adapter_memory_of_estimated_layers_is_not_below_vllm(adapter_answers: Answers, vllm: Vllm) -> None:
    answers = answers_to(adapter_answers, ESTIMATED)
    least = 0 if vllm.profile.version == NEWEST else OLDER[0]
    assert_none(f"{case}: {answer['error']}" for case, answer in answers.items() if "error" in answer)
    assert_none(
        f"{case}: {case.ours()} ours, {theirs(answer)} theirs: {answer['stages']}"
        for case, answer in answers.items()
        if differs(case, answer, least, most_percent=10)
    )


def test_class_without_adapters_is_refused_by_both(adapter_answers: Answers) -> None:
    for case, answer in answers_to(adapter_answers, REFUSED).items():
        assert "LoRA is not supported" in answer["error"]
        assert lora_support(case.case.geometry.architecture, NEWEST) is LoraSupport.NO


@pytest.mark.long
def test_classes_that_support_adapters_are_those_of_vllm(vllm: Vllm, tmp_path: Path) -> None:
    """If it fails for a new version, correct operator/sizing/data/lora.json."""
    answers = tmp_path / "classes.json"
    vllm.h100.begin("adapter_classes", tmp_path, answers).wait()
    theirs = {name: each for name, each in json.loads(answers.read_text()).items() if each is not None}
    assert len(theirs) > FEWEST_CLASSES
    data, version = read_data("lora.json"), vllm.profile.version
    assert_none(
        f"{name}: {bool(each)} in vLLM {version}"
        for name, each in theirs.items()
        if (lora_support(name, version) is LoraSupport.YES) is not bool(each)
    )
    adapted = {name: each for name, each in theirs.items() if each}
    for table, listed in (("embed_tokens", "embedding"), ("lm_head", "output_head")):
        missing = [name for name, each in adapted.items() if table in each["tables"] and name not in data[listed]]
        assert missing == [], listed
    stacked = {name for name, each in adapted.items() if each["stacked"]}
    assert stacked == adapted.keys() & set(data["stacked_experts"])
