"""Draft heads of each class."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from specdecode_operator.enums import Method, Precision
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.catalogue import find_entry, find_geometry, is_variant, made_for, published_heads
from specdecode_operator.sizing.errors import GeometryError, PlanError
from specdecode_operator.sizing.families.architectures import geometry_from_config, head_from_config
from specdecode_operator.sizing.families.draft_heads import DRAFT_CLASSES, method_of_head, missing_class
from specdecode_operator.sizing.geometry import ModelGeometry, SelfAttention
from specdecode_operator.sizing.memory.activation import (
    activation_bytes,
    proposing_bytes,
    refining_bytes,
    refining_scratch_bytes,
)
from specdecode_operator.sizing.memory.buffers import state_bytes
from specdecode_operator.sizing.memory.kv_cache import (
    cache_layout,
    cached_layers,
    kv_bytes_per_token,
    pool_blocks,
    pool_capacity,
    stage_weights,
)
from specdecode_operator.sizing.pair import EngineLimits, Pair, Parallelism, effective_batch, extra_slots, loaded_draft
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.version_rules import Runner
from specdecode_operator.sizing.weights import copied_bytes, loaded_head_bytes, parameter_count, weight_bytes
from tests.engine.oracle_cases import HEADS

SPACE_BYTES = 20 * 2**30
TENSORS = (1, 2, 4, 8)
SPECFORGE = "sgl-project/SpecForge:configs/"

Config = dict[str, Any]
PairMaker = Callable[..., Pair]

MEDUSA: Config = {"architectures": ["MedusaModel"], "hidden_size": 4096, "vocab_size": 128256, "num_heads": 4}
LLAMA, QWEN_8B, QWEN_4B = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "Qwen/Qwen3-4B"


def catalogued(model_id: str) -> ModelGeometry:
    geometry = find_geometry(model_id)
    assert geometry is not None
    return geometry


def specforge(name: str) -> Config:
    entry = find_entry(SPECFORGE + name)
    assert entry is not None
    return dict(entry.config)


def dspark(name: str) -> Config:
    """The file with its options where vLLM reads them."""
    raw = specforge(name)
    return {**raw, **raw["dflash_config"]}


@pytest.fixture(scope="session")
def make(limits: EngineLimits) -> PairMaker:
    """Return a maker of pairs: target, method, tokens, config.json of the draft, limits by keyword."""

    def pair(target_id: str, method: str, tokens: int, head: Config | None = None, **changed: Any) -> Pair:
        target = catalogued(target_id)
        draft = None if head is None else head_from_config("head", head, method)
        precision = None if draft is None else Precision.BF16
        limited = replace(limits, **{"max_num_seqs": 1024, "kv_cache_element_bytes": 2, **changed})
        served = target.checkpoint_precision or Precision.BF16
        return Pair(target, served, draft, precision, method, tokens, limited)

    return pair


def built_and_loaded(pair: Pair, tensor: int) -> tuple[int, int]:
    """Bytes of the draft as constructed, and once it shares the target's tables."""
    loaded = loaded_draft(pair)
    assert loaded is not None
    return weight_bytes(*loaded, Split(tensor)), loaded_head_bytes(*loaded, Split(tensor))


MTP_BYTES = {
    "deepseek-ai/DeepSeek-V3": [
        (15_424_227_552, 11_717_511_392),
        (7_824_318_944, 5_970_960_864),
        (4_024_364_640, 3_097_685_600),
        (2_124_387_488, 1_661_047_968),
    ],
    "deepseek-ai/DeepSeek-V3.2": [
        (15_439_567_072, 11_732_850_912),
        (7_839_658_464, 5_986_300_384),
        (4_039_704_160, 3_113_025_120),
        (2_139_727_008, 1_676_387_488),
    ],
    "zai-org/GLM-5.2": [
        (23_712_173_056, 19_905_842_176),
        (11_958_684_672, 10_055_519_232),
        (6_081_940_480, 5_130_357_760),
        (3_143_568_384, 2_667_777_024),
    ],
    "zai-org/GLM-5-FP8": [
        (13_839_750_592, 10_033_419_712),
        (7_010_221_248, 5_107_055_808),
        (3_595_456_576, 2_643_873_856),
        (1_888_074_240, 1_412_282_880),
    ],
    "Qwen/Qwen3-Next-80B-A3B-Instruct": [
        (4_545_602_560, 3_300_942_848),
        (2_273_862_656, 1_651_532_800),
        (1_139_041_280, 827_876_352),
        (571_630_592, 416_048_128),
    ],
}
"""By target: bytes as constructed and once loaded, at tensor 1, 2, 4 and 8."""


@pytest.mark.parametrize("target", MTP_BYTES)
def test_mtp_draft_bytes_per_tensor_parallel_size(make: PairMaker, target: str) -> None:
    pair = make(target, "mtp", 1)
    assert [built_and_loaded(pair, tensor) for tensor in TENSORS] == MTP_BYTES[target]


def test_ernie_mtp_module_is_a_llama_layer_with_two_norms(make: PairMaker) -> None:
    """Two norms, a projection and a LlamaDecoderLayer, without a norm before the output head (vLLM, ernie_mtp.py)."""
    pair = make("baidu/ERNIE-4.5-21B-A3B-PT", "mtp", 1)
    width, feed_forward, queries, keys = 2560, 12288, 20 * 128, 4 * 128
    layer = 2 * width * queries + 2 * width * keys + 3 * width * feed_forward + 2 * width
    around = 2 * width * width + 2 * width
    vocabularies = 2 * 103424 * width
    built, loaded = built_and_loaded(pair, 1)
    assert (built, loaded) == (2 * (layer + around + vocabularies), 2 * (layer + around))


