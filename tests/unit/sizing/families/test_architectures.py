"""Geometry that is read from config.json."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.enums import Knowledge, Precision
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.catalogue import find_entry, find_geometry
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.families.architectures import ARCHITECTURES, GeometryError, geometry_from_config
from specdecode_operator.sizing.geometry import ModelGeometry, SelfAttention
from specdecode_operator.sizing.memory.buffers import charged_state_bytes
from specdecode_operator.sizing.memory.kv_cache import cache_layout, pool_blocks, pool_capacity, stage_weights
from specdecode_operator.sizing.pair import EngineLimits, Pair, Parallelism, loaded_draft
from specdecode_operator.sizing.rank_layers import Split, stages
from specdecode_operator.sizing.weights import loaded_head_bytes, weight_bytes
from tests.support.small_models import GEMMA4, INTERNVL, MODELS, SMALL


def precision_of(model: ModelGeometry) -> Precision:
    """Return the precision of a model's checkpoint."""
    return model.checkpoint_precision or Precision.BF16


def stage_bytes(model: ModelGeometry, tensor: int, pipeline: int = 1) -> tuple[int, ...]:
    """Return the weights on a rank of each pipeline stage."""
    precision = precision_of(model)
    return tuple(weight_bytes(model, precision, Split(tensor), stage=stage) for stage in stages(model, pipeline))


def pair_of(model: ModelGeometry, length: int, block_size: int = 16, method: str = "none", tokens: int = 0) -> Pair:
    """Return a model with vLLM's defaults on an H100."""
    limits = EngineLimits(
        max_model_len=length,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        block_size=block_size,
        kv_cache_element_bytes=None,
        memory_utilization_percent=92,
        enforce_eager=False,
        min_concurrency=1,
    )
    return Pair(model, precision_of(model), None, None, method, tokens, limits)


def pool(pair: Pair, split: Parallelism, space_bytes: int) -> tuple[int, int]:
    """Return blocks and tokens of a KV cache."""
    layout = cache_layout(pair, split)
    blocks = pool_blocks(layout, [space_bytes] * split.pipeline)
    return blocks, pool_capacity(layout[0], blocks, pair.limits.max_model_len).tokens


