"""Draft heads by the class that vLLM makes of them; engine_answers.jsonl has what vLLM itself holds of each class."""

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.enums import Method, Precision
from specdecode_operator.sizing.catalogue import find_geometry, is_variant, made_for, published_heads
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.families.architectures import head_from_config
from specdecode_operator.sizing.families.draft_heads import DRAFT_CLASSES, method_of_head, missing_class
from specdecode_operator.sizing.memory.activation import proposing_bytes
from specdecode_operator.sizing.memory.buffers import state_bytes
from specdecode_operator.sizing.memory.kv_cache import cached_layers
from specdecode_operator.sizing.pair import EngineLimits, Pair, Parallelism, loaded_draft
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.weights import copied_bytes, parameter_count, weight_bytes
from tests.engine.oracle_cases import HEADS

Config = dict[str, Any]
HEAD: Config = {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "draft_vocab_size": 32_000,
    "max_position_embeddings": 40_960,
}
LATENT, DFLASH2 = HEADS["MLA head for Kimi-K2.5"], HEADS["DFlash 2 for Qwen3.5-27B"]
ASSISTANT = HEADS["assistant of Gemma-4-26B-A4B"]


def of_class(kind: str) -> list[str]:
    """Names in the registries of vLLM that stand for a class, but the one that the speculators library writes."""
    return sorted(name for name, its in DRAFT_CLASSES.items() if its == kind and name != "PEagleDraftModel")


@pytest.mark.parametrize(
    ("kind", "whole"),
    # As constructed by vLLM 0.32, at tensor 1 and 2.
    [
        ("Eagle3LlamaForCausalLM", (2_043_963_392, 1_072_457_728)),
        ("Eagle3Qwen3ForCausalLM", (2_043_963_904, 1_072_458_240)),
    ],
)
def test_heads_of_one_class_are_sized_alike(kind: str, whole: tuple[int, int]) -> None:
    assert len(of_class(kind)) > 1
    for name in of_class(kind):
        head = head_from_config("head", {**HEAD, "architectures": [name]}, "eagle3")
        assert method_of_head(head) is Method.EAGLE3
        assert tuple(weight_bytes(head, Precision.BF16, Split(tensor)) for tensor in (1, 2)) == whole


@pytest.mark.parametrize(
    ("architecture", "method", "version", "remedy"),
    [
        ("Eagle3Qwen3vlForCausalLM", "eagle3", "0.28", None),
        ("LlamaForCausalLMEagle3", "eagle3", "0.33", None),
        ("DFlash2DraftModel", "dflash", "0.28", None),
        ("PEagleDraftModel", "eagle3", "0.33", None),
        ("MuseGlimmerAssistantModel", "dflash", "0.33", None),
        ("Qwen3OmniDSparkModel", "dspark", "0.28", "use engine.version 0.29 or later"),
        ("PeagleQwen3ForCausalLM", "eagle3", "0.33", "write Eagle3Qwen3ForCausalLM into architectures"),
        ("PeagleLlamaForCausalLM", "eagle3", "0.30", "write Eagle3LlamaForCausalLM into architectures"),
        ("Qwen3ForCausalLM", "eagle3", "0.33", None),
        ("DFlash2DraftModel", "dflash", "0.24", None),
    ],
)
def test_the_registry_of_a_version_decides(architecture: str, method: str, version: str, remedy: str | None) -> None:
    found = missing_class(architecture, method, version)
    assert (found is None) == (remedy is None)
    assert found is None or (remedy or "") in found


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
def test_a_latent_head_that_the_engine_takes_for_layers_of_prediction(kind: str) -> None:
    with pytest.raises(GeometryError, match="model_type"):
        head_from_config("head", {**LATENT, "model_type": kind}, "eagle3")


def test_windows_of_a_head_with_normed_queries() -> None:
    config = {**HEAD, "architectures": ["Eagle3Qwen3ForCausalLM"], "sliding_window": 512}
    windowed = head_from_config("head", {**config, "layer_types": ["sliding_attention"]}, "eagle3")
    assert [mixer.window_tokens for mixer in windowed.attentions] == [512]  # type: ignore[union-attr]
    assert [mixer.window_tokens for mixer in head_from_config("head", config, "eagle3").attentions] == [None]  # type: ignore[union-attr]