def test_mtp_layers_excluded_from_quantization_are_16_bit(make: PairMaker) -> None:
    """NVIDIA's GLM-5 in NVFP4 excludes layer 78, which is the one that predicts."""
    assert built_and_loaded(make("nvidia/GLM-5-NVFP4", "mtp", 1), 1) == (23_712_173_064, 19_905_842_184)


@pytest.mark.parametrize(
    ("target", "tokens"),
    [
        ("deepseek-ai/DeepSeek-V3.2", (4214, 269_696)),
        ("zai-org/GLM-5.2", (3572, 228_608)),
        ("zai-org/GLM-5-FP8", (3307, 211_648)),
        ("deepseek-ai/DeepSeek-V3", (18_791, 300_656)),
    ],
)
def test_mtp_layers_are_in_the_kv_cache(make: PairMaker, target: str, tokens: tuple[int, int]) -> None:
    layout = cache_layout(make(target, "mtp", 1), Parallelism())
    blocks = pool_blocks(layout, [SPACE_BYTES])
    assert (blocks, pool_capacity(layout[0], blocks, 8192).tokens) == tokens


@pytest.mark.parametrize(
    ("target", "on_two", "on_eight"),
    [
        ("deepseek-ai/DeepSeek-V3", 5_970_960_864, 1_661_047_968),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 1_651_532_800, 416_048_128),
    ],
)
def test_mtp_experts_follow_expert_parallelism(make: PairMaker, target: str, on_two: int, on_eight: int) -> None:
    splits = [Parallelism(tensor, expert=True) for tensor in (2, 8)]
    weights = [stage_weights(make(target, "mtp", 1), split)[0].draft_bytes for split in splits]
    assert weights == [on_two, on_eight]


@pytest.mark.parametrize("target", [LLAMA, "moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2-Instruct"])
def test_mtp_is_refused_for_targets_without_mtp_layers(make: PairMaker, target: str) -> None:
    with pytest.raises(PlanError) as caught:
        loaded_draft(make(target, "mtp", 1))
    assert (caught.value.field, caught.value.value) == ("speculation.method", "mtp")
    assert target in caught.value.message
    assert "use eagle3 or draft_model" in caught.value.message


@pytest.mark.parametrize(
    ("target", "parameters"),
    [
        # vllm-project/recipes@01b04887fd36:models/deepseek-ai/DeepSeek-V4.1-Flash.yaml: "roughly 14B".
        ("deepseek-ai/DeepSeek-V4.1-Flash", 14e9),
        # Three stages of 256 experts with three matrices of 4096 x 2048.
        ("deepseek-ai/DeepSeek-V4-Flash-DSpark", 19.3e9),
    ],
)
def test_stages_of_dspark_are_counted_as_the_draft(make: PairMaker, target: str, parameters: float) -> None:
    pair = make(target, "dspark", 5)
    without, split = make(target, "none", 0), Parallelism(2)
    (weights,), (alone,) = stage_weights(pair, split), stage_weights(without, split)
    # A rank has half of the stages, mostly in 4 bits with a scale of 8 bits per 32. The estimate is the larger one.
    known = parameters / 2 * (0.5 + 1 / 32)
    assert known < weights.draft_bytes < 1.25 * known
    assert (weights.target_bytes, alone.draft_bytes) == (alone.target_bytes, 0)
    assert kv_bytes_per_token(pair, split) > kv_bytes_per_token(without, split)


def test_mtp_is_refused_for_checkpoints_with_stages_of_dspark(make: PairMaker) -> None:
    with pytest.raises(PlanError, match="use dspark, because the checkpoint contains DSpark stages"):
        loaded_draft(make("deepseek-ai/DeepSeek-V4.1-Flash", "mtp", 3))


@pytest.mark.parametrize(("tokens", "allowed"), [(1, True), (2, True), (3, False), (4, True), (5, False)])
def test_tokens_beyond_the_mtp_modules_must_be_a_multiple(make: PairMaker, tokens: int, allowed: bool) -> None:
    pair = make("deepseek-ai/DeepSeek-V3", "mtp", tokens)
    pair = replace(pair, target=replace(pair.target, mtp_layers=2))
    if allowed:
        assert loaded_draft(pair) is not None
        return
    with pytest.raises(PlanError) as caught:
        loaded_draft(pair)
    assert (caught.value.field, caught.value.value) == ("speculation.numSpeculativeTokens", tokens)
    assert f"write {tokens - 1}, or another multiple of 2" in caught.value.message


