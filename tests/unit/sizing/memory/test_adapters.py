"""Memory of LoRA adapters. tests/engine/test_adapter_oracle.py compares it with vLLM."""

from dataclasses import replace

import pytest

from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.memory.adapters import (
    RANKS,
    LoraSupport,
    adapter_bytes,
    adapter_margin_bytes,
    adapters_are_exact,
    allowed_rank,
    host_bytes,
    lora_support,
)
from specdecode_operator.sizing.memory.budget import graph_bytes
from specdecode_operator.sizing.pair import AdapterSlots, Parallelism
from specdecode_operator.sizing.rank_layers import Split, stages
from tests.unit.sizing.conftest import PairFactory

SLOT = AdapterSlots(gpu=1, host=1, rank=16)
TOKENS, REQUESTS = 8192, 256
TABLES = 32 * TOKENS + 24 * REQUESTS
KERNEL_TABLES = 2 * 4 * (2 * TOKENS + 3 + 4)


def geometry(name: str) -> ModelGeometry:
    found = find_geometry(name)
    assert found is not None
    return found


LLAMA, EXPERTS = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B"


def size(name: str, slots: AdapterSlots = SLOT, split: Split | None = None, *, on_gpu: bool = True) -> int:
    return adapter_bytes(geometry(name), slots, split or Split(1), tokens=TOKENS, requests=REQUESTS, on_gpu=on_gpu)


def test_slot_of_llama_is_the_sum_over_its_layers() -> None:
    attention = (3 * 4096 + 4096 + 2 * 1024) + (4096 + 4096)
    feed_forward = (2 * 4096 + 2 * 14_336) + (14_336 + 4096)
    tables = 2 * (128_256 + 4096)
    assert size(LLAMA) == 16 * 2 * (32 * (attention + feed_forward) + tables) + TABLES + KERNEL_TABLES


def test_tables_of_kernels_are_on_gpus_only() -> None:
    assert size(LLAMA) - size(LLAMA, on_gpu=False) == KERNEL_TABLES


def test_slots_and_rank_multiply_the_matrices() -> None:
    one = size(LLAMA, on_gpu=False) - TABLES
    assert size(LLAMA, replace(SLOT, gpu=4, rank=64), on_gpu=False) - TABLES == 16 * one


def test_tensor_parallelism_divides_only_one_side_of_each_layer() -> None:
    one, two = size(LLAMA), size(LLAMA, split=Split(2))
    sharded = size(LLAMA, replace(SLOT, fully_sharded=True), Split(2))
    assert one / 2 < sharded < two < one


def test_classes_without_embedding_modules_adapt_layers_only() -> None:
    """Of Qwen 2.5 with tied tables as of Llama: vLLM looks at the class."""
    restricted = replace(SLOT, modules=frozenset({"q_proj", "o_proj", "gate_proj", "down_proj"}))
    assert size("Qwen/Qwen2.5-7B-Instruct", restricted) == size("Qwen/Qwen2.5-7B-Instruct")
    assert size(LLAMA, restricted) < size(LLAMA)


def test_target_modules_keep_the_merged_layer() -> None:
    query = size(LLAMA, replace(SLOT, modules=frozenset({"q_proj"})))
    assert query == size(LLAMA, replace(SLOT, modules=frozenset({"k_proj", "v_proj"})))
    assert query == 16 * 2 * 32 * (3 * 4096 + 4096 + 2 * 1024) + TABLES + KERNEL_TABLES


def test_unknown_target_module_counts_all_layers() -> None:
    assert size(LLAMA, replace(SLOT, modules=frozenset({"query_key_value"}))) == size(LLAMA)


def test_each_expert_has_its_matrices() -> None:
    attention = (3 * 2048 + 4096 + 2 * 512) + (4096 + 2048)
    expert = (2 * 2048 + 2 * 768) + (768 + 2048)
    router, tables = 2048 + 128, 2 * (151_936 + 2048)
    expected = 16 * 2 * (48 * (attention + 128 * expert + router) + tables) + 48 * 2 * 4
    assert size(EXPERTS) == expected + TABLES + KERNEL_TABLES


def test_spread_experts_are_divided() -> None:
    assert size(EXPERTS, split=Split(4, experts=4)) < size(EXPERTS) / 3


def test_stages_hold_the_tables_at_their_ends() -> None:
    model = geometry(LLAMA)
    first, last = (
        adapter_bytes(model, SLOT, Split(1), stage=stage, tokens=TOKENS, requests=REQUESTS)
        for stage in stages(model, 2)
    )
    assert first == last, "embedding and output head have the same size"
    assert first + last == size(LLAMA) + TABLES + KERNEL_TABLES


def test_host_keeps_whole_adapters() -> None:
    one = host_bytes(geometry(LLAMA), SLOT)
    assert one == 16 * 2 * 2_886_144
    assert host_bytes(geometry(LLAMA), replace(SLOT, host=5, gpu=2)) == 5 * one


@pytest.mark.parametrize(("rank", "allowed"), [(1, 1), (2, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_rank_is_rounded_up_to_a_value_of_vllm(rank: int, allowed: int) -> None:
    assert allowed_rank(rank) == allowed
    assert allowed in RANKS


@pytest.mark.parametrize(
    ("architecture", "version", "support"),
    [
        ("LlamaForCausalLM", "0.28", LoraSupport.YES),
        ("DeepseekV4ForCausalLM", "0.28", LoraSupport.NO),
        ("DeepseekV4ForCausalLM", "0.29", LoraSupport.YES),
        ("Step3p5ForCausalLM", "0.33", LoraSupport.NO),
        ("Step3p5ForCausalLM", "0.34", LoraSupport.UNKNOWN),
        ("NobodysForCausalLM", "0.33", LoraSupport.UNKNOWN),
    ],
)
def test_support_follows_the_class_and_the_version(architecture: str, version: str, support: LoraSupport) -> None:
    assert lora_support(architecture, version) is support


@pytest.mark.parametrize(
    ("model", "exact"),
    [
        (LLAMA, True),
        (EXPERTS, True),
        ("deepseek-ai/DeepSeek-V3", True),
        ("deepseek-ai/DeepSeek-V3.2", False),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", False),
    ],
)
def test_margin_is_wider_if_layers_are_not_known(model: str, exact: bool) -> None:
    found, taken = geometry(model), 10**9
    assert adapters_are_exact(found) is exact
    assert (adapter_margin_bytes(found, SLOT, taken, 1) >= taken // 2) is not exact


def test_margin_has_one_result_for_each_chosen_expert() -> None:
    dense, experts = (adapter_margin_bytes(geometry(name), SLOT, 0, TOKENS) for name in (LLAMA, EXPERTS))
    assert dense == TOKENS * 16 * 3 * 4
    assert experts == 8 * dense


def test_each_size_is_captured_with_and_without_adapters(make_pair: PairFactory) -> None:
    plain = make_pair("FP8", max_num_seqs=256, max_num_batched_tokens=8192)
    one, adapted = graph_bytes(plain, Parallelism()), graph_bytes(replace(plain, adapters=SLOT), Parallelism())
    assert one < adapted < 2 * one
