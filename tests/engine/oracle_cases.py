"""The cases of sizing and the real vLLM: models, drafts and splits, in the words of both sides."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from specdecode_operator.enums import Knowledge, Method, Precision
from specdecode_operator.sizing.catalogue import find_entry, find_geometry, known_models
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.families.architectures import geometry_from_config, head_from_config
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.pair import EngineLimits, Pair, Parallelism, spread_problems
from specdecode_operator.sizing.rank_layers import Stage, stages
from specdecode_operator.sizing.tensor_parallel import tensor_problems
from specdecode_operator.sizing.version_rules import NEWEST_VERSION
from tests.engine.quantized_models import QUANTIZED_MODELS

TENSORS, PIPELINES = (1, 2, 4, 8), (1, 2)
SPACE_BYTES = 20 * 2**30
IN_PARALLEL = {
    "P-EAGLE for Qwen3-8B": (
        "sgl-project/SpecForge:configs/qwen3-8b-peagle.json",
        {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 151_669},
    ),
    "PARD of Llama-3.2-1B": ("meta-llama/Llama-3.2-1B", {"pard_token": 128_255}),
    "XPress for Qwen3-8B": (
        "sgl-project/SpecForge:configs/qwen3-8b-dflash.json",
        {"architectures": ["Qwen3XPressModel"], "xpress_rank": 128, "xpress_block_size": 8},
    ),
}
"""Drafts that propose all tokens in one pass: files of the catalogue, and what such drafts have otherwise."""

_QWEN3_HEAD = {
    "dtype": "bfloat16",
    "model_type": "qwen3",
    "hidden_act": "silu",
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000,
}
_SPECULATORS_HEAD = {
    "dtype": "bfloat16",
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "any",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": [], "name_or_path": "any"},
    },
    "speculators_version": "0.9.0",
    "tie_word_embeddings": False,
}
_WINDOWS = {"layer_types": ["sliding_attention"], "sliding_window": 2048, "use_sliding_window": True}
_MIXED_WINDOWS = {
    "layer_types": ["full_attention", *["sliding_attention"] * 4],
    "sliding_window": 2048,
    "use_sliding_window": True,
}
"""What version 0.9 of the speculators library writes by default, and with --full-attention-indices 0."""

_LLAMA_LAYERS = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"},
}
_QWEN3_LAYERS = _LLAMA_LAYERS | {
    "model_type": "qwen3",
    "intermediate_size": 12_288,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
}
HEADS: dict[str, dict[str, Any]] = {
    "Eagle3 for Qwen3-8B": _QWEN3_HEAD
    | {"architectures": ["Eagle3Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12_288}
    | {"num_hidden_layers": 2, "vocab_size": 151_936, "draft_vocab_size": 32_000, "max_position_embeddings": 40_960}
    | {"fc_norm": True, "num_aux_layers": 4},
    "speculators' EAGLE-3 for Llama-3.1-8B": _SPECULATORS_HEAD
    | {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}
    | {"draft_vocab_size": 32_000, "eagle_aux_hidden_state_layer_ids": [2, 16, 29]}
    | {"transformer_layer_config": _LLAMA_LAYERS | _WINDOWS},
    "speculators' EAGLE-3 on Qwen3 for Qwen3-8B": _SPECULATORS_HEAD
    | {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}
    | {"draft_vocab_size": 32_000, "eagle_aux_hidden_state_layer_ids": [2, 12, 24, 33], "norm_before_fc": True}
    | {"transformer_layer_config": _QWEN3_LAYERS | _WINDOWS},
    "speculators' P-EAGLE for Llama-3.1-8B": _SPECULATORS_HEAD
    | {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle", "mask_token_id": 128_255}
    | {"draft_vocab_size": 32_000, "eagle_aux_hidden_state_layer_ids": [2, 16, 29]}
    | {"transformer_layer_config": _LLAMA_LAYERS | _MIXED_WINDOWS | {"num_hidden_layers": 5}},
    "speculators' DFlash for Qwen3-8B": _SPECULATORS_HEAD
    | {"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "mask_token_id": 151_669}
    | {"draft_vocab_size": 32_000, "aux_hidden_state_layer_ids": [2, 9, 17, 25, 33], "block_size": 8}
    | {"transformer_layer_config": _QWEN3_LAYERS | _MIXED_WINDOWS | {"num_hidden_layers": 5}},
    "EAGLE-3 with a window for Llama-3.1-8B": _LLAMA_LAYERS
    | _WINDOWS
    | {"architectures": ["LlamaForCausalLMEagle3"], "dtype": "bfloat16", "draft_vocab_size": 32_000},
    "MLA head for Kimi-K2.5": {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 163_840,
        "draft_vocab_size": 32_000,
        "max_position_embeddings": 262_144,
        "rope_theta": 50_000.0,
    },
    "DFlash 2 for Qwen3.5-27B": _QWEN3_HEAD
    | {"architectures": ["DFlash2DraftModel"], "hidden_size": 5120, "intermediate_size": 17_408}
    | {"num_hidden_layers": 5, "vocab_size": 248_320, "max_position_embeddings": 262_144, "block_size": 8}
    | {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "use_sliding_window": True}
    | {
        "dflash_config": {
            "conv_group_size": 16,
            "conv_kernel_size": 2,
            "mask_token_id": 248_070,
            "selector_rank": 256,
            "selector_top_k": 16,
            "target_layer_ids": [1, 16, 31, 46, 61],
        }
    },
    "assistant of Gemma-4-26B-A4B": {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "dtype": "bfloat16",
        "backbone_hidden_size": 2816,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "gemma4_text",
            "dtype": "bfloat16",
            "hidden_size": 1024,
            "intermediate_size": 8192,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "head_dim": 256,
            "global_head_dim": 512,
            "vocab_size": 262_144,
            "vocab_size_per_layer_input": 0,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 4,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
            "sliding_window": 1024,
            "max_position_embeddings": 262_144,
        },
    },
}
"""Heads of classes that no file of the catalogue has, in the sizes of published ones."""

SHORTENED_LAYERS = 8
"""Enough for every kind of layer of each model: the longest pattern has six. Each of two stages has four."""

_SHORTENED = ", first layers"

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, BLOCK_SIZE = 1024, 8192, 16
"""vLLM's defaults on an H100 (FlashAttention's block)."""


@dataclass(frozen=True)
class Case:
    """One question to both sides."""

    target: str
    tensor: int
    pipeline: int = 1
    method: str = Method.NONE.value
    draft: str | None = None
    num_speculative_tokens: int = 0
    expert_parallel: bool = False
    version: str = field(default=NEWEST_VERSION, repr=False)

    @property
    def max_model_len(self) -> int:
        """A length that the models were made for."""
        models = [self.geometry, *([self.draft_geometry] if self.draft_geometry else [])]
        return min(8192, *(model.max_position_embeddings for model in models))

    @property
    def geometry(self) -> ModelGeometry:
        """The target."""
        return geometry_of(self.target)

    @property
    def draft_geometry(self) -> ModelGeometry | None:
        """The draft with a checkpoint of its own."""
        return geometry_of(self.draft, self.method) if self.draft else None

    @property
    def split(self) -> Parallelism:
        """How the replica is spread."""
        return Parallelism(self.tensor, self.pipeline, expert=self.expert_parallel)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The pipeline stages of the target."""
        return stages(self.geometry, self.pipeline)

    def question(self) -> dict[str, Any]:
        """Return it in the words of run_oracle.py."""
        question: dict[str, Any] = {
            "id": str(self),
            "config": completed(config_of(self.target)),
            "tp": self.tensor,
            "pp": self.pipeline,
            "max_model_len": self.max_model_len,
            "available_bytes": [SPACE_BYTES],
        }
        if self.expert_parallel:
            question["ep"] = True
        if self.method != Method.NONE:
            question["speculative"] = {
                "method": self.method,
                "num_speculative_tokens": self.num_speculative_tokens,
                "config": config_of(self.draft) if self.draft else None,
                "parallel_drafting": True if self.pair().drafts_in_parallel else None,
            }
        return question

    def pair(self, block_size: int = BLOCK_SIZE) -> Pair:
        """Return it in the words of sizing."""
        draft = self.draft_geometry
        limits = EngineLimits(
            self.max_model_len,
            MAX_NUM_SEQS,
            MAX_NUM_BATCHED_TOKENS,
            block_size,
            kv_cache_element_bytes=None,
            memory_utilization_percent=92,
            enforce_eager=False,
            min_concurrency=1,
            engine_version=self.version,
        )
        return Pair(
            self.geometry,
            precision_of(self.geometry),
            draft,
            precision_of(draft) if draft else None,
            self.method,
            self.num_speculative_tokens,
            limits,
        )

    def refused_by_sizing(self) -> bool:
        """Whether sizing would not propose it."""
        models = [self.geometry, *([self.draft_geometry] if self.draft_geometry else [])]
        split, version = self.split, self.version
        return bool(spread_problems(self.geometry, split, version)) or any(
            tensor_problems(model, self.tensor, None, version, expert=split.expert) for model in models
        )


