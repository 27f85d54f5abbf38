"""Over how many nodes a replica lies: as few as can be, and cut where nothing is torn apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.sizing.pair import Parallelism
from specdecode_operator.sizing.placement import GpuPool, nodes_needed, place_phrase

H200 = "NVIDIA-H200"


@pytest.mark.parametrize(
    ("tensor", "spread", "nodes"),
    [
        (8, Parallelism(), 1),
        (4, Parallelism(pipeline=2), 1),
        (8, Parallelism(pipeline=2), 2),
        (8, Parallelism(pipeline=4), 4),
        # Two stages of four fit a node, so that three stages take three nodes of one each, not two of one and a half.
        (4, Parallelism(pipeline=3), 3),
        (4, Parallelism(pipeline=6), 3),
        (16, Parallelism(), 2),
        (64, Parallelism(), 8),
        (16, Parallelism(pipeline=2), 4),
        (8, Parallelism(data=2), 2),
        (2, Parallelism(data=6), 2),
        (1, Parallelism(data=16, expert=True), 2),
        (4, Parallelism(pipeline=2, data=3), 3),
        # A copy that is larger than a node.
        (8, Parallelism(pipeline=2, data=2), None),
        (16, Parallelism(data=2), None),
        # No two nodes have the same share.
        (12, Parallelism(), 2),
        (3, Parallelism(pipeline=3), 3),
        (11, Parallelism(), 11),
        (128, Parallelism(), None),
    ],
)
def test_nodes_of_eight(tensor: int, spread: Parallelism, nodes: int | None) -> None:
    assert nodes_needed(GpuPool(H200, 8, 12), tensor, spread) == nodes


def test_no_more_nodes_than_there_are() -> None:
    assert nodes_needed(GpuPool(H200, 8, 2), 8, Parallelism(pipeline=2)) == 2
    assert nodes_needed(GpuPool(H200, 8, 1), 8, Parallelism(pipeline=2)) is None
    assert nodes_needed(GpuPool(H200, 8, 2), 8, Parallelism(pipeline=3)) is None


SPREADS = st.builds(Parallelism, pipeline=st.integers(1, 8), data=st.integers(1, 8))


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 64), SPREADS)
def test_shares_are_even_fit_and_tear_nothing_apart(
    per_node: int, nodes: int, tensor: int, spread: Parallelism
) -> None:
    needed = nodes_needed(GpuPool(H200, per_node, nodes), tensor, spread)
    gpus = tensor * spread.groups
    assert (needed == 1) == (gpus <= per_node)
    if needed is None or needed == 1:
        return
    share, rest = divmod(gpus, needed)
    assert rest == 0
    assert share <= per_node
    assert needed <= nodes
    if tensor <= per_node:
        assert share % tensor == 0, "whole groups that share layers"
    if spread.data > 1:
        assert share % (tensor * spread.pipeline) == 0, "whole copies"


def test_the_place_in_words() -> None:
    assert place_phrase(8, 1, H200) == "8 x NVIDIA-H200"
    assert place_phrase(16, 2, H200) == "2 nodes x 8 x NVIDIA-H200"
