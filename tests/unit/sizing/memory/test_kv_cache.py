"""Groups and pages of the KV cache."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.catalogue import find_entry, find_geometry
from specdecode_operator.sizing.errors import GeometryError, SizingError
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.geometry import LatentAttention, ModelGeometry
from specdecode_operator.sizing.memory.activation import activation_bytes, index_workspace_bytes, on_product
from specdecode_operator.sizing.memory.budget import EngineLimits, Pair, Parallelism
from specdecode_operator.sizing.memory.kv_cache import (
    KvCapacity,
    KvGrouping,
    Layers,
    blocks_for,
    cache_layout,
    kv_bytes_per_token,
    pool_blocks,
    pool_capacity,
    stage_groups,
    stage_weights,
)
from specdecode_operator.sizing.memory.kv_pages import (
    CacheKind,
    KvLayer,
    KvSettings,
    LayerRun,
    Page,
    concurrent_batches,
    is_uniform,
    keep_all_tokens,
)
from specdecode_operator.sizing.rank_layers import Split, stages
from specdecode_operator.sizing.weights import allocation_bytes, weight_bytes
from tests.support.kv_logs import printed_tokens

NEWEST = KvSettings(block_size=16, max_num_batched_tokens=8192, version="0.32.0")
SPACE = 20 * GIB


def full(heads: int, width: int, element: int = 2) -> KvLayer:
    """Full attention."""
    return KvLayer(CacheKind.FULL, token_bytes=2 * heads * width * element, head_width=width, element_bytes=element)


def sliding(heads: int, width: int, window: int) -> KvLayer:
    """A sliding window."""
    return replace(full(heads, width), kind=CacheKind.SLIDING, reach_tokens=window)


def chunked(heads: int, width: int) -> KvLayer:
    """Chunks of 8192 tokens."""
    return replace(full(heads, width), kind=CacheKind.CHUNKED, reach_tokens=8192)


def latent(width: int = 576) -> KvLayer:
    """Multi-head latent attention."""
    return KvLayer(CacheKind.LATENT, token_bytes=2 * width, head_width=width, element_bytes=2)


def linear(state_bytes: int, per_speculated: int = 0) -> KvLayer:
    """A state of a request."""
    return KvLayer(CacheKind.STATE, state_bytes=state_bytes, state_bytes_per_speculated_token=per_speculated)


def runs(*pairs: tuple[int, KvLayer]) -> Layers:
    """Layers of a model, each with their number."""
    return tuple(LayerRun(layer, count) for count, layer in pairs)


def kv_groups(layers: Layers, settings: KvSettings) -> KvGrouping:
    """The KV cache of a model without pipeline stages."""
    return stage_groups((layers,), settings)[0]


def capacity(layers: Layers, settings: KvSettings, length: int, space: float = SPACE) -> KvCapacity:
    """What a space holds of requests of a length."""
    grouping = kv_groups(layers, settings)
    return pool_capacity(grouping, pool_blocks([grouping], [int(space)]), length)


# Groups and pages of the KV cache.

IN_STEP = NEWEST._replace(async_scheduling=False)
V019 = NEWEST._replace(version="0.19.0", v2_runner=False, prefix_caching=False)

LLAMA_70B = (80, full(4, 128))
LLAMA_8B = (32, full(4, 128))
GEMMA_27B = runs((52, sliding(8, 128, 1024)), (10, full(8, 128)))
GPT_OSS_120B = runs((18, sliding(4, 64, 128)), (18, full(4, 64)))
SCOUT = runs((36, chunked(2, 128)), (12, full(2, 128)))
QWEN3_NEXT_STATE = 548_864
KIMI_LINEAR_STATE = 3 * 2048 * 3 * 2 + 16 * 128 * 128 * 4
QWEN35_STATE = 8192 * 3 * 2 + 32 * 128 * 128 * 4


@pytest.mark.parametrize(
    ("layers", "bytes_per_block", "num_blocks", "tokens", "concurrency"),
    [
        (runs(LLAMA_70B), 2_621_440, 8192, 131_072, 16.0000),
        (runs(LLAMA_70B, LLAMA_8B), 3_670_016, 5851, 93_616, 11.4277),
        (runs(LLAMA_70B, (16, full(4, 64))), 2_883_584, 7447, 119_152, 14.5449),
        (runs((80, full(4, 128, 1)), LLAMA_8B), 2_359_296, 9102, 145_632, 17.7773),
    ],
)
def test_full_attention_of_any_width_is_one_group(
    layers: Layers, bytes_per_block: int, num_blocks: int, tokens: int, concurrency: float
) -> None:
    grouping = kv_groups(layers, NEWEST)
    assert len(grouping.groups) == 1
    assert grouping.bytes_per_block == bytes_per_block
    found = capacity(layers, NEWEST, 8192)
    assert (found.num_blocks, found.tokens, round(found.max_concurrency, 4)) == (num_blocks, tokens, concurrency)


def test_full_attention_draft_joins_the_latent_group() -> None:
    settings = NEWEST._replace(block_size=64)
    assert capacity(runs((61, latent())), settings, 32_768) == KvCapacity(4774, 305_536, 4774 / 512)
    assert capacity(runs((61, latent()), (1, latent())), settings, 32_768).tokens == 300_608
    joined = kv_groups(runs((61, latent()), (1, full(8, 128))), settings)
    assert [group.num_layers for group in joined.groups] == [62]
    assert joined.bytes_per_block == 64 * (61 * 1152 + 4096)


def test_length_off_the_block_boundary_reduces_tokens() -> None:
    assert capacity(runs(LLAMA_70B), NEWEST, 8192).tokens == 131_072
    assert capacity(runs(LLAMA_70B), NEWEST, 8200).tokens == 130_944
    blocks = capacity(runs(LLAMA_70B), NEWEST, 8200).num_blocks
    assert printed_tokens(kv_groups(runs(LLAMA_70B), NEWEST), "0.20.0", blocks, 8200) == 131_072


@pytest.mark.parametrize(
    ("layers", "settings", "length", "groups", "num_blocks", "tokens", "concurrency"),
    [
        (GEMMA_27B, NEWEST, 32_768, 7, 32_768, 125_115, 3.8182),
        (GEMMA_27B, IN_STEP, 32_768, 7, 32_768, 194_871, 5.9470),
        (GEMMA_27B, NEWEST._replace(hybrid_manager=False), 32_768, 1, 5285, 84_560, 2.5806),
        (GPT_OSS_120B, NEWEST, 131_072, 2, 72_817, 1_034_609, 7.8934),
        ((*GPT_OSS_120B, LayerRun(full(4, 64), 1)), IN_STEP, 131_072, 2, 68_985, 1_037_759, 7.9175),
        (SCOUT, IN_STEP._replace(chunked_hybrid=False), 131_072, 1, 27_306, 436_896, 3.3333),
        (SCOUT, NEWEST._replace(draft_reads_hidden_states=True), 131_072, 1, 27_306, 436_896, 3.3333),
    ],
)
def test_groups_and_capacity_of_windows_and_chunks(
    layers: Layers,
    settings: KvSettings,
    length: int,
    groups: int,
    num_blocks: int,
    tokens: int,
    concurrency: float,
) -> None:
    assert len(kv_groups(layers, settings).groups) == groups
    found = capacity(layers, settings, length)
    assert (found.num_blocks, found.tokens, round(found.max_concurrency, 4)) == (num_blocks, tokens, concurrency)


def test_attention_chunks_are_freed_by_default() -> None:
    assert capacity(SCOUT, NEWEST, 131_072).tokens == 1_118_474
    assert len(kv_groups(SCOUT, NEWEST).groups) == 4


@pytest.mark.parametrize(
    ("speculated", "draft_layers", "caching", "num_blocks", "blocks_per_request"),
    [(0, 0, True, 3212, 61 + 3 * 2), (3, 1, True, 2965, 61 + 3 * 5), (3, 1, False, 2965, 61 + 3 * 4)],
)
def test_states_enlarge_blocks_and_add_one_per_drafted_token(
    speculated: int, draft_layers: int, caching: bool, num_blocks: int, blocks_per_request: int
) -> None:
    layers = runs((36, linear(QWEN3_NEXT_STATE)), (12, full(1, 256)), (draft_layers, full(1, 256)))
    settings = NEWEST._replace(num_speculative_tokens=speculated, prefix_caching=caching)
    grouping = kv_groups(layers, settings)
    assert {group.block_size for group in grouping.groups if group.kind is CacheKind.FULL} == {544}
    assert pool_blocks([grouping], [SPACE]) == num_blocks
    assert grouping.blocks_per_request(32_768) == blocks_per_request


def test_drafted_tokens_widen_the_state_and_the_block() -> None:
    layers = runs((36, linear(QWEN3_NEXT_STATE, per_speculated=8192)), (12, full(1, 256)))
    block_sizes = [
        max(group.block_size for group in kv_groups(layers, NEWEST._replace(num_speculative_tokens=k)).groups)
        for k in (0, 3, 5)
    ]
    assert block_sizes == [544, 560, 576]


def test_prefill_checkpoint_takes_one_more_state_block() -> None:
    mamba = replace(linear(1_000_000), exports_checkpoint=True)
    layers = runs((23, mamba), (6, full(2, 128)))
    plain = runs((23, linear(1_000_000)), (6, full(2, 128)))

    def more(settings: KvSettings) -> int:
        ours, theirs = kv_groups(layers, settings), kv_groups(plain, settings)
        return ours.blocks_per_request(8192) - theirs.blocks_per_request(8192)

    assert more(NEWEST) == 4
    assert more(NEWEST._replace(prefix_caching=False)) == 0
    assert more(NEWEST._replace(version="0.31.0")) == 0


def test_unequal_pages_are_scaled_or_padded() -> None:
    target = (10, full(8, 128))
    scaled = kv_groups(runs(target, (10, sliding(4, 128, 1024))), NEWEST)
    assert [(group.block_size, group.block_bytes) for group in scaled.groups] == [(16, 655_360), (32, 655_360)]
    padded = kv_groups(runs(target, (10, sliding(3, 128, 1024))), NEWEST)
    assert [(group.block_size, group.block_bytes) for group in padded.groups] == [(16, 655_360), (16, 655_360)]


def test_window_beside_latent_layers_keeps_all_tokens() -> None:
    layers = runs((61, latent()), (5, sliding(8, 128, 2048)))
    grouping = kv_groups(layers, NEWEST)
    assert [(group.kind, group.num_layers) for group in grouping.groups] == [(CacheKind.LATENT, 66)]
    with pytest.raises(SizingError, match=r"vLLM 0\.26\.0 cannot give layers of these kinds") as refused:
        kv_groups(layers, NEWEST._replace(version="0.26.0"))
    assert (refused.value.field, refused.value.value) == ("target.model", "latent, sliding")


def test_estimated_layers_are_padded_instead_of_refused() -> None:
    """As GLM-5.3-Flash (states beside latent caches) with a DFlash 2 head, which people serve."""
    states, windows = linear(4_194_304, 65_536), sliding(8, 128, 2048)
    layers = runs((34, states), (11, latent()), (5, windows))
    with pytest.raises(SizingError):
        kv_groups(layers, NEWEST)
    grouping = kv_groups(layers, NEWEST._replace(layout_known=False))
    widths = {group.block_bytes // group.num_layers for group in grouping.groups}
    assert len(widths) == 1
    assert {group.kind for group in grouping.groups} == {CacheKind.STATE, CacheKind.LATENT, CacheKind.SLIDING}


def test_latent_pages_are_padded_only_in_0_28() -> None:
    layers = runs((4, latent()), (4, sliding(8, 128, 2048)))
    padded = kv_groups(layers, NEWEST._replace(version="0.28.0")).groups
    assert [(group.kind, group.block_size, group.block_bytes) for group in padded] == [
        (CacheKind.LATENT, 16, 262_144),
        (CacheKind.SLIDING, 16, 262_144),
    ]
    (whole,) = kv_groups(layers, NEWEST._replace(version="0.29.0")).groups
    assert whole.num_layers == 8


@pytest.mark.parametrize(
    ("layers", "first_version", "before"),
    [
        (runs((10, sliding(3, 128, 1024)), (10, full(8, 128))), "0.24.0", "0.23.0"),
        (runs((10, linear(500_000)), (10, full(4, 128)), (1, full(8, 128))), "0.26.0", "0.25.1"),
    ],
)
def test_page_padding_needs_a_minimum_version(layers: Layers, first_version: str, before: str) -> None:
    kv_groups(layers, NEWEST._replace(version=first_version))
    with pytest.raises(SizingError, match=before.replace(".", r"\.")):
        kv_groups(layers, NEWEST._replace(version=before))


def test_state_blocks_beside_latent_layers_are_kernel_multiples() -> None:
    layers = runs((20, linear(KIMI_LINEAR_STATE)), (7, latent()))
    block_sizes = [
        max(group.block_size for group in kv_groups(layers, NEWEST._replace(version=version)).groups)
        for version in ("0.26.0", "0.27.0")
    ]
    assert block_sizes == [944, 1024]
    larger = kv_groups(layers, NEWEST._replace(block_size=384))
    assert max(group.block_size for group in larger.groups) == 3 * 384, "a larger block that was asked for stays"


@pytest.mark.parametrize("empty", [linear(0), replace(full(8, 128), token_bytes=0)])
def test_a_layer_without_bytes_is_refused(empty: KvLayer) -> None:
    with pytest.raises(SizingError, match="_bytes: 0"):
        kv_groups(runs((10, full(8, 128)), (10, empty)), NEWEST)


@pytest.mark.parametrize(
    "layers",
    [
        runs((10, linear(500_000)), (10, full(8, 128))),
        runs((10, sliding(8, 128, 1024)), (10, sliding(8, 128, 4096))),
        runs((10, sliding(8, 128, 1024)), (10, sliding(8, 128, 4096)), (10, full(8, 128))),
        runs((10, chunked(8, 128)), (10, replace(chunked(8, 128), reach_tokens=4096)), (10, full(8, 128))),
    ],
)
def test_mixed_layers_are_refused_without_the_hybrid_manager(layers: Layers) -> None:
    kv_groups(layers, NEWEST)
    with pytest.raises(SizingError, match="hybrid KV cache manager"):
        kv_groups(layers, NEWEST._replace(hybrid_manager=False))


def test_smallest_pipeline_stage_decides_the_blocks() -> None:
    stages = (runs((40, full(8, 128))), runs((40, full(8, 128)), (32, full(8, 128))))
    first, last = stage_groups(stages, NEWEST._replace(pipeline=2))
    assert (first.bytes_per_block, last.bytes_per_block) == (40 * 65_536, 72 * 65_536)
    assert pool_blocks((first, last), (SPACE, SPACE)) == SPACE // (72 * 65_536)
    assert pool_blocks((first, last), (GIB, SPACE)) == GIB // (40 * 65_536)


def test_every_pipeline_stage_has_layers_of_every_group() -> None:
    pattern = runs((5, sliding(8, 128, 1024)), (1, full(8, 128)))
    groupings = stage_groups((pattern * 5, pattern * 5), NEWEST._replace(pipeline=2))
    assert [[group.num_layers for group in grouping.groups] for grouping in groupings] == [[5] * 6, [5] * 6]


def test_pipeline_stage_without_layers_is_refused() -> None:
    with pytest.raises(SizingError, match="no layer of stage 2 keeps"):
        stage_groups((runs((4, full(8, 128))), ()), NEWEST._replace(pipeline=2))


@pytest.mark.parametrize(
    ("pipeline", "asynchronous", "v2_runner", "batches"),
    [(1, True, True, 2), (1, True, False, 2), (1, False, True, 1), (2, True, True, 3), (2, True, False, 2)],
)
def test_concurrent_batches_per_scheduling_and_pipeline(
    pipeline: int, asynchronous: bool, v2_runner: bool, batches: int
) -> None:
    settings = NEWEST._replace(pipeline=pipeline, async_scheduling=asynchronous, v2_runner=v2_runner)
    assert concurrent_batches(settings) == batches


def test_versions_before_0_26_keep_one_batch_beside_the_window() -> None:
    before, since = (NEWEST._replace(version=version) for version in ("0.25.1", "0.26.0"))
    assert capacity(GEMMA_27B, before, 32_768) == capacity(GEMMA_27B, IN_STEP, 32_768)
    assert capacity(GEMMA_27B, since, 32_768) == capacity(GEMMA_27B, NEWEST, 32_768)


def test_version_0_17_splits_groups_with_fewer_odd_layers() -> None:
    layers = runs((10, sliding(8, 128, 1024)), (13, full(8, 128)))
    counts = {
        version: [group.num_layers for group in kv_groups(layers, NEWEST._replace(version=version)).groups]
        for version in ("0.17.1", "0.18.0")
    }
    assert counts == {"0.17.1": [10, 7, 6], "0.18.0": [10, 13]}


def test_larger_layer_kind_is_split_from_1_5_times_the_smaller() -> None:
    for odd, expected in ((14, [10, 14]), (15, [10, 8, 7])):
        grouping = kv_groups(runs((10, sliding(8, 128, 1024)), (odd, full(8, 128))), NEWEST)
        assert [group.num_layers for group in grouping.groups] == expected


def test_chained_mtp_modules_keep_tokens_beyond_the_window() -> None:
    layers = runs((10, sliding(8, 128, 1025)), (10, full(8, 128)))
    chained = NEWEST._replace(num_speculative_tokens=3, draft_reads_hidden_states=True, prediction_modules=3)
    blocks = [
        kv_groups(layers, settings).blocks_per_request(131_072)
        for settings in (chained._replace(prediction_modules=1), chained, chained._replace(version="0.27.0"))
    ]
    assert blocks == [8192 + 1089, 8192 + 1090, 8192 + 1089]
    two_to_the_boundary = runs((10, sliding(8, 128, 1023)), (10, full(8, 128)))
    assert kv_groups(two_to_the_boundary, chained).blocks_per_request(131_072) == 8192 + 1089


def test_invalid_version_is_refused() -> None:
    with pytest.raises(SizingError, match=r"write it as 0\.32\.0"):
        kv_groups(GEMMA_27B, NEWEST._replace(version="latest"))


def test_needed_blocks_include_the_reserved_block() -> None:
    exact, grouping = 512, kv_groups(runs(LLAMA_70B), NEWEST)
    assert blocks_for(grouping, 8192, requests=1) == exact + 1
    assert blocks_for(grouping, 8192, requests=3) == 3 * exact + 1


def test_zero_length_is_refused() -> None:
    with pytest.raises(SizingError, match="maxModelLen: 0"):
        capacity(runs(LLAMA_70B), NEWEST, 0)


QWEN_7B = full(4, 128)


@pytest.mark.parametrize(
    ("layers", "settings", "available_gib", "length", "printed", "concurrency"),
    [
        pytest.param(runs(LLAMA_70B), V019, 37.28, 8192, 244_304, 29.82, id="Llama 70B TP2, 0.19"),
        pytest.param(runs((28, QWEN_7B)), V019, 58.53, 32_768, 1_096_000, 33.45, id="Qwen2.5 7B, 0.19"),
        pytest.param(runs((28, full(4, 128, 1))), V019, 58.53, 8192, 2_192_000, 267.58, id="Qwen2.5 7B FP8 KV, 0.19"),
        pytest.param(runs((27, latent())), V019, 41.32, 8192, 1_426_368, 174.12, id="Kimi VL (MLA), 0.19"),
        pytest.param(
            runs((29, sliding(4, 256, 1024)), (5, full(4, 256))), V019, 62.51, 8192, 468_144, 57.05,
            id="Gemma 3 4B, 0.19",
        ),
        pytest.param(SCOUT, V019, 16.75, 8192, 365_968, 44.68, id="Llama 4 Scout TP4, 0.19"),
        pytest.param(
            runs((36, linear(QWEN3_NEXT_STATE)), (12, full(1, 256))),
            V019._replace(version="0.10.2"), 44.59, 262_144, 973_760, 14.77,
            id="Qwen3-Next TP2, 0.10.2",
        ),
        pytest.param(
            runs((20, linear(KIMI_LINEAR_STATE)), (7, latent())),
            V019._replace(version="0.11.1", block_size=64, max_num_batched_tokens=64_000), 2.3, 120_000, 75_840, 2.48,
            id="Kimi Linear TP2, 0.11.1",
        ),
        pytest.param(
            runs((30, linear(QWEN35_STATE)), (10, full(2, 256, 1))),
            V019._replace(version="0.17.1"), 5.18, 131_072, 134_144, None,
            id="Qwen3.5 35B FP8 KV, 0.17.1",
        ),
        pytest.param(runs((32, full(8, 128))), NEWEST, 56.21, 131_072, 460_496, 3.51, id="Llama 8B, 0.32"),
        pytest.param(
            runs((36, full(8, 128)), (1, full(8, 128))),
            NEWEST._replace(version="0.31.0", num_speculative_tokens=3, draft_reads_hidden_states=True),
            4.34, 16_384, 30_784, 1.88,
            id="Qwen3 8B + EAGLE-3, 0.31",
        ),
    ],
)  # fmt: skip
def test_tokens_and_concurrency_match_public_logs(
    layers: Layers, settings: KvSettings, available_gib: float, length: int, printed: int, concurrency: float | None
) -> None:
    """The log rounds the memory to 0.01 GiB, so tokens lie between what the ends of that range hold."""
    least, most = (capacity(layers, settings, length, (available_gib + half) * GIB) for half in (-0.005, 0.005))
    grouping = kv_groups(layers, settings)
    tokens = [printed_tokens(grouping, settings.version, each.num_blocks, length) for each in (least, most)]
    assert tokens[0] <= printed <= tokens[1]
    if concurrency is not None:
        assert least.max_concurrency - 0.005 <= concurrency <= most.max_concurrency + 0.005


# Whether layers share one table of blocks, and what is made of windows beside whole caches.

FULL = Page(KvLayer(CacheKind.FULL, 4096), 16, 65_536)
WIDE = Page(KvLayer(CacheKind.FULL, 8192), 16, 131_072)
LATENT = Page(KvLayer(CacheKind.LATENT, 1152), 16, 18_432)
WINDOW = Page(KvLayer(CacheKind.SLIDING, 4096, 1024), 16, 65_536)
STATE = Page(KvLayer(CacheKind.STATE, state_bytes=60_000), 0, 65_536)


def changed(page: Page, **layer: object) -> Page:
    return replace(page, layer=replace(page.layer, **layer))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pages", "uniform"),
    [
        ([FULL, WIDE, LATENT], True),
        ([FULL, WINDOW], False),
        ([WINDOW, WINDOW], True),
        ([WINDOW, changed(WINDOW, reach_tokens=512)], False),
        ([WINDOW, changed(WINDOW, kind=CacheKind.CHUNKED)], False),
        ([STATE, STATE], True),
        ([STATE, replace(STATE, page_bytes=70_000)], False),
        ([STATE, changed(STATE, exports_checkpoint=True)], False),
        ([STATE, FULL], False),
    ],
)
def test_only_equal_layer_types_are_uniform(pages: list[Page], *, uniform: bool) -> None:
    assert is_uniform(pages) is uniform


def test_windows_beside_full_attention_keep_all_tokens() -> None:
    kept = keep_all_tokens([FULL, WINDOW])
    assert kept == [FULL, changed(WINDOW, kind=CacheKind.FULL, reach_tokens=0)]
    assert keep_all_tokens([WINDOW, WINDOW]) == [WINDOW, WINDOW]
    assert keep_all_tokens([WINDOW, STATE]) is None


# What holds of every mix of layers.


@st.composite
def mixes(draw: st.DrawFn) -> Layers:
    kinds = st.sampled_from(
        [full(8, 128), full(4, 64), sliding(8, 128, 1024), sliding(4, 128, 128), chunked(8, 128), linear(700_000)]
    )
    drawn = draw(st.lists(st.tuples(st.integers(1, 20), kinds), min_size=1, max_size=6))
    return runs(*drawn)


@given(layers=mixes())
def test_kv_groups_contain_every_layer(layers: Layers) -> None:
    grouping = kv_groups(layers, NEWEST)
    assert sum(group.num_layers for group in grouping.groups) == sum(run.count for run in layers)
    assert all(group.block_bytes <= grouping.bytes_per_block for group in grouping.groups)


# DeepSeek V3.2, GLM-5 and Kimi K2.5 as vLLM 0.32 holds them: figures of its own classes on the meta device.

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
def test_rank_weights_per_tensor_parallel_size(model_id: str, by_tensor: list[int]) -> None:
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
def test_kv_cache_blocks_and_tokens_match_vllm(
    pair_of: Callable[..., Pair], model_id: str, element_bytes: int, pipeline: int, blocks: int, tokens: int
) -> None:
    layout = cache_layout(pair_of(model_id, kv_cache_element_bytes=element_bytes), Parallelism(1, pipeline))
    assert pool_blocks(layout, [SPACE_BYTES] * pipeline) == blocks
    assert pool_capacity(layout[0], blocks, 8192).tokens == tokens


def test_sparse_attention_bytes_per_token(pair_of: Callable[..., Pair]) -> None:
    """132 bytes an indexer always; 1152 a layer in 16 bits and 656 in FP8."""
    whole = Parallelism()
    assert kv_bytes_per_token(pair_of(DEEPSEEK), whole) == 61 * (132 + 1152)
    assert kv_bytes_per_token(pair_of(DEEPSEEK, kv_cache_element_bytes=FP8), whole) == 61 * (132 + 656)
    assert kv_bytes_per_token(pair_of(SHARING_GLM), whole) == 21 * 132 + 78 * 1152


def test_layers_that_share_indices_have_no_indexer_in_glm_5_2() -> None:
    """GLM-5.2: the first three layers and then one in four."""
    mixers = [layer.mixer for layer in catalogued(SHARING_GLM).layers]
    with_indexer = [i for i, mixer in enumerate(mixers) if isinstance(mixer, LatentAttention) and mixer.indexer]
    assert with_indexer == [0, 1, 2, *range(6, 78, 4)]


def test_index_topk_pattern_names_the_sharing_layers() -> None:
    entry = find_entry(SHARING_GLM)
    assert entry is not None
    geometry = geometry_from_config("m", {**entry.config, "index_topk_pattern": "FS" * 20})
    mixers = [layer.mixer for layer in geometry.layers if isinstance(layer.mixer, LatentAttention)]
    assert [mixer.indexer is not None for mixer in mixers] == [True, False] * 20 + [True] * 38


def test_indexer_has_its_own_rotary_table_unless_interleaved() -> None:
    assert [rope.size_bytes(2) for rope in catalogued(DEEPSEEK).ropes] == [20_971_520, 20_971_520]
    assert [rope.size_bytes(2) for rope in catalogued(GLM).ropes] == [25_952_256]


@pytest.mark.parametrize("key", ["index_topk", "index_n_heads", "index_head_dim"])
def test_config_with_a_missing_indexer_key_is_refused(key: str) -> None:
    entry = find_entry(DEEPSEEK)
    assert entry is not None
    with pytest.raises(GeometryError) as caught:
        geometry_from_config("m", {name: value for name, value in entry.config.items() if name != key})
    assert caught.value.field == key


def test_sparse_attention_blocks_are_multiples_of_64_tokens(pair_of: Callable[..., Pair]) -> None:
    sizes = [cache_layout(pair_of(DEEPSEEK, block_size=asked), Parallelism())[0] for asked in (16, 64, 65)]
    assert [grouping.groups[0].block_size for grouping in sizes] == [64, 64, 128]


def test_top_k_index_tables_are_counted_with_the_weights(pair_of: Callable[..., Pair]) -> None:
    """T x 2048 and, for each of 61 indexers, min(T, R) + 1 rows of 2048 and a count, in int32."""
    pair = pair_of(DEEPSEEK)
    geometry = pair.target
    loaded = stage_weights(pair, Parallelism(8))[0].target_bytes
    precision = own_precision(geometry)
    known = (
        weight_bytes(geometry, precision, Split(8)) + allocation_bytes(geometry, precision, Split(8)) + 2 * 20_971_520
    )
    assert loaded - known == (8192 * 2048 + 61 * 1025 * 2049) * 4


def test_stage_that_starts_between_indexers_has_one_more_table(pair_of: Callable[..., Pair]) -> None:
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
def test_indexer_workspace_grows_with_max_model_len(
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


def test_dense_latent_attention_has_no_indexer_workspace(pair_of: Callable[..., Pair]) -> None:
    assert index_workspace_bytes(pair_of("deepseek-ai/DeepSeek-V2-Lite")) == 0


@pytest.mark.parametrize(("product", "token_bytes"), [("NVIDIA-H200", 656), ("NVIDIA-GB200", 576)])
def test_fp8_sparse_cache_layout_depends_on_the_gpu(
    pair_of: Callable[..., Pair], product: str, token_bytes: int
) -> None:
    """A public log of GLM-5.2 on GB200 has 47,699 bytes a token: 78 layers, and 132 bytes of 21 indexers."""
    pair = on_product(pair_of(SHARING_GLM, kv_cache_element_bytes=FP8), product)
    assert kv_bytes_per_token(pair, Parallelism(4)) == 78 * token_bytes + 21 * 132
