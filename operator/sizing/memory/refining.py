"""What a refiner of proposed blocks takes (XPress): in the profiling run, which also makes what it keeps.

vLLM, model_executor/models/qwen3_xpress.py, jacobi_refine_greedy, called with as many requests as a step has room for.
"""

from typing import Final

from specdecode_operator.sizing.base.formula import named
from specdecode_operator.sizing.base.units import ceil_div
from specdecode_operator.sizing.model.geometry import ModelGeometry, Refiner
from specdecode_operator.sizing.pair.pair import Pair, effective_batch

_INT64_BYTES: Final = 8

_CHUNK_TOKENS: Final = 4096
_CHUNK_BYTES: Final = 4 + _INT64_BYTES
"""Where all tokens are looked at, the best of so many is kept, with its score (_scratch_buffers)."""


def refining_bytes(pair: Pair, draft: ModelGeometry, tensor: int) -> int:
    """Return the peak while the blocks of a full step are refined; 0 for drafts whose blocks stay as proposed.

    The states and logits of all places, and beside them first a copy of the
    logits of those to fill, then for each the rows of its candidates in the
    second table, their logits before and after, and their ids.
    """
    refiner = draft.head.refiner if draft.head else None
    if refiner is None:
        return 0
    requests, width, vocabulary = effective_batch(pair), draft.dtype_bytes, draft.vocab_size
    places = named(requests * refiner.places, "places")
    logits = places * vocabulary * width
    gathering = logits + ceil_div(logits, tensor) if tensor > 1 else 0
    filled = named(requests * (refiner.places - 1), "places to fill")
    copied = filled * vocabulary * width
    chosen = filled * _candidates(pair, refiner) * ((refiner.rank + 2) * width + _INT64_BYTES)
    return places * draft.hidden_size * width + logits + max(gathering, copied, chosen)


def refining_scratch_bytes(pair: Pair, draft: ModelGeometry) -> int:
    """Return what its first pass makes and keeps: logits twice, for all requests, where it looks at all tokens."""
    refiner = draft.head.refiner if draft.head else None
    if refiner is None or _candidates(pair, refiner):
        return 0
    width, vocabulary = draft.dtype_bytes, draft.vocab_size
    of_place = (2 * vocabulary + refiner.rank) * width + ceil_div(vocabulary, _CHUNK_TOKENS) * _CHUNK_BYTES
    return pair.limits.max_num_seqs * named(refiner.places - 1, "places to fill") * of_place


def _candidates(pair: Pair, refiner: Refiner) -> int:
    return refiner.candidates if pair.refined_candidates is None else pair.refined_candidates
