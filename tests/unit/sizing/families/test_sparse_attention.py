"""DeepSeek V3.2, GLM-5 and Kimi K2.5 as vLLM 0.32 holds them: figures of its own classes on the meta device."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.catalogue import find_entry, find_geometry
from specdecode_operator.sizing.devices import find_device
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.geometry import LatentAttention, ModelGeometry
from specdecode_operator.sizing.memory.activation import activation_bytes, index_workspace_bytes, on_product
from specdecode_operator.sizing.memory.budget import EngineLimits, Pair, Parallelism, estimate
from specdecode_operator.sizing.memory.kv_cache import (
    cache_layout,
    kv_bytes_per_token,
    pool_blocks,
    pool_capacity,
    stage_weights,
)
from specdecode_operator.sizing.rank_layers import Split, stages
from specdecode_operator.sizing.weights import allocation_bytes, weight_bytes

SPACE_BYTES = 20 * 2**30
FP8, BF16 = 1, 2

DEEPSEEK = "deepseek-ai/DeepSeek-V3.2"
GLM, SHARING_GLM = "zai-org/GLM-5", "zai-org/GLM-5.2"


def catalogued(model_id: str) -> ModelGeometry:
    geometry = find_geometry(model_id)
    assert geometry is not None
    return geometry


def own_precision(geometry: ModelGeometry) -> Precision:
    return geometry.checkpoint_precision or Precision.BF16


@pytest.fixture(scope="session")
def pair_of(limits: EngineLimits) -> Callable[..., Pair]:
    def make(model_id: str, **changed: Any) -> Pair:
        target = catalogued(model_id)
        limited = replace(limits, **{"max_num_seqs": 1024, "kv_cache_element_bytes": BF16, **changed})
        return Pair(target, own_precision(target), None, None, "none", 0, limited)

    return make


@pytest.mark.parametrize(
    ("model_id", "by_tensor"),
    [
        (DEEPSEEK, [674_086_322_528, 338_080_333_408, 170_077_338_848, 86_075_841_568]),
        (GLM, [1_487_822_515_200, 746_018_958_336, 375_117_179_904, 189_666_290_688]),
        (SHARING_GLM, [1_486_754_088_960, 744_950_532_096, 374_048_753_664, 188_597_864_448]),
        ("zai-org/GLM-5-FP8", [746_191_421_568, 374_247_740_544, 188_275_900_032, 95_289_979_776]),
        ("zai-org/GLM-5.2-FP8", [745_601_029_248, 373_657_348_224, 187_685_507_712, 94_699_587_456]),
        ("nvidia/DeepSeek-V3.2-NVFP4", [388_083_223_944, 195_924_266_376, 99_844_787_592, 51_805_048_200]),
        ("nvidia/GLM-5-NVFP4", [440_911_330_752, 222_563_597_760, 113_389_731_264, 58_802_798_016]),
        ("nvidia/GLM-5.2-NVFP4", [444_889_436_784, 224_018_436_720, 113_582_936_688, 58_365_186_672]),
        ("moonshotai/Kimi-K2.5", [595_147_824_096, 298_723_539_312, 150_511_396_920, 76_405_325_724]),
        ("nvidia/Kimi-K2.5-NVFP4", [590_779_958_144, 296_539_791_632, 149_419_708_376, 75_859_666_748]),
    ],
)
def test_weights_of_a_rank(model_id: str, by_tensor: list[int]) -> None:
    geometry = catalogued(model_id)
    assert [weight_bytes(geometry, own_precision(geometry), Split(tensor)) for tensor in (1, 2, 4, 8)] == by_tensor


@pytest.mark.parametrize(
    ("model_id", "by_stage"),
    [
        (DEEPSEEK, [41_719_449_952, 44_356_391_616]),
        (SHARING_GLM, [90_769_222_656, 97_828_641_792]),
        ("moonshotai/Kimi-K2.5", [38_389_377_948, 38_238_495_644]),
    ],
)
def test_weights_of_pipeline_stages(model_id: str, by_stage: list[int]) -> None:
    geometry = catalogued(model_id)
    precision = own_precision(geometry)
    assert [weight_bytes(geometry, precision, Split(8), stage=stage) for stage in stages(geometry, 2)] == by_stage


@pytest.mark.parametrize(
    ("model_id", "element_bytes", "pipeline", "blocks", "tokens"),
    [
        (DEEPSEEK, BF16, 1, 4284, 274_176),
        (DEEPSEEK, FP8, 1, 6980, 446_720),
        (DEEPSEEK, BF16, 2, 8429, 539_456),
        (GLM, BF16, 1, 3350, 214_400),
        (SHARING_GLM, BF16, 1, 3622, 231_808),
        (SHARING_GLM, FP8, 1, 6220, 398_080),
        (SHARING_GLM, BF16, 2, 7214, 461_696),
        ("moonshotai/Kimi-K2.5", BF16, 1, 19_099, 305_584),
    ],
)
def test_the_cache_holds_what_the_engine_says(  # noqa: PLR0913, PLR0917 (one argument a column)
    pair_of: Callable[..., Pair], model_id: str, element_bytes: int, pipeline: int, blocks: int, tokens: int
) -> None:
    layout = cache_layout(pair_of(model_id, kv_cache_element_bytes=element_bytes), Parallelism(1, pipeline))
    assert pool_blocks(layout, [SPACE_BYTES] * pipeline) == blocks
    assert pool_capacity(layout[0], blocks, 8192).tokens == tokens


def test_index_keys_and_latents_of_one_token(pair_of: Callable[..., Pair]) -> None:
    """132 bytes an indexer always; 1152 a layer in 16 bits and 656 in FP8."""
    whole = Parallelism()
    assert kv_bytes_per_token(pair_of(DEEPSEEK), whole) == 61 * (132 + 1152)
    assert kv_bytes_per_token(pair_of(DEEPSEEK, kv_cache_element_bytes=FP8), whole) == 61 * (132 + 656)
    assert kv_bytes_per_token(pair_of(SHARING_GLM), whole) == 21 * 132 + 78 * 1152


def test_layers_that_share_indices_have_no_indexer() -> None:
    """GLM-5.2: the first three layers and then one in four."""
    mixers = [layer.mixer for layer in catalogued(SHARING_GLM).layers]
    with_indexer = [i for i, mixer in enumerate(mixers) if isinstance(mixer, LatentAttention) and mixer.indexer]
    assert with_indexer == [0, 1, 2, *range(6, 78, 4)]


def test_a_pattern_names_the_layers_that_share() -> None:
    entry = find_entry(SHARING_GLM)
    assert entry is not None
    geometry = geometry_from_config("m", {**entry.config, "index_topk_pattern": "FS" * 20})
    mixers = [layer.mixer for layer in geometry.layers if isinstance(layer.mixer, LatentAttention)]
    assert [mixer.indexer is not None for mixer in mixers] == [True, False] * 20 + [True] * 38


def test_the_indexer_has_a_rotary_table_of_its_own_unless_interleaved() -> None:
    assert [rope.size_bytes(2) for rope in catalogued(DEEPSEEK).ropes] == [20_971_520, 20_971_520]
    assert [rope.size_bytes(2) for rope in catalogued(GLM).ropes] == [25_952_256]


@pytest.mark.parametrize("key", ["index_topk", "index_n_heads", "index_head_dim"])
def test_a_file_without_its_indexer_is_refused(key: str) -> None:
    entry = find_entry(DEEPSEEK)
    assert entry is not None
    with pytest.raises(GeometryError) as caught:
        geometry_from_config("m", {name: value for name, value in entry.config.items() if name != key})
    assert caught.value.field == key


def test_blocks_are_multiples_of_64_tokens(pair_of: Callable[..., Pair]) -> None:
    sizes = [cache_layout(pair_of(DEEPSEEK, block_size=asked), Parallelism())[0] for asked in (16, 64, 65)]
    assert [grouping.groups[0].block_size for grouping in sizes] == [64, 64, 128]


def test_chosen_tokens_take_memory_beside_the_weights(pair_of: Callable[..., Pair]) -> None:
    """T x 2048 and, for each of 61 indexers, min(T, R) + 1 rows of 2048 and a count, in int32."""
    pair = pair_of(DEEPSEEK)
    geometry = pair.target
    loaded = stage_weights(pair, Parallelism(8))[0].target_bytes
    precision = own_precision(geometry)
    known = (
        weight_bytes(geometry, precision, Split(8)) + allocation_bytes(geometry, precision, Split(8)) + 2 * 20_971_520
    )
    assert loaded - known == (8192 * 2048 + 61 * 1025 * 2049) * 4


def test_fewer_requests_leave_more_for_the_cache(pair_of: Callable[..., Pair]) -> None:
    device = find_device("NVIDIA-H200")
    assert device is not None
    few, many = (estimate(pair_of(DEEPSEEK, max_num_seqs=seqs), device, 8) for seqs in (64, 1024))
    assert many.target_weights_bytes - few.target_weights_bytes == 61 * (1024 - 64) * 2049 * 4


def test_a_stage_that_begins_between_indexers_keeps_one_table_more(pair_of: Callable[..., Pair]) -> None:
    """GLM-5.2 on two stages: layer 39 has no indexer; after it come nine that have."""
    pair = pair_of(SHARING_GLM)
    last = stages(pair.target, 2)[1]
    loaded = stage_weights(pair, Parallelism(8, 2))[1].target_bytes
    known = weight_bytes(pair.target, Precision.BF16, Split(8), stage=last)
    known += allocation_bytes(pair.target, Precision.BF16, Split(8), stage=last) + 134_217_728
    assert loaded - known == (8192 * 2048 + (9 + 1) * 1025 * 2049) * 4


@pytest.mark.parametrize(
    ("version", "length", "lengths"), [("0.31.0", 819_200, 40), ("0.32.0", 819_200, 16), ("0.32.0", 262_144, 40)]
)
def test_indexers_reserve_a_workspace_for_keys_of_long_requests(
    pair_of: Callable[..., Pair], version: str, length: int, lengths: int
) -> None:
    """4.03 GiB for GLM-5.2 with 819,200 tokens, of 6.31 GiB that a public log of vLLM 0.26 calls activation."""
    short, long = (
        pair_of(SHARING_GLM, engine_version=version, max_model_len=each, max_num_seqs=64, max_num_batched_tokens=1024)
        for each in (length // 2, length)
    )
    if lengths == 40 and version == "0.31.0":
        grown = activation_bytes(long, Parallelism(4)) - activation_bytes(short, Parallelism(4))
        assert grown == length // 2 * 40 * 132
    assert index_workspace_bytes(long) == length * lengths * 132 + 2**20


def test_dense_latent_attention_reserves_no_keys(pair_of: Callable[..., Pair]) -> None:
    assert index_workspace_bytes(pair_of("deepseek-ai/DeepSeek-V2-Lite")) == 0


@pytest.mark.parametrize(("product", "token_bytes"), [("NVIDIA-H200", 656), ("NVIDIA-GB200", 576)])
def test_an_fp8_cache_is_packed_where_flashmla_reads_it(
    pair_of: Callable[..., Pair], product: str, token_bytes: int
) -> None:
    """A public log of GLM-5.2 on GB200 has 47,699 bytes a token: 78 layers, and 132 bytes of 21 indexers."""
    pair = on_product(pair_of(SHARING_GLM, kv_cache_element_bytes=FP8), product)
    assert kv_bytes_per_token(pair, Parallelism(4)) == 78 * token_bytes + 21 * 132
