"""Layers of estimated models: attention, states and experts, by the keys with which config.json files say them."""

from typing import Any

import pytest

from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.geometry import Experts, LatentAttention, SelfAttention
from specdecode_operator.sizing.memory.kv_cache import cached_layers
from tests.unit.sizing.estimated.test_estimated import EXPERTS, NEW, bytes_on_one

WITH_EXPERTS = NEW | EXPERTS | {"num_experts": 64}


IN_FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def expert_bytes(config: dict[str, Any]) -> int:
    """What 64 experts more take."""
    double = config | {"num_experts": 128}
    return bytes_on_one(geometry_from_config("new", double)) - bytes_on_one(geometry_from_config("new", config))


def test_experts_in_4_bits_beside_layers_in_fp8_take_half() -> None:
    elements = 32 * 64 * 3 * 4096 * 2048
    whole, halved = (expert_bytes(WITH_EXPERTS | IN_FP8 | more) for more in ({}, {"expert_dtype": "fp4"}))
    assert whole == pytest.approx(elements, rel=1e-2)
    # 4 bits, and a byte of scale for each 32.
    assert halved == pytest.approx(elements * 17 / 32, rel=1e-2)


def test_deepseek_v4_has_experts_in_4_bits_unless_its_file_says_otherwise() -> None:
    v4 = WITH_EXPERTS | IN_FP8 | {"architectures": ["DeepseekV4ForCausalLM"]}
    assert expert_bytes(v4) == expert_bytes(v4 | {"expert_dtype": "fp4"}) < expert_bytes(v4 | {"expert_dtype": "fp8"})


def test_first_layers_without_experts_by_every_name() -> None:
    by_name = {
        bytes_on_one(geometry_from_config("new", WITH_EXPERTS | {key: 3}))
        for key in ("first_k_dense_replace", "num_dense_layers", "dense_mlp_idx")
    }
    assert len(by_name) == 1
    assert by_name != {bytes_on_one(geometry_from_config("new", WITH_EXPERTS))}


def test_an_empty_pattern_of_windows_is_none() -> None:
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
def test_the_cache_follows_from_attention(changes: dict[str, Any], token_bytes: int) -> None:
    (runs,) = cached_layers(geometry_from_config("new", NEW | changes), None, 1, 1, None)
    assert sum(run.count * run.layer.token_bytes for run in runs) == token_bytes


def test_the_last_layer_of_each_period_has_no_window() -> None:
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
def test_a_window_that_no_sequence_fills_is_used_unless_the_file_turns_it_off(
    changes: dict[str, Any], window_tokens: int | None
) -> None:
    attentions = geometry_from_config("new", NEW | changes).attentions
    assert {each.window_tokens for each in attentions if isinstance(each, SelfAttention)} == {window_tokens}


def test_the_rotary_table_is_as_wide_as_the_widest_head() -> None:
    model = geometry_from_config("new", NEW | {"global_head_dim": 256})
    assert [table.rotary_dim for table in model.ropes] == [256]
    assert [table.rotary_dim for table in geometry_from_config("new", NEW).ropes] == [128]


def test_windows_and_states_are_kept_as_such() -> None:
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
def test_a_state_holds_its_heads_and_the_columns_of_its_convolution(changes: dict[str, Any], state_bytes: int) -> None:
    config = NEW | {
        "layer_types": ["linear_attention", "full_attention"] * 16, "linear_num_key_heads": 8,
        "linear_num_value_heads": 32, "linear_key_head_dim": 64, "linear_value_head_dim": 128,
    }  # fmt: skip
    (runs,) = cached_layers(geometry_from_config("new", config | changes), None, 1, 1, None)
    assert {run.layer.state_bytes for run in runs if run.layer.state_bytes} == {state_bytes}


def test_experts_and_dense_layers_are_told_apart() -> None:
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


def test_a_token_asks_for_no_more_experts_than_there_are() -> None:
    asks, has = (
        geometry_from_config("new", NEW | EXPERTS | {"num_experts": 4, "num_experts_per_tok": number})
        for number in (8, 4)
    )
    assert asks.layers == has.layers


def test_experts_behind_a_projection_have_its_width() -> None:
    latent = expert_bytes(WITH_EXPERTS | {"moe_latent_size": 1024})
    assert latent == pytest.approx(expert_bytes(WITH_EXPERTS) / 4, rel=1e-2)


def test_experts_of_a_layer_with_a_state_need_no_dense_width() -> None:
    config = {key: value for key, value in WITH_EXPERTS.items() if key != "intermediate_size"}
    model = geometry_from_config("new", config | {"layer_types": ["mamba", "attention"] * 16, "mamba_d_state": 128})
    assert sum(isinstance(layer.feed_forward, Experts) for layer in model.layers) == 32


@pytest.mark.parametrize("key", ["hidden_act", "mlp_hidden_act", "activation_function"])
def test_an_activation_without_a_gate_spares_a_projection(key: str) -> None:
    gated, plain = (bytes_on_one(geometry_from_config("new", NEW | {key: each})) for each in ("silu", "relu2"))
    assert gated - plain == 32 * 4096 * 14336 * 2


def test_a_bias_of_queries_keys_and_values_is_not_one_of_the_output() -> None:
    of_all, of_queries = (
        bytes_on_one(geometry_from_config("new", NEW | {key: True})) for key in ("attention_bias", "qkv_bias")
    )
    assert of_all - of_queries == 32 * 4096 * 2


def test_a_sparse_model_has_indexers() -> None:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1536}
    model = geometry_from_config("new", NEW | latent | {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128})
    assert model.has_sparse_attention
    assert all(isinstance(mixer, LatentAttention) and mixer.indexer for mixer in model.attentions)


def test_a_gate_of_the_output_is_as_wide_as_the_queries() -> None:
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
def test_experts_in_no_layer_are_sized_in_all(where: dict[str, Any]) -> None:
    everywhere = geometry_from_config("new", NEW | EXPERTS | {"num_experts": 64})
    found = geometry_from_config("new", NEW | EXPERTS | {"num_experts": 64} | where)
    assert found.layers == everywhere.layers
    assert any("no layer for them" in doubt for doubt in found.doubts)


def test_experts_in_a_layer_that_is_not_there_are_doubted() -> None:
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
def test_extreme_savings_of_the_cache_are_doubted(changes: dict[str, Any]) -> None:
    assert len(geometry_from_config("new", NEW | changes).doubts) == 1
    assert geometry_from_config("new", NEW).doubts == ()
