"""What proposing takes in the profiling run of model runner V2: logits of all proposed places at once for block heads.

Sums are written out tensor by tensor, as vLLM's source has them.
"""

from dataclasses import replace

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.memory.activation import activation_bytes, profiled_sampling_bytes, proposing_bytes
from specdecode_operator.sizing.memory.buffers import state_bytes
from specdecode_operator.sizing.pair import EngineLimits, Pair, Parallelism, loaded_draft, profiled_requests

T, H, V, K = 8192, 4096, 151_936, 7
ONE_GPU = Parallelism()
HEADS = "sgl-project/SpecForge:configs/qwen3-8b-"


def catalogued(name: str) -> ModelGeometry:
    geometry = find_geometry(name)
    assert geometry is not None
    return geometry


def qwen(limits: EngineLimits, method: str, tokens: int = K, **limited: object) -> Pair:
    """Qwen3-8B with the published head of a method; with DSpark that of DFlash, whose layers it has."""
    limits = replace(limits, **{"max_num_seqs": 512, "engine_version": "0.33.0"} | limited)
    draft = catalogued(f"{HEADS}{method.replace('dspark', 'dflash')}.json")
    return Pair(catalogued("Qwen/Qwen3-8B"), Precision.BF16, draft, Precision.BF16, method, tokens, limits)


def with_vocabulary(pair: Pair, rows: int) -> Pair:
    assert pair.draft is not None
    assert pair.draft.head is not None
    return replace(pair, draft=replace(pair.draft, head=replace(pair.draft.head, output_rows=rows)))


def proposing(pair: Pair, tensor: int = 1) -> int:
    draft = loaded_draft(pair)
    assert draft is not None
    return proposing_bytes(pair, draft[0], tensor)


def test_dflash_has_logits_of_all_proposed_tokens_at_once(limits: EngineLimits) -> None:
    """2.2 GiB of them with 512 requests and 15 tokens, beside all states that the target returned."""
    pair = qwen(limits, "dflash", 15)
    assert pair.draft is not None
    assert pair.draft.head is not None
    returned = T * H * 2 * (1 + pair.draft.head.auxiliary_states)
    assert activation_bytes(pair, ONE_GPU) == returned + (512 * 16 + 512 * 15) * H * 2 + 512 * 15 * V * 2


def test_over_several_gpus_they_are_gathered(limits: EngineLimits) -> None:
    pair = qwen(limits, "dflash")
    assert proposing(pair, 4) - proposing(pair) == 512 * K * V * 2 * 5 // 4


def test_a_vocabulary_of_its_own_is_spread_over_that_of_the_target(limits: EngineLimits) -> None:
    rows = 512 * K
    states = (512 * (K + 1) + rows) * H * 2
    assert proposing(with_vocabulary(qwen(limits, "dflash"), 32_000)) == states + rows * (32_000 + V) * 2


def test_rows_of_a_vocabulary_are_as_vllm_pads_them(limits: EngineLimits) -> None:
    pair = qwen(limits, "dflash")
    assert proposing(with_vocabulary(pair, 32_001)) == proposing(with_vocabulary(pair, 32_064))


def test_layers_return_no_more_states_than_a_step_has_tokens(limits: EngineLimits) -> None:
    """Up to 0.30 nothing makes room for each block."""
    pair = qwen(limits, "dflash", engine_version="0.30.0", max_num_batched_tokens=2048)
    assert proposing(pair) == (2048 + 512 * K) * H * 2 + 512 * K * V * 2


def test_dspark_goes_from_place_to_place_beside_them(limits: EngineLimits) -> None:
    rows = 512 * K
    assert proposing(qwen(limits, "dspark")) == (rows + rows) * H * 2 + (rows + 3 * 512) * V * 2


def test_dspark_that_samples_spreads_one_place_in_a_buffer(limits: EngineLimits) -> None:
    pair = replace(qwen(limits, "dspark"), samples_drafts=True)
    assert state_bytes(with_vocabulary(pair, 32_000), ONE_GPU) - state_bytes(pair, ONE_GPU) == 512 * V * 2


def test_others_propose_one_token_a_request(limits: EngineLimits) -> None:
    """EAGLE-3 returns two tensors beside the states that it joined."""
    pair = with_vocabulary(qwen(limits, "eagle3"), 32_000)
    assert proposing(pair) == (3 * T + 512) * H * 2 + 512 * (32_000 + V) * 2
    model = replace(pair, method="draft_model", draft=catalogued("Qwen/Qwen3-0.6B"))
    assert proposing(model) == (T + 512) * 1024 * 2 + 512 * V * 2


def test_states_of_several_layers_are_joined_while_they_are_held(limits: EngineLimits) -> None:
    """Where the layers are so divided, and the requests so few, that nothing else takes as much."""
    pair = qwen(limits, "dflash", max_num_seqs=16)
    assert pair.draft is not None
    assert pair.draft.head is not None
    states = pair.draft.head.auxiliary_states
    assert activation_bytes(pair, Parallelism(8)) == T * H * 2 * (1 + states + states + 1)
    older = replace(pair, limits=replace(pair.limits, engine_version="0.23.0"))
    assert activation_bytes(older, Parallelism(8)) < activation_bytes(pair, Parallelism(8))


@pytest.mark.parametrize(
    ("version", "method", "requests"),
    [("0.30.0", "dflash", 512), ("0.31.0", "dflash", 256), ("0.31.0", "dspark", 292), ("0.31.0", "eagle3", 512)],
)
def test_from_0_31_on_the_run_has_room_for_each_block(
    limits: EngineLimits, version: str, method: str, requests: int
) -> None:
    pair = qwen(limits, method, engine_version=version, max_num_batched_tokens=2048)
    assert profiled_requests(pair) == requests
    assert profiled_sampling_bytes(pair, 1) == (2048 + requests) * H * 2 + requests * V * 2


def test_v1_runs_the_layers_alone(limits: EngineLimits) -> None:
    pair = qwen(limits, "dflash", 15, engine_version="0.23.0", max_num_batched_tokens=2048)
    assert profiled_requests(pair) == 512
    assert activation_bytes(pair, ONE_GPU) == activation_bytes(replace(pair, num_speculative_tokens=1), ONE_GPU)
