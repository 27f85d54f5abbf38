"""Models whose class sizing does not implement."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from bench.sizing.estimated import comparisons
from specdecode_operator.enums import Knowledge, Precision
from specdecode_operator.sizing.catalogue import find_geometry, hub_ids
from specdecode_operator.sizing.devices import find_device
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.families.architectures import geometry_from_config, head_from_config
from specdecode_operator.sizing.families.draft_heads import dspark_head, mtp_head
from specdecode_operator.sizing.geometry import Experts, LatentAttention, ModelGeometry, SelfAttention, StoredWeights
from specdecode_operator.sizing.memory.budget import Budget, EngineLimits, Pair, estimate
from specdecode_operator.sizing.memory.kv_cache import cached_layers
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.weights import loaded_head_bytes, weight_bytes

GIB = 2**30

NEW: dict[str, Any] = {
    "architectures": ["BrandNewForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
}
TABLE = 128_256 * 4096 * 2
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 2048, "num_experts_per_tok": 8}


def stored(layers: int, **parts: int) -> StoredWeights:
    """Headers of a model with both tables, layers of so many bytes, and further parts."""
    by_part = {"model.embed_tokens": TABLE, "lm_head": TABLE, "model.layers": layers, **parts}
    total = sum(by_part.values())
    return StoredWeights.of(total, {"BF16": total}, by_part, output_head=True)


def budget_of(model: ModelGeometry) -> Budget:
    device = find_device("NVIDIA-H100-80GB-HBM3")
    assert device is not None
    limits = EngineLimits(8192, 64, 8192, 16, None, 92, False, 1)
    return estimate(Pair(model, Precision.BF16, None, None, "none", 0, limits), device, 1)


def bytes_on_one(model: ModelGeometry, tensor: int = 1) -> int:
    return weight_bytes(model, model.checkpoint_precision or Precision.BF16, Split(tensor))


def test_estimates_are_never_more_optimistic_than_exact_sizing() -> None:
    assert [(row.model, row.tensor) for row in comparisons() if row.promises_more] == []


def test_estimates_of_catalogue_models_are_close_to_exact() -> None:
    rows = comparisons()
    models, unequal = {row.model for row in rows}, {row.model for row in rows if not row.same_kv}
    far = {row.model for row in rows if row.tensor == 1 and abs(row.weights_error) > 0.005}
    assert len(models) > 100
    assert len(unequal) <= 0.05 * len(models)
    assert len(far) <= 0.05 * len(models)


def test_estimated_weights_are_those_in_the_headers() -> None:
    in_files = 9 * GIB
    model = geometry_from_config("new", NEW, stored(in_files))
    assert (model.knowledge, model.estimated_because) == (Knowledge.ESTIMATED, "architectures")
    assert bytes_on_one(model) == pytest.approx(in_files + 2 * TABLE, rel=1e-4)
    assert bytes_on_one(model, 2) == pytest.approx((in_files + 2 * TABLE) / 2, rel=1e-3)


KNOWN = NEW | {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("more_percent", "knowledge"), [(0, Knowledge.EXACT), (4, Knowledge.EXACT), (25, Knowledge.ESTIMATED)]
)
def test_headers_far_above_a_known_class_make_an_estimate(more_percent: int, knowledge: Knowledge) -> None:
    own = geometry_from_config("known", KNOWN)
    layers = (bytes_on_one(own) - 2 * TABLE) * (100 + more_percent) // 100
    model = geometry_from_config("known", KNOWN, stored(layers))
    assert model.knowledge is knowledge
    if knowledge is Knowledge.ESTIMATED:
        assert bytes_on_one(model) == pytest.approx(layers + 2 * TABLE, rel=1e-4)


def test_float32_parts_are_counted_in_16_bits() -> None:
    layers = 9 * GIB
    parts = {"model.embed_tokens": 2 * TABLE, "lm_head": 2 * TABLE, "model.layers": 2 * layers}
    total = sum(parts.values())
    model = geometry_from_config("new", NEW, StoredWeights.of(total, {"F32": total}, parts, output_head=True))
    assert bytes_on_one(model) == pytest.approx(layers + 2 * TABLE, rel=1e-4)


def test_additional_embedding_tables_are_counted() -> None:
    model = geometry_from_config("new", NEW, stored(9 * GIB, **{"model.ngram.embedding": 7 * GIB}))
    assert bytes_on_one(model) == pytest.approx(16 * GIB + 2 * TABLE, rel=1e-4)


def test_quoted_numbers_are_read_as_numbers() -> None:
    experts = {"moe_intermediate_size": 2048, "num_experts_per_tok": 8}
    as_number, as_text = (geometry_from_config("new", NEW | experts | {"num_experts": n}) for n in (128, "128"))
    assert bytes_on_one(as_text) == bytes_on_one(as_number)


def test_weights_without_headers_follow_from_the_config() -> None:
    llama = geometry_from_config("known", NEW | {"architectures": ["LlamaForCausalLM"]})
    assert bytes_on_one(geometry_from_config("new", NEW)) == pytest.approx(bytes_on_one(llama), rel=1e-3)


def test_missing_output_head_means_tied_embeddings() -> None:
    headers = replace(stored(9 * GIB), output_head=False)
    assert geometry_from_config("new", NEW, headers).tie_word_embeddings
    assert not geometry_from_config("new", NEW, stored(9 * GIB)).tie_word_embeddings


def test_float32_total_is_counted_in_16_bits() -> None:
    headers = StoredWeights.of(20 * GIB, {"F32": 20 * GIB}, {}, output_head=True)
    assert bytes_on_one(geometry_from_config("new", NEW, headers)) == pytest.approx(10 * GIB, rel=1e-3)


@pytest.mark.parametrize("part", ["mtp.layers", "model.layers.mtp", "talker.model", "code2wav.decoder"])
def test_parts_that_vllm_does_not_load_are_not_counted(part: str) -> None:
    without = geometry_from_config("new", NEW, stored(9 * GIB))
    beside = geometry_from_config("new", NEW, stored(9 * GIB, **{part: 3 * GIB}))
    assert bytes_on_one(beside) == bytes_on_one(without)


def test_estimation_margin_is_wider_without_headers() -> None:
    with_headers = budget_of(geometry_from_config("new", NEW, stored(9 * GIB)))
    without = budget_of(geometry_from_config("new", NEW))
    exact = budget_of(geometry_from_config("known", NEW | {"architectures": ["LlamaForCausalLM"]}))
    assert exact.estimated_margin_bytes == 0
    for budget, percent in ((with_headers, 3), (without, 15)):
        expected = budget.target_weights_bytes * percent / 100 + budget.activation_bytes / 4
        assert budget.estimated_margin_bytes == pytest.approx(expected, abs=2)
        assert budget.margin_bytes == exact.margin_bytes + budget.estimated_margin_bytes


def test_vision_encoder_is_counted_and_in_the_margin() -> None:
    config = {
        "architectures": ["BrandNewForConditionalGeneration"],
        "llm_config": {key: value for key, value in NEW.items() if key != "architectures"},
        "vision_config": {"hidden_size": 1024, "depth": 24},
    }
    plain = budget_of(geometry_from_config("new", NEW, stored(9 * GIB)))
    seeing = geometry_from_config("new", config, stored(9 * GIB, **{"vision_tower.blocks": 2 * GIB}))
    assert bytes_on_one(seeing) == pytest.approx(11 * GIB + 2 * TABLE, rel=1e-4)
    assert seeing.tower.split_elements == GIB, "2 GiB in 16 bits"
    assert budget_of(seeing).estimated_margin_bytes - plain.estimated_margin_bytes >= 3.5 * GIB


@pytest.mark.parametrize(
    ("method", "section", "states"),
    [("eagle3", "eagle_config", 3), ("dflash", "dflash_config", 5), ("dspark", "dflash_config", 5)],
)
def test_unknown_head_uses_the_auxiliary_states_of_its_config(method: str, section: str, states: int) -> None:
    key = "eagle_aux_hidden_state_layer_ids" if method == "eagle3" else "target_layer_ids"
    head = head_from_config("head", NEW | {"num_hidden_layers": 1, section: {key: list(range(states))}}, method).head
    assert head is not None
    assert head.auxiliary_states == states
    assert head.whole_elements == (states * 4096 + 2) * 4096


def test_unknown_head_without_output_head_shares_the_target_output() -> None:
    config = NEW | {"architectures": ["Eagle3BrandNewForCausalLM"], "num_hidden_layers": 1}
    own, target_s = (
        head_from_config("head", config, "eagle3", replace(stored(GIB), output_head=has)).head for has in (True, False)
    )
    assert own is not None
    assert target_s is not None
    assert (own.shares_output, target_s.shares_output) == (False, True)


@pytest.mark.parametrize(
    ("section", "precision"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, Precision.INT4),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}, Precision.INT4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, Precision.FP8),
        ({"quant_method": "quark", "bits": 4}, Precision.INT4),
        ({"quant_method": "auto-round", "bits": 8}, Precision.FP8),
    ],
)
def test_unknown_quantization_is_estimated_by_its_bits(section: dict[str, Any], precision: Precision) -> None:
    assert geometry_from_config("new", NEW | {"quantization_config": section}).checkpoint_precision is precision


def test_embeddings_are_tied_if_the_config_says_so() -> None:
    tied, apart = (
        bytes_on_one(geometry_from_config("new", NEW | {"tie_word_embeddings": tied})) for tied in (True, False)
    )
    assert apart - tied == TABLE


def test_mtp_layers_are_read_from_the_config() -> None:
    assert geometry_from_config("new", NEW | {"num_nextn_predict_layers": 2}).mtp_layers == 2


def test_unloaded_parts_keep_a_known_class_exact() -> None:
    own = geometry_from_config("known", KNOWN)
    headers = stored(bytes_on_one(own) - 2 * TABLE, **{"mtp.layers": 3 * GIB})
    assert geometry_from_config("known", KNOWN, headers).knowledge is Knowledge.EXACT


def test_unloaded_float32_parts_are_not_counted() -> None:
    def loaded(**more: int) -> int:
        parts = {"model.embed_tokens": 2 * TABLE, "lm_head": 2 * TABLE, "model.layers": 18 * GIB, **more}
        total = sum(parts.values())
        return bytes_on_one(
            geometry_from_config("new", NEW, StoredWeights.of(total, {"F32": total}, parts, output_head=True))
        )

    assert loaded(**{"mtp.layers": 3 * GIB}) == pytest.approx(loaded(), rel=1e-6)


def test_encoder_size_without_header_parts_follows_from_its_config() -> None:
    config = NEW | {
        "architectures": ["BrandNewForConditionalGeneration"],
        "vision_config": {"hidden_size": 1024, "depth": 24},
    }
    total = 18 * GIB
    headers = StoredWeights.of(total, {"BF16": total}, {}, output_head=True)
    tower = geometry_from_config("new", config, headers).tower
    assert tower == geometry_from_config("new", config).tower
    assert tower.split_elements == 24 * 1024 * (4 * 1024 + 3 * 4096)


def test_unknown_head_shares_the_embedding_of_its_target() -> None:
    config = NEW | {"architectures": ["Eagle3BrandNewForCausalLM"], "num_hidden_layers": 1, "draft_vocab_size": 32_000}
    head = head_from_config("head", config, "eagle3")
    assert head.knowledge is Knowledge.ESTIMATED
    assert head.head is not None
    assert (head.head.auxiliary_states, head.head.output_rows, head.head.shares_embedding) == (3, 32_000, True)
    assert isinstance(head.layers[0].mixer, SelfAttention)
    assert head.layers[0].input_multiple == 2
    assert head.head.token_map_bytes == 32_000 * 8, "an int64 for each of its tokens"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"num_key_value_heads": 7}, "num_key_value_heads"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"num_hidden_layers": 2**60}, "num_hidden_layers"),
        ({"quantization_config": {"quant_method": "mystery"}}, "quantization_config.quant_method"),
        ({"architectures": ["Gemma3nForCausalLM"], "num_kv_shared_layers": 32}, "num_kv_shared_layers"),
        ({"architectures": ["Gemma3nForCausalLM"], "num_kv_shared_layers": 33}, "num_kv_shared_layers"),
        # This took a quarter of an hour once.
        ({"architectures": ["Gemma3nForCausalLM"], "num_kv_shared_layers": 2**31 - 1}, "num_kv_shared_layers"),
        (
            {
                "architectures": ["Gemma3nForCausalLM"],
                "num_kv_shared_layers": 31,
                "layer_types": ["sliding_attention"] * 16 + ["full_attention"] * 16,
            },
            "num_kv_shared_layers",
        ),
        (
            {"architectures": ["Gemma4ForCausalLM"], "num_kv_shared_layers": 32, "tie_word_embeddings": True},
            "num_kv_shared_layers",
        ),
        ({"layer_types": ["moe"] * 32}, "layer_types"),
        ({"hybrid_override_pattern": "-E" * 16}, "hybrid_override_pattern"),
        ({"n_layer": 2**60}, "n_layer"),
        ({"num_experts": True, "moe_intermediate_size": 64}, "num_experts"),
    ],
)
def test_invalid_config_of_an_unknown_class_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(GeometryError) as caught:
        geometry_from_config("new", NEW | changes)
    assert caught.value.field == field


def test_null_keys_of_text_config_fall_back_to_the_outer_config() -> None:
    inner = {"num_key_value_heads": None, "intermediate_size": None, "vocab_size": None, "hidden_act": "silu"}
    found = geometry_from_config("new", NEW | {"text_config": inner})
    assert found.layers == geometry_from_config("new", NEW).layers
    assert found.doubts == ()


@pytest.mark.parametrize(
    ("changes", "like"),
    [
        (EXPERTS | {"num_experts": 8, "n_routed_experts": 256}, EXPERTS | {"num_experts": 256}),
        (EXPERTS | {"num_experts": "256", "n_routed_experts": 8}, EXPERTS | {"num_experts": 256}),
        (EXPERTS | {"num_experts": 8, "num_experts_per_token": 2}, EXPERTS | {"num_experts": 8}),
        ({"text_config": {"num_hidden_layers": 1}}, {}),
        ({"text_config": {"n_layer": 64}}, {"num_hidden_layers": 64}),
        ({"n_kv_heads": 16}, {"num_key_value_heads": 16}),
        ({"head_dim": 64, "head_size": 256}, {"head_dim": 256}),
        ({"text_config": {"hidden_size": 8192}}, {"hidden_size": 8192}),
        (
            {"num_hidden_layers": 48, "text_config": {"num_hidden_layers": 32, "layer_types": ["attention"] * 32}},
            {"layer_types": ["attention"] * 32},
        ),
    ],
)
def test_contradicting_sizes_use_the_larger_and_raise_a_doubt(changes: dict[str, Any], like: dict[str, Any]) -> None:
    found, expected = (geometry_from_config("new", NEW | each) for each in (changes, like))
    assert found.layers == expected.layers
    assert found.hidden_size == expected.hidden_size
    assert expected.doubts == ()
    (doubt,) = found.doubts
    assert "contradicts itself" in doubt


def test_contradiction_names_both_fields_and_values() -> None:
    (doubt,) = geometry_from_config("new", NEW | {"text_config": {"num_hidden_layers": 1}}).doubts
    assert "num_hidden_layers 32" in doubt
    assert "text_config.num_hidden_layers 1" in doubt


def test_equal_duplicate_sizes_raise_no_doubt() -> None:
    config = NEW | {"n_layer": 32, "text_config": {"num_hidden_layers": 32, "num_kv_heads": "8"}}
    assert geometry_from_config("new", config).doubts == ()


def test_published_models_raise_no_doubts() -> None:
    models = []
    for name in hub_ids():
        # Some heads need their method to be read.
        with suppress(GeometryError):
            models.append(find_geometry(name))
    assert len(models) > 200
    assert [model.name for model in models if model is not None and model.doubts] == []


def test_unknown_class_error_is_short() -> None:
    with pytest.raises(GeometryError) as caught:
        geometry_from_config("new", {"architectures": ["Strange"]})
    assert len(str(caught.value)) < 200


PREDICTING: dict[str, Any] = NEW | {"num_nextn_predict_layers": 1}


def test_mtp_layer_weights_are_those_in_the_headers() -> None:
    """As NVIDIA's Puzzle 75B: they are in 16 bits, with larger experts than the last layer."""
    parts = {"mtp.layers": 5 * GIB}
    draft = mtp_head(geometry_from_config("new", PREDICTING, stored(9 * GIB, **parts)))
    assert loaded_head_bytes(draft, Precision.BF16, Split(1)) == pytest.approx(5 * GIB, rel=1e-4)
    without = mtp_head(geometry_from_config("new", PREDICTING, stored(9 * GIB)))
    assert loaded_head_bytes(without, Precision.BF16, Split(1)) < GIB