def shortened(model: str) -> str:
    """Return the name of a model that consists of the first layers of another."""
    return model + _SHORTENED


def _with_layers(config: dict[str, Any], count: int) -> dict[str, Any]:
    """Return a config.json with the first layers only. Lists with one entry per layer are cut too."""
    if "text_config" in config:
        return config | {"text_config": _with_layers(config["text_config"], count)}
    whole = config["num_hidden_layers"]
    lists = {
        key: value[:count]
        for key, value in config.items()
        if isinstance(value, list | str) and len(value) == whole and not key.endswith("name_or_path")
    }
    return config | lists | {"num_hidden_layers": count}


def config_of(model: str) -> dict[str, Any]:
    """Return the config.json of a model of the catalogue, of one of the small quantized ones, or of a shortened one."""
    if model.endswith(_SHORTENED):
        return _with_layers(config_of(model.removesuffix(_SHORTENED)), SHORTENED_LAYERS)
    if model in QUANTIZED_MODELS:
        return QUANTIZED_MODELS[model]
    if model in HEADS:
        return HEADS[model]
    if model in IN_PARALLEL:
        base, otherwise = IN_PARALLEL[model]
        return config_of(base) | otherwise
    entry = find_entry(model)
    assert entry is not None
    return dict(entry.config)