@pytest.mark.parametrize(
    ("model_id", "tensor", "pipeline", "weights", "block_size", "blocks", "tokens"),
    [
        ("Qwen/Qwen3-VL-2B-Instruct", 1, 1, (4_255_064_064,), 16, 11_702, 187_232),
        ("Qwen/Qwen3-VL-2B-Instruct", 4, 1, (1_070_125_056,), 16, 46_811, 748_976),
        ("Qwen/Qwen3-VL-2B-Instruct", 8, 1, (539_301_888,), 16, 93_622, 1_497_952),
        ("Qwen/Qwen3-VL-2B-Instruct", 2, 2, (1_427_002_368, 1_427_006_464), 16, 46_811, 748_976),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", 1, 1, (62_141_508_064,), 16, 13_653, 218_448),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", 4, 1, (15_561_542_200,), 16, 54_613, 873_808),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", 8, 1, (7_823_380_380,), 16, 54_613, 873_808),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", 2, 2, (16_126_906_224, 16_126_906_224), 16, 54_613, 873_808),
        ("Qwen/Qwen3.5-9B", 1, 1, (18_819_629_024,), 16, 1_137, 388_096),
        ("Qwen/Qwen3.5-9B", 4, 1, (4_712_244_152,), 16, 4_551, 1_553_408),
        ("Qwen/Qwen3.5-9B", 8, 1, (2_377_790_556,), 16, 8_192, 1_917_396),
        ("Qwen/Qwen3.5-9B", 2, 2, (4_937_662_960, 5_954_789_872), 16, 4_551, 1_553_408),
        ("Qwen/Qwen3.5-35B-A3B", 1, 1, (70_214_365_792,), 16, 963, 464_052),
        ("Qwen/Qwen3.5-35B-A3B", 4, 1, (17_602_843_352,), 16, 3_640, 1_242_453),
        ("Qwen/Qwen3.5-35B-A3B", 8, 1, (8_837_751_532,), 16, 6_553, 1_533_776),
        ("Qwen/Qwen3.5-35B-A3B", 2, 2, (17_792_104_976, 18_300_668_432), 16, 3_855, 1_857_656),
        ("nvidia/Qwen3.5-122B-A10B-NVFP4", 1, 1, (78_427_516_992,), 16, 413, 307_572),
        ("nvidia/Qwen3.5-122B-A10B-NVFP4", 4, 1, (19_690_207_512,), 16, 1_654, 1_042_274),
        ("nvidia/Qwen3.5-122B-A10B-NVFP4", 8, 1, (9_906_947_388,), 16, 3_212, 1_547_806),
        ("nvidia/Qwen3.5-122B-A10B-NVFP4", 2, 2, (19_856_314_656, 20_619_159_840), 16, 1_654, 1_231_778),
        ("google/gemma-4-26B-A4B", 1, 1, (51_640_703_584,), 16, 32_768, 95_156),
        ("google/gemma-4-26B-A4B", 4, 1, (13_801_052_768,), 16, 131_072, 348_957),
        ("google/gemma-4-26B-A4B", 8, 1, (7_499_250_272,), 16, 131_072, 597_519),
        ("google/gemma-4-26B-A4B", 2, 2, (14_135_571_296, 14_152_873_824), 16, 109_226, 317_185),
        ("nvidia/Gemma-4-31B-IT-NVFP4", 1, 1, (32_853_451_744,), 64, 4_096, 47_326),
        ("nvidia/Gemma-4-31B-IT-NVFP4", 4, 1, (9_078_973_408,), 64, 16_384, 189_305),
        ("nvidia/Gemma-4-31B-IT-NVFP4", 8, 1, (5_171_610_592,), 64, 32_768, 347_264),
        ("nvidia/Gemma-4-31B-IT-NVFP4", 2, 2, (9_782_289_440, 9_782_289_440), 64, 16_384, 189_305),
        ("nvidia/Gemma-4-26B-A4B-NVFP4", 1, 1, (18_811_192_144,), 64, 16_384, 189_305),
        ("nvidia/Gemma-4-26B-A4B-NVFP4", 4, 1, (5_593_744_208,), 64, 65_536, 694_528),
        ("nvidia/Gemma-4-26B-A4B-NVFP4", 8, 1, (3_390_235_472,), 64, 65_536, 1_185_145),
        ("nvidia/Gemma-4-26B-A4B-NVFP4", 2, 2, (5_928_216_536, 5_945_519_064), 64, 54_613, 631_015),
        ("MiniMaxAI/MiniMax-M2.5", 1, 1, (230_121_631_216,), 16, 5_285, 84_560),
        ("MiniMaxAI/MiniMax-M2.5", 4, 1, (57_677_308_144,), 16, 21_140, 338_240),
        ("MiniMaxAI/MiniMax-M2.5", 8, 1, (28_957_157_744,), 16, 42_281, 676_496),
        ("MiniMaxAI/MiniMax-M2.5", 2, 2, (57_579_371_512, 57_579_377_656), 16, 21_140, 338_240),
        ("nvidia/MiniMax-M2.5-NVFP4", 1, 1, (134_499_275_248,), 16, 10_570, 169_120),
        ("nvidia/MiniMax-M2.5-NVFP4", 4, 1, (33_772_004_848,), 16, 42_281, 676_496),
        ("nvidia/MiniMax-M2.5-NVFP4", 8, 1, (16_984_126_448,), 16, 84_562, 1_352_992),
        ("nvidia/MiniMax-M2.5-NVFP4", 2, 2, (33_673_877_752, 33_673_883_896), 16, 42_281, 676_496),
        ("XiaomiMiMo/MiMo-7B-Base", 1, 1, (15_245_238_272,), 16, 9_102, 145_632),
        ("XiaomiMiMo/MiMo-7B-Base", 4, 1, (3_811_758_080,), 16, 36_408, 582_528),
        ("XiaomiMiMo/MiMo-7B-Base", 8, 1, (1_906_178_048,), 16, 72_817, 1_165_072),
        ("XiaomiMiMo/MiMo-7B-Base", 2, 2, (3_811_454_976, 3_811_463_168), 16, 36_408, 582_528),
        ("XiaomiMiMo/MiMo-V2-Flash", 1, 1, (310_252_037_120,), 16, 29_127, 84_582),
        ("XiaomiMiMo/MiMo-V2-Flash", 4, 1, (77_711_491_424,), 16, 116_508, 338_331),
        ("XiaomiMiMo/MiMo-V2-Flash", 8, 1, (38_960_635_888,), 16, 233_016, 620_366),
        ("XiaomiMiMo/MiMo-V2-Flash", 2, 2, (76_048_428_288, 79_176_577_984), 16, 104_857, 304_497),
    ],
)
def test_weights_and_kv_cache_of_catalogue_models(
    model_id: str, tensor: int, pipeline: int, weights: tuple[int, ...], block_size: int, blocks: int, tokens: int
) -> None:
    model = find_geometry(model_id)
    assert model is not None
    assert stage_bytes(model, tensor, pipeline) == weights
    assert pool(pair_of(model, 8192, block_size), Parallelism(tensor, pipeline), 20 * GIB) == (blocks, tokens)


