"""The shape of a dense decoder model, as far as memory depends on it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from specdecode_operator.sizing.checkpoint import checkpoint_format
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.fields import Fields
from specdecode_operator.sizing.precision import DEFAULT_FORMATS, Precision, WeightFormat
from specdecode_operator.sizing.rope import RopeTable, rope_table

DENSE_ARCHITECTURES: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose weights and KV cache the formulas of this package describe."""

_SIXTEEN_BIT: Final = 2
"""Bytes an element. vLLM's dtype auto loads float32 checkpoints as bfloat16 (config/model.py, _resolve_auto_dtype)."""

_MISSING_BY_NAME: Final = (
    ("eagle", "EAGLE heads, which share parts of their target"),
    ("moe", "expert weights and their router"),
    ("mixtral", "expert weights and their router"),
    ("gptoss", "expert weights and their router"),
    ("llama4", "expert weights and chunked attention"),
    ("deepseek", "multi-head latent attention"),
    ("gemma", "sliding-window attention and its norms"),
    ("mamba", "state-space layers"),
    ("jamba", "state-space layers"),
    ("next", "linear attention layers"),
    ("conditionalgeneration", "the vision or audio tower"),
)
"""What sizing would have to count for an architecture whose name holds the word."""

_FOREIGN_KEYS: Final = {
    "num_local_experts": "expert weights",
    "num_experts": "expert weights",
    "n_routed_experts": "expert weights",
    "kv_lora_rank": "multi-head latent attention",
    "attention_chunk_size": "chunked attention",
    "dual_chunk_attention_config": "dual-chunk attention",
}
"""Keys that no dense model has: the architecture says one thing, the file another."""


@dataclass(frozen=True)
class ModelGeometry:
    """Shape of one model.

    Attributes
    ----------
    name
        What to call the model in messages.
    architecture
        First entry of ``architectures`` in config.json.
    num_layers, hidden_size, intermediate_size, num_attention_heads, num_kv_heads, head_dim, vocab_size
        Sizes of the decoder.
    tie_word_embeddings
        Whether the output head is the embedding.
    qkv_bias, output_bias, mlp_bias
        Which linear layers have biases: query/key/value, attention output, both of the MLP.
    qk_norm
        Whether queries and keys are normed a head.
    norms_per_layer
        Norms of hidden_size in one layer.
    max_position_embeddings
        Longest sequence the model was made for, in tokens.
    rope
        The rotary table it loads.
    dtype_bytes
        Bytes of an unquantized element.
    checkpoint
        How the checkpoint is quantized; None when it is not.
    """

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    norms_per_layer: int
    max_position_embeddings: int
    rope: RopeTable
    dtype_bytes: int
    checkpoint: WeightFormat | None

    @property
    def checkpoint_precision(self) -> Precision | None:
        """Precision that the checkpoint was quantized to; None when it was not."""
        return None if self.checkpoint is None else self.checkpoint.precision

    def weight_format(self, precision: Precision | None = None) -> WeightFormat:
        """Return how linear layers are stored when served in a precision; None: as in the checkpoint."""
        if self.checkpoint is not None and precision in (None, self.checkpoint.precision):
            return self.checkpoint
        return DEFAULT_FORMATS[precision or Precision.BF16]


