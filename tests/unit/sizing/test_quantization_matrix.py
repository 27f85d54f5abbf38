"""Precisions that a pair may run in."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.geometry import ModelGeometry, QuantizationMethod, Scales, WeightFormat
from specdecode_operator.sizing.kernel_support import Available, kernel_note
from specdecode_operator.sizing.memory.budget import Pair, Term, Verdict
from specdecode_operator.sizing.placement import GpuPool
from specdecode_operator.sizing.quantization_matrix import MatrixRow, quantization_matrix
from tests.support.named_checkpoints import checkpoints, named

H100 = "NVIDIA-H100-80GB-HBM3"
H200 = "NVIDIA-H200"
POOLS = (GpuPool(H100, 8), GpuPool(H200, 8))

PairFactory = Callable[..., Pair]


def _find(rows: tuple[MatrixRow, ...], **wanted: Any) -> list[MatrixRow]:
    return [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]


def _one(rows: tuple[MatrixRow, ...], target: str, draft: str | None, tensor: int, product: str = H100) -> MatrixRow:
    precision = None if draft is None else Precision(draft)
    found = _find(
        rows,
        target_precision=Precision(target),
        draft_precision=precision,
        tensor=tensor,
        product=product,
        kv_cache_dtype="auto",
    )
    assert len(found) == 1
    return found[0]


def test_matrix_has_every_combination_once(make_pair: PairFactory) -> None:
    rows = quantization_matrix(make_pair(), POOLS)
    assert len(rows) == len(Precision) ** 2 * 2 * 4 * 2
    keys = {(r.target_precision, r.draft_precision, r.kv_cache_dtype, r.tensor, r.product) for r in rows}
    assert len(keys) == len(rows)


def test_matrix_tokens_of_known_rows(make_pair: PairFactory) -> None:
    # The precision that the pair itself asks for must not matter.
    rows = quantization_matrix(make_pair("INT4", "FP8"), POOLS)
    wanted = {
        ("BF16", "BF16", H100): 0,
        ("FP8", "BF16", H100): 127_024,
        ("FP8", "FP8", H100): 142_224,
        ("INT8", "BF16", H100): 127_024,
        ("INT4", "INT4", H100): 221_952,
        ("BF16", "BF16", H200): 238_896,
    }
    for (target, draft, product), tokens in wanted.items():
        row = _one(rows, target, draft, 2, product)
        assert row.verdict is (Verdict.FITS if tokens else Verdict.DOES_NOT_FIT)
        # Weights and KV cache are exact; the coefficients beside them may be measured better.
        assert row.tokens == pytest.approx(tokens, rel=0.04)
        assert row.gpus == 2


def test_row_names_its_binding_term(make_pair: PairFactory) -> None:
    rows = quantization_matrix(make_pair(), POOLS)
    assert _one(rows, "BF16", "BF16", 2).binding_term is Term.WEIGHTS
    assert _one(rows, "FP8", "BF16", 2).binding_term is None


def test_only_bf16_and_fp8_are_launchable_without_a_checkpoint(make_pair: PairFactory) -> None:
    rows = quantization_matrix(make_pair(), POOLS)
    loadable = {Precision.BF16, Precision.FP8}
    for row in rows:
        assert row.launchable == (row.target_precision in loadable and row.draft_precision in loadable)
    reason = _one(rows, "INT4", "INT8", 2).reason
    assert reason is not None
    assert "target INT4 needs a checkpoint" in reason
    assert "draft INT8 needs a checkpoint" in reason
    assert _one(rows, "INT4", "INT8", 2).tokens > 0, "a hypothetical row is still sized"


def test_a_named_checkpoint_makes_its_rows_launchable(make_pair: PairFactory) -> None:
    available = named(["INT4"])
    rows = quantization_matrix(make_pair(), POOLS, available=available)
    assert _one(rows, "INT4", "BF16", 2).launchable
    assert not _one(rows, "INT4", "INT4", 2).launchable, "the checkpoint is the target's, not the draft's"
    assert not _one(rows, "INT8", "BF16", 2).launchable


def test_quantized_checkpoint_is_launchable_only_in_its_own_precision(
    make_pair: PairFactory, llama_70b: ModelGeometry
) -> None:
    int8 = replace(
        llama_70b, checkpoint=WeightFormat(Precision.INT8, Scales.CHANNEL, method=QuantizationMethod.COMPRESSED_TENSORS)
    )
    rows = quantization_matrix(replace(make_pair(), target=int8), POOLS)
    assert _one(rows, "INT8", "BF16", 2).launchable
    for precision in ("BF16", "FP8", "INT4"):
        reason = _one(rows, precision, "BF16", 2).reason
        assert reason is not None
        assert "in its own precision, INT8" in reason


def test_kernel_limits_make_a_row_unlaunchable(make_pair: PairFactory, llama_config: dict[str, Any]) -> None:
    """Qwen2.5-72B's intermediate size of 29568 breaks the 4-bit groups at TP 4; a peer divides without asking."""
    geometry = _geometry({**llama_config, "hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 29_568})
    pair = replace(make_pair("BF16", None), target=geometry)
    rows = quantization_matrix(pair, POOLS, available=Available(checkpoints(geometry, [Precision.INT4])))
    assert _one(rows, "INT4", None, 1).launchable
    broken = _one(rows, "INT4", None, 4)
    assert not broken.launchable
    assert (broken.budget, broken.verdict, broken.tokens) == (None, Verdict.DOES_NOT_FIT, 0)
    assert broken.reason is not None
    assert "groups of 128" in broken.reason
    assert _one(rows, "BF16", None, 4).launchable


def test_indivisible_attention_heads_make_a_row_unlaunchable(
    make_pair: PairFactory, llama_config: dict[str, Any]
) -> None:
    """TP must divide heads (defects 3 and 7): refused in words, never rounded."""
    geometry = _geometry({**llama_config, "hidden_size": 1792, "num_attention_heads": 14, "num_key_value_heads": 2})
    rows = quantization_matrix(replace(make_pair("BF16", None), target=geometry), POOLS)
    assert _one(rows, "BF16", None, 2).launchable
    refused = _one(rows, "BF16", None, 4)
    assert not refused.launchable
    assert refused.reason is not None
    assert "num_attention_heads 14" in refused.reason


def test_kernel_note_says_4_bits_are_weight_only_on_hopper() -> None:
    note = kernel_note(H100, Precision.INT4)
    assert note is not None
    assert "weight-only on Hopper" in note
    for precision in (Precision.BF16, Precision.FP8, Precision.INT8):
        assert kernel_note(H200, precision) is None
    assert kernel_note("NVIDIA-A100-SXM4-80GB", Precision.FP8) is not None
    assert kernel_note("Mystery-GPU", Precision.INT4) is None


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_block_float_formats_need_a_checkpoint(make_pair: PairFactory, name: str) -> None:
    pair = make_pair()
    row = _one(quantization_matrix(pair, POOLS), name, "BF16", 2)
    assert not row.launchable
    with_one = quantization_matrix(pair, POOLS, available=named([name]))
    row = _one(with_one, name, "BF16", 2)
    assert row.launchable
    assert "weight-only on Hopper" in " ".join(row.notes)


def test_mxfp4_is_refused_for_models_without_experts(make_pair: PairFactory) -> None:
    """Their row would save nothing: MXFP4 is for experts alone."""
    row = _one(quantization_matrix(make_pair(), POOLS), "MXFP4", "BF16", 2)
    assert row.reason == (
        "target MXFP4 only applies to experts, and meta-llama/Llama-3.1-70B-Instruct has none: use another precision"
    )


def test_matrix_keeps_the_precision_of_a_draft_head(make_pair: PairFactory) -> None:
    pair = replace(make_pair(), method="eagle3", draft_precision=Precision.BF16)
    rows = quantization_matrix(pair, POOLS)
    assert {row.draft_precision for row in rows} == {Precision.BF16}


@pytest.mark.parametrize(
    ("pools", "tensor", "field"),
    [([GpuPool("Mystery-GPU", 8)], None, "accelerator.products"), ([GpuPool(H100, 2)], 4, "parallelism.tensor")],
)
def test_matrix_is_refused_for_unknown_products_or_tensor_sizes(
    make_pair: PairFactory, pools: list[GpuPool], tensor: int, field: str
) -> None:
    with pytest.raises(PlanError) as caught:
        quantization_matrix(make_pair(), pools, tensor)
    assert caught.value.field == field


def _geometry(config: dict[str, Any]) -> ModelGeometry:
    return geometry_from_config("generated", config)
