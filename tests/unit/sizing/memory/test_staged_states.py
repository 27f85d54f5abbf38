"""What heads that propose a block, and heads with a rotary table or an output head of their own, take from 0.33 on."""

from dataclasses import replace

import pytest

from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.memory.buffers import state_bytes
from specdecode_operator.sizing.memory.kv_cache import stage_weights
from specdecode_operator.sizing.pair import Pair, Parallelism, loaded_draft
from tests.unit.sizing.conftest import PairFactory

ONE_GPU = Parallelism()


def at(pair: Pair, version: str, **limits: object) -> Pair:
    return replace(pair, limits=replace(pair.limits, engine_version=version, **limits))


@pytest.fixture
def block(make_pair: PairFactory) -> Pair:
    """Qwen3-8B with a DFlash head that reads five of its layers; 256 requests propose 7 tokens each."""
    target = find_geometry("Qwen/Qwen3-8B")
    assert target is not None
    head = find_geometry("sgl-project/SpecForge:configs/qwen3-8b-dflash.json")
    return replace(make_pair(), target=target, draft=head, method="dflash", num_speculative_tokens=7)


def test_states_of_all_rows_are_staged_for_graphs(block: Pair) -> None:
    head = loaded_draft(block)
    assert head is not None
    assert head[0].head is not None
    staged = state_bytes(at(block, "0.33.0"), ONE_GPU) - state_bytes(at(block, "0.32.0"), ONE_GPU)
    assert staged == 256 * 8 * head[0].head.auxiliary_states * 4096 * 2
    full_step = at(block, "0.33.0", max_num_batched_tokens=1024)
    staged = state_bytes(full_step, ONE_GPU) - state_bytes(at(full_step, "0.32.0"), ONE_GPU)
    assert staged == 1024 * head[0].head.auxiliary_states * 4096 * 2


@pytest.mark.parametrize("without", [{"enforce_eager": True}, {"graph_mode": "PIECEWISE"}, {"graph_mode": "NONE"}])
def test_without_graphs_of_whole_steps_nothing_is_staged(block: Pair, without: dict[str, object]) -> None:
    newer, older = (state_bytes(at(block, version, **without), ONE_GPU) for version in ("0.33.0", "0.32.0"))
    assert newer == older


def test_the_rotary_table_of_a_block_head_is_as_long_as_requests(block: Pair) -> None:
    """The file of the head ends at 40,960 tokens; before 0.33 only EAGLE's tables were made longer."""
    rows = {}
    for version in ("0.32.0", "0.33.0"):
        loaded = loaded_draft(at(block, version, max_model_len=131_072))
        assert loaded is not None
        rows[version] = [rope.positions for rope in loaded[0].ropes]
    assert rows["0.33.0"] == [131_072]
    assert rows["0.32.0"] == [40_960]


@pytest.mark.parametrize(
    ("quantization", "tensor", "size_bytes"),
    [
        ("fp8", 1, 128_256 * 8192 + 128_256 * 4),
        ("fp8", 2, 64_128 * 8192 + 64_128 * 4),
        ("nvfp4", 2, 64_128 * 8192 * 9 // 16 + 4),
    ],
)
def test_a_quantized_output_head_stands_beside_that_of_the_target(
    make_pair: PairFactory, quantization: str, tensor: int, size_bytes: int
) -> None:
    head = find_geometry("yuhuili/EAGLE-LLaMA3-Instruct-8B")
    pair = replace(make_pair("FP8"), draft=head, method="eagle", num_speculative_tokens=3)
    shared, own = (
        stage_weights(replace(pair, draft_head_quantization=kind), Parallelism(tensor))[0]
        for kind in (None, quantization)
    )
    assert own.draft_bytes - shared.draft_bytes == size_bytes
    assert own.target_bytes == shared.target_bytes
