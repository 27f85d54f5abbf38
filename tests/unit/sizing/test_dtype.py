"""Element types: what is not quantized, the KV cache and the draft follow the engine's ``--dtype``."""

from dataclasses import asdict, replace

from specdecode_operator.enums import FLOAT32_BYTES, Precision
from specdecode_operator.sizing.calibration import Calibration, CalibrationEntry
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.devices import find_device
from specdecode_operator.sizing.geometry import computed_in
from specdecode_operator.sizing.kernel_support import checkpoint_problem
from specdecode_operator.sizing.memory.budget import Budget, engine_kind, estimate, find_correction
from specdecode_operator.sizing.pair import TENSOR_ONLY, Pair
from specdecode_operator.sizing.placement import GpuPool
from specdecode_operator.sizing.plan import plan_on_gpus
from tests.support.llama import ARTICLE_LIMITS


def budget(**changes: object) -> Budget:
    """The budget of a small pair on an H200."""
    target, draft = (find_geometry(f"meta-llama/Llama-3.{each}-Instruct") for each in ("1-8B", "2-1B"))
    device = find_device("NVIDIA-H200")
    assert target is not None
    assert device is not None
    limits = replace(ARTICLE_LIMITS, **changes)  # type: ignore[arg-type]
    pair = Pair(target, Precision.BF16, draft, Precision.BF16, "draft_model", 5, limits)
    return estimate(pair, device, 1)


def test_float32_doubles_weights_and_kv_cache() -> None:
    half, full = budget(), budget(dtype_bytes=FLOAT32_BYTES)
    # What the allocator rounds up to is no part of the weights.
    assert abs(full.target_weights_bytes - 2 * half.target_weights_bytes) < 2**20
    assert abs(full.draft_weights_bytes - 2 * half.draft_weights_bytes) < 2**20
    assert full.kv_bytes_per_token == 2 * half.kv_bytes_per_token
    assert full.activation_bytes > 1.5 * half.activation_bytes


def test_explicit_kv_cache_dtype_ignores_dtype() -> None:
    eight = {"kv_cache_element_bytes": 1}
    assert budget(dtype_bytes=FLOAT32_BYTES, **eight).kv_bytes_per_token == budget(**eight).kv_bytes_per_token


def test_replaced_models_keep_the_dtype_of_the_limits() -> None:
    target, other = (find_geometry(f"meta-llama/Llama-3.{each}-Instruct") for each in ("1-8B", "2-1B"))
    assert target is not None
    assert other is not None
    limits = replace(ARTICLE_LIMITS, dtype_bytes=FLOAT32_BYTES)
    pair = Pair(target, Precision.BF16, None, None, "none", 0, limits)
    assert replace(pair, target=other, draft=other).target.dtype_bytes == FLOAT32_BYTES
    assert replace(pair, draft=other).draft.dtype_bytes == FLOAT32_BYTES  # type: ignore[union-attr]
    assert replace(pair, limits=ARTICLE_LIMITS).target.dtype_bytes == target.dtype_bytes


def test_calibration_in_16_bits_does_not_apply_to_float32() -> None:
    target = find_geometry("meta-llama/Llama-3.1-8B-Instruct")
    device = find_device("NVIDIA-H200")
    assert target is not None
    assert device is not None
    pair = Pair(target, Precision.BF16, None, None, "none", 0, ARTICLE_LIMITS)
    entry = CalibrationEntry(**asdict(engine_kind(pair, device.product, 1)), residual_bytes=2**30)
    measured = replace(pair, calibration=Calibration((entry,)))
    assert find_correction(measured, device, TENSOR_ONLY) is not None
    in_float32 = replace(measured, limits=replace(ARTICLE_LIMITS, dtype_bytes=FLOAT32_BYTES))
    assert find_correction(in_float32, device, TENSOR_ONLY) is None


def test_online_quantization_in_float32_is_refused() -> None:
    target = find_geometry("meta-llama/Llama-3.1-8B-Instruct")
    assert target is not None
    assert checkpoint_problem("target", target, Precision.FP8) is None
    in_float32 = checkpoint_problem("target", computed_in(target, FLOAT32_BYTES), Precision.FP8)
    assert in_float32 == "target FP8 is multiplied in 16 bits: use a serving.dtype other than float32"


def test_float32_pair_that_does_not_fit_gets_a_dtype_fix() -> None:
    target = find_geometry("meta-llama/Llama-3.1-70B-Instruct")
    assert target is not None
    pair = Pair(target, Precision.BF16, None, None, "none", 0, replace(ARTICLE_LIMITS, dtype_bytes=FLOAT32_BYTES))
    plan = plan_on_gpus(pair, [GpuPool("NVIDIA-H200", 8)], 2)
    assert "serving.dtype: auto" in [fix.change for fix in plan.fixes]
    long = replace(ARTICLE_LIMITS, max_model_len=131_072, min_concurrency=64)
    half = plan_on_gpus(replace(pair, limits=long), [GpuPool("NVIDIA-H200", 8)], 2)
    assert half.fixes
    assert "serving.dtype" not in " ".join(fix.change for fix in half.fixes)