STAGED: dict[str, Any] = (
    NEW
    | {"architectures": ["DeepseekV4ForCausalLM"], "dspark_target_layer_ids": [29, 30, 31], "dspark_markov_rank": 256}
    | {**EXPERTS, "n_routed_experts": 64, "num_nextn_predict_layers": 1}
)


def stages_of(config: dict[str, Any], headers: StoredWeights | None = None) -> ModelGeometry:
    draft = dspark_head(geometry_from_config("new", config, headers))
    assert draft is not None
    return draft


@pytest.mark.parametrize(
    ("changed", "stages", "experts"),
    [
        ({}, 3, 64),
        ({"n_mtp_layers": 2}, 2, 64),
        ({"architectures": ["DeepseekV41ForCausalLM"], "num_nextn_predict_layers": 4}, 4, 64),
        ({"dspark_n_routed_experts": 16}, 3, 16),
    ],
)
def test_stages_of_dspark_follow_the_config(changed: dict[str, Any], stages: int, experts: int) -> None:
    draft = stages_of(STAGED | changed)
    parts = [layer.feed_forward for layer in draft.layers]
    assert [part.num_experts for part in parts if isinstance(part, Experts)] == [experts] * stages


def test_weights_of_dspark_stages_are_those_in_the_headers() -> None:
    headers = stored(9 * GIB, **{"mtp.0": 2 * GIB, "mtp.1": 2 * GIB})
    assert loaded_head_bytes(stages_of(STAGED, headers), Precision.BF16, Split(1)) == pytest.approx(4 * GIB, rel=1e-4)


