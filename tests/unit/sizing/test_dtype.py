"""Element types: what is not quantized, the KV cache and the draft follow the engine's ``--dtype``."""

from dataclasses import replace

from specdecode_operator.sizing.base.devices import find_device
from specdecode_operator.sizing.families.catalogue import find_geometry
from specdecode_operator.sizing.memory.budget import Budget, estimate
from specdecode_operator.sizing.pair.pair import EngineLimits, Pair
from specdecode_operator.vocabulary import FLOAT32_BYTES, Precision

LIMITS = EngineLimits(
    max_model_len=8192,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    block_size=16,
    kv_cache_element_bytes=None,
    memory_utilization_percent=92,
    enforce_eager=False,
    min_concurrency=1,
)


def budget(**changes: object) -> Budget:
    """The budget of a small pair on an H200."""
    target, draft = (find_geometry(f"meta-llama/Llama-3.{each}-Instruct") for each in ("1-8B", "2-1B"))
    device = find_device("NVIDIA-H200")
    assert target is not None
    assert device is not None
    limits = replace(LIMITS, **changes)  # type: ignore[arg-type]
    pair = Pair(target, Precision.BF16, draft, Precision.BF16, "draft_model", 5, limits)
    return estimate(pair, device, 1)


def test_float32_takes_twice_the_weights_and_the_cache_of_target_and_draft() -> None:
    half, full = budget(), budget(dtype_bytes=FLOAT32_BYTES)
    # What the allocator rounds up to is no part of the weights.
    assert abs(full.target_weights_bytes - 2 * half.target_weights_bytes) < 2**20
    assert abs(full.draft_weights_bytes - 2 * half.draft_weights_bytes) < 2**20
    assert full.kv_bytes_per_token == 2 * half.kv_bytes_per_token
    assert full.activation_bytes > 1.5 * half.activation_bytes


def test_a_cache_of_a_type_of_its_own_keeps_it() -> None:
    eight = {"kv_cache_element_bytes": 1}
    assert budget(dtype_bytes=FLOAT32_BYTES, **eight).kv_bytes_per_token == budget(**eight).kv_bytes_per_token


def test_whatever_model_takes_the_place_of_another_computes_in_the_same_type() -> None:
    target, other = (find_geometry(f"meta-llama/Llama-3.{each}-Instruct") for each in ("1-8B", "2-1B"))
    assert target is not None
    assert other is not None
    limits = replace(LIMITS, dtype_bytes=FLOAT32_BYTES)
    pair = Pair(target, Precision.BF16, None, None, "none", 0, limits)
    assert replace(pair, target=other, draft=other).target.dtype_bytes == FLOAT32_BYTES
    assert replace(pair, draft=other).draft.dtype_bytes == FLOAT32_BYTES  # type: ignore[union-attr]
    assert replace(pair, limits=LIMITS).target.dtype_bytes == target.dtype_bytes