def test_dflash_2_is_dflash_with_convolutions_and_a_selector() -> None:
    plain = head_from_config("head", {**DFLASH2, "architectures": ["DFlashDraftModel"]}, "dflash")
    second = head_from_config("head", DFLASH2, "dflash")
    convolution = 2 * 2 * (5120 + 5120 // 16 * 5120)
    selector = 256 * (2 * 248_320 + 5120)
    assert parameter_count(second) - parameter_count(plain) == 5 * 2 * convolution + selector
    assert second.head is not None
    assert second.head.most_tokens == 7
    inside = {key: value for key, value in DFLASH2.items() if key != "block_size"}
    inside["dflash_config"] = {**DFLASH2["dflash_config"], "block_size": 4}
    assert head_from_config("head", inside, "dflash").head.most_tokens == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("changed", [{"conv_group_size": 48}, {"conv_group_size": None}, {"conv_kernel_size": None}])
def test_convolutions_that_the_engine_refuses(changed: Config) -> None:
    with pytest.raises(GeometryError, match=next(iter(changed))):
        head_from_config("head", {**DFLASH2, "dflash_config": {**DFLASH2["dflash_config"], **changed}}, "dflash")


def pair_of(limits: EngineLimits, target: str, method: str, config: Config, k: int, **more: Any) -> Pair:
    geometry = find_geometry(target)
    assert geometry is not None
    draft = head_from_config("head", config, method)
    return Pair(geometry, Precision.BF16, draft, Precision.BF16, method, k, limits, **more)


def test_dflash_2_keeps_its_logits_in_32_bits(limits: EngineLimits) -> None:
    plain = {**DFLASH2, "architectures": ["DFlashDraftModel"]}
    kept = []
    for config in (plain, DFLASH2):
        pair = pair_of(limits, "Qwen/Qwen3.5-27B", "dflash", config, 7)
        kept.append(state_bytes(replace(pair, samples_drafts=True), Parallelism(1)) - state_bytes(pair, Parallelism(1)))
    assert kept == [limits.max_num_seqs * 7 * 248_320 * width for width in (2, 4)]


def test_an_assistant_reads_the_targets_cache_and_keeps_none(limits: EngineLimits) -> None:
    pair = pair_of(limits, "google/gemma-4-26B-A4B", "mtp", ASSISTANT, 4)
    loaded = loaded_draft(pair)
    assert loaded is not None
    assert method_of_head(loaded[0]) is Method.MTP
    alone, beside = (cached_layers(pair.target, draft, 1, 1, None) for draft in (None, loaded[0]))
    assert alone == beside
    assert pair.prediction_modules == 0


def test_an_assistant_with_centroids_copies_rows_of_its_output_head(limits: EngineLimits) -> None:
    plain = head_from_config("head", ASSISTANT, "mtp")
    ordered = head_from_config("head", {**ASSISTANT, "use_ordered_embeddings": True}, "mtp")
    grown = weight_bytes(ordered, Precision.BF16, Split(1)) - weight_bytes(plain, Precision.BF16, Split(1))
    assert grown == 2048 * 1024 * 2 + 262_144 * 8
    assert [copied_bytes(ordered, tensor) for tensor in (1, 2)] == [0, 262_144 * 1024 * 2]
    first, second = (
        pair_of(limits, "google/gemma-4-26B-A4B", "mtp", {**ASSISTANT, "use_ordered_embeddings": flag}, 4)
        for flag in (False, True)
    )
    more = proposing_bytes(second, ordered, 1) - proposing_bytes(first, plain, 1)
    assert more == limits.max_num_seqs * 32 * 128 * 1024 * 2


def test_layers_of_prediction_of_another_checkpoint_are_in_its_sizes(limits: EngineLimits) -> None:
    target = find_geometry("Qwen/Qwen3.5-27B")
    assert target is not None
    own = Pair(target, Precision.BF16, None, None, "mtp", 3, limits)
    other = replace(own, draft=target, draft_precision=Precision.BF16)
    drafts = [loaded_draft(pair) for pair in (own, other)]
    assert drafts[0] is not None
    assert drafts[1] is not None
    assert weight_bytes(*drafts[0], Split(1)) == weight_bytes(*drafts[1], Split(1))
    assert drafts[1][0].head == drafts[0][0].head
    assert own.prediction_modules == other.prediction_modules == 1


@pytest.mark.parametrize(
    ("model", "of", "is_one"),
    [
        ("RedHatAI/Qwen3-8B-FP8-dynamic", "Qwen/Qwen3-8B", True),
        ("nvidia/Qwen3-8B-NVFP4", "Qwen/Qwen3-8B", True),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct", True),
        ("RedHatAI/Llama-3.1-8B-Instruct-quantized.w4a16", "meta-llama/Llama-3.1-8B-Instruct", True),
        ("me/qwen3-8b-chat", "Qwen/Qwen3-8B", True),
        ("me/Qwen3-8B_chat", "Qwen/Qwen3-8B", True),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8", False),
        ("Qwen/Qwen3-14B", "Qwen/Qwen3-8B", False),
        ("Qwen/Qwen3.5-27B", "Qwen/Qwen3.6-27B", False),
        ("nvidia/Gemma-4-26B-A4B-NVFP4", "google/gemma-4-26B-A4B-it", True),
        ("google/gemma-4-26B-A4B", "google/gemma-4-26B-A4B-it", False),
        # A draft model of its own serves both, but they are different models.
        ("Qwen/Qwen3-14B", "Qwen/Qwen3-32B", False),
    ],
)
def test_variants_of_a_model_go_by_its_name(model: str, of: str, is_one: bool) -> None:
    assert is_variant(model, of) is is_one


def test_what_a_head_was_made_for_is_named_once() -> None:
    published = published_heads()[0]
    head = find_geometry("RedHatAI/Qwen3-14B-speculator.eagle3")
    assert head is not None
    assert head.head is not None
    target, other = published.targets[0], "org/other"
    told, also = (
        replace(head, name=published.head, head=replace(head.head, verifier=verifier)) for verifier in (target, other)
    )
    assert made_for(told) == published.targets
    assert made_for(also) == (*published.targets, other)