@pytest.mark.parametrize("changed", [{"architectures": ["BrandNewForCausalLM"]}, {"dspark_target_layer_ids": None}])
def test_other_models_have_no_stages_of_dspark(changed: dict[str, Any]) -> None:
    model = geometry_from_config("new", STAGED | changed)
    assert dspark_head(model) is None
    assert model.mtp_layers == 1


def test_known_class_headers_are_compared_without_mtp_parts() -> None:
    known = KNOWN | {"architectures": ["Glm4MoeForCausalLM"], **EXPERTS, "n_routed_experts": 16, "n_shared_experts": 1}
    known |= {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
    own = geometry_from_config("known", known)
    layers = (bytes_on_one(own) - 2 * TABLE) * 110 // 100
    model = geometry_from_config("known", known, stored(layers, **{"model.layers.mtp": 3 * GIB}))
    assert (own.knowledge, model.knowledge) == (Knowledge.EXACT, Knowledge.ESTIMATED)


NVFP4_MIXED: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "note": "NVFP4"}


@pytest.mark.parametrize("excluded", [{"ignore": ["lm_head", "mtp*"]}, {"exclude_modules": ["mtp.layers.0"]}])
def test_excluded_mtp_layers_are_counted_in_16_bits(excluded: dict[str, Any]) -> None:
    def drafted_bytes(quantization: dict[str, Any]) -> int:
        draft = mtp_head(geometry_from_config("new", PREDICTING | {"quantization_config": quantization}))
        return loaded_head_bytes(draft, Precision.NVFP4, Split(1))

    everywhere = drafted_bytes(NVFP4_MIXED | {"ignore": ["lm_head"]})
    assert 2.5 * everywhere < drafted_bytes(NVFP4_MIXED | excluded) < 4 * everywhere