@pytest.mark.parametrize(
    ("target", "method", "head", "built", "loaded"),
    [
        (
            QWEN_8B,
            "dflash",
            specforge("qwen3-8b-dflash.json"),
            [4_586_580_480, 2_377_230_848, 1_272_556_032, 720_218_624],
            [2_097_261_056, 1_132_571_136, 650_226_176, 409_053_696],
        ),
        (
            QWEN_4B,
            "dflash",
            specforge("qwen3-4b-dflash.json"),
            [2_630_684_160, 1_348_144_640, 706_874_880, 386_240_000],
            [1_074_859_520, 570_232_320, 317_918_720, 191_761_920],
        ),
        (
            QWEN_8B,
            "dspark",
            dspark("qwen3-8b-dspark.json"),
            [4_742_180_356, 2_532_830_724, 1_428_155_908, 875_818_500],
            [2_252_860_932, 1_288_171_012, 805_826_052, 564_653_572],
        ),
        (
            QWEN_4B,
            "dspark",
            dspark("qwen3-4b-dspark.json"),
            [2_786_277_892, 1_503_738_372, 862_468_612, 541_833_732],
            [1_230_453_252, 725_826_052, 473_512_452, 347_355_652],
        ),
        (
            "Qwen/Qwen3-30B-A3B",
            "eagle3",
            specforge("qwen3-30B-A3B-eagle3.1.json"),
            [988_567_552, 507_009_024, 266_229_760, 146_888_704],
            [366_237_696, 195_844_096, 110_647_296, 69_097_472],
        ),
    ],
    ids=["dflash 8B", "dflash 4B", "dspark 8B", "dspark 4B", "eagle 3.1"],
)
def test_head_bytes_per_tensor_parallel_size(
    make: PairMaker, target: str, method: str, head: Config, built: list[int], loaded: list[int]
) -> None:
    pair = make(target, method, 7, head)
    assert [built_and_loaded(pair, tensor) for tensor in TENSORS] == list(zip(built, loaded, strict=True))


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_block_head_layers_are_in_the_kv_cache(make: PairMaker, method: str) -> None:
    config = specforge("qwen3-8b-dflash.json") if method == "dflash" else dspark("qwen3-8b-dspark.json")
    for tensor, known in ((1, (7992, 127_872)), (8, (63_937, 1_022_992))):
        layout = cache_layout(make(QWEN_8B, method, 7, config), Parallelism(tensor))
        blocks = pool_blocks(layout, [SPACE_BYTES])
        assert [group.num_layers for group in layout[0].groups] == [36 + 5]
        assert (blocks, pool_capacity(layout[0], blocks, 8192).tokens) == known


def test_sliding_window_of_a_block_head_limits_its_kv_cache(make: PairMaker) -> None:
    config = specforge("qwen3-8b-dflash.json")
    config |= {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 2048}
    groups = cache_layout(make(QWEN_8B, "dflash", 7, config), Parallelism())[0].groups
    assert sum(group.num_layers for group in groups if group.held_tokens) == 4


def test_head_of_another_width_does_not_share_embeddings(make: PairMaker) -> None:
    """The head for a 4B model beside a 27B one: vLLM shares nothing."""
    pair = make("Qwen/Qwen3.5-27B", "dflash", 15, specforge("qwen3.5-4b-dflash.json"))
    assert built_and_loaded(pair, 1) == (3_617_656_320, 3_617_656_320)


def test_block_heads_copy_their_key_and_value_projections(make: PairMaker) -> None:
    pair = make(QWEN_8B, "dflash", 7, specforge("qwen3-8b-dflash.json"))
    loaded = loaded_draft(pair)
    assert loaded is not None
    copied = 5 * (2 * 8 * 128 * 4096 + 128) * 2
    assert copied_bytes(loaded[0], 1) == copied
    weights = stage_weights(pair, Parallelism())[0]
    assert weights.draft_bytes == 2_097_261_056 + copied


@pytest.mark.parametrize(
    ("target", "method", "head", "embedding", "weights"),
    [
        # The target holds its embedding on every stage.
        ("openai/gpt-oss-120b", "eagle3", "gpt-oss-120B-eagle3.json", 0, 615_539_200),
        ("Qwen/Qwen3-4B", "dflash", "qwen3-4b-dflash.json", 0, 1_074_859_520),
        # vLLM makes a second one for the target, which is counted as the head's.
        (LLAMA, "eagle3", "llama3-8B-eagle3.json", 1_050_673_152, 849_635_328),
        (QWEN_8B, "dflash", "qwen3-8b-dflash.json", 1_244_659_712, 2_097_261_056),
        # MTP layers never share it over stages.
        ("deepseek-ai/DeepSeek-V3", "mtp", None, 1_853_358_080, 11_717_511_392),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "mtp", None, 622_329_856, 3_300_942_848),
    ],
)
def test_embedding_of_a_head_on_the_second_pipeline_stage(
    make: PairMaker, target: str, method: str, head: str | None, embedding: int, weights: int
) -> None:
    pair = make(target, method, 1, specforge(head) if head else None)
    loaded = loaded_draft(pair)
    assert loaded is not None
    own_ropes = sum(rope.size_bytes(2) for rope in loaded[0].ropes if rope not in pair.target.ropes)
    on_stages = stage_weights(pair, Parallelism(pipeline=2))
    assert on_stages[0].draft_bytes == 0
    assert on_stages[1].draft_bytes == weights + embedding + own_ropes + copied_bytes(loaded[0], 1)


