"""Other checkpoints of a model, for tests of what plans may choose from."""

from collections.abc import Iterable
from dataclasses import replace

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.geometry import DEFAULT_FORMATS, ModelGeometry
from specdecode_operator.sizing.kernel_support import Available

LLAMA_70B, LLAMA_8B = "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"


def checkpoints(geometry: ModelGeometry, precisions: Iterable[Precision]) -> tuple[ModelGeometry, ...]:
    """Return a checkpoint of a model in each precision, as the usual tools make it."""
    return tuple(replace(geometry, checkpoint=DEFAULT_FORMATS[precision]) for precision in precisions)


def named(target: Iterable[str] = (), draft: Iterable[str] = ()) -> Available:
    """Return what is available where somebody named checkpoints of Llama 70B and 8B in these precisions."""
    seventy, eight = find_geometry(LLAMA_70B), find_geometry(LLAMA_8B)
    assert seventy is not None
    assert eight is not None
    return Available(checkpoints(seventy, map(Precision, target)), checkpoints(eight, map(Precision, draft)))
