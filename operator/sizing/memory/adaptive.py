"""What adaptive verification takes: tables of confidences, graphs of any mix of tokens, and a profile at the start.

vLLM, v1/worker/gpu/spec_decode: adaptive_verification.py and acceptance_estimator.py.
"""

from typing import Final

from specdecode_operator.sizing.base.formula import described, named
from specdecode_operator.sizing.base.units import ceil_div
from specdecode_operator.sizing.memory.captures import captured_sizes, decode_graphs
from specdecode_operator.sizing.pair.pair import Pair

_NUMBER_BYTES: Final = 4
"""A float32 or an int32: all that these tables have."""

_TABLES_OF_ESTIMATOR: Final = 2
"""What it saw of each proposed token and what it said of it (OnlineAcceptanceEstimator)."""

_TABLES_OF_MANAGER: Final = 3
"""Confidences as they are, and two copies on their way to the host (AdaptiveVerificationManager)."""

_ROWS_OF_MANAGER: Final = 3
"""Numbers of each request: what it may have verified, what else it computes, where its logits begin."""

_STEPS_OF_A_SIZE: Final = 5
"""Steps by which each size is timed (_PROFILE_REPLAYS)."""

_STEP_OF_MEMORY_S: Final = 0.1
"""In which any GPU reads its whole memory: 24 GB at 0.3 TB/s, 80 at 3.3. No step of decoding reads more."""

_WEIGHTS_BYTES_PER_S: Final = 50e12
"""Bytes of 16-bit weights that a GPU multiplies with a token in a second: two operations each, at 50 TFLOP/s."""


def confidence_state_bytes(pair: Pair) -> int:
    """Return the tables that estimate what will be accepted; they are made with the draft, before the profiling run.

    A DSpark head that says so itself needs none: a few KiB too much.
    """
    if not pair.adaptive_verification:
        return 0
    tables = named(_TABLES_OF_ESTIMATOR, "tables", like=pair.num_speculative_tokens)
    return described(tables * _confidences(pair), "of an estimate of acceptance")


def confidence_tables_bytes(pair: Pair) -> int:
    """Return the tables that choose what is verified; they are made after the KV cache, out of the slack."""
    if not pair.adaptive_verification:
        return 0
    rows = _ROWS_OF_MANAGER * pair.limits.max_num_seqs + 1
    return _TABLES_OF_MANAGER * _confidences(pair) + rows * _NUMBER_BYTES


def _confidences(pair: Pair) -> int:
    return pair.limits.max_num_seqs * pair.num_speculative_tokens * _NUMBER_BYTES


def adaptive_graphs(pair: Pair) -> int:
    """Return the graphs that are captured beyond those of a fixed K.

    A fixed K has one for each multiple of K + 1 that a size is rounded up to, adaptive verification one for each size
    (v1/worker/gpu/cudagraph_utils.py, _init_candidates).
    """
    if not pair.adaptive_verification:
        return 0
    most = pair.limits.max_num_seqs * (pair.num_speculative_tokens + 1)
    return max(0, sum(size <= most for size in captured_sizes(pair)) - decode_graphs(pair))


def profiled_steps(pair: Pair) -> tuple[int, ...]:
    """Return the tokens of each step that is timed at the start, before the engine serves: captured sizes and larger.

    Beyond the largest captured: half as many again, and doubled up to a full step (batches_to_profile).
    """
    if not pair.adaptive_verification:
        return ()
    sizes, most = captured_sizes(pair), pair.limits.max_num_batched_tokens
    if not sizes:
        return ()
    larger = {min(sizes[-1] * 3 // 2, most)}
    size = sizes[-1]
    while size < most:
        size = min(size * 2, most)
        larger.add(size)
    return tuple(each for each in (*sizes, *sorted(larger - set(sizes))) for _ in range(_STEPS_OF_A_SIZE))


def cost_profile_s(pair: Pair, weights_bytes: int) -> int:
    """Return the seconds by which timing those steps makes the start longer at most; 0 without adaptive verification.

    ``weights_bytes`` are those of one GPU. An upper bound, for deadlines: each step may read all memory once, and
    every token is computed at a fraction of what data sheets say.
    """
    steps = profiled_steps(pair)
    computing_s = sum(steps) * weights_bytes / _WEIGHTS_BYTES_PER_S
    return ceil_div(round(10 * (len(steps) * _STEP_OF_MEMORY_S + computing_s)), 10)