@pytest.mark.parametrize(
    ("changes", "tokens", "tensor", "size_bytes"),
    [
        ({}, 4, 1, 4_336_910_336),
        ({}, 4, 8, 659_554_304),
        ({}, 1, 1, 1_084_227_584),
        ({}, 2, 1, 2_168_455_168),
        ({"vocab_size": 32000}, 4, 1, 4_336_910_336),
        ({"original_lm_head": True}, 4, 1, 1_184_890_880),
        ({"original_lm_head": True, "truncated_vocab_size": 32000}, 4, 1, 396_361_728),
        ({"num_hidden_layers": 2, "medusa_fc_bias": True}, 4, 2, 2_369_847_296),
    ],
)
def test_medusa_bytes_grow_with_heads_and_tokens(
    make: PairMaker, changes: Config, tokens: int, tensor: int, size_bytes: int
) -> None:
    pair = make(LLAMA, "medusa", tokens, MEDUSA | changes)
    assert built_and_loaded(pair, tensor) == (size_bytes, size_bytes)
    assert cache_layout(pair, Parallelism())[0].groups[0].num_layers == 32


def test_old_medusa_config_is_sized(make: PairMaker) -> None:
    pair = make(LLAMA, "medusa", 4, {"medusa_num_heads": 4, "medusa_num_layers": 1})
    assert built_and_loaded(pair, 1)[0] == 4_336_910_336


@pytest.mark.parametrize(
    ("method", "head", "most"),
    [
        ("medusa", MEDUSA, 4),
        ("dflash", specforge("qwen3-8b-dflash.json"), 15),
        ("dspark", dspark("qwen3-8b-dspark.json"), 7),
    ],
)
def test_more_tokens_than_the_head_can_propose_are_refused(
    make: PairMaker, method: str, head: Config, most: int
) -> None:
    target = LLAMA if method == "medusa" else QWEN_8B
    assert loaded_draft(make(target, method, most, head)) is not None
    with pytest.raises(PlanError) as caught:
        loaded_draft(make(target, method, most + 1, head))
    assert (caught.value.field, caught.value.value) == ("speculation.numSpeculativeTokens", most + 1)
    assert f"write {most} or less" in caught.value.message


@pytest.mark.parametrize(
    ("method", "head", "slots", "batch"),
    [("dflash", specforge("qwen3-8b-dflash.json"), 0, 1024), ("dspark", dspark("qwen3-8b-dspark.json"), 0, 1024)],
)
def test_block_heads_take_no_extra_slots_of_the_batch(
    make: PairMaker, method: str, head: Config, slots: int, batch: int
) -> None:
    pair = make(QWEN_8B, method, 7, head)
    assert (extra_slots(pair), effective_batch(pair)) == (slots, batch)


def test_eagle_rotary_table_covers_max_model_len(make: PairMaker) -> None:
    entry = find_entry("yuhuili/EAGLE-LLaMA3-Instruct-8B")
    assert entry is not None
    for length, rows in ((1024, 2048), (8192, 8192)):
        loaded = loaded_draft(make(LLAMA, "eagle", 3, dict(entry.config), max_model_len=length))
        assert loaded is not None
        assert [rope.size_bytes(2) for rope in loaded[0].ropes] == [rows * 128 * 2]


@pytest.mark.parametrize("length", [1024, 8192])
def test_pair_with_other_requests_equals_a_new_pair(make: PairMaker, length: int) -> None:
    entry = find_entry("yuhuili/EAGLE-LLaMA3-Instruct-8B")
    assert entry is not None
    pair = make(LLAMA, "eagle", 3, dict(entry.config), max_model_len=4096, max_num_seqs=8)
    new = replace(pair, limits=replace(pair.limits, max_model_len=length, max_num_seqs=16))
    assert loaded_draft(pair) is not None
    changed = pair.with_requests(16, length)
    assert (changed, changed.era) == (new, new.era)
    ropes = [[] if draft is None else draft[0].ropes for draft in map(loaded_draft, (changed, new))]
    assert ropes[0] == ropes[1]


@pytest.mark.parametrize("method", ["suffix", "ngram", "ngram_gpu"])
def test_methods_without_a_draft_use_no_weights_or_kv_cache(make: PairMaker, method: str) -> None:
    pair = make(LLAMA, method, 5)
    assert loaded_draft(pair) is None
    assert stage_weights(pair, Parallelism())[0].draft_bytes == 0
    assert cache_layout(pair, Parallelism())[0].groups[0].num_layers == 32


@pytest.mark.parametrize(
    ("name", "method", "field", "words"),
    [
        ("qwen3-8b-domino.json", "dflash", "architectures", "does not know this draft head"),
        ("qwen3-8b-peagle.json", "eagle3", "architectures", "convert it"),
        ("qwen3-8b-dspark.json", "dspark", "markov_rank", "copy them there from dflash_config"),
    ],
)
def test_head_that_vllm_cannot_load_is_refused(name: str, method: str, field: str, words: str) -> None:
    with pytest.raises(GeometryError) as caught:
        head_from_config("head", specforge(name), method)
    assert caught.value.field == field
    assert words in caught.value.message


def test_unknown_head_model_type_is_refused() -> None:
    with pytest.raises(GeometryError) as caught:
        catalogued("torchspec-project/TorchSpec:torchspec/config/dflash_draft_config.json")
    assert (caught.value.field, caught.value.value) == ("model_type", "dflash")


