"""What stands for a draft before the profiling run, tensor by tensor."""

from dataclasses import replace

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.geometry import ModelGeometry, Tower
from specdecode_operator.sizing.memory.buffers import state_bytes
from specdecode_operator.sizing.pair import Pair, Parallelism
from tests.unit.sizing.conftest import PairFactory

ONE_GPU = Parallelism()
TOKENS = 8192


def catalogued(name: str) -> ModelGeometry:
    geometry = find_geometry(name)
    assert geometry is not None
    return geometry


def drafting_itself(pair: Pair, target: ModelGeometry) -> Pair:
    alone = replace(pair, target=target, target_precision=Precision.BF16, draft=None, draft_precision=None)
    return replace(alone, method="mtp", num_speculative_tokens=1)


def drafter_bytes(pair: Pair) -> int:
    """What is there with the draft; masks of one more proposed token a request aside."""
    alone = replace(pair, method="none", num_speculative_tokens=0)
    masks = pair.limits.max_num_seqs * pair.num_speculative_tokens * (pair.target.vocab_size // 32) * 4
    return state_bytes(pair, ONE_GPU) - state_bytes(alone, ONE_GPU) - masks


def test_images_reach_the_mtp_layers_of_qwen3_5(make_pair: PairFactory) -> None:
    """Their embeddings are put together once more for the draft; a target that reads text has no such."""
    target = catalogued("Qwen/Qwen3.5-27B")
    states = TOKENS * target.hidden_size * 2
    assert drafter_bytes(drafting_itself(make_pair(), target)) == 2 * states
    assert drafter_bytes(drafting_itself(make_pair(), replace(target, tower=Tower()))) == states


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_other_heads_see_no_images(make_pair: PairFactory, method: str) -> None:
    target = catalogued("Qwen/Qwen3.5-27B")
    head = catalogued("sgl-project/SpecForge:configs/qwen3.5-35b-a3b-eagle3.json")
    pair = replace(make_pair(), target=target, draft=head, method=method, num_speculative_tokens=1)
    assert drafter_bytes(pair) == TOKENS * head.hidden_size * 2


def test_two_vocabularies_are_mapped_by_three_tables(make_pair: PairFactory) -> None:
    """From each to the other in 8 bytes a token, and a byte for each token of the draft's: whether both have it."""
    pair = replace(make_pair(), draft=catalogued("Qwen/Qwen3-0.6B"))
    tables = state_bytes(replace(pair, maps_vocabulary=True), ONE_GPU) - state_bytes(
        replace(pair, maps_vocabulary=False, limits=replace(pair.limits, engine_version="0.30.0")), ONE_GPU
    )
    assert tables == (128_256 + 151_936) * 8 + 151_936
