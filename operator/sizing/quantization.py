"""What a config.json's quantization_config says about the stored weights."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specdecode_operator.sizing.base.fields import Fields
from specdecode_operator.sizing.model.checkpoint_formats import read_format
from specdecode_operator.sizing.model.exclusions import Exclusions, read_exclusions
from specdecode_operator.sizing.model.layers import Layer
from specdecode_operator.sizing.model.precision import Method, WeightFormat
from specdecode_operator.vocabulary import FP8_ELEMENT_BYTES

_HEAD = "lm_head"


_EXCLUSION_KEYS = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")

_DYNAMIC = "dynamic"
_SKIPPED = "-:"
"""GPTQModel's settings by module, and what its patterns of modules in 16 bits begin with (vLLM, gptq_utils.py,
get_dynamic_override).
"""

_QUANTIZABLE = (
    "self_attn.q_proj",
    "self_attn.o_proj",
    "self_attn.indexer.wq_b",
    "linear_attn.in_proj_qkvz",
    "linear_attn.out_proj",
    "mamba.in_proj",
    "mamba.out_proj",
    "mlp.gate_proj",
    "mlp.down_proj",
    "mlp.gate",
    "mlp.experts.0.gate_proj",
    "experts.0.gate_proj",
    "mlp.shared_experts.gate_proj",
    "mlp.shared_experts.down_proj",
    "mlp.fc1_latent_proj",
    "mlp.fc2_latent_proj",
    "per_layer_input_gate",
    "per_layer_projection",
)
"""Modules of a layer that a checkpoint may hold quantized, one for all that the engine merges with it."""

_ALIASES = {
    "mlp.fc2_latent_proj": ("mixer.fc2_latent_proj",),
    "mlp.fc1_latent_proj": ("mixer.fc1_latent_proj",),
    "mamba.out_proj": ("mixer.out_proj",),
    "linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv",),
    "mamba.in_proj": ("mixer.in_proj",),
    "self_attn.o_proj": ("mixer.o_proj",),
    "self_attn.q_proj": ("self_attn.qkv_proj", "self_attn.q_b_proj", "self_attn", "mixer.q_proj"),
    "mlp.gate_proj": ("mlp.gate_up_proj", "feed_forward.gate_proj", "shared_mlp.input_linear", "mixer.up_proj"),
    "mlp.down_proj": ("feed_forward.down_proj", "shared_mlp.output_linear", "mixer.down_proj"),
    "mlp.experts.0.gate_proj": (
        "block_sparse_moe.experts.0.w1",
        "feed_forward.experts",
        "block_sparse_moe.input_linear",
        "mixer.experts.0.up_proj",
    ),
    "mlp.shared_experts.gate_proj": (
        "mlp.shared_expert.gate_proj",
        "feed_forward.shared_expert.gate_proj",
        "shared_mlp.input_linear",
        "mixer.shared_experts.up_proj",
    ),
    "mlp.shared_experts.down_proj": (
        "mlp.shared_expert.down_proj",
        "feed_forward.shared_expert.down_proj",
        "shared_mlp.output_linear",
        "mixer.shared_experts.down_proj",
    ),
}
"""Other names that files use for the same modules."""

_PREFIXES = ("model.layers", "backbone.layers", "language_model.model.layers", "model.language_model.layers")

_PREDICTION_LAYERS = "mtp.layers"
"""What the files of Qwen3.5 and Nemotron 3 call their layers for multi-token prediction."""

_PREDICTION = re.compile(r"\bmtp(\b|_)")


@dataclass(frozen=True)
class Checkpoint:
    """How a checkpoint is stored."""

    format: WeightFormat | None  # Format of its quantized layers; None when nothing is quantized
    excluded: tuple[Exclusions, ...] = ()  # Modules that stay in 16 bits
    # Bytes of a number in the KV cache where the checkpoint asks for it; None where it does not
    cache_element_bytes: int | None = None

    def unquantized_modules(self, layer_index: int) -> frozenset[str]:
        """Return the modules of one layer that stay in 16 bits."""
        return self._unquantized([f"{prefix}.{layer_index}" for prefix in _PREFIXES]) if self.excluded else frozenset()

    def unquantized_prediction_modules(self, num_layers: int, index: int = 0) -> frozenset[str]:
        """Return the modules of a layer for multi-token prediction that stay in 16 bits.

        Files number it after the last layer, or apart (Qwen3.5, Nemotron 3).
        """
        after = (f"{prefix}.{num_layers + index}" for prefix in _PREFIXES)
        return self._unquantized([*after, f"{_PREDICTION_LAYERS}.{index}"]) if self.excluded else frozenset()

    def _unquantized(self, layers: Sequence[str]) -> frozenset[str]:
        return frozenset(
            module
            for module in _QUANTIZABLE
            if any(
                exclusions.hold(f"{layer}.{name}")
                for exclusions in self.excluded
                for layer in layers
                for name in _names(module)
            )
        )


def read_checkpoint(config: Fields) -> Checkpoint:
    """Return how the checkpoint stores its linear layers.

    Knows fp8, compressed-tensors, AWQ, GPTQ, MXFP4 and ModelOpt's FP8 and
    NVFP4, and refuses the rest by name.
    """
    section = config.section("quantization_config") or config.section("compression_config")
    if section is None:
        return Checkpoint(None)
    inner = section.section("quantization")
    if inner is not None:
        # The older file of ModelOpt, hf_quant_config.json, has its producer outside.
        section = inner.having({"quant_method": "modelopt", **inner.values})
    num_layers = config.size("num_hidden_layers", default=1)
    excluded = tuple(read_exclusions(section, key, num_layers) for key in _EXCLUSION_KEYS if section.is_set(key))
    if section.is_set(_DYNAMIC):
        excluded = (*excluded, read_exclusions(_skipped(section), _DYNAMIC, num_layers))
    _refuse_quantized_head(config, section)
    return Checkpoint(read_format(section), excluded, _cache_element_bytes(section))


def in_16_bits_for_prediction(layer: Layer, config: Fields) -> Layer:
    """Return a layer for multi-token prediction of a checkpoint in a format that sizing does not implement.

    It is in 16 bits if the file names such layers among what it does not quantize.
    """
    section = config.values.get("quantization_config")
    inner = section.get("quantization", section) if isinstance(section, Mapping) else {}
    named = [inner.get(key) for key in (*_EXCLUSION_KEYS, _DYNAMIC)] if isinstance(inner, Mapping) else []
    excluded = any(_PREDICTION.search(str(each)) for each in named if each)
    return replace(layer, unquantized=frozenset(_QUANTIZABLE)) if excluded else layer


def _skipped(section: Fields) -> Fields:
    """Return the section with patterns of the modules that GPTQModel left in 16 bits under its key."""
    rules = section.section(_DYNAMIC) or section.having({})
    if any(value for key, value in rules.values.items() if not key.startswith(_SKIPPED)):
        raise section.unmodelled(_DYNAMIC, "modules with settings of their own cannot be sized yet")
    patterns = [f"re:{key.removeprefix(_SKIPPED)}" for key in rules.values if key.startswith(_SKIPPED)]
    return section.having({_DYNAMIC: patterns})


def _refuse_quantized_head(config: Fields, section: Fields) -> None:
    """Refuse a quantized output head: ModelOpt's is, unless it is left out (vLLM, modelopt.py, get_quant_method)."""
    if section.flag("lm_head"):
        raise section.unmodelled("lm_head", "a quantized output head cannot be sized yet")
    excluded = [name for key in _EXCLUSION_KEYS for name in section.strings(key)]
    by_modelopt = section.text("quant_method", default="").startswith(Method.MODELOPT)
    # A file that leaves nothing out is taken to be cut short: ModelOpt itself always leaves the head out.
    if (
        by_modelopt
        and excluded
        and not config.flag("tie_word_embeddings")
        and not any(_HEAD in name for name in excluded)
    ):
        key = "ignore" if section.is_set("ignore") else "exclude_modules"
        raise section.unmodelled(key, f"lacks {_HEAD}: a quantized output head cannot be sized yet")


def _cache_element_bytes(section: Fields) -> int | None:
    """Return what the engine makes of `--kv-cache-dtype auto`; None for the model's own type.

    vLLM, torch_utils.py, get_kv_cache_quant_algo_string, and attention.py for compressed-tensors.
    """
    method = section.text("quant_method", default="")
    asked = section.values.get("kv_cache_scheme") or section.values.get("kv_cache_quant_algo")
    if asked is None:
        return None
    if method == Method.COMPRESSED_TENSORS:
        return FP8_ELEMENT_BYTES
    if not method.startswith(Method.MODELOPT):
        return None
    match asked:
        case {"dynamic": False, "num_bits": 8, "type": "float"}:
            return FP8_ELEMENT_BYTES
        case str() if asked.lower() == "fp8":
            return FP8_ELEMENT_BYTES
        case {"num_bits": 4, "type": "float"}:
            raise section.unmodelled("kv_cache_scheme", "a KV cache in 4 bits cannot be sized")
        case str() if asked.lower() == "nvfp4":
            raise section.unmodelled("kv_cache_quant_algo", "a KV cache in 4 bits cannot be sized")
        case _:
            return None


def _names(module: str) -> tuple[str, ...]:
    return (module, *_ALIASES.get(module, ()))
