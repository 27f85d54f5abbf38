"""What sampling needs: in the profiling run, and when it verifies a draft."""

from typing import Final

from specdecode_operator.sizing.base.devices import memory_coefficients
from specdecode_operator.sizing.base.eras import Runner, Sampler
from specdecode_operator.sizing.base.formula import Named, named
from specdecode_operator.sizing.base.units import GIB, ceil_div
from specdecode_operator.sizing.pair.pair import Pair, loaded_draft, profiled_requests
from specdecode_operator.sizing.weights.weights import padded_vocabulary
from specdecode_operator.vocabulary import FLOAT32_BYTES

_FLOAT32_COPIES: Final = 3
"""What the sampler makes of the logits, each as large as they are in float32."""

_LARGEST_PIECE_BYTES: Final = Named(GIB, "of a piece in float32")
"""V2 copies logits to float32 in pieces of at most so much (v1/worker/gpu/spec_decode/rejection_sampler.py)."""


def profiled_sampling_bytes(pair: Pair, tensor: int) -> int:
    """Return hidden states of a full step, the rows to sample from, and what the profiling run's sampler makes.

    vLLM, v1/worker/gpu_model_runner.py and v1/worker/gpu/model_runner.py, _dummy_sampler_run.
    """
    target, tokens, requests = pair.target, pair.limits.max_num_batched_tokens, profiled_requests(pair)
    state_bytes = target.hidden_size * target.dtype_bytes
    if pair.era.runner is Runner.V2:
        # The rows are picked out once.
        return (tokens + requests) * state_bytes + _v2_sampler_bytes(pair, requests, tensor)
    # Picked out, and filled with random numbers in a tensor of their own.
    return (tokens + 2 * requests) * state_bytes + _v1_sampler_bytes(pair, requests)


def verification_bytes(pair: Pair, tensor: int) -> int:
    """Return what verifying K + 1 rows a request takes that no profiling run has seen; 0 without a draft.

    V2 (v1/worker/gpu/spec_decode/rejection_sampler.py): this rank's logits,
    the gathered rows and their copy, and a float32 piece of at most 1 GiB
    (MAX_CHUNK_BYTES). V1: its profiling run verified one proposed token a
    request. A draft that samples leaves its probabilities there, through the
    whole next step (v1/worker/gpu_model_runner.py, _draft_probs), and those of
    the rows that are verified are gathered (_get_spec_decode_draft_probs); V2
    keeps logits, which are part of its state. Entropy (v1/spec_decode/fly.py,
    compute_fly_entropy) copies such a piece once more, in logsumexp; on V1 it
    reads the softmax that is there.
    """
    vocabulary, proposed = pair.target.vocab_size, pair.num_speculative_tokens
    if not proposed:
        return 0
    rows = named(_verified_rows(pair), "rows")
    logits = rows * vocabulary * pair.target.dtype_bytes
    if pair.era.runner is Runner.V2:
        gathered = 2 * logits if tensor > 1 else logits
        piece = min(rows * vocabulary * FLOAT32_BYTES, _LARGEST_PIECE_BYTES)
        return gathered + ceil_div(logits, tensor) + (2 * piece if pair.checks_by_entropy else piece)
    requests = ceil_div(rows, proposed + 1)
    verified = _v1_rejection_bytes(pair, requests, proposed * requests)
    gathered = _v1_probabilities_bytes(pair, proposed * requests)
    profiled = _v1_rejection_bytes(pair, _requests(pair), _requests(pair))
    profiled += _v1_probabilities_bytes(pair, _requests(pair))
    return _v1_probabilities_bytes(pair, proposed * _requests(pair)) + max(0, verified + gathered - profiled)


