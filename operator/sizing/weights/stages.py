"""Pipeline stages: which layers a rank holds."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from specdecode_operator.sizing.base.remembered import MOST_REMEMBERED
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.model.layers import Layer, counted


@dataclass(frozen=True, eq=False)
class Stage:
    """The part of a model that one pipeline rank holds."""

    layers: tuple[Layer, ...]  # Its decoder layers
    # Whether it holds the embedding, and the output head
    is_first: bool
    is_last: bool

    @cached_property
    def distinct_layers(self) -> tuple[tuple[Layer, int], ...]:
        """Layers that differ, each with how often it occurs."""
        return counted(self.layers)


def whole_model(geometry: ModelGeometry) -> Stage:
    """Return the one stage of a model without pipeline parallelism."""
    return stages(geometry, 1)[0]


@lru_cache(maxsize=MOST_REMEMBERED)
def stages(geometry: ModelGeometry, pipeline: int) -> tuple[Stage, ...]:
    """Return the stages that a model is cut into.

    Layers that do not divide go one each to the stages before the last one,
    from the back (vLLM, distributed/utils.py, get_pp_indices).
    """
    counts = _layer_counts(geometry.num_layers, pipeline)
    cut, result = 0, []
    for index, count in enumerate(counts):
        layers = geometry.layers[cut : cut + count]
        result.append(Stage(layers, is_first=index == 0, is_last=index == pipeline - 1))
        cut += count
    return tuple(result)


def _layer_counts(num_layers: int, pipeline: int) -> list[int]:
    share, rest = divmod(num_layers, pipeline)
    counts = [share] * pipeline
    for index in range(2, rest + 2):
        counts[-index] += 1
    return counts