# Layers of estimated models: attention, states and experts, by the keys with which config.json files say them.

WITH_EXPERTS = NEW | EXPERTS | {"num_experts": 64}


IN_FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def expert_bytes(config: dict[str, Any]) -> int:
    """What 64 experts more take."""
    double = config | {"num_experts": 128}
    return bytes_on_one(geometry_from_config("new", double)) - bytes_on_one(geometry_from_config("new", config))


def test_fp4_experts_beside_fp8_layers_take_half() -> None:
    elements = 32 * 64 * 3 * 4096 * 2048
    whole, halved = (expert_bytes(WITH_EXPERTS | IN_FP8 | more) for more in ({}, {"expert_dtype": "fp4"}))
    assert whole == pytest.approx(elements, rel=1e-2)
    # 4 bits, and a byte of scale for each 32.
    assert halved == pytest.approx(elements * 17 / 32, rel=1e-2)


def test_deepseek_v4_experts_default_to_fp4() -> None:
    v4 = WITH_EXPERTS | IN_FP8 | {"architectures": ["DeepseekV4ForCausalLM"]}
    assert expert_bytes(v4) == expert_bytes(v4 | {"expert_dtype": "fp4"}) < expert_bytes(v4 | {"expert_dtype": "fp8"})


def test_every_key_for_leading_dense_layers_is_read() -> None:
    by_name = {
        bytes_on_one(geometry_from_config("new", WITH_EXPERTS | {key: 3}))
        for key in ("first_k_dense_replace", "num_dense_layers", "dense_mlp_idx")
    }
    assert len(by_name) == 1
    assert by_name != {bytes_on_one(geometry_from_config("new", WITH_EXPERTS))}