@pytest.mark.parametrize(
    ("version", "draft_vocabulary", "shared"),
    [("0.6.0.dev0", 128_256, True), ("0.5.0", 128_256, True), ("0.4.0.1", 128_256, False), ("0.6.0", 32_000, False)],
)
def test_speculators_head_shares_output_head_by_version_and_vocabulary(
    version: str, draft_vocabulary: int, shared: bool
) -> None:
    """With all rows it is a frozen copy, which vLLM finds equal to the target's: 0.51 GiB loaded in place of 1.67."""
    layer = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
    }
    head = head_from_config(
        "head",
        {
            "architectures": ["Eagle3DraftModel"],
            "draft_vocab_size": draft_vocabulary,
            "speculators_model_type": "eagle3",
            "speculators_version": version,
            "transformer_layer_config": layer,
        },
        "eagle3",
    )
    tables = 0 if shared else draft_vocabulary
    without = replace(head, head=replace(head.head, shares_output=True)) if head.head else head
    loaded, least = (loaded_head_bytes(each, Precision.BF16, Split(1)) for each in (head, without))
    assert loaded - least == tables * 4096 * 2


KIMI_LAYERS: dict[str, Any] = {
    "hidden_size": 7168,
    "intermediate_size": 14_336,
    "num_hidden_layers": 5,
    "num_attention_heads": 96,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "vocab_size": 163_840,
    "max_position_embeddings": 131_072,
    "model_type": "qwen3",
    "sliding_window": 2048,
    "layer_types": ["sliding_attention"] * 5,
    "rope_theta": 10_000.0,
}
KIMI_DSPARK: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "draft_vocab_size": 163_840,
    "block_size": 8,
    "markov_rank": 256,
    "mask_token_id": 163_837,
    "sample_from_anchor": True,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "aux_hidden_state_layer_ids": [24, 48, 72, 88, 92],
    "speculators_config": {"algorithm": "dspark", "verifier": {"name_or_path": "moonshotai/Kimi-K3"}},
    "transformer_layer_config": KIMI_LAYERS,
}
"""RedHatAI/Kimi-K3-speculator.dspark as published, which the catalogue has as vLLM rewrites it."""


def test_dspark_speculators_config_matches_the_catalogue() -> None:
    name = "RedHatAI/Kimi-K3-speculator.dspark"
    published, known = head_from_config(name, KIMI_DSPARK, "dspark"), find_geometry(name)
    assert known is not None
    assert published.head is not None
    assert published.head.verifier == "moonshotai/Kimi-K3"
    assert asdict(replace(published, head=replace(published.head, verifier=None))) == asdict(known)


@pytest.mark.parametrize(
    ("kind", "more", "architecture"),
    [
        ("dflash", {}, "DFlashDraftModel"),
        (
            "dflash2",
            {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16},
            "DFlash2DraftModel",
        ),
    ],
)
def test_dflash_speculators_config_matches_the_vllm_config(kind: str, more: dict[str, Any], architecture: str) -> None:
    outside = {"aux_hidden_state_layer_ids": [2, 20, 40], "mask_token_id": 7, "block_size": 8, **more}
    saved = {"speculators_model_type": kind, **outside, "transformer_layer_config": KIMI_LAYERS}
    rewritten = {
        **KIMI_LAYERS,
        "architectures": [architecture],
        "eagle_aux_hidden_state_layer_ids": [2, 20, 40],
        "dflash_config": {"mask_token_id": 7, **more},
    }
    read, wanted = (head_from_config("head", config, "dflash") for config in (saved, rewritten))
    assert asdict(read) == asdict(wanted)
    with pytest.raises(GeometryError) as caught:
        head_from_config("head", {**saved, "aux_hidden_state_layer_ids": []}, "dflash")
    assert caught.value.field == "aux_hidden_state_layer_ids"
    broken = {**saved, "transformer_layer_config": {**KIMI_LAYERS, "hidden_size": 0}}
    with pytest.raises(GeometryError) as caught:
        head_from_config("head", broken, "dflash")
    assert caught.value.field == "transformer_layer_config.hidden_size"


# Draft heads by the class that vLLM makes of them; engine_answers.jsonl has what vLLM itself holds of each class.

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
def test_all_names_of_a_head_class_have_the_same_size(kind: str, whole: tuple[int, int]) -> None:
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
        ("Qwen3OmniDSparkModel", "dspark", "0.28", 'use engine.version: "0.29" or later'),
        ("PeagleQwen3ForCausalLM", "eagle3", "0.33", "write Eagle3Qwen3ForCausalLM into architectures"),
        ("PeagleLlamaForCausalLM", "eagle3", "0.30", "write Eagle3LlamaForCausalLM into architectures"),
        ("Qwen3ForCausalLM", "eagle3", "0.33", None),
        ("DFlash2DraftModel", "dflash", "0.24", None),
    ],
)
def test_head_class_must_be_in_the_registry_of_the_version(
    architecture: str, method: str, version: str, remedy: str | None
) -> None:
    found = missing_class(architecture, method, version)
    assert (found is None) == (remedy is None)
    assert found is None or (remedy or "") in found


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"])
def test_mla_head_that_vllm_would_load_as_mtp_is_refused(kind: str) -> None:
    with pytest.raises(GeometryError, match="model_type"):
        head_from_config("head", {**LATENT, "model_type": kind}, "eagle3")


def windows_of(config: Config, method: str = "eagle3") -> list[int | None]:
    head = head_from_config("head", config, method)
    mixers = [mixer for layer in head.layers for mixer in layer.mixers]
    return [mixer.window_tokens for mixer in mixers if isinstance(mixer, SelfAttention)]


