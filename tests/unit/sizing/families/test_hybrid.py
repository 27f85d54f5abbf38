"""State-space and hybrid models."""

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.catalogue import find_entry, find_geometry
from specdecode_operator.sizing.errors import GeometryError, SizingError
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.memory.activation import forward_bytes
from specdecode_operator.sizing.memory.buffers import state_bytes as staged_bytes
from specdecode_operator.sizing.memory.kv_cache import (
    cache_layout,
    cached_layers,
    pool_blocks,
    pool_capacity,
    stage_weights,
)
from specdecode_operator.sizing.pair import Pair, Parallelism, loaded_draft
from specdecode_operator.sizing.rank_layers import Split, stages, whole_model
from specdecode_operator.sizing.tensor_parallel import split_remedy, tensor_problems
from specdecode_operator.sizing.version_rules import caches_prefixes
from specdecode_operator.sizing.weights import loaded_head_bytes, parameter_count, weight_bytes
from tests.support.llama import ARTICLE_LIMITS
from tests.support.state_space_models import (
    GRANITE,
    GRANITE_DENSE,
    H56,
    LLAMA_DRAFT,
    MAMBA2,
    MODELS,
    NANO,
    NANO_FP4,
    ULTRA,
    model,
)
from tests.unit.sizing.conftest import PairFactory

LIMITS = replace(ARTICLE_LIMITS, max_model_len=262144)


def pair(
    target: ModelGeometry,
    length: int,
    method: str = "none",
    speculated: int = 0,
    draft: ModelGeometry | None = None,
    version: str = LIMITS.engine_version,
) -> Pair:
    precision = target.checkpoint_precision or Precision.BF16
    limits = replace(LIMITS, max_model_len=length, engine_version=version)
    return Pair(target, precision, draft, None if draft is None else Precision.BF16, method, speculated, limits)


def cache(of: Pair, tensor: int, pipeline: int, space_gib: int = 20) -> tuple[int, int, list[list[int]]]:
    """Blocks, tokens, and the layers of each group on each stage."""
    layout = cache_layout(of, Parallelism(tensor, pipeline))
    blocks = pool_blocks(layout, [space_gib * GIB] * pipeline)
    tokens = pool_capacity(layout[0], blocks, of.limits.max_model_len).tokens
    return blocks, tokens, [sorted(group.num_layers for group in stage.groups) for stage in layout]


def state_bytes(name: str, tensor: int) -> int:
    runs = cached_layers(model(name), None, tensor, 1, None)[0]
    return next(run.layer.state_bytes for run in runs if run.layer.state_bytes)


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline", "a_stage"),
    [
        (NANO, 1, 1, [63_155_889_408]),
        (NANO, 4, 2, [7_763_821_312, 8_393_699_456]),
        (NANO, 8, 1, [7_914_787_520]),
        (NANO_FP4, 1, 1, [19_323_958_224]),
        (NANO_FP4, 4, 2, [2_524_878_664, 2_674_695_560]),
        (NANO_FP4, 8, 1, [2_431_881_680]),
        (ULTRA, 1, 1, [1_098_618_060_800]),
        (ULTRA, 8, 1, [140_537_548_800]),
        (H56, 1, 1, [112_648_728_576]),
        (H56, 4, 2, [14_618_701_312, 14_618_701_312]),
        ("granite", 1, 1, [13_883_400_192]),
        ("granite", 4, 1, [3_498_237_696]),
        ("granite dense", 2, 2, [1_708_004_864, 1_708_004_864]),
        ("granite without states", 1, 1, [5_276_766_208]),
        ("falcon", 1, 1, [2_959_102_976]),
        ("falcon", 2, 2, [752_437_504, 752_441_600]),
        ("falcon normed", 1, 1, [3_296_526_336]),
        ("mamba2", 4, 1, [3_643_105_280]),
        ("jamba", 1, 1, [103_147_986_688]),
        ("jamba", 4, 1, [25_788_980_992]),
        ("jamba dense", 2, 2, [1_768_125_312, 1_768_125_312]),
    ],
)
def test_hybrid_weights_per_stage(name: str, tensor: int, pipeline: int, a_stage: list[int]) -> None:
    target = model(name)
    precision = target.checkpoint_precision or Precision.BF16
    assert [
        weight_bytes(target, precision, Split(tensor), stage=stage) for stage in stages(target, pipeline)
    ] == a_stage


