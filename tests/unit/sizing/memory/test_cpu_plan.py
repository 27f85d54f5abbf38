"""An engine on CPU: the KV space is given, the memory must hold everything."""

from dataclasses import replace

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.devices import memory_coefficients
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.memory.budget import EngineLimits, Pair, Term, Verdict
from specdecode_operator.sizing.plan import plan_on_cpu


@pytest.fixture
def pair(llama_1b: ModelGeometry, limits: EngineLimits) -> Pair:
    return Pair(llama_1b, Precision.BF16, None, None, "none", 0, replace(limits, block_size=128, max_model_len=1024))


def test_it_fits(pair: Pair) -> None:
    plan = plan_on_cpu(pair, 8 * GIB, 1 * GIB)
    assert (plan.verdict, plan.chosen.product, plan.chosen.tensor) == (Verdict.FITS, "CPU", 1)
    budget = plan.chosen.budget
    assert budget.target_weights_bytes == 1_235_814_400 * 2 + 131_072 * 64 * 2
    assert budget.non_torch_bytes == memory_coefficients().cpu_overhead_bytes
    assert budget.kv_cache_tokens == 32_768
    assert plan.explanation == (
        "CPU with 8.0 GiB per replica fits: 32,768 tokens (32.0 requests of 1024) in 1.0 GiB of KV cache"
    )


def test_too_little_memory_names_the_whole_gib_that_fits(pair: Pair) -> None:
    plan = plan_on_cpu(pair, 4 * GIB, 1 * GIB)
    assert (plan.verdict, plan.chosen.budget.binding_term) == (Verdict.DOES_NOT_FIT, Term.MEMORY)
    assert [fix.change for fix in plan.fixes] == ["accelerator.memoryGiB: 7"]
    assert plan_on_cpu(pair, 7 * GIB, 1 * GIB).verdict is Verdict.FITS
    assert "make 6.3 GiB; smallest change: accelerator.memoryGiB: 7" in plan.explanation


def test_memory_within_the_margin_is_tight(pair: Pair) -> None:
    needed = plan_on_cpu(pair, 8 * GIB, 1 * GIB).chosen.budget.requested_bytes
    assert plan_on_cpu(pair, needed, 1 * GIB).verdict is Verdict.TIGHT
    assert plan_on_cpu(pair, needed - 1, 1 * GIB).verdict is Verdict.DOES_NOT_FIT
    assert plan_on_cpu(pair, needed + GIB // 2, 1 * GIB).verdict is Verdict.FITS


def test_too_little_kv_space_raises_both_where_needed(pair: Pair) -> None:
    longer = replace(pair, limits=replace(pair.limits, max_model_len=65_536))
    plan = plan_on_cpu(longer, 7 * GIB, 1 * GIB)
    assert plan.chosen.budget.binding_term is Term.KV_CACHE
    assert [fix.change for fix in plan.fixes] == ["accelerator.kvCacheGiB: 3, accelerator.memoryGiB: 9"]
    assert plan.fixes[0].verdict is Verdict.FITS
    assert plan_on_cpu(longer, 9 * GIB, 3 * GIB).verdict is Verdict.FITS
    roomy = plan_on_cpu(longer, 16 * GIB, 1 * GIB)
    assert [fix.change for fix in roomy.fixes] == ["accelerator.kvCacheGiB: 3"]
    enough_bytes = roomy.chosen.budget.requested_bytes + 2 * GIB + roomy.chosen.budget.margin_bytes
    just, lacking = plan_on_cpu(longer, enough_bytes, 1 * GIB), plan_on_cpu(longer, enough_bytes - 1, 1 * GIB)
    assert [fix.change for fix in just.fixes] == ["accelerator.kvCacheGiB: 3"]
    assert "accelerator.memoryGiB" in lacking.fixes[0].change


def test_ranks_share_memory_and_kv_space(pair: Pair) -> None:
    """The real engine, with the tiny pair at TP 2 and 1 GiB of KV space a rank, holds twice what one rank holds."""
    one, two = plan_on_cpu(pair, 8 * GIB, 1 * GIB).chosen, plan_on_cpu(pair, 16 * GIB, 2 * GIB, 2).chosen
    assert (two.product, two.tensor) == ("CPU", 2)
    assert two.budget.kv_cache_tokens == 2 * one.budget.kv_cache_tokens
    assert two.budget.available_kv_bytes == 1 * GIB
    assert 0.5 < two.budget.target_weights_bytes / one.budget.target_weights_bytes < 0.52, "norms lie on both"
    overheads = memory_coefficients().cpu_overhead_bytes + memory_coefficients().cpu_rank_overhead_bytes
    assert 2 * two.budget.non_torch_bytes == overheads


def test_what_lacks_is_named_for_all_ranks_together(pair: Pair) -> None:
    plan = plan_on_cpu(pair, 6 * GIB, 2 * GIB, 2)
    assert [fix.change for fix in plan.fixes] == ["accelerator.memoryGiB: 9"]
    assert plan_on_cpu(pair, 9 * GIB, 2 * GIB, 2).verdict is Verdict.FITS
    longer = replace(pair, limits=replace(pair.limits, max_model_len=131_072))
    fix = plan_on_cpu(longer, 16 * GIB, 2 * GIB, 2).fixes[0]
    assert fix.change == "accelerator.kvCacheGiB: 6"
    assert fix.verdict is Verdict.FITS
