"""What model runner V1 holds before the profiling run: room for embeddings, and its drafter's buffers."""

from dataclasses import replace

import pytest

from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.memory.buffers import state_bytes
from specdecode_operator.sizing.pair import Pair, Parallelism
from specdecode_operator.sizing.rank_layers import stages
from specdecode_operator.sizing.version_rules import Runner
from tests.unit.sizing.conftest import PairFactory

ONE_GPU = Parallelism()
OF_TARGET = 8192 * 8192 * 2
"""A step's tokens in the width of Llama-3.1-70B."""
OF_DRAFT = 8192 * 4096 * 2


@pytest.fixture(params=["0.28.0", "0.30.0"])
def drafted(request: pytest.FixtureRequest, make_pair: PairFactory) -> Pair:
    """A draft model in versions that serve it on V1."""
    pair = make_pair("FP8", engine_version=request.param)
    assert pair.era.runner is Runner.V1
    return pair


def test_a_draft_model_gets_hidden_states_and_embeddings(drafted: Pair) -> None:
    assert state_bytes(drafted, ONE_GPU) == OF_TARGET + 2 * OF_DRAFT


def test_they_lie_on_the_stage_that_drafts(drafted: Pair) -> None:
    of_stages = [state_bytes(drafted, Parallelism(1, 3), stage) for stage in stages(drafted.target, 3)]
    assert of_stages == [OF_TARGET, OF_TARGET, OF_TARGET + 2 * OF_DRAFT]


@pytest.mark.parametrize("method", ["ngram", "medusa"])
def test_other_drafters_of_v1_have_none(drafted: Pair, method: str) -> None:
    head = find_geometry("yuhuili/EAGLE-LLaMA3-Instruct-8B") if method == "medusa" else None
    assert state_bytes(replace(drafted, method=method, draft=head), ONE_GPU) == OF_TARGET


def test_a_draft_that_proposes_in_one_pass_is_on_v1_still(make_pair: PairFactory) -> None:
    pair = make_pair("FP8", engine_version="0.33.0")
    assert pair.draft is not None
    parallel = replace(pair, draft=replace(pair.draft, drafts_in_parallel=True))
    assert state_bytes(parallel, ONE_GPU) == OF_TARGET + 2 * OF_DRAFT
