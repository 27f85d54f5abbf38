"""Memory that is neither weights nor KV cache: formulas for vLLM 0.32, model runner V2."""

from typing import Final

from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.pair import NGRAM, Pair
from specdecode_operator.sizing.units import ceil_div

INT32_BYTES: Final = 4

BITS_PER_MASK_WORD: Final = 32
"""Vocabulary entries in one int32 of a bit mask."""

SAMPLER_BYTES_PER_REQUEST: Final = 1024 * 12 + 128 * 4 + 1024 * 4 + 129 * 4
"""Logit biases, allowed ids, stop ids and bad words of one request (vLLM, v1/worker/gpu/sample)."""

NGRAM_PAGE_TOKENS: Final = 256
NGRAM_PAGE_BYTES: Final = 8
"""The token table of ngram keeps a pointer for so many tokens (vLLM, spec_decode/ngram/speculator.py)."""

GATE_UP_AND_ACTIVATION: Final = 3
"""Rows of the MLP alive at its peak: gate, up and their product."""


def state_bytes(pair: Pair) -> int:
    """Return the persistent buffers of sampler and drafter (vLLM, v1/worker/gpu/sample and states.py).

    Penalty counts, prompt mask, one grammar mask a proposed token and one
    more, and per-request tables; with ngram also its table of tokens.
    Drafting is greedy, so no draft logits are kept.
    """
    requests = pair.limits.max_num_seqs
    vocabulary = pair.target.vocab_size
    mask = ceil_div(vocabulary, BITS_PER_MASK_WORD) * INT32_BYTES
    masks = 1 + (pair.num_speculative_tokens + 1)
    size_bytes = requests * (vocabulary * INT32_BYTES + masks * mask + SAMPLER_BYTES_PER_REQUEST)
    if pair.method == NGRAM:
        length = pair.limits.max_model_len
        size_bytes += requests * (length * INT32_BYTES + ceil_div(length, NGRAM_PAGE_TOKENS) * NGRAM_PAGE_BYTES)
    return size_bytes


def activation_bytes(pair: Pair, tensor: int) -> int:
    """Return the peak of one step beyond what stays allocated.

    The largest of the target's forward pass, the draft's forward pass while
    the target's hidden states are kept, and sampling. Scratch of FP8 kernels
    (about T x max(H, I / tp) bytes) is left to the margin.
    """
    hidden_states = pair.limits.max_num_batched_tokens * pair.target.hidden_size * pair.target.dtype_bytes
    peaks = [_forward_bytes(pair.target, pair, tensor), hidden_states + _sampling_bytes(pair, tensor)]
    if pair.draft is not None:
        peaks.append(hidden_states + _forward_bytes(pair.draft, pair, tensor))
    return max(peaks)


def _forward_bytes(geometry: ModelGeometry, pair: Pair, tensor: int) -> int:
    """Return hidden states, residual and the MLP's rows for a full step."""
    row = 2 * geometry.hidden_size + GATE_UP_AND_ACTIVATION * geometry.intermediate_size // tensor
    return pair.limits.max_num_batched_tokens * row * geometry.dtype_bytes


def _sampling_bytes(pair: Pair, tensor: int) -> int:
    """Return the logits of the profiling run: this rank's part, the gathered rows and their copy."""
    logits = pair.limits.max_num_seqs * pair.target.vocab_size * pair.target.dtype_bytes
    gathered = logits if tensor > 1 else 0
    return logits + ceil_div(logits, tensor) + gathered
