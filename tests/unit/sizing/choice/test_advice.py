"""Each rule of thumb: when it speaks, and when it is silent."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from specdecode_operator.deployment.advice import Advice, Workload, advise
from specdecode_operator.enums import Precision, Slo, WorkloadKind
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.devices import Device, find_device
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.memory.budget import Pair
from specdecode_operator.sizing.pair import effective_batch

PairFactory = Callable[..., Pair]


def _device(product: str) -> Device:
    device = find_device(product)
    assert device is not None
    return device


H100 = _device("NVIDIA-H100-80GB-HBM3")
H200 = _device("NVIDIA-H200")


def _advice(pair: Pair, workload: Workload | None = None, device: Device = H100) -> dict[str, Advice]:
    return {advice.code: advice for advice in advise(pair, device, 2, workload or Workload())}


def test_no_speculation_needs_no_advice(make_pair: PairFactory) -> None:
    everything = Workload(WorkloadKind.MIXED, 1.0, Slo.TTFT)
    assert _advice(make_pair("FP8", None), everything) == {}


def test_a_draft_within_either_rule_is_not_mentioned(make_pair: PairFactory, llama_1b: ModelGeometry) -> None:
    assert "draft-size" not in _advice(make_pair("FP8")), "8B for 70B is 1:8.8"
    assert "draft-size" not in _advice(replace(make_pair("FP8"), draft=llama_1b)), "1B for 70B is 1.8 %"


def test_a_draft_that_is_too_large_names_both_rules(make_pair: PairFactory, llama_8b: ModelGeometry) -> None:
    advice = _advice(replace(make_pair(), target=llama_8b, draft=llama_8b))["draft-size"]
    assert advice.sentence.startswith("the draft has 100.0 % of the target's parameters")
    assert "1/8 to 1/12" in advice.sentence
    assert "1 to 5 %" in advice.sentence
    assert "too large, a proposal costs as much as the token that it saves" in advice.sentence


def test_a_draft_between_both_rules_says_so(
    make_pair: PairFactory, llama_8b: ModelGeometry, llama_1b: ModelGeometry
) -> None:
    large = replace(make_pair(), target=llama_8b, draft=llama_1b)
    assert "15.4 % of the target's parameters" in _advice(large)["draft-size"].sentence


def test_another_family_is_named(make_pair: PairFactory, llama_8b: ModelGeometry) -> None:
    assert "draft-family" not in _advice(make_pair("FP8"))
    other = replace(llama_8b, name="org/other", architecture="MistralForCausalLM")
    advice = _advice(replace(make_pair("FP8"), draft=other))["draft-family"]
    assert "org/other (MistralForCausalLM)" in advice.sentence


def test_shares_of_memory(make_pair: PairFactory, llama_8b: ModelGeometry) -> None:
    quiet = _advice(make_pair("FP8"))
    assert not {"draft-memory", "target-memory"} & set(quiet), "9 % and 43 % are within the rules"
    assert "target weights take 83 %" in _advice(make_pair("BF16"))["target-memory"].sentence
    assert "quantize the target or split it" in _advice(make_pair("BF16"))["target-memory"].sentence
    assert "target-memory" not in _advice(make_pair("BF16"), device=H200)
    within = replace(H100, total_bytes=62 * GIB)
    assert "draft-memory" not in _advice(make_pair("INT4"), device=within), "12 % is within the rule"
    small = replace(H100, total_bytes=48 * GIB)
    large_draft = _advice(make_pair("INT4"), device=small)
    assert "draft weights take 16 %" in large_draft["draft-memory"].sentence
    assert "a smaller or quantized draft" in large_draft["draft-memory"].sentence


def test_what_is_quantized_is_not_told_to_be_quantized(make_pair: PairFactory) -> None:
    advice = _advice(make_pair("FP8", "FP8"), device=replace(H100, total_bytes=26 * GIB))
    assert "quantize" not in advice["target-memory"].sentence
    assert "split it over more GPUs" in advice["target-memory"].sentence
    assert "quantize" not in advice["draft-memory"].sentence


def test_the_draft_costs_44_percent_of_the_tokens(make_pair: PairFactory) -> None:
    advice = _advice(make_pair("FP8"))["draft-kv"]
    assert "44 %" in advice.sentence
    assert "at least 48 % acceptance to pay for that while the cache is full (22 % with few" in advice.sentence


def test_where_no_acceptance_pays_for_the_draft_that_is_said(make_pair: PairFactory) -> None:
    pair = replace(make_pair("FP8"), num_speculative_tokens=1)
    advice = _advice(pair, device=replace(H100, total_bytes=64 * GIB))["draft-kv"]
    assert "not even 100 % acceptance pays for that while the cache is full" in advice.sentence


def test_a_small_draft_costs_too_few_tokens_to_mention(make_pair: PairFactory, llama_1b: ModelGeometry) -> None:
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
def test_a_block_of_each_prefix_that_a_draft_has_computed_again_is_told(
    make_pair: PairFactory, method: str, version: str, caching: bool, is_told: bool
) -> None:
    pair = make_pair("FP8")
    limits = replace(pair.limits, engine_version=version, prefix_caching=caching)
    advice = _advice(replace(pair, method=method, limits=limits)).get("prefix-cache")
    assert (advice is not None) == is_told
    if advice is not None:
        assert "the last block of 16 tokens that agrees is computed again" in advice.sentence


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
def test_what_was_not_read_of_prefixes_is_called_unknown(
    make_pair: PairFactory, model: str, method: str, words: str
) -> None:
    target = find_geometry(model)
    assert target is not None
    pair = make_pair("BF16", "BF16" if method == "eagle3" else None, engine_version="0.33.0")
    pair = replace(pair, target=target, method=method, num_speculative_tokens=2)
    advice = _advice(pair).get("prefix-cache-unknown")
    assert (advice is not None) == bool(words)
    if advice is not None:
        assert f"not known for a model with {words}" in advice.sentence


def test_eight_bits_before_four_on_the_target(make_pair: PairFactory) -> None:
    assert "target-int8-first" in _advice(make_pair("INT4"))
    assert "target-int8-first" not in _advice(make_pair("INT8", "INT4"))


def test_the_draft_is_the_one_to_quantize(make_pair: PairFactory) -> None:
    assert "quantize-draft" in _advice(make_pair("FP8", "BF16"))
    assert "quantize-draft" not in _advice(make_pair("FP8", "FP8"))
    assert "quantize-draft" not in _advice(make_pair("BF16", "BF16"), device=H200)


@pytest.mark.parametrize(
    ("temperature", "words"), [(0.0, "good"), (0.5, "good"), (0.6, None), (0.7, None), (0.71, "poor"), (None, None)]
)
def test_temperature(make_pair: PairFactory, temperature: float | None, words: str | None) -> None:
    advice = _advice(make_pair("FP8"), Workload(temperature=temperature)).get("temperature")
    assert (advice is None) == (words is None)
    if advice is not None and words is not None:
        assert words in advice.sentence


def test_a_promise_on_the_first_token(make_pair: PairFactory) -> None:
    assert "first-token" in _advice(make_pair("FP8"), Workload(primary_slo=Slo.TTFT))
    assert "first-token" not in _advice(make_pair("FP8"), Workload(primary_slo=Slo.TPOT))


def test_a_promise_on_throughput(make_pair: PairFactory) -> None:
    assert "throughput" in _advice(make_pair("FP8"), Workload(primary_slo=Slo.THROUGHPUT))
    assert "throughput" not in _advice(make_pair("FP8"), Workload(primary_slo=Slo.TPOT))


def test_usual_lengths_tell_how_many_requests_run_at_once(make_pair: PairFactory) -> None:
    pair = make_pair("FP8")
    advice = _advice(pair, Workload(prompt_tokens=1500, output_tokens=548))["usual-concurrency"]
    # 127,024 tokens less the null block's 16, in requests of 2,048.
    assert f"holds {127_008 // 2048} requests of 2,048 tokens" in advice.sentence
    assert "usual-concurrency" not in _advice(pair, Workload(prompt_tokens=100, output_tokens=28))
    assert "usual-concurrency" not in _advice(pair, Workload(prompt_tokens=1500))


@pytest.mark.parametrize("kind", list(WorkloadKind))
def test_kinds_of_workload(make_pair: PairFactory, kind: WorkloadKind) -> None:
    found = set(_advice(make_pair("FP8"), Workload(kind=kind)))
    assert ("mixed-workload" in found) == (kind is WorkloadKind.MIXED)
    assert ("prompt-lookup" in found) == (kind in (WorkloadKind.SUMMARIZATION, WorkloadKind.RAG))


def test_ngram_is_not_proposed_to_ngram(make_pair: PairFactory) -> None:
    pair = replace(make_pair("FP8", None), method="ngram", num_speculative_tokens=5)
    assert "prompt-lookup" not in _advice(pair, Workload(kind=WorkloadKind.RAG))


def test_nothing_known_of_the_workload_gives_no_advice_on_it(make_pair: PairFactory) -> None:
    assert not {"temperature", "first-token", "mixed-workload", "prompt-lookup"} & set(_advice(make_pair("FP8")))


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


def test_logits_that_overrun_the_slack_name_a_smaller_batch(make_pair: PairFactory) -> None:
    """K multiplies the logits and no profile sees it: the peers have no such term."""
    assert "sampler-logits" not in _advice(make_pair("FP8", max_num_seqs=1024))
    pair = make_pair("FP8", max_num_seqs=2048, memory_utilization_percent=97)
    advice = _advice(pair)["sampler-logits"]
    fitting = int(advice.sentence.partition("lower maxNumSeqs to ")[2].partition(",")[0])
    assert 0 < fitting < 2048
    for sequences, silent in ((fitting, True), (fitting + 1, False)):
        again = _advice(make_pair("FP8", max_num_seqs=sequences, memory_utilization_percent=97))
        assert ("sampler-logits" not in again) == silent


def test_logits_with_no_slack_at_all(make_pair: PairFactory) -> None:
    pair = make_pair("FP8", max_num_seqs=2048, memory_utilization_percent=100)
    sentence = _advice(pair)["sampler-logits"].sentence
    assert "lower gpuMemoryUtilizationPercent" in sentence
