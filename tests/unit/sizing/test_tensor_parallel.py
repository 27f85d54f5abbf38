"""Splits of weights over ranks."""

from typing import Any

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.tensor_parallel import Problem, split_remedy, supported_tensors, tensor_problems
from tests.support.objects import STATES_CONFIG, TINY_CONFIG
from tests.unit.sizing.test_weights import BLOCKS, compressed, gptq, qwen3_moe


def tiny(**changes: Any) -> ModelGeometry:
    return geometry_from_config("tiny", {**TINY_CONFIG, **changes})


def does_not(key: str, value: str, tensor: int, name: str = "tiny") -> str:
    return f"{key} {value} of {name} does not divide over tensor {tensor}"


def test_each_indivisible_size_is_reported_with_key_and_value() -> None:
    assert tensor_problems(tiny(), 3) == (
        Problem("num_attention_heads", "4", does_not("num_attention_heads", "4", 3)),
        Problem("intermediate_size", "512", does_not("intermediate_size", "512", 3)),
        Problem("vocab_size", "1024", does_not("vocab_size", "1024 (padded)", 3)),
        Problem("num_key_value_heads", "2", does_not("num_key_value_heads", "2", 3)),
    )


SHARED = "moe_intermediate_size 24 of experts does not divide over tensor 4 x data 4, which share each expert"
EXPERTS = {
    "one copy": (16, 1, False, does_not("moe_intermediate_size", "24", 16, "experts")),
    "copies": (4, 4, False, SHARED),
    "spread whole": (4, 4, True, None),
}


@pytest.mark.parametrize(("tensor", "data", "expert", "message"), EXPERTS.values(), ids=EXPERTS)
def test_experts_must_divide_over_tensor_and_data_ranks(
    tensor: int, data: int, *, expert: bool, message: str | None
) -> None:
    config = {
        **TINY_CONFIG,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_attention_heads": 16,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    problems = tensor_problems(geometry_from_config("experts", config), tensor, data=data, expert=expert)
    expected = () if message is None else (Problem("moe_intermediate_size", "24", message),)
    assert problems == expected


@pytest.mark.parametrize(
    ("model", "tensor", "found"),
    [
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 3, {"mamba_num_heads": 64, "num_attention_heads": 32}),
    ],
)
def test_indivisible_mamba_heads_are_reported_by_their_config_key(
    model: str, tensor: int, found: dict[str, int]
) -> None:
    geometry = find_geometry(model)
    assert geometry is not None
    problems = {problem.field: int(problem.value) for problem in tensor_problems(geometry, tensor)}
    assert {key: problems.get(key) for key in found} == found


def test_only_a_single_mamba_group_is_copied_to_ranks() -> None:
    one, two = (geometry_from_config("m", {**STATES_CONFIG, "n_groups": groups}) for groups in (1, 2))
    assert tensor_problems(one, 4) == ()
    message = (
        "n_groups 2 of m does not divide over tensor 4, and the engine copies a group only where it is the only one"
    )
    assert tensor_problems(two, 4) == (Problem("n_groups", "2", message),)


def test_kernel_limit_is_reported_with_the_rank_part_that_breaks_it() -> None:
    grouped = compressed(4, "int", "group", group_size=128)
    on_each = "on each GPU breaks {}"
    assert tensor_problems(tiny(quantization_config=grouped), 4, engine_version="0.32") == (
        Problem(
            "num_attention_heads",
            "4",
            f"INT4 weights of tiny at tensor 4: a layer of 64 x 256 {on_each.format('groups of 128 inputs')}",
        ),
    )
    # The key and the value are those of the experts: the model has no other feed-forward layer.
    (problem,) = tensor_problems(qwen3_moe(BLOCKS), 4)
    assert (problem.field, problem.value) == ("moe_intermediate_size", "768")
    assert problem.message.endswith(on_each.format("blocks of 128 x 128"))


SORTED = gptq(4, 128, desc_act=True)
IN_BYTES = compressed(8, "int", "group", group_size=128)
BY_CHANNEL = compressed(4, "int", "channel")


@pytest.mark.parametrize(
    ("stored", "refused"),
    [
        (IN_BYTES, {"0.28": ("num_bits", "8")}),
        (BY_CHANNEL, {"0.28": ("strategy", "channel"), "0.29": ("strategy", "channel")}),
        (compressed(8, "int", "channel"), {"0.28": ("num_bits", "8"), "0.29": ("strategy", "channel")}),
        (compressed(4, "int", "group", group_size=128), {}),
    ],
)
def test_packed_experts_are_refused_for_versions_that_cannot_load_them(
    stored: dict[str, Any], refused: dict[str, tuple[str, str]]
) -> None:
    """Of experts alone: dense layers of all these are loaded."""
    for version in ("0.27", "0.28", "0.29", "0.30", "0.33"):
        found = [(each.field, each.value) for each in tensor_problems(qwen3_moe(stored), 1, engine_version=version)]
        assert found == [
            (f"quantization_config.{key}", value) for key, value in [refused.get(version, ("", ""))] if key
        ]
        assert tensor_problems(tiny(quantization_config=stored), 1, engine_version=version) == ()