@pytest.mark.parametrize(
    ("name", "weights", "staged", "tokens"),
    [
        # Weights at tensor 1, 4 and 8; on two pipeline stages, where the engine starts so; tokens of its KV cache.
        ("olmo2", (221_278_208, 55_341_056, 28_209_152), (110_638_080, 110_640_128), 262_144),
        ("olmo3", (221_278_208, 55_341_056, 28_209_152), (110_638_080, 110_640_128), 261_378),
        ("smollm3", (155_731_968, 38_946_816, 20_006_912), (110_632_960, 110_635_008), 262_144),
        ("exaone4", (155_732_992, 38_947_840, 20_007_936), (110_633_472, 110_635_520), 261_378),
        ("exaone4_plain", (155_732_992, 38_947_840, 20_007_936), (110_633_472, 110_635_520), 262_144),
        ("ernie", (176_703_488, 44_189_696, 23_152_640), (121_118_720, 121_120_768), 131_072),
        ("ernie_moe", (184_109_120, 46_090_304, 23_611_456), (), 262_144),
        ("hunyuan", (155_732_992, 38_947_840, 20_007_936), (110_633_472, 110_635_520), 262_144),
        ("cohere2", (155_723_776, 38_938_624, 19_998_720), (110_630_912, 110_630_912), 261_378),
        ("cohere", (155_734_016, 38_941_184, 20_000_256), (110_636_032, 110_636_032), 262_144),
        ("starcoder2", (132_732_928, 33_223_168, 17_163_008), (99_132_416, 99_136_512), 261_123),
        ("seed_oss", (242_264_064, 60_579_840, 31_348_736), (121_131_008, 121_133_056), 131_072),
        ("glm4", (221_296_640, 55_350_272, 28_217_344), (110_647_296, 110_649_344), 262_144),
        ("glm", (221_280_256, 55_333_888, 28_200_960), (110_639_104, 110_641_152), 262_144),
        ("glm4_moe", (254_409_824, 63_690_848, 32_429_152), (121_682_464, 132_727_360), 262_144),
        ("granite_moe", (187_254_784, 46_876_672, 24_004_608), (126_396_416, 126_396_416), 262_144),
        ("gemma", (155_731_968, 38_946_816, 20_006_912), (110_635_008, 110_635_008), 262_144),
        ("olmoe", (252_801_024, 63_270_912, 32_206_848), (191_937_536, 191_937_536), 262_144),
        ("internlm2", (221_267_968, 55_330_816, 28_198_912), (176_171_008, 176_171_008), 262_144),
        ("arcee", (198_199_296, 49_563_648, 25_315_328), (99_098_624, 99_100_672), 262_144),
        ("nemotron", (198_217_728, 49_582_080, 25_333_760), (99_106_816, 99_110_912), 262_144),
        ("internvl", (163_534_848, 45_567_744, 26_430_848), (118_435_328, 118_437_376), 262_144),
        ("hunyuan_moe", (256_461_824, 64_179_200, 32_656_384), (160_997_888, 160_999_936), 262_144),
        ("internvl_llama", (229_065_216, 61_946_112, 34_617_216), (118_430_208, 118_432_256), 262_144),
        ("gemma4_small", (137_911_360, 36_510_784, 19_741_760), (), 347_714),
        ("gemma4_borrowing", (94_974_912, 24_785_856, 13_218_752), (), 347_714),
        ("qwen35", (220_441_312, 55_124_488, 27_702_756), (108_683_584, 177_293_728), 818_400),
        ("qwen35_moe", (264_555_232, 66_208_264, 33_281_508), (130_740_544, 199_350_688), 818_400),
        ("exaone3", (221_267_968, 55_330_816, 28_198_912), (110_632_960, 110_635_008), 262_144),
        ("stablelm", (221_298_688, 55_352_320, 28_219_392), (176_187_392, 176_187_392), 262_144),
        ("phi", (210_847_744, 52_739_584, 26_388_224), (105_421_824, 105_425_920), 65_536),
        ("mimo_v2", (281_659_552, 70_502_512, 35_965_032), (136_880_192, 144_779_360), 69_717),
        ("granite_moe_shared", (212_420_608, 53_168_128, 27_150_336), (138_979_328, 138_979_328), 262_144),
        ("glm4_moe_lite", (311_550_048, 83_091_552, 45_015_136), (150_252_576, 161_297_472), 233_008),
        ("cwm", (221_267_968, 55_330_816, 28_198_912), (110_632_960, 110_635_008), 261_378),
        ("bailing", (254_397_536, 63_687_776, 32_427_104), (121_676_320, 132_721_216), 262_144),
    ],
)
def test_weights_and_kv_cache_of_small_models(
    name: str, weights: tuple[int, ...], staged: tuple[int, ...], tokens: int
) -> None:
    model = geometry_from_config(name, MODELS[name])
    assert tuple(stage_bytes(model, tensor)[0] for tensor in (1, 4, 8)) == weights
    assert not staged or stage_bytes(model, 1, 2) == staged
    assert pool(pair_of(model, 4096), Parallelism(), GIB)[1] == tokens


