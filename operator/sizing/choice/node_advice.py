"""Advice on replicas that lie on several nodes."""

from specdecode_operator.sizing.base.sources import LAYERS_WITHIN_NODES
from specdecode_operator.sizing.choice.advice import Advice
from specdecode_operator.sizing.choice.plan_row import Row


def advise_on_nodes(row: Row) -> tuple[Advice, ...]:
    """Return what it costs that GPUs of different nodes share layers; empty where none do."""
    if row.tensor <= row.gpus_per_node:
        return ()
    sentence = (
        f"GPUs of {row.nodes} nodes share each layer and meet over the network at every one: without InfiniBand or RoCE"
        f" with GPUDirect this is slow; tensor {row.gpus_per_node}, pipeline {row.nodes} meets once a stage, where the"
        " method goes with stages"
    )
    numbers = (("nodes", row.nodes), ("tensor", row.tensor))
    return (Advice("layers-over-nodes", sentence, numbers, LAYERS_WITHIN_NODES),)
