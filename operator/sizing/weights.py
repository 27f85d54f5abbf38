"""Bytes of a dense decoder's weights on one tensor-parallel rank."""

from dataclasses import dataclass
from typing import Final

from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.precision import ATTENTION_SCALES_BYTES, Precision, linear_bytes
from specdecode_operator.sizing.units import round_up

VOCABULARY_PADDING: Final = 64
"""vLLM pads the vocabulary to it, whatever the tensor parallelism (vocab_parallel_embedding.py)."""

GATE_AND_UP: Final = 2
"""Projections that an MLP with gated activation merges into one layer."""

KEYS_AND_VALUES: Final = 2
"""Tensors that attention keeps a token."""

QUERIES_AND_KEYS: Final = 2
"""What models with a norm a head apply it to."""


@dataclass(frozen=True)
class LinearLayer:
    """One rank's part of a linear layer.

    Attributes
    ----------
    inputs, outputs
        Sizes on this rank.
    bias
        Elements of its bias on this rank.
    """

    inputs: int
    outputs: int
    bias: int


def kv_heads_per_rank(geometry: ModelGeometry, tensor: int) -> int:
    """Return the KV heads on one rank: replicated where there are fewer than ranks."""
    return max(1, geometry.num_kv_heads // tensor)


def linear_layers(geometry: ModelGeometry, tensor: int) -> tuple[LinearLayer, ...]:
    """Return the four merged linear layers of one decoder layer, as one rank holds them.

    Query/key/value and gate/up are split by outputs, attention output and
    down by inputs (vLLM, linear.py). The bias of the latter two is whole on
    every rank.
    """
    hidden = geometry.hidden_size
    query = geometry.num_attention_heads // tensor * geometry.head_dim
    key_value = KEYS_AND_VALUES * kv_heads_per_rank(geometry, tensor) * geometry.head_dim
    intermediate = geometry.intermediate_size // tensor
    return (
        LinearLayer(hidden, query + key_value, (query + key_value) * geometry.qkv_bias),
        LinearLayer(query, hidden, hidden * geometry.output_bias),
        LinearLayer(hidden, GATE_AND_UP * intermediate, GATE_AND_UP * intermediate * geometry.mlp_bias),
        LinearLayer(intermediate, hidden, hidden * geometry.mlp_bias),
    )


def padded_vocabulary(geometry: ModelGeometry) -> int:
    """Return the rows of the embedding as vLLM allocates it."""
    return round_up(geometry.vocab_size, VOCABULARY_PADDING)


def parameter_count(geometry: ModelGeometry) -> int:
    """Return the parameters of the whole model as vLLM lays it out."""
    linears = sum(layer.inputs * layer.outputs for layer in linear_layers(geometry, tensor=1))
    return geometry.num_layers * linears + _sixteen_bit_elements(geometry, tensor=1)


def weight_bytes(geometry: ModelGeometry, precision: Precision, tensor: int) -> int:
    """Return the bytes of the weights on one rank, without the rotary table.

    Equal to the parameters of vLLM 0.32's classes on the meta device. The
    tensor parallelism must divide the model (see divisibility).
    """
    weight_format = geometry.weight_format(precision)
    layer_bytes = sum(
        linear_bytes(weight_format, layer.inputs, layer.outputs) for layer in linear_layers(geometry, tensor)
    )
    if weight_format.compressed_tensors:
        layer_bytes += ATTENTION_SCALES_BYTES
    return geometry.num_layers * layer_bytes + _sixteen_bit_elements(geometry, tensor) * geometry.dtype_bytes


def _sixteen_bit_elements(geometry: ModelGeometry, tensor: int) -> int:
    """Return what no precision shrinks: embedding, output head, norms and biases."""
    tables = 1 if geometry.tie_word_embeddings else 2
    vocabulary = tables * (padded_vocabulary(geometry) // tensor) * geometry.hidden_size
    biases = sum(layer.bias for layer in linear_layers(geometry, tensor))
    head_norms = QUERIES_AND_KEYS * geometry.head_dim * geometry.qk_norm
    layer_norms = geometry.norms_per_layer * geometry.hidden_size
    final_norm = geometry.hidden_size
    return vocabulary + geometry.num_layers * (biases + head_norms + layer_norms) + final_norm