@pytest.mark.parametrize(
    ("model_id", "tokens", "weights", "blocks", "capacity"),
    [
        ("Qwen/Qwen3.5-9B", 3, (486_581_248, 121_676_800), 1_011, 250_973),
        ("Qwen/Qwen3.5-122B-A10B", 2, (5_047_358_464, 1_264_620_544), 381, 164_271),
        ("nvidia/Qwen3.5-397B-A17B-NVFP4", 2, (13_191_136_264, 3_303_064_584), 310, 149_383),
        ("XiaomiMiMo/MiMo-7B-Base", 1, (421_580_800, 155_757_568), 8_856, 141_696),
        ("XiaomiMiMo/MiMo-V2-Flash", 1, (396_466_824, 149_479_080), 29_127, 84_582),
    ],
)
def test_weights_and_kv_cache_with_mtp_layers(
    model_id: str, tokens: int, weights: tuple[int, int], blocks: int, capacity: int
) -> None:
    model = find_geometry(model_id)
    assert model is not None
    pair = pair_of(model, 8192, method="mtp", tokens=tokens)
    loaded = loaded_draft(pair)
    assert loaded is not None
    assert tuple(loaded_head_bytes(*loaded, Split(tensor)) for tensor in (1, 4)) == weights
    assert pool(pair, Parallelism(), 20 * GIB) == (blocks, capacity)


@pytest.mark.parametrize(
    ("model_id", "table_bytes"),
    [
        ("Qwen/Qwen3.5-9B", 34_144_256),
        ("google/gemma-4-26B-A4B", 402_653_184),
        ("MiniMaxAI/MiniMax-M2.5", 25_165_824),
        ("XiaomiMiMo/MiMo-V2-Flash", 67_108_864),
    ],
)
def test_rotary_table_bytes_of_catalogue_models(model_id: str, table_bytes: int) -> None:
    model = find_geometry(model_id)
    assert model is not None
    assert sum(rope.size_bytes(model.dtype_bytes) for rope in model.ropes) == table_bytes


