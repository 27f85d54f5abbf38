"""What holds of every mix of layers."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.memory.kv_cache import Layers
from tests.support.kv_layers import NEWEST, capacity, chunked, full, kv_groups, linear, runs, sliding


@st.composite
def mixes(draw: st.DrawFn) -> Layers:
    kinds = st.sampled_from(
        [full(8, 128), full(4, 64), sliding(8, 128, 1024), sliding(4, 128, 128), chunked(8, 128), linear(700_000)]
    )
    drawn = draw(st.lists(st.tuples(st.integers(1, 20), kinds), min_size=1, max_size=6))
    return runs(*drawn)


@given(
    layers=mixes(), spaces=st.lists(st.integers(0, 80 * GIB), min_size=2, max_size=5), length=st.integers(1, 200_000)
)
def test_more_memory_never_holds_less(layers: Layers, spaces: list[int], length: int) -> None:
    found = [capacity(layers, NEWEST, length, space) for space in sorted(spaces)]
    assert all(smaller.tokens <= larger.tokens for smaller, larger in pairwise(found))


@given(layers=mixes())
def test_no_layer_is_lost(layers: Layers) -> None:
    grouping = kv_groups(layers, NEWEST)
    assert sum(group.num_layers for group in grouping.groups) == sum(run.count for run in layers)
    assert all(group.block_bytes <= grouping.bytes_per_block for group in grouping.groups)