@pytest.mark.parametrize(
    ("name", "length", "tensor", "pipeline", "blocks", "tokens", "groups"),
    [
        (NANO, 262144, 1, 1, 1667, 3_166_623, [[5, 6, 6, 6, 6]]),
        (NANO, 262144, 4, 2, 13239, 13_297_028, [[3, 3, 3, 3, 3], [2, 3, 3, 3, 3]]),
        (NANO_FP4, 262144, 8, 1, 13239, 13_297_028, [[5, 6, 6, 6, 6]]),
        (ULTRA, 262144, 4, 2, 1680, 5_794_762, [[6, 6, 6, 6, 6], [6, 6, 6, 6, 6]]),
        (H56, 8192, 1, 1, 127, 52_019, [[9, 9, 9, 9, 9, 9, 10]]),
        (H56, 8192, 4, 2, 1016, 416_153, [[4, 4, 4, 5, 5, 5, 5], [4, 4, 4, 5, 5, 5, 5]]),
        ("granite", 131072, 1, 1, 6553, 2_419_478, [[4] * 10]),
        ("granite", 131072, 2, 2, 26214, 9_678_651, [[2] * 10, [2] * 10]),
        ("granite without states", 131072, 2, 2, 65536, 1_048_576, [[20], [20]]),
        ("falcon", 131072, 1, 1, 557, 839_162, [[24, 24]]),
        ("falcon", 131072, 4, 1, 2229, 1_708_535, [[24, 24]]),
        ("falcon normed", 131072, 1, 1, 420, 423_463, [[24, 24]]),
        ("jamba", 262144, 4, 1, 65536, 5_220_258, [[4] * 8]),
        ("jamba dense", 262144, 2, 2, 218453, 41_139_470, [[1] * 14, [1] * 14]),
        # No attention: no prefixes are cached, and a request is one state, however long.
        ("mamba2", 32768, 1, 1, 155, 5_079_040, [[64]]),
    ],
)
def test_hybrid_kv_cache_blocks_tokens_and_groups(
    name: str, length: int, tensor: int, pipeline: int, blocks: int, tokens: int, groups: list[list[int]]
) -> None:
    assert cache(pair(model(name), length), tensor, pipeline) == (blocks, tokens, groups)


@pytest.mark.parametrize(
    ("name", "length", "tensor", "pipeline", "blocks", "tokens"),
    [(NANO, 262144, 2, 1, 4927, 8_726_915), (NANO, 262144, 2, 2, 9855, 17_455_602), (H56, 8192, 2, 1, 378, 81_488)],
)
def test_ngram_tokens_take_extra_mamba_states(
    name: str, length: int, tensor: int, pipeline: int, blocks: int, tokens: int
) -> None:
    """Each speculated token takes a state of its own, and a column of each state's convolution."""
    assert cache(pair(model(name), length, "ngram", 3), tensor, pipeline, 30)[:2] == (blocks, tokens)


def test_mamba_1_convolution_has_no_columns_for_drafted_tokens() -> None:
    assert cache(pair(model("jamba"), 16384, "ngram", 3), 1, 1) == (16384, 1_118_481, [[4] * 8])