def test_empty_sliding_window_pattern_is_ignored() -> None:
    windowed = NEW | {"sliding_window": 4096}
    model = geometry_from_config("new", windowed | {"sliding_window_pattern": "", "_sliding_window_pattern": ""})
    assert model.layers == geometry_from_config("new", windowed).layers


WINDOWED: dict[str, Any] = {"layer_types": ["sliding_attention"] * 32, "sliding_window": 1024}


@pytest.mark.parametrize(
    ("changes", "token_bytes"),
    [
        ({}, 32 * 8 * 256 * 2),
        ({"num_key_value_heads": None}, 32 * 32 * 256 * 2),
        ({"multi_query": True, "num_key_value_heads": None}, 32 * 256 * 2),
        ({"head_dim": 64}, 32 * 8 * 128 * 2),
        ({"v_head_dim": 64}, 32 * 8 * (128 + 64) * 2),
        (WINDOWED | {"v_head_dim": 64}, 32 * 8 * (128 + 64) * 2),
        (WINDOWED | {"v_head_dim": 64, "swa_v_head_dim": 32}, 32 * 8 * (128 + 32) * 2),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 16, "num_global_key_value_heads": 2,
             "global_head_dim": 256},
            16 * 2 * 512 * 2 + 16 * 8 * 256 * 2,
        ),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 32 * 576 * 2),
        ({"layer_group_size": 8, "group_norm_size": 4}, 4 * 8 * 256 * 2),
        ({"layer_group_size": 8}, 32 * 8 * 256 * 2),
        ({"num_kv_shared_layers": 8}, 32 * 8 * 256 * 2),
        ({"num_kv_shared_layers": 8, "architectures": ["Gemma3nForCausalLM"]}, 24 * 8 * 256 * 2),
        ({"layer_types": ["linear_attention", "full_attention"] * 16}, 16 * 8 * 256 * 2),
        ({"hybrid_override_pattern": "M*-E" * 8}, 8 * 8 * 256 * 2),
        ({"linear_attn_config": {"kda_layers": [1, 2, 3], "num_heads": 32, "head_dim": 128}}, 29 * 8 * 256 * 2),
    ],
)  # fmt: skip
def test_kv_cache_bytes_follow_from_the_attention_config(changes: dict[str, Any], token_bytes: int) -> None:
    (runs,) = cached_layers(geometry_from_config("new", NEW | changes), None, 1, 1, None)
    assert sum(run.count * run.layer.token_bytes for run in runs) == token_bytes