@pytest.mark.parametrize("architecture", ["Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM"])
@pytest.mark.parametrize(
    ("changed", "window"),
    [
        ({"layer_types": ["sliding_attention"]}, 512),
        # A file may name the layers of its target, too.
        ({"layer_types": ["sliding_attention", *["full_attention"] * 35]}, 512),
        ({"layer_types": ["full_attention", *["sliding_attention"] * 35]}, None),
        ({"layer_types": ["sliding_attention"], "sliding_window": None}, None),
        ({"use_sliding_window": True}, None),
    ],
)
def test_eagle3_head_window_follows_layer_types(architecture: str, changed: Config, window: int | None) -> None:
    config = {**HEAD, "architectures": [architecture], "sliding_window": 512, **changed}
    assert windows_of(config) == [window]


def test_layers_without_an_entry_in_layer_types_have_no_window() -> None:
    config = {**HEAD, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 2, "sliding_window": 512}
    assert windows_of({**config, "layer_types": ["sliding_attention"]}) == [512, None]


@pytest.mark.parametrize(
    ("changed", "windows"),
    [
        ({}, [None] * 5),
        ({"dflash_config": {"use_swa": True}}, [1024] * 5),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 256}}, [256] * 5),
        ({"layer_types": ["sliding_attention"]}, [1024, *[None] * 4]),
    ],
)
def test_windows_of_a_block_head(changed: Config, windows: list[int | None]) -> None:
    config = {**specforge("qwen3-8b-dflash.json"), "sliding_window": 1024, "layer_types": None}
    options = {**config["dflash_config"], **changed.get("dflash_config", {})}
    assert windows_of({**config, **changed, "dflash_config": options}, "dflash") == windows


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("speculators' EAGLE-3 for Llama-3.1-8B", [2048]),
        ("speculators' EAGLE-3 on Qwen3 for Qwen3-8B", [2048]),
        ("speculators' P-EAGLE for Llama-3.1-8B", [None, *[2048] * 4]),
        ("speculators' DFlash for Qwen3-8B", [None, *[2048] * 4]),
    ],
)
def test_speculators_head_has_the_windows_of_its_layer_section(name: str, windows: list[int | None]) -> None:
    config = HEADS[name]
    assert windows_of(config, "dflash" if "DFlash" in name else "eagle3") == windows
    plain = {**config["transformer_layer_config"], "layer_types": None}
    assert set(windows_of({**config, "transformer_layer_config": plain}, "eagle3")) == {None}


def test_speculators_head_on_qwen3_has_the_size_of_the_plain_one() -> None:
    """Four states of the target, and norms of queries and keys, in the class that vLLM makes of it."""
    config = HEADS["speculators' EAGLE-3 on Qwen3 for Qwen3-8B"]
    keys = ("draft_vocab_size", "norm_before_fc", "eagle_aux_hidden_state_layer_ids")
    outer = {key: config[key] for key in keys}
    plain = {**config["transformer_layer_config"], **outer, "architectures": ["Eagle3Qwen3ForCausalLM"]}
    head, same = (head_from_config("head", each, "eagle3") for each in (config, plain))
    assert head.layers == same.layers
    assert weight_bytes(head, Precision.BF16, Split(1)) == weight_bytes(same, Precision.BF16, Split(1))


@pytest.mark.parametrize(
    ("kind", "groups", "tokens"), [("sliding_attention", 5, 798_915), ("full_attention", 1, 838_784)]
)
def test_window_of_a_head_changes_the_groups_of_its_target(kind: str, groups: int, tokens: int) -> None:
    """The tokens that vLLM 0.32 on a CPU reported for this target with a head trained by speculators 0.9."""
    layers = {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
    }
    head = HEADS["speculators' EAGLE-3 for Llama-3.1-8B"] | {
        "draft_vocab_size": 512,
        "transformer_layer_config": layers
        | {"num_hidden_layers": 1, "layer_types": [kind], "sliding_window": 2048, "use_sliding_window": True},
    }
    pair = Pair(
        geometry_from_config("target", layers | {"architectures": ["LlamaForCausalLM"]}),
        Precision.BF16,
        head_from_config("head", head, "eagle3"),
        Precision.BF16,
        "eagle3",
        3,
        EngineLimits(
            max_model_len=512,
            max_num_seqs=16,
            max_num_batched_tokens=2048,
            block_size=128,
            kv_cache_element_bytes=2,
            memory_utilization_percent=92,
            enforce_eager=True,
            min_concurrency=1,
            engine_version="0.32",
        ),
    )
    layout = cache_layout(pair, Parallelism())
    assert len(layout[0].groups) == groups
    assert pool_capacity(layout[0], pool_blocks(layout, [GIB]), 512).tokens == tokens


def test_dflash_2_adds_convolutions_and_a_selector() -> None:
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
def test_invalid_convolution_sizes_are_refused(changed: Config) -> None:
    with pytest.raises(GeometryError, match=next(iter(changed))):
        head_from_config("head", {**DFLASH2, "dflash_config": {**DFLASH2["dflash_config"], **changed}}, "dflash")


def pair_of(limits: EngineLimits, target: str, method: str, config: Config, k: int, **more: Any) -> Pair:
    geometry = find_geometry(target)
    assert geometry is not None
    draft = head_from_config("head", config, method)
    return Pair(geometry, Precision.BF16, draft, Precision.BF16, method, k, limits, **more)


