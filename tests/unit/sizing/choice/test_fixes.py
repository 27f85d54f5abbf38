"""What is proposed when a pair does not fit, with what it gives back."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from specdecode_operator.sizing.catalogue import PublishedHead, find_entry, find_geometry, published_heads
from specdecode_operator.sizing.families.architectures import head_from_config
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.kernel_support import NOTHING_NAMED, Available
from specdecode_operator.sizing.memory.budget import Pair, Verdict
from specdecode_operator.sizing.placement import GpuPool
from specdecode_operator.sizing.plan import (
    DraftHead,
    Fix,
    find_fixes,
    known_heads,
    plan_on_gpus,
    smaller_drafts,
)
from specdecode_operator.sizing.quantization_matrix import PlanOptions, candidate_rows
from tests.support.named_checkpoints import named

EIGHT_H100 = (GpuPool("NVIDIA-H100-80GB-HBM3", 8),)

PairFactory = Callable[..., Pair]


def _fixes(pair: Pair, available: Available = NOTHING_NAMED, heads: Sequence[DraftHead] = ()) -> dict[str, Fix]:
    chosen = candidate_rows(pair, EIGHT_H100, 2)[0]
    assert chosen.budget.verdict is Verdict.DOES_NOT_FIT
    options = PlanOptions(available=available)
    return {fix.change: fix for fix in find_fixes(pair, EIGHT_H100, 2, chosen, heads, options=options)}


def test_each_fix_says_what_it_gives_back(make_pair: PairFactory) -> None:
    pair = make_pair("FP8", min_concurrency=20)
    chosen = candidate_rows(pair, EIGHT_H100, 2)[0].budget
    lacking = chosen.needed_kv_bytes - chosen.available_kv_bytes
    fixes = _fixes(pair)
    assert len(fixes) >= 5
    for fix in fixes.values():
        assert fix.gained_bytes > lacking
        assert fix.tokens > 0
    # Half of the need is gained, nothing is freed.
    assert fixes["serving.kvCacheDtype: fp8"].gained_bytes == chosen.needed_kv_bytes // 2


def test_least_harm_comes_first(make_pair: PairFactory, llama_1b: ModelGeometry) -> None:
    heads = (DraftHead("eagle3", replace(llama_1b, name="org/head")),)
    pair = make_pair("FP8", "BF16", min_concurrency=16, max_num_seqs=64)
    starts = [change.split(":")[0] for change in _fixes(pair, named(["INT4"], ["INT4"]), heads)]
    wanted = [
        "serving.gpuMemoryUtilizationPercent",
        "serving.maxNumBatchedTokens",
        "serving.maxNumSeqs",
        "speculation.draft.quantization",
        "serving.kvCacheDtype",
        "target.quantization",
        "serving.minConcurrency",
        "serving.maxModelLen",
        "parallelism.tensor",
        "accelerator.products",
        "speculation.draft.model",
        "speculation.method",
    ]
    assert [start for start in wanted if start in starts] == list(dict.fromkeys(starts))
    assert {"speculation.draft.quantization", "target.quantization", "speculation.draft.model"} <= set(starts)


def test_int8_is_proposed_before_int4(make_pair: PairFactory) -> None:
    eight = named(["INT8", "INT4"])
    without = [change for change in _fixes(make_pair("FP8", min_concurrency=20)) if change.startswith("target")]
    assert without == []
    fixes = _fixes(make_pair("FP8", min_concurrency=20), eight)
    # INT8 weighs what FP8 does, so only INT4 helps here.
    assert [change for change in fixes if change.startswith("target")] == ["target.quantization: INT4"]
    whole = _fixes(make_pair("BF16"), eight)
    assert [change for change in whole if change.startswith("target")] == ["target.quantization: FP8"]


def test_a_smaller_draft_of_the_same_family(make_pair: PairFactory) -> None:
    fix = _fixes(make_pair("FP8", min_concurrency=20))["speculation.draft.model: meta-llama/Llama-3.2-1B-Instruct"]
    assert fix.verdict is Verdict.FITS
    assert fix.concurrency >= 20


def test_smaller_drafts_are_alike(llama_70b: ModelGeometry, llama_8b: ModelGeometry, llama_1b: ModelGeometry) -> None:
    found = [geometry.name for geometry in smaller_drafts(llama_70b, llama_8b)]
    assert "meta-llama/Llama-3.2-1B-Instruct" in found
    assert all(name.startswith("meta-llama/") and name.endswith("-Instruct") for name in found)
    assert smaller_drafts(llama_70b, llama_1b) == ()
    assert smaller_drafts(replace(llama_70b, vocab_size=32_000), llama_8b) == ()
    assert smaller_drafts(llama_70b, replace(llama_8b, name="other/Model-8B-Instruct")) == ()


def test_a_head_is_proposed_only_when_one_was_made_for_the_target(
    make_pair: PairFactory, llama_1b: ModelGeometry
) -> None:
    pair = make_pair("FP8", min_concurrency=20)
    assert not [change for change in _fixes(pair) if "eagle" in change]
    head = replace(llama_1b, name="org/EAGLE3-70B")
    fixes = _fixes(pair, heads=(DraftHead("eagle3", head),))
    fix = fixes["speculation.method: eagle3, speculation.draft.model: org/EAGLE3-70B"]
    assert fix.concurrency >= 20


@pytest.mark.parametrize("precision", ["INT8", "INT4"])
def test_a_precision_without_a_checkpoint_is_never_proposed(make_pair: PairFactory, precision: str) -> None:
    changes = _fixes(make_pair("FP8", min_concurrency=20))
    assert changes
    assert [change for change in changes if precision in change] == []


def test_of_heads_of_one_size_the_first_is_proposed() -> None:
    """Three EAGLE-3 heads are published for Llama 3.1 8B, all of one size, and an older EAGLE head."""
    heads = [(head.method, head.geometry.name) for head in known_heads("meta-llama/Llama-3.1-8B-Instruct")]
    assert heads == [
        ("eagle3", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
        ("eagle", "yuhuili/EAGLE-LLaMA3.1-Instruct-8B"),
    ]
    assert known_heads("nobody/nothing") == ()


def _with_draft(pair: Pair, target_id: str, draft_id: str) -> Pair:
    target, draft = find_geometry(target_id), find_geometry(draft_id)
    assert target is not None
    assert draft is not None
    return replace(pair, target=target, draft=draft)


def test_a_published_head_is_proposed_for_its_target(make_pair: PairFactory) -> None:
    base = make_pair("BF16", "BF16", min_concurrency=35, max_num_seqs=64)
    pair = _with_draft(base, "Qwen/Qwen3-8B", "Qwen/Qwen3-1.7B")
    plan = plan_on_gpus(pair, EIGHT_H100, 1)
    fixes = {fix.change: fix for fix in plan.fixes}
    head = fixes["speculation.method: eagle3, speculation.draft.model: AngelSlim/Qwen3-8B_eagle3"]
    assert head.verdict is Verdict.FITS
    other = plan_on_gpus(replace(pair, target=replace(pair.target, name="org/another")), EIGHT_H100, 1)
    assert not any("eagle3" in fix.change for fix in other.fixes)


def test_layers_of_the_targets_own_are_proposed(make_pair: PairFactory) -> None:
    base = make_pair("BF16", "BF16", min_concurrency=100, max_num_seqs=128)
    pair = _with_draft(base, "Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-8B")
    changes = [fix.change for fix in plan_on_gpus(pair, EIGHT_H100, 4).fixes]
    assert "speculation.method: mtp" in changes
    plain = _with_draft(base, "Qwen/Qwen3-14B", "Qwen/Qwen3-8B")
    assert "speculation.method: mtp" not in [fix.change for fix in plan_on_gpus(plain, EIGHT_H100, 1).fixes]


@pytest.mark.parametrize("published", published_heads(), ids=lambda published: published.head)
def test_a_published_head_goes_with_its_targets(published: PublishedHead) -> None:
    for target_id in published.targets:
        target = find_geometry(target_id)
        if target is None:
            continue  # read from the hub when it is served
        entry = find_entry(published.head)
        assert entry is not None
        head = head_from_config(published.head, entry.config, published.method)
        assert head.head is not None
        assert head.head.reads_width == target.hidden_size
        assert head.vocab_size == target.vocab_size
        assert known_heads(target_id)