def test_last_layer_of_each_window_period_is_full_attention() -> None:
    config = NEW | {
        "sliding_window": 1024, "sliding_window_pattern": 6, "swa_num_attention_heads": 16,
        "swa_num_key_value_heads": 4,
    }  # fmt: skip
    mixers = [layer.mixer for layer in geometry_from_config("new", config).layers]
    assert [isinstance(each, SelfAttention) and each.window_tokens for each in mixers[:7]] == [1024] * 5 + [None, 1024]
    assert {each.num_kv_heads for each in mixers if isinstance(each, SelfAttention) and each.window_tokens} == {4}


@pytest.mark.parametrize(
    ("changes", "window_tokens"),
    [
        ({"sliding_window": 131_072}, 131_072),
        ({"sliding_window": 131_072, "use_sliding_window": True}, 131_072),
        ({"sliding_window": 131_072, "use_sliding_window": False}, None),
        ({"sliding_window": 131_071}, None),
    ],
)
def test_window_as_long_as_the_context_is_used_unless_turned_off(
    changes: dict[str, Any], window_tokens: int | None
) -> None:
    attentions = geometry_from_config("new", NEW | changes).attentions
    assert {each.window_tokens for each in attentions if isinstance(each, SelfAttention)} == {window_tokens}


def test_the_rotary_table_is_as_wide_as_the_widest_head() -> None:
    model = geometry_from_config("new", NEW | {"global_head_dim": 256})
    assert [table.rotary_dim for table in model.ropes] == [256]
    assert [table.rotary_dim for table in geometry_from_config("new", NEW).ropes] == [128]