@pytest.mark.parametrize(
    ("scaling", "table_bytes"),
    [
        ({"rope_type": "default"}, 67_633_152),
        ({"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 262144}, 201_850_880),
    ],
)
def test_mrope_does_not_lengthen_the_rotary_table(scaling: dict[str, Any], table_bytes: int) -> None:
    entry = find_entry("Qwen/Qwen3-VL-2B-Instruct")
    assert entry is not None
    text = entry.config["text_config"] | {"rope_scaling": scaling | {"mrope_section": [24, 20, 20]}}
    model = geometry_from_config("images", entry.config | {"text_config": text})
    assert sum(rope.size_bytes(model.dtype_bytes) for rope in model.ropes) == table_bytes


@pytest.mark.parametrize("model_id", ["Qwen/Qwen3.5-9B", "Qwen/Qwen3-VL-32B-Instruct"])
def test_mrope_table_is_four_times_as_long_up_to_0_31(model_id: str) -> None:
    model = find_geometry(model_id)
    assert model is not None
    pair = pair_of(model, 8192)
    older, newer = (
        stage_weights(replace(pair, limits=replace(pair.limits, engine_version=version)), Parallelism())[0]
        for version in ("0.31.0", "0.32.0")
    )
    (rope,) = model.ropes[:1]
    assert older.target_bytes - newer.target_bytes == 3 * 262_144 * rope.rotary_dim * 2


@pytest.mark.parametrize("version", ["0.19.0", "0.32.0"])
def test_deepstack_levels_have_buffers_in_every_version(version: str) -> None:
    deep, flat = (
        replace(pair_of(model, 8192), limits=replace(pair_of(model, 8192).limits, engine_version=version))
        for model in (levels_of([5, 11, 17]), levels_of([]))
    )
    stage = stages(deep.target, 1)[0]
    more = charged_state_bytes(deep, Parallelism(), stage) - charged_state_bytes(flat, Parallelism(), stage)
    assert more == 3 * 8192 * 2048 * 2


def levels_of(indexes: list[int]) -> ModelGeometry:
    """Return Qwen3-VL 2B with an encoder that hands on these layers."""
    entry = find_entry("Qwen/Qwen3-VL-2B-Instruct")
    assert entry is not None
    vision = entry.config["vision_config"] | {"deepstack_visual_indexes": indexes}
    return geometry_from_config("levels", entry.config | {"vision_config": vision})


@pytest.mark.parametrize(("window", "tokens"), [({}, 261_123), ({"sliding_window": None}, 262_144)])
def test_mistral_config_without_sliding_window_key_has_a_window(window: dict[str, Any], tokens: int) -> None:
    config = SMALL | {"architectures": ["MistralForCausalLM"]} | window
    model = geometry_from_config("mistral", config)
    assert pool(pair_of(model, 4096), Parallelism(), GIB)[1] == tokens


def test_documented_architectures_match_the_code() -> None:
    text = (Path(__file__).parents[4] / "docs/design/sizing-weights.md").read_text()
    documented = re.findall(r"`([A-Z]\w+)`", text[text.index("## Families") :])
    assert sorted(documented) == sorted(ARCHITECTURES)


def test_stages_that_separate_shared_kv_layers_are_refused() -> None:
    model = geometry_from_config("small", GEMMA4)
    with pytest.raises(SizingError, match=r"parallelism\.pipeline: 2: cuts layers of small off"):
        cache_layout(pair_of(model, 4096), Parallelism(1, 2))


@pytest.mark.parametrize("tied", [True, False])
def test_outer_config_decides_whether_embeddings_are_tied(tied: bool) -> None:
    text = INTERNVL["text_config"] | {"tie_word_embeddings": not tied}
    model = geometry_from_config("wrapped", INTERNVL | {"text_config": text, "tie_word_embeddings": tied})
    assert model.tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (INTERNVL | {"text_config": SMALL | {"model_type": "mystery"}}, "text_config.model_type"),
        (GEMMA4 | {"audio_config": {"hidden_size": 64}}, "audio_config"),
        (MODELS["hunyuan_moe"] | {"num_experts": [8, 8, 4, 4]}, "num_experts"),
    ],
)
def test_config_that_is_not_implemented_is_estimated(config: dict[str, Any], field: str) -> None:
    model = geometry_from_config("strange", config)
    assert (model.knowledge, model.estimated_because) == (Knowledge.ESTIMATED, field)


# A config.json becomes a geometry, or one error that names key, value and fix.

Config = dict[str, Any]


def _refused(config: Config) -> GeometryError:
    with pytest.raises(GeometryError) as caught:
        geometry_from_config("some/model", config)
    assert "some/model" in str(caught.value)
    return caught.value


def test_llama_geometry(llama_config: Config) -> None:
    geometry = geometry_from_config("some/model", llama_config)
    assert geometry.num_layers == 32
    assert geometry.attentions == (SelfAttention(32, 8, 128),)
    assert geometry.max_position_embeddings == 131_072
    assert geometry.checkpoint_precision is None