def _verified_rows(pair: Pair) -> int:
    """Return the rows of logits of a full step: K + 1 a request.

    Adaptive verification takes no more than one float32 piece holds, or one a request (get_num_tokens).
    """
    limits = pair.limits
    rows = min(limits.max_num_seqs * (pair.num_speculative_tokens + 1), limits.max_num_batched_tokens)
    if not pair.adaptive_verification:
        return rows
    return min(rows, max(_requests(pair), _LARGEST_PIECE_BYTES // (pair.target.vocab_size * FLOAT32_BYTES)))


def _requests(pair: Pair) -> int:
    return min(pair.limits.max_num_seqs, pair.limits.max_num_batched_tokens)


def _v1_sampler_bytes(pair: Pair, requests: int) -> int:
    """Return the logits and what the sampler makes of them (vLLM, v1/sample/sampler.py, topk_topp_sampler.py).

    Logits as computed, gathered over the ranks; as float32 (a copy even of
    float32, as a log of vLLM 0.19 with --dtype float32 shows); their softmax,
    and the noise of the draw or, with FlashInfer, the masked logits. The Triton kernel keeps a row for each
    multiprocessor. With a draft the rejection sampler runs after it.
    """
    vocabulary = pair.target.vocab_size
    entries = requests * vocabulary
    buffer = 0
    if pair.era.sampler is Sampler.TRITON:
        buffer = min(memory_coefficients().multiprocessors, requests) * vocabulary * FLOAT32_BYTES
    if pair.num_speculative_tokens:
        return _v1_rejection_bytes(pair, requests, requests) + _v1_probabilities_bytes(pair, requests) + buffer
    logits = requests * padded_vocabulary(vocabulary) * pair.target.dtype_bytes
    return logits + _FLOAT32_COPIES * entries * FLOAT32_BYTES + buffer


def _v1_probabilities_bytes(pair: Pair, rows: int) -> int:
    """Return the distributions that a draft which samples took its tokens from; 0 where it takes the likeliest.

    As wide as the target's logits, in float32 (vLLM, v1/spec_decode/llm_base_proposer.py,
    compute_probs_and_sample_next_token). Heads with a smaller vocabulary
    spread their logits over the target's (llama_eagle3.py, compute_logits).
    """
    if not pair.samples_drafts or loaded_draft(pair) is None:
        return 0
    return rows * pair.target.vocab_size * FLOAT32_BYTES


def _v1_rejection_bytes(pair: Pair, bonus_rows: int, target_rows: int) -> int:
    """Return the peak of the rejection sampler (vLLM, v1/sample/rejection_sampler.py, RejectionSampler.forward).

    Kept: all rows and the bonus rows as computed, the bonus rows as float32
    for log probabilities. The target's rows: raw, cloned, softmax. For each
    request the noise and its reciprocal (sample_recovered_tokens, q and
    inv_q). The profiling run has one of each a request, whatever K is.
    """
    kept = (2 * bonus_rows + target_rows) * pair.target.dtype_bytes + bonus_rows * FLOAT32_BYTES
    return (kept + (3 * target_rows + 2 * bonus_rows) * FLOAT32_BYTES) * pair.target.vocab_size


def _v2_sampler_bytes(pair: Pair, requests: int, tensor: int) -> int:
    """Return the logits under V2 (v1/worker/gpu/sample/sampler.py).

    The profiling run filters nothing up to 0.32; then it takes a second pass
    with all that a request can ask for: in float32, masked, and their softmax.
    """
    vocabulary = pair.target.vocab_size
    logits = requests * padded_vocabulary(vocabulary) * pair.target.dtype_bytes
    gathering = gathered_logits_bytes(logits, tensor)
    if pair.era.copies_logits_to_float32:
        copies = _FLOAT32_COPIES if pair.era.sampler is Sampler.FLASHINFER else 1
        return max(gathering, logits + copies * requests * vocabulary * FLOAT32_BYTES)
    return gathering


def gathered_logits_bytes(logits_bytes: int, tensor: int) -> int:
    """Return what logits take while they are gathered: this rank's part, the gathered rows and their copy in order.

    vLLM, distributed/device_communicators/base_device_communicator.py, all_gather; a rank alone has nothing to gather.
    """
    return 2 * logits_bytes + ceil_div(logits_bytes, tensor) if tensor > 1 else logits_bytes
