"""Advice on what to change."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from specdecode_operator.deployment.planning import (
    Advice,
    BreakEven,
    Workload,
    advise,
    advise_on_nodes,
    break_even,
    pays_from,
)
from specdecode_operator.enums import Precision, Slo, WorkloadKind
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.devices import Device, find_device
from specdecode_operator.sizing.geometry import Experts, ModelGeometry
from specdecode_operator.sizing.memory.budget import Budget, Pair, estimate
from specdecode_operator.sizing.pair import Parallelism, effective_batch, without_speculation
from specdecode_operator.sizing.placement import GpuPool, Row
from specdecode_operator.sizing.quantization_matrix import PlanOptions, candidate_rows

PairFactory = Callable[..., Pair]


def _device(product: str) -> Device:
    device = find_device(product)
    assert device is not None
    return device


H100 = _device("NVIDIA-H100-80GB-HBM3")
H200 = _device("NVIDIA-H200")


def _advice(pair: Pair, workload: Workload | None = None, device: Device = H100) -> dict[str, Advice]:
    return {advice.code: advice for advice in advise(pair, device, 2, workload or Workload())}


def test_draft_within_a_size_rule_gets_no_advice(make_pair: PairFactory, llama_1b: ModelGeometry) -> None:
    assert "draft-size" not in _advice(make_pair("FP8")), "8B for 70B is 1:8.8"
    assert "draft-size" not in _advice(replace(make_pair("FP8"), draft=llama_1b)), "1B for 70B is 1.8 %"


def test_too_large_draft_advice_names_both_size_rules(make_pair: PairFactory, llama_8b: ModelGeometry) -> None:
    advice = _advice(replace(make_pair(), target=llama_8b, draft=llama_8b))["draft-size"]
    assert advice.sentence.startswith("the draft has 100.0 % of the target's parameters")
    assert "1/8 to 1/12" in advice.sentence
    assert "1 to 5 %" in advice.sentence
    assert "too large: a proposal costs as much as the token that it saves" in advice.sentence


def test_draft_between_both_size_rules_gets_advice(
    make_pair: PairFactory, llama_8b: ModelGeometry, llama_1b: ModelGeometry
) -> None:
    large = replace(make_pair(), target=llama_8b, draft=llama_1b)
    assert "15.4 % of the target's parameters" in _advice(large)["draft-size"].sentence


def test_draft_of_another_family_is_named(make_pair: PairFactory, llama_8b: ModelGeometry) -> None:
    assert "draft-family" not in _advice(make_pair("FP8"))
    other = replace(llama_8b, name="org/other", architecture="MistralForCausalLM")
    advice = _advice(replace(make_pair("FP8"), draft=other))["draft-family"]
    assert "org/other (MistralForCausalLM)" in advice.sentence


def test_draft_and_target_memory_shares_get_advice(make_pair: PairFactory, llama_8b: ModelGeometry) -> None:
    quiet = _advice(make_pair("FP8"))
    assert not {"draft-memory", "target-memory"} & set(quiet), "9 % and 43 % are within the rules"
    assert "target weights use 83 %" in _advice(make_pair("BF16"))["target-memory"].sentence
    assert "quantize the target or split it" in _advice(make_pair("BF16"))["target-memory"].sentence
    assert "target-memory" not in _advice(make_pair("BF16"), device=H200)
    within = replace(H100, total_bytes=62 * GIB)
    assert "draft-memory" not in _advice(make_pair("INT4"), device=within), "12 % is within the rule"
    small = replace(H100, total_bytes=48 * GIB)
    large_draft = _advice(make_pair("INT4"), device=small)
    assert "draft weights use 16 %" in large_draft["draft-memory"].sentence
    assert "a smaller or quantized draft" in large_draft["draft-memory"].sentence


def test_draft_kv_advice_names_token_cost_and_break_even(make_pair: PairFactory) -> None:
    advice = _advice(make_pair("FP8"))["draft-kv"]
    assert "44 %" in advice.sentence
    assert "Break-even acceptance: 48 % when the cache is full, 22 % at low load" in advice.sentence


def test_break_even_above_100_percent_is_reported(make_pair: PairFactory) -> None:
    pair = replace(make_pair("FP8"), num_speculative_tokens=1)
    advice = _advice(pair, device=replace(H100, total_bytes=64 * GIB))["draft-kv"]
    assert "acceptance: above 100 % when the cache is full" in advice.sentence


def test_small_draft_gets_no_kv_cache_advice(make_pair: PairFactory, llama_1b: ModelGeometry) -> None:
    pair = replace(make_pair("FP8"), draft=llama_1b, target_precision=Precision.INT4)
    assert "draft-kv" not in _advice(pair)


@pytest.mark.parametrize(
    ("method", "version", "caching", "is_told"),
    [
        ("eagle3", "0.32.0", True, True),
        ("eagle3", "0.32.0", False, False),
        ("eagle3", "0.33.0", True, False),
        ("draft_model", "0.32.0", True, False),
    ],
)
def test_recomputed_prefix_block_gets_advice(
    make_pair: PairFactory, method: str, version: str, caching: bool, is_told: bool
) -> None:
    pair = make_pair("FP8")
    limits = replace(pair.limits, engine_version=version, prefix_caching=caching)
    advice = _advice(replace(pair, method=method, limits=limits)).get("prefix-cache")
    assert (advice is not None) == is_told
    if advice is not None:
        assert "recomputes the last cached block (16 tokens)" in advice.sentence


@pytest.mark.parametrize(
    ("model", "method", "words"),
    [
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "mtp", "states of a fixed size"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "ngram", ""),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "ngram", ""),
        ("Qwen/Qwen3-8B", "eagle3", ""),
    ],
    ids=["states", "no hidden states", "chunks and no hidden states", "every token"],
)
def test_unknown_prefix_cache_cost_gets_advice(make_pair: PairFactory, model: str, method: str, words: str) -> None:
    target = find_geometry(model)
    assert target is not None
    pair = make_pair("BF16", "BF16" if method == "eagle3" else None, engine_version="0.33.0")
    pair = replace(pair, target=target, method=method, num_speculative_tokens=2)
    advice = _advice(pair).get("prefix-cache-unknown")
    assert (advice is not None) == bool(words)
    if advice is not None:
        assert f"unknown for a model with {words}" in advice.sentence


def test_int4_target_gets_advice_to_try_int8_first(make_pair: PairFactory) -> None:
    assert "target-int8-first" in _advice(make_pair("INT4"))
    assert "target-int8-first" not in _advice(make_pair("INT8", "INT4"))


def test_unquantized_draft_gets_advice_to_quantize_it(make_pair: PairFactory) -> None:
    assert "quantize-draft" in _advice(make_pair("FP8", "BF16"))
    assert "quantize-draft" not in _advice(make_pair("FP8", "FP8"))
    assert "quantize-draft" not in _advice(make_pair("BF16", "BF16"), device=H200)


@pytest.mark.parametrize(
    ("temperature", "words"), [(0.0, "good"), (0.5, "good"), (0.6, None), (0.7, None), (0.71, "low"), (None, None)]
)
def test_temperature_advice(make_pair: PairFactory, temperature: float | None, words: str | None) -> None:
    advice = _advice(make_pair("FP8"), Workload(temperature=temperature)).get("temperature")
    assert (advice is None) == (words is None)
    if advice is not None and words is not None:
        assert words in advice.sentence


@pytest.mark.parametrize(
    ("changes", "temperature", "advised"),
    [({}, 0.6, True), ({}, 0.0, False), ({}, None, False), ({"samples_drafts": True}, 0.6, False),
     ({"maps_vocabulary": True}, 0.6, False)],
)  # fmt: skip
def test_draft_sampling_is_advised_for_requests_with_a_temperature(
    make_pair: PairFactory, changes: dict[str, bool], temperature: float | None, advised: bool
) -> None:
    pair = replace(make_pair("FP8"), **changes)
    assert ("draft-sampling" in _advice(pair, Workload(temperature=temperature))) is advised
    ngram = replace(pair, method="ngram", draft=None, draft_precision=None)
    assert "draft-sampling" not in _advice(ngram, Workload(temperature=temperature)), "it has no probabilities"


def test_ttft_slo_gets_first_token_advice(make_pair: PairFactory) -> None:
    assert "first-token" in _advice(make_pair("FP8"), Workload(primary_slo=Slo.TTFT))
    assert "first-token" not in _advice(make_pair("FP8"), Workload(primary_slo=Slo.TPOT))


def test_throughput_slo_gets_advice(make_pair: PairFactory) -> None:
    assert "throughput" in _advice(make_pair("FP8"), Workload(primary_slo=Slo.THROUGHPUT))
    assert "throughput" not in _advice(make_pair("FP8"), Workload(primary_slo=Slo.TPOT))


def test_usual_lengths_give_the_expected_concurrency(make_pair: PairFactory) -> None:
    pair = make_pair("FP8")
    advice = _advice(pair, Workload(prompt_tokens=1500, output_tokens=548))["usual-concurrency"]
    # 127,024 tokens less the null block's 16, in requests of 2,048.
    assert f"holds {127_008 // 2048} requests of 2,048 tokens" in advice.sentence
    assert "usual-concurrency" not in _advice(pair, Workload(prompt_tokens=100, output_tokens=28))
    assert "usual-concurrency" not in _advice(pair, Workload(prompt_tokens=1500))


@pytest.mark.parametrize("kind", list(WorkloadKind))
def test_workload_kind_advice(make_pair: PairFactory, kind: WorkloadKind) -> None:
    found = set(_advice(make_pair("FP8"), Workload(kind=kind)))
    assert ("mixed-workload" in found) == (kind is WorkloadKind.MIXED)
    assert ("prompt-lookup" in found) == (kind in (WorkloadKind.SUMMARIZATION, WorkloadKind.RAG))


@pytest.mark.parametrize(
    ("method", "draft_tokens", "sequences", "expected"),
    [
        ("draft_model", 5, 2048, 1170),
        ("draft_model", 7, 1024, 910),
        ("draft_model", 5, 256, 256),
        ("eagle3", 7, 2048, 1024),
        ("ngram", 7, 2048, 1024),
        ("dflash", 7, 2048, 1024),
        ("dspark", 7, 2048, 1024),
        ("none", 0, 256, 256),
    ],
)
def test_effective_batch(make_pair: PairFactory, method: str, draft_tokens: int, sequences: int, expected: int) -> None:
    pair = replace(make_pair(max_num_seqs=sequences), method=method, num_speculative_tokens=draft_tokens)
    assert effective_batch(pair) == expected
    said = _advice(replace(pair, target_precision=Precision.FP8)).get("effective-batch")
    assert (said is not None) == (expected < sequences and method != "none")
    assert said is None or said.sentence.startswith(f"only {expected} of maxNumSeqs {sequences} requests can decode in")


def test_logits_beyond_the_slack_get_advice_to_lower_max_num_seqs(make_pair: PairFactory) -> None:
    """K multiplies the logits and no profile sees it: the peers have no such term."""
    assert "sampler-logits" not in _advice(make_pair("FP8", max_num_seqs=1024))
    pair = make_pair("FP8", max_num_seqs=2048, memory_utilization_percent=97)
    advice = _advice(pair)["sampler-logits"]
    fitting = int(advice.sentence.partition("lower maxNumSeqs to ")[2].partition(",")[0])
    assert 0 < fitting < 2048
    for sequences, silent in ((fitting, True), (fitting + 1, False)):
        again = _advice(make_pair("FP8", max_num_seqs=sequences, memory_utilization_percent=97))
        assert ("sampler-logits" not in again) == silent


def test_logits_without_slack_get_advice_to_lower_utilization(make_pair: PairFactory) -> None:
    pair = make_pair("FP8", max_num_seqs=2048, memory_utilization_percent=100)
    sentence = _advice(pair)["sampler-logits"].sentence
    assert "lower gpuMemoryUtilizationPercent" in sentence


# From which acceptance on a draft pays for its share of the KV cache: counted in bytes that are read.


def _budgets(pair: Pair) -> tuple[Budget, Budget]:
    device = find_device("NVIDIA-H100-80GB-HBM3")
    assert device is not None
    return estimate(pair, device, 2), estimate(without_speculation(pair), device, 2)


@pytest.mark.parametrize("k", [3, 5, 12])
def test_break_even_equates_tokens_per_byte_read(make_pair: PairFactory, k: int) -> None:
    pair = replace(make_pair("FP8"), num_speculative_tokens=k)
    budget, alone = _budgets(pair)
    needed = break_even(pair, budget, alone)
    assert needed is not None
    assert needed.full_cache is not None
    target, draft = alone.target_weights_bytes, budget.draft_weights_bytes
    of_draft = budget.kv_bytes_per_token - alone.kv_bytes_per_token
    # A request is one token long here: a full cache holds as many.
    tokens, without = budget.kv_cache_tokens, alone.kv_cache_tokens
    read = target + tokens * alone.kv_bytes_per_token + k * (draft + tokens * of_draft)
    read_without = target + without * alone.kv_bytes_per_token
    given = tokens * (1 + needed.full_cache * k)
    assert given / read == pytest.approx(without / read_without)
    assert needed.few_requests is not None
    assert needed.few_requests == pytest.approx(draft / target, rel=1e-3)
    assert needed.full_cache > needed.few_requests


def test_draft_heavier_than_its_target_has_no_break_even(make_pair: PairFactory) -> None:
    pair = make_pair("INT4", "BF16")
    budget, alone = _budgets(pair)
    heavy = msgspec.structs.replace(budget, draft_weights_bytes=2 * alone.target_weights_bytes)
    needed = break_even(pair, heavy, alone)
    assert needed is not None
    assert (needed.few_requests, needed.full_cache) == (None, None)


def test_parallel_draft_reads_its_weights_once_per_step(make_pair: PairFactory) -> None:
    pair = make_pair("FP8")
    assert pair.draft is not None
    budget, alone = _budgets(pair)
    in_parallel = replace(pair, draft=replace(pair.draft, drafts_in_parallel=True))
    for at_once in (in_parallel, replace(pair, method="dflash")):
        needed = break_even(at_once, budget, alone)
        assert needed is not None
        share = budget.draft_weights_bytes / alone.target_weights_bytes
        assert needed.few_requests == pytest.approx(share / pair.num_speculative_tokens, rel=1e-3)


def test_no_break_even_without_tokens_drafts_or_weights(make_pair: PairFactory) -> None:
    pair = make_pair("FP8")
    budget, alone = _budgets(pair)
    assert break_even(pair, msgspec.structs.replace(budget, kv_cache_tokens=0), alone) is None
    assert break_even(replace(pair, num_speculative_tokens=0), budget, alone) is None
    assert break_even(pair, budget, msgspec.structs.replace(alone, target_weights_bytes=0)) is None


def test_mixture_of_experts_has_no_low_load_break_even(make_pair: PairFactory) -> None:
    """A step of few tokens reads a part of the experts, and one that verifies reads more of them."""
    pair = make_pair("FP8")
    budget, alone = _budgets(pair)
    layer = pair.target.layers[0]
    experts = replace(layer, feed_forward=Experts(num_experts=64, top_k=8, intermediate_size=1024))
    mixture = replace(pair, target=replace(pair.target, layers=(experts, *pair.target.layers[1:])))
    dense, needed = break_even(pair, budget, alone), break_even(mixture, budget, alone)
    assert dense is not None
    assert needed is not None
    assert (needed.few_requests, needed.full_cache) == (None, dense.full_cache)
    text = pays_from(needed)
    assert "low load" not in text
    assert "weights of all experts" in text


def test_low_load_break_even_is_reported_without_a_full_cache_one() -> None:
    assert "49 % at low load" in pays_from(BreakEven(few_requests=0.49, full_cache=None))


def test_one_byte_target_has_a_break_even(make_pair: PairFactory) -> None:
    pair = make_pair("FP8")
    budget, alone = _budgets(pair)
    assert break_even(pair, budget, msgspec.structs.replace(alone, target_weights_bytes=1)) is not None


# What is said of GPUs that share layers over a network.

NODES_OF_4 = (GpuPool("NVIDIA-H200", 4, 4),)


def row(pair: Pair, tensor: int, pipeline: int = 1) -> Row:
    (found,) = candidate_rows(pair, NODES_OF_4, tensor, PlanOptions(spread=Parallelism(pipeline=pipeline)))
    return found


def test_tensor_parallelism_over_nodes_gets_advice_with_a_fix(make_pair: Callable[..., Pair]) -> None:
    sentence = (
        "GPUs of 2 nodes share each layer and synchronize over the network in every layer, which is slow without"
        " InfiniBand or RoCE with GPUDirect; tensor 4, pipeline 2 synchronizes only once per stage, if the method"
        " supports pipeline parallelism"
    )
    said = Advice("layers-over-nodes", sentence)
    assert advise_on_nodes(row(make_pair("BF16", None), 8)) == (said,)


@pytest.mark.parametrize(("tensor", "pipeline"), [(4, 1), (4, 2), (2, 1)])
def test_tensor_parallelism_within_a_node_gets_no_advice(
    make_pair: Callable[..., Pair], tensor: int, pipeline: int
) -> None:
    assert advise_on_nodes(row(make_pair("BF16", None), tensor, pipeline)) == ()
