"""What is refused says the field, the value and what to write instead: whole sentences, for people act on them."""

from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.calibration import CalibrationError, parse_calibration
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.geometry import ModelGeometry, StoredWeights
from specdecode_operator.sizing.pair import TENSOR_ONLY, Pair, Parallelism
from specdecode_operator.sizing.placement import GpuPool, refuse_too_many
from specdecode_operator.sizing.plan import keep, plan_on_gpus
from specdecode_operator.sizing.quantization_matrix import candidate_rows
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.weights import checkpoint_disagreement, loaded_head_bytes, weight_bytes
from tests.support.objects import TINY_CONFIG
from tests.unit.sizing.conftest import PairFactory
from tests.unit.sizing.test_calibration import broken

ONE_NODE, TWO_NODES = GpuPool("NVIDIA-H200", 8), GpuPool("NVIDIA-H200", 8, 2)
COUNT = "must be a whole number"


@pytest.mark.parametrize(
    ("pools", "tensor", "spread", "message"),
    [
        ([ONE_NODE], 16, TENSOR_ONLY, "tensor: 16: no node has this many GPUs, and the largest has 8; write 8 or less"),
        (
            [GpuPool("NVIDIA-H200", 4), TWO_NODES],
            32,
            TENSOR_ONLY,
            "tensor: 32: no group of matching nodes has this many GPUs, and the largest has 8; write 8 or less",
        ),
        (
            [ONE_NODE],
            4,
            Parallelism(pipeline=4),
            "parallelism: 16: GPUs per replica (tensor x pipeline x data), but the largest node has 8; lower one",
        ),
        (
            [TWO_NODES],
            None,
            Parallelism(data=32),
            "parallelism: 32: GPUs per replica (tensor x pipeline x data), but the largest node has 8; lower one",
        ),
    ],
)
def test_more_gpus_than_exist_are_refused(
    pools: list[GpuPool], tensor: int | None, spread: Parallelism, message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        refuse_too_many(pools, tensor, spread)
    assert str(caught.value).removeprefix("parallelism.") == message


def test_parallelism_that_fits_some_pool_is_accepted() -> None:
    refuse_too_many([GpuPool("NVIDIA-H200", 4), TWO_NODES], 16, TENSOR_ONLY)
    refuse_too_many([ONE_NODE], None, Parallelism(pipeline=8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_seqs": "256"}, f'entries[0].max_num_seqs: "256": {COUNT}'),
        ({"tensor": True}, f"entries[0].tensor: true: {COUNT}"),
        ({"tensor": 0}, "entries[0].tensor: 0: must be 1 or more, and less than 2^31"),
        ({"tensor": 2**31}, "entries[0].tensor: 2147483648: must be 1 or more, and less than 2^31"),
        (
            {"num_speculative_tokens": -1},
            "entries[0].num_speculative_tokens: -1: must be 0 or more, and less than 2^31",
        ),
        ({"residual_bytes": 1.5}, f"entries[0].residual_bytes: 1.5: {COUNT}"),
        ({"residual_bytes": False}, f"entries[0].residual_bytes: false: {COUNT}"),
        ({"enforce_eager": 0}, "entries[0].enforce_eager: 0: must be true or false"),
        ({"product": ""}, 'entries[0].product: "": must be a text that is not empty'),
        ({"model": 1}, "entries[0].model: 1: must be a text that is not empty"),
        ({"engine_version": "latest"}, "entries[0].engine_version: latest: must be a version such as 0.32"),
        ({"runner": "V3"}, "entries[0].runner: V3: must be one of V1, V2"),
    ],
    ids=str,
)
def test_invalid_calibration_entry_is_refused_with_field_and_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        parse_calibration(broken(**change))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "change",
    [
        {"tensor": 2**31 - 1},
        {"num_speculative_tokens": 0},
        {"draft_precision": None},
        {"residual_bytes": -16 * GIB},
        {"residual_bytes": 2**40},
    ],
)
def test_calibration_values_at_their_limits_are_accepted(change: dict[str, Any]) -> None:
    (entry,) = parse_calibration(broken(**change)).entries
    assert {name: getattr(entry, name) for name in change} == change


def test_checkpoint_size_is_compared_to_the_nearer_bound() -> None:
    """A draft head may come with or without the tables that it shares."""
    config = {**TINY_CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "vocab_size": 128_000}
    head = geometry_from_config("head", config)
    least = loaded_head_bytes(head, Precision.BF16, Split(1))
    most = weight_bytes(head, Precision.BF16, Split(1)) + 128_000 * 256 * 2
    assert most > 2 * least

    def said(stored: int) -> str:
        return str(checkpoint_disagreement(head, StoredWeights.of(stored, {}, {}, output_head=True)))

    assert f"{100 * GIB / most:.1f} % more than" in said(most + GIB)
    assert "50.0 % less than" in said(least // 2)


def test_kept_plan_row_is_first_and_listed_once(make_pair: PairFactory) -> None:
    pair: Pair = make_pair("FP8", "FP8")
    plan = plan_on_gpus(pair, [ONE_NODE], None)
    other = plan.rows[1]
    kept = keep(plan, pair, other)
    assert kept.rows == (other, *(row for row in plan.rows if row != other))
    assert (kept.chosen, kept.verdict, kept.fixes) == (other, other.budget.verdict, ())
    assert kept.explanation.endswith(f"; it is in force and kept, a new plan would be: {plan.explanation}")
    assert keep(plan, pair, plan.chosen) is plan


def test_rotary_tables_are_equal_for_equal_numbers_of_other_types(llama_config: dict[str, Any]) -> None:
    def table(**facts: object) -> object:
        scaling = {"rope_type": "yarn", "original_max_position_embeddings": 8192, **facts}
        return geometry_from_config("m", llama_config | {"rope_scaling": scaling}).ropes

    assert table(factor=4.0, beta_fast=32) == table(factor=4, beta_fast=32.0, beta_slow=None)
    assert table(factor=4.0) != table(factor=4.0, beta_fast=32)
    assert table(factor=4.0, beta_fast=32.5) != table(factor=4.0, beta_fast=32)
    # YAML, which people write by hand, reads this as a date.
    assert table(factor=4.0, released=date(2026, 1, 1)) != table(factor=4.0)


def test_eagle3_head_adds_hidden_state_and_mask_buffers(make_pair: PairFactory, llama_8b: ModelGeometry) -> None:
    head = geometry_from_config("head", {**TINY_CONFIG, "architectures": ["LlamaForCausalLMEagle3"]})
    alone = make_pair("FP8", None)
    drafted = replace(alone, method="eagle3", draft=head, draft_precision=Precision.BF16, num_speculative_tokens=3)
    rows = [candidate_rows(each, [ONE_NODE], 2)[0].budget for each in (alone, drafted)]
    masks = 256 * 3 * llama_8b.vocab_size // 8
    assert rows[1].state_bytes - rows[0].state_bytes == masks + 8192 * 256 * 2