def test_dflash_2_draft_logits_are_32_bit(limits: EngineLimits) -> None:
    plain = {**DFLASH2, "architectures": ["DFlashDraftModel"]}
    kept = []
    for config in (plain, DFLASH2):
        pair = pair_of(limits, "Qwen/Qwen3.5-27B", "dflash", config, 7)
        kept.append(state_bytes(replace(pair, samples_drafts=True), Parallelism(1)) - state_bytes(pair, Parallelism(1)))
    assert kept == [limits.max_num_seqs * 7 * 248_320 * width for width in (2, 4)]


def test_assistant_head_has_no_kv_cache_of_its_own(limits: EngineLimits) -> None:
    pair = pair_of(limits, "google/gemma-4-26B-A4B", "mtp", ASSISTANT, 4)
    loaded = loaded_draft(pair)
    assert loaded is not None
    assert method_of_head(loaded[0]) is Method.MTP
    alone, beside = (cached_layers(pair.target, draft, 1, 1, None) for draft in (None, loaded[0]))
    assert alone == beside
    assert pair.prediction_modules == 0


def test_assistant_with_ordered_embeddings_copies_output_rows(limits: EngineLimits) -> None:
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


def test_mtp_layers_of_another_checkpoint_have_the_same_size(limits: EngineLimits) -> None:
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
def test_model_variants_are_recognized_by_name(model: str, of: str, is_one: bool) -> None:
    assert is_variant(model, of) is is_one


def test_targets_of_a_head_are_listed_once() -> None:
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


# DFlash heads with an XPress refiner: recognized by their files, and sized with what refining takes.

VOCABULARY, WIDTH = 151_936, 4096


def config_of(model: str) -> Config:
    entry = find_entry(model)
    assert entry is not None
    return dict(entry.config)


PLAIN = config_of("sgl-project/SpecForge:configs/qwen3-8b-dflash.json")
XPRESS = PLAIN | {"architectures": ["Qwen3XPressModel"], "xpress_rank": 128, "xpress_mlp_hidden": 64}
XPRESS |= {"xpress_block_size": 8}


def drafting(limits: EngineLimits, config: Config = XPRESS, k: int = 7, **limited: Any) -> Pair:
    target = find_geometry("Qwen/Qwen3-8B")
    assert target is not None
    head = head_from_config("draft", config, "dflash")
    settings = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "kv_cache_element_bytes": 2} | limited
    return Pair(target, Precision.BF16, head, Precision.BF16, "dflash", k, replace(limits, **settings))


@pytest.mark.parametrize("architecture", ["Qwen3XPressModel", "DFlashQwen3XPressModel"])
def test_xpress_head_adds_two_tables_and_copies_to_dflash(limits: EngineLimits, architecture: str) -> None:
    refined = drafting(limits, XPRESS | {"architectures": [architecture]}).draft
    plain = drafting(limits, PLAIN).draft
    assert refined is not None
    assert plain is not None
    assert method_of_head(refined) is Method.DFLASH
    inner = 128 * (3 * 128 + 8 * 8 + 3 * 64)
    tables, projections = 2 * VOCABULARY * 128, 2 * WIDTH * 128
    assert parameter_count(refined) - parameter_count(plain) == tables + projections + inner
    assert copied_bytes(refined, 1) - copied_bytes(plain, 1) == 2 * (VOCABULARY * 128 + inner)


def test_quantized_xpress_head_has_a_16_bit_refiner() -> None:
    quantized = XPRESS | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    head = head_from_config("draft", quantized, "dflash")
    assert copied_bytes(head, 1) == 2 * 128 * (VOCABULARY + 3 * 128 + 8 * 8 + 3 * 64)


def test_xpress_config_defaults_match_vllm() -> None:
    short = {key: value for key, value in XPRESS.items() if not key.startswith("xpress")}
    full = short | {"xpress_rank": 256, "xpress_mlp_hidden": 512, "xpress_block_size": 16, "xpress_topc": 512}
    heads = [head_from_config("draft", config, "dflash").head for config in (short, full)]
    assert heads[0] == heads[1]
    steps = head_from_config("draft", short | {"num_speculative_steps": 7}, "dflash").head
    assert steps is not None
    assert steps.most_tokens == 7


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sample_from_anchor", True),
        ("draft_vocab_size", 32_000),
        ("xpress_topc", VOCABULARY + 1),
        ("xpress_topc", -1),
        ("xpress_topc", "all"),
        ("xpress_rank", 0),
    ],
)
def test_invalid_xpress_config_is_refused(key: str, value: object) -> None:
    with pytest.raises(GeometryError) as caught:
        head_from_config("draft", XPRESS | {key: value}, "dflash")
    assert caught.value.field == key


@pytest.mark.parametrize("k", [6, 8])
def test_xpress_head_proposes_only_its_block_size(limits: EngineLimits, k: int) -> None:
    with pytest.raises(PlanError, match="write 7") as caught:
        loaded_draft(drafting(limits, k=k))
    assert caught.value.field == "speculation.numSpeculativeTokens"


def refining(pair: Pair, tensor: int = 1) -> tuple[int, int]:
    """What refining takes for a moment, and what it keeps."""
    assert pair.draft is not None
    return refining_bytes(pair, pair.draft, tensor), refining_scratch_bytes(pair, pair.draft)


