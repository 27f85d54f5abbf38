"""Draft heads and MTP layers as vLLM 0.32 makes them: figures of its own classes on the meta device."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.catalogue import find_entry, find_geometry
from specdecode_operator.sizing.errors import GeometryError, PlanError
from specdecode_operator.sizing.families.architectures import head_from_config
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.memory.budget import EngineLimits, Pair, Parallelism
from specdecode_operator.sizing.memory.kv_cache import cache_layout, pool_blocks, pool_capacity, stage_weights
from specdecode_operator.sizing.pair import effective_batch, extra_slots, loaded_draft
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.weights import copied_bytes, loaded_head_bytes, weight_bytes

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
def test_mtp_layers(make: PairMaker, target: str) -> None:
    pair = make(target, "mtp", 1)
    assert [built_and_loaded(pair, tensor) for tensor in TENSORS] == MTP_BYTES[target]


def test_the_mtp_module_of_ernie_is_a_llama_layer_behind_two_norms(make: PairMaker) -> None:
    """Two norms, a projection and a LlamaDecoderLayer, without a norm before the output head (vLLM, ernie_mtp.py)."""
    pair = make("baidu/ERNIE-4.5-21B-A3B-PT", "mtp", 1)
    width, feed_forward, queries, keys = 2560, 12288, 20 * 128, 4 * 128
    layer = 2 * width * queries + 2 * width * keys + 3 * width * feed_forward + 2 * width
    around = 2 * width * width + 2 * width
    vocabularies = 2 * 103424 * width
    built, loaded = built_and_loaded(pair, 1)
    assert (built, loaded) == (2 * (layer + around + vocabularies), 2 * (layer + around))


def test_mtp_layers_stay_in_16_bits_where_the_checkpoint_excludes_them(make: PairMaker) -> None:
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
def test_mtp_layers_keep_a_cache_too(make: PairMaker, target: str, tokens: tuple[int, int]) -> None:
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
def test_experts_of_mtp_layers_are_spread_as_the_targets(
    make: PairMaker, target: str, on_two: int, on_eight: int
) -> None:
    splits = [Parallelism(tensor, expert=True) for tensor in (2, 8)]
    weights = [stage_weights(make(target, "mtp", 1), split)[0].draft_bytes for split in splits]
    assert weights == [on_two, on_eight]


@pytest.mark.parametrize("target", [LLAMA, "moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2-Instruct"])
def test_mtp_without_such_layers_is_refused(make: PairMaker, target: str) -> None:
    with pytest.raises(PlanError) as caught:
        loaded_draft(make(target, "mtp", 1))
    assert (caught.value.field, caught.value.value) == ("speculation.method", "mtp")
    assert target in caught.value.message
    assert "use eagle3 or draft_model" in caught.value.message


@pytest.mark.parametrize(("tokens", "allowed"), [(1, True), (2, True), (3, False), (4, True), (5, False)])
def test_tokens_beyond_the_mtp_modules_are_a_multiple_of_them(make: PairMaker, tokens: int, allowed: bool) -> None:
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
def test_heads(  # noqa: PLR0913, PLR0917 (one argument a column)
    make: PairMaker, target: str, method: str, head: Config, built: list[int], loaded: list[int]
) -> None:
    pair = make(target, method, 7, head)
    assert [built_and_loaded(pair, tensor) for tensor in TENSORS] == list(zip(built, loaded, strict=True))


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_all_layers_of_a_block_head_keep_the_context(make: PairMaker, method: str) -> None:
    config = specforge("qwen3-8b-dflash.json") if method == "dflash" else dspark("qwen3-8b-dspark.json")
    for tensor, known in ((1, (7992, 127_872)), (8, (63_937, 1_022_992))):
        layout = cache_layout(make(QWEN_8B, method, 7, config), Parallelism(tensor))
        blocks = pool_blocks(layout, [SPACE_BYTES])
        assert [group.num_layers for group in layout[0].groups] == [36 + 5]
        assert (blocks, pool_capacity(layout[0], blocks, 8192).tokens) == known


def test_windows_of_a_block_head_are_windows_in_the_cache(make: PairMaker) -> None:
    config = specforge("qwen3-8b-dflash.json")
    config |= {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 2048}
    groups = cache_layout(make(QWEN_8B, "dflash", 7, config), Parallelism())[0].groups
    assert sum(group.num_layers for group in groups if group.held_tokens) == 4


def test_a_head_of_another_width_keeps_its_tables(make: PairMaker) -> None:
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
def test_the_embedding_of_a_head_on_the_second_stage(  # noqa: PLR0913, PLR0917 (one argument a column)
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
def test_medusa_has_a_head_a_token(make: PairMaker, changes: Config, tokens: int, tensor: int, size_bytes: int) -> None:
    pair = make(LLAMA, "medusa", tokens, MEDUSA | changes)
    assert built_and_loaded(pair, tensor) == (size_bytes, size_bytes)
    assert cache_layout(pair, Parallelism())[0].groups[0].num_layers == 32


def test_old_files_of_medusa(make: PairMaker) -> None:
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
def test_more_tokens_than_a_head_proposes_are_refused(make: PairMaker, method: str, head: Config, most: int) -> None:
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
def test_places_that_drafting_takes_of_a_step(
    make: PairMaker, method: str, head: Config, slots: int, batch: int
) -> None:
    pair = make(QWEN_8B, method, 7, head)
    assert (extra_slots(pair), effective_batch(pair)) == (slots, batch)


def test_eagle_reaches_as_far_as_requests(make: PairMaker) -> None:
    entry = find_entry("yuhuili/EAGLE-LLaMA3-Instruct-8B")
    assert entry is not None
    for length, rows in ((1024, 2048), (8192, 8192)):
        loaded = loaded_draft(make(LLAMA, "eagle", 3, dict(entry.config), max_model_len=length))
        assert loaded is not None
        assert [rope.size_bytes(2) for rope in loaded[0].ropes] == [rows * 128 * 2]


@pytest.mark.parametrize("method", ["suffix", "ngram", "ngram_gpu"])
def test_methods_without_a_model_load_and_keep_nothing(make: PairMaker, method: str) -> None:
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
def test_heads_that_the_engine_does_not_start_with(name: str, method: str, field: str, words: str) -> None:
    with pytest.raises(GeometryError) as caught:
        head_from_config("head", specforge(name), method)
    assert caught.value.field == field
    assert words in caught.value.message


def test_a_type_that_the_engine_does_not_know_is_refused() -> None:
    with pytest.raises(GeometryError) as caught:
        catalogued("torchspec-project/TorchSpec:torchspec/config/dflash_draft_config.json")
    assert (caught.value.field, caught.value.value) == ("model_type", "dflash")


@pytest.mark.parametrize(
    ("version", "draft_vocabulary", "shared"),
    [("0.6.0.dev0", 128_256, True), ("0.5.0", 128_256, True), ("0.4.0.1", 128_256, False), ("0.6.0", 32_000, False)],
)
def test_a_head_of_speculators_keeps_the_targets_output_head(version: str, draft_vocabulary: int, shared: bool) -> None:
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


def test_a_dspark_head_of_speculators_is_read_as_the_engine_reads_it() -> None:
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
def test_a_dflash_head_of_speculators_is_read_as_the_engine_reads_it(
    kind: str, more: dict[str, Any], architecture: str
) -> None:
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