@pytest.mark.parametrize(
    ("name", "length", "blocks", "tokens", "groups"),
    [
        (NANO, 262144, 2445, 1_384_324, [[5, 5, 5, 6, 6, 6, 6, 6]]),
        (H56, 8192, 376, 59_234, [[8, 8, 9, 9, 9, 9, 9, 9, 10]]),
    ],
)
def test_draft_model_has_its_own_kv_cache_groups(
    name: str, length: int, blocks: int, tokens: int, groups: list[list[int]]
) -> None:
    draft = geometry_from_config("draft", LLAMA_DRAFT | {"max_position_embeddings": length})
    assert cache(pair(model(name), length, "draft_model", 5, draft), 2, 1, 30) == (blocks, tokens, groups)


def test_block_size_follows_only_the_target_states() -> None:
    """The platform does not look at the draft (platforms/interface.py, _align_hybrid_block_size); 60 GiB at TP 2."""
    dense = model("granite dense")
    # A target without states: blocks stay at 16 tokens, and attention is padded to the page of the draft's states.
    assert cache(pair(model("granite without states"), 8192, "draft_model", 4, dense), 2, 1, 60)[:2] == (2630, 41_512)
    target = geometry_from_config("mamba2", MAMBA2 | {"vocab_size": 100352})
    attending = model("granite without states")
    assert cache(pair(target, 8192, "draft_model", 4, attending), 2, 1, 60)[:2] == (1_437, 22_551)


def test_draft_with_larger_states_than_the_target_is_refused() -> None:
    larger = geometry_from_config("larger", GRANITE_DENSE | {"hidden_size": 4096, "mamba_n_heads": 128})
    drafting = pair(model("granite dense"), 8192, "draft_model", 4, larger)
    with pytest.raises(SizingError, match="use a draft without states"):
        cache(drafting, 2, 1)


@pytest.mark.parametrize(
    ("name", "speculated", "draft", "blocks", "tokens", "groups"),
    [
        (ULTRA, 1, 11_253_401_600, 580, 3_167_573, [[12, 12, 12, 12, 13]]),
    ],
)
def test_nemotron_mtp_is_an_attention_layer_and_an_expert_layer(
    name: str, speculated: int, draft: int, blocks: int, tokens: int, groups: list[list[int]]
) -> None:
    drafting = pair(model(name), 262144, "mtp", speculated)
    loaded = loaded_draft(drafting)
    assert loaded is not None
    assert loaded_head_bytes(*loaded, Split(2)) == draft
    assert cache(drafting, 2, 1, 30) == (blocks, tokens, groups)


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        # Convolution of 3 tokens in 16 bits, state in float32: 3 x 6144 x 2 + 64 x 64 x 128 x 4.
        (NANO, 1, 36_864 + 2_097_152),
        (NANO, 8, 4_608 + 262_144),
        # A single group is copied: 3 x (768 + 2 x 128) x 2, and the state in 16 bits.
        ("granite", 4, 6_144 + 196_608),
        ("mamba2", 1, 61_440 + 2_097_152),
        ("jamba", 2, 24_576 + 131_072),
    ],
)
def test_state_bytes_per_tensor_parallel_size(name: str, tensor: int, expected: int) -> None:
    assert state_bytes(name, tensor) == expected