def test_layer_types_decide_the_kv_cache_kinds() -> None:
    kinds = ["sliding_attention", "mamba", "chunked_attention", "attention"] * 8
    config = NEW | {
        "layer_types": kinds, "sliding_window": 1024, "attention_chunk_size": 512, "mamba_d_state": 128,
        "mamba_n_heads": 64,
    }  # fmt: skip
    (runs,) = cached_layers(geometry_from_config("new", config), None, 1, 1, None)
    found = {run.layer.kind.value: (run.count, run.layer.reach_tokens) for run in runs}
    assert found == {"sliding": (8, 1024), "state": (8, 0), "chunked": (8, 512), "full": (8, 0)}


@pytest.mark.parametrize(
    ("changes", "state_bytes"),
    [
        ({}, 32 * 64 * 128 * 4 + 3 * (2 * 8 * 64 + 32 * 128) * 2),
        ({"mamba_ssm_dtype": "float32"}, 32 * 64 * 128 * 4 + 3 * (2 * 8 * 64 + 32 * 128) * 2),
        ({"mamba_ssm_dtype": "bfloat16"}, 32 * 64 * 128 * 2 + 3 * (2 * 8 * 64 + 32 * 128) * 2),
        ({"mamba_ssm_cache_dtype": "float16"}, 32 * 64 * 128 * 2 + 3 * (2 * 8 * 64 + 32 * 128) * 2),
    ],
)
def test_linear_attention_state_counts_heads_and_convolution(changes: dict[str, Any], state_bytes: int) -> None:
    config = NEW | {
        "layer_types": ["linear_attention", "full_attention"] * 16, "linear_num_key_heads": 8,
        "linear_num_value_heads": 32, "linear_key_head_dim": 64, "linear_value_head_dim": 128,
    }  # fmt: skip
    (runs,) = cached_layers(geometry_from_config("new", config | changes), None, 1, 1, None)
    assert {run.layer.state_bytes for run in runs if run.layer.state_bytes} == {state_bytes}


def test_expert_and_dense_layers_are_distinguished() -> None:
    config = NEW | {
        "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1024, "first_k_dense_replace": 3,
        "n_shared_experts": 2,
    }  # fmt: skip
    model = geometry_from_config("new", config)
    experts = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, Experts)]
    assert len(experts) == 29
    assert (experts[0].num_experts, experts[0].top_k, experts[0].shared_intermediate_size) == (64, 6, 2048)
    own_width = geometry_from_config("new", config | {"shared_expert_intermediate_size": 512}).layers[-1].feed_forward
    assert isinstance(own_width, Experts)
    assert own_width.shared_intermediate_size == 2 * 512