def test_xpress_refining_memory_depends_on_candidates(limits: EngineLimits) -> None:
    requests = 256
    states, logits = requests * 8 * WIDTH * 2, requests * 8 * VOCABULARY * 2
    copy = requests * 7 * VOCABULARY * 2
    assert refining(drafting(limits)) == (states + logits + copy, 0)
    rows = requests * 7 * 2048 * (130 * 2 + 8)
    many = replace(drafting(limits), refined_candidates=2048)
    assert refining(many) == (states + logits + rows, 0)
    assert refining(drafting(limits, XPRESS | {"xpress_topc": 2048})) == refining(many)
    assert refining(drafting(limits), 4)[0] == states + logits + logits + logits // 4
    # No more requests than a step has room for.
    assert refining(drafting(limits, max_num_batched_tokens=512))[0] == (states + logits + copy) // 4


def test_xpress_without_candidates_keeps_logits_of_all_requests(limits: EngineLimits) -> None:
    among_all = replace(drafting(limits, max_num_batched_tokens=512), refined_candidates=0)
    kept = 256 * 7 * ((2 * VOCABULARY + 128) * 2 + 38 * 12)
    assert refining(among_all)[1] == kept
    with_candidates = replace(among_all, refined_candidates=None)
    more = activation_bytes(among_all, Parallelism()) - activation_bytes(with_candidates, Parallelism())
    assert more == kept > GIB


# Drafts that propose all tokens in one pass, PARD and P-EAGLE: recognized by their files, and sized as they run.

QWEN, LLAMA_8B = "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B"


TRAINED = config_of("sgl-project/SpecForge:configs/qwen3-8b-peagle.json")
PEAGLE = TRAINED | {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 151_669}
PARD = config_of("meta-llama/Llama-3.2-1B") | {"pard_token": 128_255}
SPECULATOR = {
    "architectures": ["PEagleDraftModel"],
    "speculators_model_type": "peagle",
    "draft_vocab_size": 32_000,
    "mask_token_id": 151_669,
    "transformer_layer_config": {key: value for key, value in TRAINED.items() if key != "draft_vocab_size"},
}


def drafting_alone(limits: EngineLimits, target_id: str, method: str, config: Config) -> Pair:
    target = find_geometry(target_id)
    assert target is not None
    limited = replace(limits, max_num_seqs=1024, kv_cache_element_bytes=2)
    return Pair(target, Precision.BF16, head_from_config("draft", config, method), Precision.BF16, method, 7, limited)


def draft_bytes(pair: Pair) -> int:
    assert pair.draft is not None
    return weight_bytes(pair.draft, Precision.BF16, Split(1))


@pytest.mark.parametrize(
    ("target", "method", "config", "places"),
    [(QWEN, "eagle3", PEAGLE, (6, 585)), (LLAMA_8B, "draft_model", PARD, (7, 546))],
)
def test_parallel_draft_takes_extra_slots_and_runs_on_v1(
    limits: EngineLimits, target: str, method: str, config: Config, places: tuple[int, int]
) -> None:
    pair = drafting_alone(limits, target, method, config)
    assert (extra_slots(pair), effective_batch(pair)) == places
    one_by_one = {key: value for key, value in config.items() if key not in ("ptd_token_id", "pard_token")}
    plain = drafting_alone(limits, target, method, one_by_one)
    assert (pair.era.runner, plain.era.runner) == (Runner.V1, Runner.V2)
    assert extra_slots(plain) == (1 if method == "draft_model" else 0)
    # Of EAGLE-3 the state of a place to fill: as many numbers as it reads of the target.
    assert draft_bytes(pair) - draft_bytes(plain) == (0 if method == "draft_model" else 3 * 4096 * 2)


def test_parallel_draft_mask_state_is_as_wide_as_the_target() -> None:
    narrow = PEAGLE | {"hidden_size": 2048, "head_dim": 128, "target_hidden_size": 4096}
    plain = {key: value for key, value in narrow.items() if key != "ptd_token_id"}
    in_one_pass, one_by_one = (head_from_config("draft", config, "eagle3") for config in (narrow, plain))
    sizes = [weight_bytes(head, Precision.BF16, Split(1)) for head in (in_one_pass, one_by_one)]
    assert sizes[0] - sizes[1] == 3 * 4096 * 2


def test_mask_token_alone_does_not_make_a_parallel_draft() -> None:
    """vLLM would fill places with it if it were told to; ordinary models may have one."""
    masked = config_of("meta-llama/Llama-3.2-1B") | {"mask_token_id": 128_255}
    assert not head_from_config("draft", masked, "draft_model").drafts_in_parallel


def test_peagle_speculators_config_has_the_size_of_plain_peagle(limits: EngineLimits) -> None:
    pair = drafting_alone(limits, QWEN, "eagle3", SPECULATOR)
    assert pair.drafts_in_parallel
    assert draft_bytes(pair) == draft_bytes(drafting_alone(limits, QWEN, "eagle3", PEAGLE))


@pytest.mark.parametrize(
    ("config", "words"),
    [(TRAINED, "convert it"), ({**SPECULATOR, "mask_token_id": None}, "fills the places")],
)
def test_peagle_config_that_vllm_cannot_load_is_refused(config: Config, words: str) -> None:
    with pytest.raises(GeometryError, match=words):
        head_from_config("head", config, "eagle3")
