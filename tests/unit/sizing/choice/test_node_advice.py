"""What is said of GPUs that share layers over a network."""

from collections.abc import Callable

import pytest

from specdecode_operator.deployment.advice import Advice, advise_on_nodes
from specdecode_operator.sizing.pair import Pair, Parallelism
from specdecode_operator.sizing.placement import GpuPool, Row
from specdecode_operator.sizing.quantization_matrix import PlanOptions, candidate_rows

NODES_OF_4 = (GpuPool("NVIDIA-H200", 4, 4),)


def row(pair: Pair, tensor: int, pipeline: int = 1) -> Row:
    (found,) = candidate_rows(pair, NODES_OF_4, tensor, PlanOptions(spread=Parallelism(pipeline=pipeline)))
    return found


def test_layers_over_nodes_are_told_with_what_to_write_instead(make_pair: Callable[..., Pair]) -> None:
    sentence = (
        "GPUs of 2 nodes share each layer and meet over the network at every one: without InfiniBand or RoCE with"
        " GPUDirect this is slow; tensor 4, pipeline 2 meets once a stage, where the method goes with stages"
    )
    said = Advice("layers-over-nodes", sentence)
    assert advise_on_nodes(row(make_pair("BF16", None), 8)) == (said,)


@pytest.mark.parametrize(("tensor", "pipeline"), [(4, 1), (4, 2), (2, 1)])
def test_layers_within_a_node_need_no_advice(make_pair: Callable[..., Pair], tensor: int, pipeline: int) -> None:
    assert advise_on_nodes(row(make_pair("BF16", None), tensor, pipeline)) == ()