def geometry_from_config(name: str, config: Mapping[str, object]) -> ModelGeometry:
    """Return the geometry that a Hugging Face config.json describes.

    Raises
    ------
    GeometryError
        When the architecture is not a known dense decoder, or a value is
        missing, of the wrong type, out of range, or contradicts another.
    """
    fields = Fields(name, config)
    architecture = _architecture(fields)
    _refuse_other_attention(fields, architecture)
    heads = fields.size("num_attention_heads")
    head_dim = _head_dim(fields, architecture, heads)
    max_position_embeddings = fields.size("max_position_embeddings")
    attention_bias = fields.flag("attention_bias") or fields.flag("bias")
    llama_like = architecture in ("LlamaForCausalLM", "MistralForCausalLM")
    return ModelGeometry(
        name=name,
        architecture=architecture,
        num_layers=fields.size("num_hidden_layers"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_attention_heads=heads,
        num_kv_heads=_num_kv_heads(fields, architecture, heads),
        head_dim=head_dim,
        vocab_size=fields.size("vocab_size"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=architecture == "Qwen2ForCausalLM" or fields.flag("qkv_bias", default=attention_bias),
        # Only the Llama class gives the output projection and the MLP a bias.
        output_bias=llama_like and attention_bias,
        mlp_bias=llama_like and fields.flag("mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        norms_per_layer=2,
        max_position_embeddings=max_position_embeddings,
        rope=rope_table(fields, head_dim, max_position_embeddings),
        dtype_bytes=_dtype_bytes(fields),
        checkpoint=checkpoint_format(fields),
    )


def _architecture(fields: Fields) -> str:
    architectures = fields.strings("architectures")
    if not architectures:
        raise fields.error("architectures", "is missing; copy it from the model's config.json")
    architecture = architectures[0]
    if architecture in DENSE_ARCHITECTURES:
        return architecture
    known = ", ".join(DENSE_ARCHITECTURES)
    lowered = architecture.lower()
    missing = next((what for word, what in _MISSING_BY_NAME if word in lowered), "its layers")
    raise fields.error("architectures", f"cannot be sized yet, sizing lacks {missing}; use one of {known}")


def _refuse_other_attention(fields: Fields, architecture: str) -> None:
    for key, lacking in _FOREIGN_KEYS.items():
        if fields.is_set(key):
            raise fields.error(key, f"contradicts the dense architecture, sizing lacks {lacking}; remove it")
    for layer_type in fields.strings("layer_types"):
        if layer_type != "full_attention":
            raise fields.error("layer_types", f"sizing lacks {layer_type}; only full_attention can be sized")
    # Qwen files carry a window that is switched off unless they say otherwise; elsewhere its presence switches it on.
    windowed = fields.flag("use_sliding_window", default=not architecture.startswith("Qwen"))
    if fields.is_set("sliding_window") and windowed:
        raise fields.error("sliding_window", "sizing lacks sliding-window attention; only full attention can be sized")


def _num_kv_heads(fields: Fields, architecture: str, heads: int) -> int:
    # Llama files of before grouped attention leave it out; other models' defaults differ, so they must say it.
    default = heads if architecture == "LlamaForCausalLM" else None
    kv_heads = fields.size("num_key_value_heads", default=default)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"must divide num_attention_heads, which is {heads}")
    return kv_heads


def _head_dim(fields: Fields, architecture: str, heads: int) -> int:
    hidden = fields.size("hidden_size")
    if fields.is_set("head_dim"):
        head_dim = fields.size("head_dim")
        if architecture == "Qwen2ForCausalLM" and head_dim * heads != hidden:
            raise fields.error("head_dim", f"Qwen2 needs hidden_size / num_attention_heads, {hidden} / {heads}")
    else:
        if architecture == "Qwen3ForCausalLM":
            raise fields.error("head_dim", "is missing; copy it from the model's config.json")
        if hidden % heads:
            raise fields.error(
                "num_attention_heads", f"must divide hidden_size, which is {hidden}, or head_dim be given"
            )
        head_dim = hidden // heads
    if head_dim % 2:
        key = "head_dim" if fields.is_set("head_dim") else "num_attention_heads"
        raise fields.error(key, f"heads are {head_dim} wide, but rotary embeddings need an even width")
    return head_dim


def _dtype_bytes(fields: Fields) -> int:
    key = "dtype" if fields.is_set("dtype") else "torch_dtype"
    if fields.text(key, default="bfloat16") not in ("bfloat16", "float16", "float32"):
        raise fields.error(key, "must be bfloat16, float16 or float32")
    return _SIXTEEN_BIT


__all__ = ["DENSE_ARCHITECTURES", "GeometryError", "ModelGeometry", "geometry_from_config"]