@pytest.mark.parametrize(("kind", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_mamba_ssm_cache_dtype_sets_the_state_size(kind: str, size: int) -> None:
    entry = find_entry(NANO)
    assert entry is not None
    target = geometry_from_config("nano", {**entry.config, "mamba_ssm_cache_dtype": kind})
    runs = cached_layers(target, None, 1, 1, None)[0]
    assert runs[0].layer.state_bytes == 36_864 + 64 * 64 * 128 * size


def test_prefix_caching_adds_two_states_per_request_since_0_32() -> None:
    with_prefixes = cache_layout(pair(model(NANO), 8192), Parallelism())[0]
    off = pair(model(NANO), 8192)
    without = cache_layout(replace(off, limits=replace(off.limits, prefix_caching=False)), Parallelism())[0]
    assert [group.extra_blocks for group in with_prefixes.groups] == [3, 3, 3, 3, 0]
    assert [group.extra_blocks for group in without.groups] == [1, 1, 1, 1, 0]
    # Before 0.32 no state was stored from inside a prefill (mamba_mixer2.py).
    before = cache_layout(pair(model(NANO), 8192, version="0.31.0"), Parallelism())[0]
    assert [group.extra_blocks for group in before.groups] == [2, 2, 2, 2, 0]


@pytest.mark.parametrize(
    ("version", "cached"), [("0.25.0", False), ("0.27.1", False), ("0.28.0", True), ("0.32.0", True)]
)
def test_hybrids_cache_prefixes_by_default_since_0_28(version: str, *, cached: bool) -> None:
    assert caches_prefixes(version) is cached


@pytest.mark.parametrize(
    ("name", "tensor", "key", "value"),
    [(NANO, 16, "n_groups", 8), ("falcon normed", 4, "mamba_n_groups", 2), ("mamba2", 16, "n_groups", 8)],
)
def test_mamba_groups_must_divide_over_tensor_ranks(name: str, tensor: int, key: str, value: int) -> None:
    problems = tensor_problems(model(name), tensor)
    assert [(problem.field, int(problem.value)) for problem in problems] == [(key, value)]
    assert split_remedy([(model(name), None)]).endswith(f" or {value}"), "no more than there are groups"


def test_single_mamba_group_is_copied_to_every_rank() -> None:
    assert tensor_problems(model("granite"), 4) == ()
    # Granite's twelve attention heads do not divide, its 96 Mamba heads and its one group do.
    assert [problem.field for problem in tensor_problems(model("granite"), 8)] == ["num_attention_heads"]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (MAMBA2 | {"num_heads": 36, "head_dim": 64}, "num_heads"),
        (GRANITE | {"mamba_n_heads": 36, "mamba_d_head": "auto", "hidden_size": 1152}, "mamba_n_heads"),
    ],
)
def test_mamba_heads_must_divide_over_tensor_ranks(config: dict[str, Any], key: str) -> None:
    assert key in {problem.field for problem in tensor_problems(geometry_from_config("odd", config), 8)}


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        (NANO, {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern"),
        (NANO, {"hybrid_override_pattern": None}, "hybrid_override_pattern"),
        (NANO, {"layers_block_type": ["mamba", "conv"]}, "layers_block_type"),
        (NANO, {"mamba_ssm_cache_dtype": "int8"}, "mamba_ssm_cache_dtype"),
        (NANO, {"mamba_num_heads": 0}, "mamba_num_heads"),
        (ULTRA, {"mtp_layers_block_type": ["mamba", "moe"]}, "mtp_layers_block_type"),
        ("granite", {"layer_types": ["mamba"]}, "layer_types"),
        ("granite", {"mamba_n_heads": 95}, "mamba_n_heads"),
        ("granite", {"mamba_d_head": "many"}, "mamba_d_head"),
        ("jamba", {"attn_layer_offset": 8}, "attn_layer_offset"),
        ("jamba", {"expert_layer_offset": -1}, "expert_layer_offset"),
    ],
)
def test_invalid_hybrid_config_is_refused(name: str, changes: dict[str, Any], key: str) -> None:
    entry = find_entry(name)
    config = MODELS[name] if entry is None else entry.config
    with pytest.raises(GeometryError) as caught:
        geometry_from_config("bad", {**config, **changes})
    assert caught.value.field == key


def test_old_and_new_layer_type_names_are_equivalent() -> None:
    newer = GRANITE | {
        "layer_types": ["linear_attention" if kind == "mamba" else "full_attention" for kind in GRANITE["layer_types"]]
    }
    assert geometry_from_config("new", newer).layers == geometry_from_config("old", GRANITE).layers