@pytest.mark.parametrize(
    "key",
    [
        "architectures",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("absent", [True, False])
def test_missing_config_key_is_named(llama_config: Config, key: str, absent: bool) -> None:
    if absent:
        del llama_config[key]
    else:
        llama_config[key] = None
    error = _refused(llama_config)
    assert error.field == key
    assert "missing" in error.message


SIZES = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
]


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [0, -1, 2**63, True, 32.0, "32", float("nan"), [32], {}])
def test_config_size_must_be_a_positive_integer_in_range(llama_config: Config, key: str, value: object) -> None:
    error = _refused(llama_config | {key: value})
    assert error.field == key
    assert error.value is value
    assert key in str(error)


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ("zai-org/GLM-4.5-Air", "num_nextn_predict_layers"),
        ("Qwen/Qwen3.5-27B", "mtp_num_hidden_layers"),
    ],
)
def test_number_of_prediction_modules_is_limited_because_each_takes_memory(model: str, key: str) -> None:
    entry = find_entry(model)
    assert entry is not None
    config = entry.config
    text = config.get("text_config", config)
    assert text[key] == 1
    geometry_from_config("some/model", config | {key: 1024} | {"text_config": text | {key: 1024}})
    error = _refused(config | {key: 2**31 - 1, "text_config": text | {key: 2**31 - 1}})
    assert (error.field.removeprefix("text_config."), error.value) == (key, 2**31 - 1)


@pytest.mark.parametrize("key", ["n_layer", "num_layers", "num_mtp_modules", "num_hidden_layers"])
def test_number_of_layers_of_an_unknown_class_is_limited(llama_config: Config, key: str) -> None:
    unknown = llama_config | {"architectures": ["NovelForCausalLM"]}
    if key != "num_mtp_modules":
        del unknown["num_hidden_layers"]
    assert _refused(unknown | {key: 2**31 - 1}).field == key


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_key_value_heads": 7}, "num_key_value_heads"),
        ({"num_key_value_heads": 64}, "num_key_value_heads"),
        ({"num_attention_heads": 48, "num_key_value_heads": 8}, "num_attention_heads"),
        ({"head_dim": 127}, "head_dim"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"torch_dtype": "float64"}, "torch_dtype"),
        ({"dtype": "int8"}, "dtype"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"type": "spiral", "factor": 4}}, "rope_scaling.type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": float("inf")}}, "rope_scaling.factor"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": None}, "num_key_value_heads"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "head_dim"),
        ({"architectures": ["Qwen2ForCausalLM"], "head_dim": 64}, "head_dim"),
    ],
)
def test_contradictions_and_wrong_types_are_refused(llama_config: Config, changes: Config, field: str) -> None:
    assert _refused(llama_config | changes).field == field


def test_unknown_class_is_reported_before_missing_keys(llama_config: Config) -> None:
    without = {key: value for key, value in llama_config.items() if key != "hidden_size"}
    assert _refused(without | {"architectures": ["SomethingNew"]}).field == "architectures"
    assert _refused(without | {"architectures": ["SomethingNewForCausalLM"]}).field == "hidden_size"


def test_qwen_window_is_ignored_unless_use_sliding_window(llama_config: Config) -> None:
    config = llama_config | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096}
    unlimited = (SelfAttention(32, 8, 128, qkv_bias=True),)
    assert geometry_from_config("qwen", config | {"use_sliding_window": False}).attentions == unlimited
    assert geometry_from_config("qwen", config).attentions == unlimited
    windowed = geometry_from_config("qwen", config | {"use_sliding_window": True})
    assert (windowed.knowledge, windowed.estimated_because) == (Knowledge.ESTIMATED, "use_sliding_window")


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 131_072),
        ({"rope_type": "default"}, 131_072),
        ({"type": "linear", "factor": 2.5}, 327_680),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
        ({"rope_type": "yarn", "factor": 4.0}, 524_288),
    ],
)
def test_rope_scaling_sets_the_rotary_table_length(
    llama_config: Config, scaling: Config | None, positions: int
) -> None:
    rope = geometry_from_config("rope", llama_config | {"rope_scaling": scaling}).ropes[0]
    assert rope.size_bytes(2) == positions * 128 * 2


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_adds_a_table_of_the_original_length(llama_config: Config, kind: str) -> None:
    """phi3_long_rope_scaled_rope.py: the caches for short and for long requests, one behind the other."""
    config = llama_config | {"original_max_position_embeddings": 4096, "rope_scaling": {"type": kind}}
    rope = geometry_from_config("rope", config).ropes[0]
    assert rope.size_bytes(2) == (4096 + 131_072) * 128 * 2