def test_experts_per_token_are_capped_at_the_expert_count() -> None:
    asks, has = (
        geometry_from_config("new", NEW | EXPERTS | {"num_experts": 4, "num_experts_per_tok": number})
        for number in (8, 4)
    )
    assert asks.layers == has.layers


def test_latent_experts_have_the_latent_width() -> None:
    latent = expert_bytes(WITH_EXPERTS | {"moe_latent_size": 1024})
    assert latent == pytest.approx(expert_bytes(WITH_EXPERTS) / 4, rel=1e-2)


def test_experts_of_state_layers_need_no_intermediate_size() -> None:
    config = {key: value for key, value in WITH_EXPERTS.items() if key != "intermediate_size"}
    model = geometry_from_config("new", config | {"layer_types": ["mamba", "attention"] * 16, "mamba_d_state": 128})
    assert sum(isinstance(layer.feed_forward, Experts) for layer in model.layers) == 32


@pytest.mark.parametrize("key", ["hidden_act", "mlp_hidden_act", "activation_function"])
def test_activation_without_a_gate_has_one_projection_less(key: str) -> None:
    gated, plain = (bytes_on_one(geometry_from_config("new", NEW | {key: each})) for each in ("silu", "relu2"))
    assert gated - plain == 32 * 4096 * 14336 * 2


def test_qkv_bias_excludes_the_output_bias() -> None:
    of_all, of_queries = (
        bytes_on_one(geometry_from_config("new", NEW | {key: True})) for key in ("attention_bias", "qkv_bias")
    )
    assert of_all - of_queries == 32 * 4096 * 2


def test_index_topk_adds_indexers_to_latent_attention() -> None:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1536}
    model = geometry_from_config("new", NEW | latent | {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128})
    assert model.has_sparse_attention
    assert all(isinstance(mixer, LatentAttention) and mixer.indexer for mixer in model.attentions)


def test_attention_output_gate_is_as_wide_as_the_queries() -> None:
    plain, gated, not_gated = (
        bytes_on_one(geometry_from_config("new", NEW | changes))
        for changes in ({}, {"attn_output_gate": True}, {"attn_output_gate": False})
    )
    assert gated - plain == 32 * 4096 * 4096 * 2
    assert not_gated == plain


@pytest.mark.parametrize(
    "where",
    [
        {"moe_layers_enum": "999"},
        {"moe_layers": [32]},
        {"mlp_only_layers": list(range(32))},
        {"first_k_dense_replace": 32},
        {"moe_layer_freq": [0] * 32},
        {"decoder_sparse_step": 33},
        {"expert_layer_period": 2, "expert_layer_offset": 2},
    ],
)
def test_experts_assigned_to_no_layer_are_sized_in_all_layers(where: dict[str, Any]) -> None:
    everywhere = geometry_from_config("new", NEW | EXPERTS | {"num_experts": 64})
    found = geometry_from_config("new", NEW | EXPERTS | {"num_experts": 64} | where)
    assert found.layers == everywhere.layers
    assert any("no layer for them" in doubt for doubt in found.doubts)


def test_experts_in_a_missing_layer_raise_a_doubt() -> None:
    model = geometry_from_config("new", NEW | EXPERTS | {"num_experts": 64, "moe_layers_enum": "4,5,32"})
    assert sum(isinstance(layer.feed_forward, Experts) for layer in model.layers) == 2
    (doubt,) = model.doubts
    assert "moe_layers_enum lists layer 32" in doubt


@pytest.mark.parametrize(
    "changes",
    [
        {"linear_attn_config": {"kda_layers": list(range(1, 33)), "num_heads": 1, "head_dim": 1}},
        {"layer_types": ["linear_attention"] * 32},
        {"attn_layer_period": 8, "attn_layer_offset": 8},
        {"num_kv_shared_layers": 31},
    ],
)
def test_implausibly_small_kv_cache_raises_a_doubt(changes: dict[str, Any]) -> None:
    assert len(geometry_from_config("new", NEW | changes).doubts) == 1
    assert geometry_from_config("new", NEW).doubts == ()