@pytest.mark.parametrize(
    ("geometry", "options", "remedy"),
    [
        (tiny(), {}, "use 1, 2 or 4"),
        (tiny(num_attention_heads=12, num_key_value_heads=12), {}, "use 1, 2 or 4"),
        (qwen3_moe(BLOCKS), {"engine_version": "0.32"}, "use 1, 2, 4 or 8"),
        (
            tiny(quantization_config=SORTED),
            {"engine_version": "0.32"},
            "no tensor parallelism helps: name another checkpoint, or vLLM 0.29, which still loads it",
        ),
        (tiny(quantization_config=SORTED), {"engine_version": "0.29"}, "use 1 or 2"),
        (
            qwen3_moe(IN_BYTES),
            {"engine_version": "0.28"},
            "no tensor parallelism helps: name another checkpoint, or vLLM 0.33, which loads it",
        ),
        (qwen3_moe(IN_BYTES), {"engine_version": "0.29"}, "use 1 or 2"),
        (
            tiny(quantization_config=gptq(4, 96)),
            {"engine_version": "0.32"},
            "no tensor parallelism helps: name a checkpoint that is quantized otherwise, or not at all",
        ),
    ],
)
def test_split_remedy_names_exactly_the_valid_tensor_sizes(
    geometry: ModelGeometry, options: dict[str, Any], remedy: str
) -> None:
    """Each number that it names can be had, and none that can be had is left out."""
    assert split_remedy([(geometry, None)], **options) == remedy
    named = {int(word) for word in remedy.replace(",", "").split() if word.isdigit()}
    assert named == {tensor for tensor in (1, 2, 4, 8, 16, 32, 64) if not tensor_problems(geometry, tensor, **options)}


def test_problem_of_every_tensor_size_does_not_mention_tensor() -> None:
    (problem,) = tensor_problems(tiny(quantization_config=SORTED), 1, engine_version="0.32")
    assert problem.field == "quantization_config.desc_act"
    assert "tensor" not in problem.message


def test_remedy_for_many_data_ranks_is_expert_parallelism() -> None:
    config = {**TINY_CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 2}
    config |= {"moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    geometry = geometry_from_config("experts", config)
    assert split_remedy([(geometry, None)], data=16) == "set parallelism.expert, which spreads experts whole"
    assert tensor_problems(geometry, 2, data=16, expert=True) == ()


# Over how many GPUs a model can be split, and why not.

QWEN25_72B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "max_position_embeddings": 32768,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
}


def test_all_indivisible_sizes_are_reported_at_once(llama_70b: ModelGeometry) -> None:
    problems = tensor_problems(llama_70b, 3)
    assert {(problem.field, int(problem.value)) for problem in problems} == {
        ("num_attention_heads", 64),
        ("intermediate_size", 28672),
        ("num_key_value_heads", 8),
    }
    assert all("tensor 3" in problem.message and llama_70b.name in problem.message for problem in problems)


def test_vocabulary_must_divide_after_padding(llama_config: dict[str, Any]) -> None:
    # 128,193 is padded to 2004 x 64.
    geometry = geometry_from_config("odd", llama_config | {"vocab_size": 128_193})
    assert tensor_problems(geometry, 8) == ()
    thirds = llama_config | {"num_attention_heads": 36, "num_key_value_heads": 12, "head_dim": 128}
    problems = tensor_problems(geometry_from_config("x", thirds | {"intermediate_size": 1536, "vocab_size": 64}), 12)
    assert [problem.field for problem in problems] == ["vocab_size"]


def test_supported_tensor_sizes_are_limited_by_the_draft(
    llama_70b: ModelGeometry, llama_config: dict[str, Any]
) -> None:
    assert supported_tensors([(llama_70b, None)]) == (1, 2, 4, 8, 16, 32, 64)
    draft = geometry_from_config("draft", llama_config | {"num_attention_heads": 4, "num_key_value_heads": 2})
    assert supported_tensors([(llama_70b, None), (draft, None)]) == (1, 2, 4)


def test_int4_groups_must_not_be_split() -> None:
    geometry = geometry_from_config("Qwen2.5-72B", QWEN25_72B)
    assert tensor_problems(geometry, 4) == ()
    assert tensor_problems(geometry, 1, Precision.INT4) == ()
    problems = tensor_problems(geometry, 4, Precision.INT4)
    assert [problem.field for problem in problems] == ["intermediate_size"]
    assert "groups of 128" in problems[0].message
    assert supported_tensors([(geometry, Precision.INT4)]) == (1,)


def test_int4_kernel_tiles_must_be_full(llama_config: dict[str, Any]) -> None:
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    config = llama_config | {"intermediate_size": 64 * 3, "quantization_config": quantization}
    problems = tensor_problems(geometry_from_config("small", config), 1)
    assert [problem.field for problem in problems] == ["intermediate_size"]
    assert "tiles" in problems[0].message


def test_fp8_blocks_must_not_be_split(llama_config: dict[str, Any]) -> None:
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    geometry = geometry_from_config("block", llama_config | {"quantization_config": block, "intermediate_size": 256})
    assert tensor_problems(geometry, 2) == ()
    assert [problem.field for problem in tensor_problems(geometry, 4)] == ["intermediate_size"]
    assert tensor_problems(geometry, 4, Precision.BF16) == ()
