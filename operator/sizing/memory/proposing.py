"""What the profiling run holds while a draft proposes: the rows that it proposes from, and their logits.

Model runner V2 lets the draft propose in full (vLLM, v1/worker/gpu/model_runner.py, _dummy_run), V1 runs its layers
alone (v1/spec_decode/llm_base_proposer.py, dummy_run).
"""

from typing import Final

from specdecode_operator.sizing.base.formula import named
from specdecode_operator.sizing.memory.sampling import gathered_logits_bytes
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.pair.pair import Pair, block_places, profiled_requests
from specdecode_operator.sizing.weights.weights import padded_vocabulary
from specdecode_operator.vocabulary import METHODS_OF_BLOCKS, Method

_TRANSITIONS: Final = 3
"""Logits of a place that DSpark has beside all: of the place before, the bias, and their sum (_sample_sequential)."""


def proposing_bytes(pair: Pair, draft: ModelGeometry, tensor: int) -> int:
    """Return the states that a draft's layers return, the rows picked out of them, and their logits at the peak.

    Heads that propose blocks take all places of all requests at once (dflash/speculator.py, _generate_draft), others
    one a request (target_dependent_ar/speculator.py and standalone_ar/speculator.py, _prefill). EAGLE-3 returns two
    tensors, and holds what it joined the target's states to.
    """
    tokens, requests = pair.limits.max_num_batched_tokens, profiled_requests(pair)
    rows = requests
    if pair.method in METHODS_OF_BLOCKS:
        rows = named(requests * pair.num_speculative_tokens, "proposed tokens", like=requests)
        tokens = min(tokens, requests * block_places(pair))
    elif pair.method == Method.EAGLE3:
        tokens *= 3
    states = (tokens + rows) * draft.hidden_size
    if draft.head and draft.head.returns_width:
        # Beside its own states it returns those of the target's width (gemma4_mtp.py).
        states += tokens * draft.head.returns_width
    return states * draft.dtype_bytes + _logits_bytes(pair, draft, requests, rows, tensor)


def joining_bytes(pair: Pair, draft: ModelGeometry) -> int:
    """Return a step's states of several layers side by side, and what a head makes of them; 0 where it joins none.

    vLLM, combine_hidden_states, called with their torch.cat while the states themselves are still held.
    """
    states = draft.head.auxiliary_states if draft.head else 0
    if not states:
        return 0
    width = states * pair.target.hidden_size * pair.target.dtype_bytes + draft.hidden_size * draft.dtype_bytes
    return pair.limits.max_num_batched_tokens * width


def _logits_bytes(pair: Pair, draft: ModelGeometry, requests: int, rows: int, tensor: int) -> int:
    """Return the logits while they are gathered over the ranks, or what is made of them then.

    Those of a smaller vocabulary are spread over the target's (qwen3_dflash.py and llama_eagle3.py, compute_logits).
    """
    vocabulary = (draft.head.output_rows if draft.head else 0) or draft.vocab_size
    padded = padded_vocabulary(vocabulary) * draft.dtype_bytes
    made = 0
    if pair.method == Method.DSPARK:
        made = _TRANSITIONS * requests * padded
    elif draft.head and draft.head.copied_rows:
        made = rows * draft.head.copied_rows * draft.hidden_size * draft.dtype_bytes
    elif vocabulary != draft.vocab_size:
        made = rows * draft.vocab_size * draft.dtype_bytes
    return max(gathered_logits_bytes(rows * padded, tensor), rows * padded + made)