@cache
def geometry_of(model: str, method: str = Method.DRAFT_MODEL) -> ModelGeometry:
    """Return the geometry of a model, or of what a method drafts with."""
    if method not in (Method.DRAFT_MODEL, Method.NONE):
        return head_from_config(model, config_of(model), method)
    if model in QUANTIZED_MODELS or model in IN_PARALLEL or model.endswith(_SHORTENED):
        return geometry_from_config(model, config_of(model))
    geometry = find_geometry(model)
    assert geometry is not None
    return geometry


def precision_of(geometry: ModelGeometry) -> Precision:
    """Return the precision that the checkpoint has."""
    return geometry.checkpoint_precision or Precision.BF16


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with what copies of ModelOpt's hf_quant_config.json may lack, and the tool always writes.

    vLLM recognizes such a file by its producer (transformers_utils/model_arch_config_convertor.py,
    _normalize_quantization_config), wants some keys (modelopt.py, ModelOptNvFp4Config._from_config), and would
    quantize the output head.
    """
    section = config.get("quantization_config") or {}
    if "quantization" not in section:
        return config
    inner = {"group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]} | section["quantization"]
    return config | {"quantization_config": {"producer": {"name": "modelopt"}} | section | {"quantization": inner}}


ESTIMATED: Final = "is estimated"


def why_unsized(model: str | None, method: str = Method.DRAFT_MODEL) -> str:
    """Return why sizing does not know a model exactly; empty where it does."""
    try:
        if model and geometry_of(model, method).knowledge is not Knowledge.EXACT:
            return ESTIMATED
    except SizingError as error:
        return str(error)[:160]
    return ""


def distinct_targets() -> dict[str, str]:
    """Return the models to serve, one of those whose files say the same, with why sizing does not know them."""
    by_config = {json.dumps(config_of(model), sort_keys=True): model for model in reversed(known_models())}
    reasons = {model: why_unsized(model) for model in sorted(by_config.values())}
    return {model: why for model, why in reasons.items() if why or geometry_of(model).head is None}


def representatives(targets: list[str]) -> set[str]:
    """Return a model of each architecture, the one with the fewest layers, and one of each quantized format."""
    kinds: dict[Any, str] = {}
    for model in sorted(targets, key=lambda model: (geometry_of(model).num_layers, model)):
        geometry = geometry_of(model)
        kinds.setdefault(geometry.architecture, model)
        if geometry.checkpoint is not None:
            kinds.setdefault(geometry.checkpoint, model)
    return set(kinds.values())


def splits(model: str) -> Iterator[tuple[int, int]]:
    """Yield the splits to ask about."""
    for tensor in TENSORS:
        yield from ((tensor, pipeline) for pipeline in PIPELINES if pipeline <= geometry_of(model).num_layers)