def test_profile_run_peak_is_around_a_mamba_state() -> None:
    """Alive in conv_ssm_forward: residual, projection (gate, convolution, steps), output, two copies for it."""
    target = model(NANO)
    limits = replace(LIMITS, enforce_eager=True)
    pair = Pair(target, Precision.BF16, None, None, "none", 0, limits)
    row = 2688 + (4096 + 6144 + 64) + 4096 + 2 * 6144
    assert forward_bytes(pair, target, whole_model(target), Precision.BF16, Parallelism()) == 8192 * row * 2


def test_parameter_count_matches_the_model_name() -> None:
    """The names say 30 billion and 550."""
    assert [round(parameter_count(model(name)) / 1e9) for name in (NANO, ULTRA)] == [32, 549]


# What heads that propose a block, and heads with a rotary table or an output head of their own, take from 0.33 on.

ONE_GPU = Parallelism()


def at(pair: Pair, version: str, **limits: object) -> Pair:
    return replace(pair, limits=replace(pair.limits, engine_version=version, **limits))


@pytest.fixture
def block(make_pair: PairFactory) -> Pair:
    """Qwen3-8B with a DFlash head that reads five of its layers; 256 requests propose 7 tokens each."""
    target = find_geometry("Qwen/Qwen3-8B")
    assert target is not None
    head = find_geometry("sgl-project/SpecForge:configs/qwen3-8b-dflash.json")
    return replace(make_pair(), target=target, draft=head, method="dflash", num_speculative_tokens=7)


def test_auxiliary_states_of_all_rows_are_staged_since_0_33(block: Pair) -> None:
    head = loaded_draft(block)
    assert head is not None
    assert head[0].head is not None
    staged = staged_bytes(at(block, "0.33.0"), ONE_GPU) - staged_bytes(at(block, "0.32.0"), ONE_GPU)
    assert staged == 256 * 8 * head[0].head.auxiliary_states * 4096 * 2
    full_step = at(block, "0.33.0", max_num_batched_tokens=1024)
    staged = staged_bytes(full_step, ONE_GPU) - staged_bytes(at(full_step, "0.32.0"), ONE_GPU)
    assert staged == 1024 * head[0].head.auxiliary_states * 4096 * 2


@pytest.mark.parametrize("without", [{"enforce_eager": True}, {"graph_mode": "PIECEWISE"}, {"graph_mode": "NONE"}])
def test_no_states_are_staged_without_full_cuda_graphs(block: Pair, without: dict[str, object]) -> None:
    newer, older = (staged_bytes(at(block, version, **without), ONE_GPU) for version in ("0.33.0", "0.32.0"))
    assert newer == older


def test_block_head_rotary_table_covers_max_model_len_since_0_33(block: Pair) -> None:
    """The file of the head ends at 40,960 tokens; before 0.33 only EAGLE's tables were made longer."""
    rows = {}
    for version in ("0.32.0", "0.33.0"):
        loaded = loaded_draft(at(block, version, max_model_len=131_072))
        assert loaded is not None
        rows[version] = [rope.positions for rope in loaded[0].ropes]
    assert rows["0.33.0"] == [131_072]
    assert rows["0.32.0"] == [40_960]


@pytest.mark.parametrize(
    ("quantization", "tensor", "size_bytes"),
    [
        ("fp8", 1, 128_256 * 8192 + 128_256 * 4),
        ("fp8", 2, 64_128 * 8192 + 64_128 * 4),
        ("nvfp4", 2, 64_128 * 8192 * 9 // 16 + 4),
    ],
)
def test_quantized_draft_output_head_adds_to_that_of_the_target(
    make_pair: PairFactory, quantization: str, tensor: int, size_bytes: int
) -> None:
    head = find_geometry("yuhuili/EAGLE-LLaMA3-Instruct-8B")
    pair = replace(make_pair("FP8"), draft=head, method="eagle", num_speculative_tokens=3)
    shared, own = (
        stage_weights(replace(pair, draft_head_quantization=kind), Parallelism(tensor))[0]
        for kind in (None, quantization)
    )
    assert own.draft_bytes - shared.draft_bytes == size_bytes
    assert own.target_bytes == shared.target_bytes