def test_rope_scaling_and_rope_parameters_give_equal_tables(llama_config: Config) -> None:
    old = llama_config | {"rope_theta": 500_000.0, "rope_scaling": {"type": "linear", "factor": 8.0}}
    new = llama_config | {"rope_parameters": {"rope_type": "linear", "factor": 8, "rope_theta": 500_000}}
    assert geometry_from_config("old", old).ropes == geometry_from_config("new", new).ropes
    other = new["rope_parameters"] | {"rope_theta": 10_000}
    assert (
        geometry_from_config("x", llama_config | {"rope_parameters": other}).ropes
        != geometry_from_config("n", new).ropes
    )


def _compressed(weights: Config) -> Config:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize(
    ("quantization", "precision"),
    [
        ({"quant_method": "fp8"}, Precision.FP8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Precision.FP8),
        (_compressed({"num_bits": 8, "type": "float", "strategy": "channel"}), Precision.FP8),
        (_compressed({"num_bits": 8, "type": "int", "strategy": "channel"}), Precision.INT8),
        (_compressed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}), Precision.INT4),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, Precision.INT4),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, Precision.INT4),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, Precision.INT4),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, Precision.INT4),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, Precision.INT8),
        (_compressed({"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False}), Precision.INT4),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}, Precision.FP8),
    ],
)
def test_precision_of_quantized_checkpoints(llama_config: Config, quantization: Config, precision: Precision) -> None:
    geometry = geometry_from_config("q", llama_config | {"quantization_config": quantization})
    assert geometry.checkpoint_precision is precision
    assert geometry.weight_format().precision is precision


MODELOPT_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}


WEIGHTS = "config_groups.group_0.weights"


@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        (MODELOPT_FP8 | {"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo"),
        (_compressed({"num_bits": 2, "type": "int", "strategy": "channel"}), f"{WEIGHTS}.num_bits"),
        (_compressed({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16}), f"{WEIGHTS}.num_bits"),
        (_compressed({"num_bits": 8, "type": "float", "strategy": "block"}), f"{WEIGHTS}.block_structure"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "bits"),
        ({"quant_method": "bitsandbytes"}, "quant_method"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}, "b": {}}}, "config_groups"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}, "lm_head"),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["model.norm"]}}, "quantization.exclude_modules"),
    ],
)  # fmt: skip
def test_partly_supported_quantization_is_estimated(llama_config: Config, quantization: object, field: str) -> None:
    model = geometry_from_config("some/model", llama_config | {"quantization_config": quantization})
    assert (model.knowledge, model.estimated_because) == (Knowledge.ESTIMATED, f"quantization_config.{field}")
    assert model.checkpoint_precision is not None


@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        ({"quant_method": "mystery"}, "quant_method"),
        ({}, "quant_method"),
        ({"quant_algo": "FP8", "producer": {"name": "modelopt"}}, "quant_method"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -2}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}, "sym"),
        (_compressed({"num_bits": 4, "type": "int", "strategy": "group", "symmetric": False}), f"{WEIGHTS}.group_size"),
        ("fp8", ""),
    ],
)  # fmt: skip
def test_invalid_quantization_config_is_refused(llama_config: Config, quantization: object, field: str) -> None:
    assert _refused(llama_config | {"quantization_config": quantization}).field == f"quantization_config.{field}".strip(
        "."
    )


@pytest.mark.parametrize(
    ("model", "changes", "field"),
    [
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"full_attention_interval": 128}, "num_hidden_layers"),
        ("XiaomiMiMo/MiMo-V2-Flash", {"hybrid_layer_pattern": [0] * 48}, "hybrid_layer_pattern"),
        ("XiaomiMiMo/MiMo-V2-Flash", {"moe_layer_freq": [1] * 48}, "moe_layer_freq"),
    ],
)
def test_layer_patterns_that_mtp_cannot_copy_are_refused(model: str, changes: Config, field: str) -> None:
    entry = find_entry(model)
    assert entry is not None
    assert _refused({**entry.config, **changes}).field == field
