"""The geometry of a model that determines memory: layers, heads, encoders, stored tensor bytes.

It includes rotary position tables, because the engine keeps them in GPU memory and RoPE scaling limits the length.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Final

from specdecode_operator.enums import FLOAT32_BYTES, Knowledge, Precision
from specdecode_operator.sizing.arithmetic import round_up
from specdecode_operator.sizing.config_fields import MAX_TOKENS, Fields
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.result_cache import MEMO_SIZE

_MROPE_STRETCH: Final = 4
"""Tables of positions in several dimensions are so much longer (vLLM, mrope.py)."""


@dataclass(frozen=True)
class RopeTable:
    """Table of sines and cosines; models whose tables are equal share one."""

    head_dim: int  # Width of the heads it is for
    rotary_dim: int  # Columns: how much of each head is rotated
    positions: int  # Rows
    parameters: tuple[tuple[str, str], ...]  # Type, base and scaling, in one canonical order
    element_bytes: int | None = None  # Bytes of a number in it; None: of the model's type
    # So many times as long in versions that do not know that its positions never go beyond the tokens
    stretch_once: int = 1

    def size_bytes(self, dtype_bytes: int, *, stretched: bool = False) -> int:
        """Return the bytes of the table, a full copy on every rank; ``stretched``: in versions that know less."""
        rows = self.positions * (self.stretch_once if stretched else 1)
        return rows * self.rotary_dim * (self.element_bytes or dtype_bytes)


def rope_table(
    config: Fields, head_dim: int, max_position_embeddings: int, *, follows_tokens: bool = False
) -> RopeTable:
    """Return the table that vLLM builds for a config.json.

    The rows of each type are those of vLLM 0.32's rotary_embedding package:
    default and llama3 cover max_position_embeddings, linear and yarn stretch
    by their factor. Positions in several dimensions may go beyond the tokens
    unless it is known that they never do (``follows_tokens``).
    """
    nested = config.section("rope_parameters") or config.section("rope_scaling")
    parameters = nested or Fields(config.model, {})
    # Old files say "type" and keep the base and the partial factor outside.
    kind = parameters.text("rope_type", default=parameters.text("type", default="default"))
    factor_home = parameters if parameters.is_set("partial_rotary_factor") else config
    partial = factor_home.number("partial_rotary_factor", default=1.0)
    if partial > 1:
        raise factor_home.error("partial_rotary_factor", "must be above 0 and at most 1")
    facts = {
        **parameters.values,
        "rope_theta": parameters.values.get("rope_theta", config.values.get("rope_theta")),
        "type": None,
        "rope_type": kind,
        "partial_rotary_factor": partial,
    }
    stretch = _MROPE_STRETCH if kind == "mrope" or parameters.is_set("mrope_section") else 1
    return RopeTable(
        head_dim=head_dim,
        rotary_dim=_rotary_dim(head_dim, partial, kind),
        positions=_rows(config, parameters, kind, max_position_embeddings) * (1 if follows_tokens else stretch),
        parameters=_canonical(facts),
        stretch_once=stretch if follows_tokens else 1,
    )


_INCLUDED: Final = ("llama3", "longrope", "su")
"""Types with which max_position_embeddings is the stretched length, in all versions."""

_YARN: Final = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")


def stretched_length(max_position_embeddings: int, ropes: Iterable[RopeTable], *, multiplies_yarn: bool) -> int:
    """Return the longest sequence that the engine takes (vLLM, config/model.py, _get_and_verify_max_len).

    Before 0.30 it is the original length of YaRN times its factor, from then on what the file says.
    """
    length, factor = max_position_embeddings, 1.0
    for facts in ({key: json.loads(value) for key, value in rope.parameters} for rope in ropes):
        kind = facts["rope_type"]
        if kind in _INCLUDED or (kind in _YARN and not multiplies_yarn):
            continue
        factor = _number(facts.get("factor"), factor)
        if kind == "yarn":
            length = int(_number(facts.get("original_max_position_embeddings"), length))
    return min(int(length * factor), MAX_TOKENS)


def _number(value: object, default: float) -> float:
    """Return a positive number, as most files have it, or else the default."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 < value <= MAX_TOKENS else default  # type: ignore[return-value,operator]


def _rotary_dim(head_dim: int, partial: float, kind: str) -> int:
    # Gemma 4 fills the part that is not rotated with ones and zeros (gemma4_rope.py).
    return head_dim if kind == "proportional" else int(head_dim * partial)


def _rows(config: Fields, parameters: Fields, kind: str, max_position_embeddings: int) -> int:
    match kind:
        case "default" | "llama3" | "proportional" | "mrope":
            return max_position_embeddings
        case "linear" | "dynamic":
            return math.ceil(max_position_embeddings * parameters.number("factor"))
        case "longrope" | "su":
            # Two tables, one of the original length and one of the full (phi3_long_rope_scaled_rope.py).
            original = config.size("original_max_position_embeddings", default=max_position_embeddings)
            return original + max_position_embeddings
        case "yarn" | "deepseek_yarn":
            original = parameters.size("original_max_position_embeddings", default=max_position_embeddings)
            return math.ceil(original * parameters.number("factor"))
        case _:
            key = "rope_type" if parameters.is_set("rope_type") else "type"
            raise parameters.error(
                key,
                "is not supported; known are default, linear, dynamic, llama3, yarn, longrope, mrope and proportional",
            )


def _canonical(facts: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Return the facts sorted, with 8.0 written as 8: files write numbers both ways."""
    return tuple(
        (key, json.dumps(_plain(value), sort_keys=True, default=str))
        for key, value in sorted(facts.items())
        if value is not None
    )


def _plain(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Scales(StrEnum):
    """For what each stored scale holds."""

    NONE = "none"
    TENSOR = "tensor"
    CHANNEL = "channel"
    BLOCK = "block"
    GROUP = "group"
    MICROSCALE = "microscale"


class QuantizationMethod(StrEnum):
    """Which of vLLM's quantization methods holds the layers; each has small tensors of its own."""

    NONE = "none"
    FP8 = "fp8"
    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"
    AWQ = "awq"
    GPTQ = "gptq"
    MXFP4 = "mxfp4"


def precision_name(precision: Precision, dtype_bytes: int) -> str:
    """Return what people call a precision: BF16 stands for what is not quantized, which may be float32."""
    return "FP32" if precision is Precision.BF16 and dtype_bytes == FLOAT32_BYTES else precision.value


class ExpertKernel(StrEnum):
    """Kernel that runs experts in MXFP4."""

    MARLIN = "Marlin"
    TRITON = "Triton"
    TRITON_BESIDE_SCALES = "Triton, beside the stored scales"
    """Up to vLLM 0.24 the scales of the checkpoint stay beside those that the kernel reads."""


@dataclass(frozen=True)
class WeightFormat:
    """How a checkpoint or the loader stores a linear layer."""

    precision: Precision  # Precision of the weights themselves
    # For what each scale holds: a tensor, an output channel, a square block, a group of inputs
    scales: Scales = Scales.NONE
    # Inputs a group, or edge of a block. Zero where scales are not grouped: a group is then a whole channel.
    group_size: int = 0
    zero_points: bool = False  # Whether each group stores a zero point beside its scale (AWQ, GPTQ)
    method: QuantizationMethod = QuantizationMethod.NONE  # What of vLLM loads it
    static_inputs: bool = False  # Whether the scales of activations are stored too
    experts_only: bool = False  # Whether only the layers of experts are quantized
    expert_format: "WeightFormat | None" = None  # How the experts are stored; None: as all linear layers are
    ordered_by_activation: bool = False  # Whether GPTQ sorted the inputs before it grouped them (desc_act)
    expert_kernel: ExpertKernel = ExpertKernel.MARLIN  # What runs experts in MXFP4, which decides how they are padded


DEFAULT_FORMATS: Final = {
    Precision.BF16: WeightFormat(Precision.BF16),
    Precision.FP8: WeightFormat(Precision.FP8, Scales.CHANNEL, method=QuantizationMethod.COMPRESSED_TENSORS),
    Precision.INT8: WeightFormat(Precision.INT8, Scales.CHANNEL, method=QuantizationMethod.COMPRESSED_TENSORS),
    Precision.INT4: WeightFormat(
        Precision.INT4, Scales.GROUP, group_size=128, method=QuantizationMethod.COMPRESSED_TENSORS
    ),
    Precision.MXFP4: WeightFormat(
        Precision.MXFP4, Scales.MICROSCALE, group_size=32, method=QuantizationMethod.MXFP4, experts_only=True
    ),
    Precision.NVFP4: WeightFormat(
        Precision.NVFP4, Scales.MICROSCALE, group_size=16, method=QuantizationMethod.MODELOPT, static_inputs=True
    ),
}
"""What a precision means when no checkpoint says more.

Symmetric w4a16 with groups of 128 is 4.125 bits a weight. FP8 made while
loading has one scale a channel at most, so this never counts too little.
"""


@dataclass(frozen=True)
class SelfAttention:
    """Attention with heads of its own for keys and values (MHA, GQA, MQA)."""

    # Query heads, key/value heads, and how wide each is
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Whether the projections have biases
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # Whether queries and keys are normed a head
    gated: bool = False  # Whether the query projection also makes a gate of the same size (Qwen3-Next)
    sinks: bool = False  # Whether each query head has a learned sink (gpt-oss)
    window_tokens: int | None = None  # Tokens of a sliding window; None for none
    chunk_tokens: int | None = None  # Tokens of a local chunk (Llama 4); None for none
    # Whether queries and keys have norms as wide as all heads instead, and whether each rank holds them whole
    norm_over_heads: bool = False
    whole_norms: bool = False
    value_head_dim: int | None = None  # How wide a head of the values is; None: as the others (MiMo V2 differs)
    # Whether it reads keys and values of an earlier layer of its kind instead of its own (Gemma 4 E2B, E4B)
    borrows_cache: bool = False

    @property
    def value_dim(self) -> int:
        """Width of a head of the values."""
        return self.value_head_dim or self.head_dim


@dataclass(frozen=True)
class Indexer:
    """Chooses the tokens that sparse attention reads (DeepSeek V3.2); it keeps keys of its own."""

    # Its heads and their width. All share one key a token.
    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek, Kimi): one compressed vector a token."""

    num_heads: int  # Query heads
    query_rank: int | None  # Width that queries are compressed to; None where they are not
    kv_rank: int  # Width of the compressed keys and values
    # Parts of a head: without and with rotary positions, and of its values
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    sparse_tokens: int = 0  # Tokens that it reads of a sequence; zero where it reads all
    indexer: Indexer | None = None  # What chooses them; None where it reads all, or those that a layer before it chose
    packs_cache: bool = True  # Whether its kernel has scales and a rotary part of 16 bits in an FP8 cache (fp8_ds_mla)


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta rule: linear attention with a state of fixed size (Qwen3-Next, Qwen3.5)."""

    # Heads and their widths
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int  # Tokens that the convolution before it looks at
    # Bytes of a number in the state; None: of the model's type (Qwen3.5 keeps float32)
    state_element_bytes: int | None = None

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class StateSpace:
    """Mamba 2: heads with a state of fixed size, which groups of them read and write alike."""

    # Heads and their width; together the width of the layer
    num_heads: int
    head_dim: int
    # Groups of heads that share what goes into the state and out of it, and columns of the state
    num_groups: int
    state_size: int
    conv_kernel: int  # Tokens that the convolution before it looks at
    # Whether the convolution, and the projections in and out, have biases
    conv_bias: bool = True
    projection_bias: bool = False
    output_norm: bool = True  # Whether its output is normed (Falcon-H1 may leave that out)
    state_element_bytes: int | None = None  # Bytes of a number in the state; None: of the model's type

    @property
    def width(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class SelectiveScan:
    """Mamba 1 with norms inside (Jamba)."""

    # Channels, and columns of the state of each
    width: int
    state_size: int
    step_rank: int  # Width that the size of a time step is compressed to
    conv_kernel: int  # Tokens that the convolution before it looks at
    # Whether the convolution, and the projections in and out, have biases
    conv_bias: bool = True
    projection_bias: bool = False


@dataclass(frozen=True)
class ParallelMixers:
    """Attention and Mamba 2 side by side in one layer (Falcon-H1)."""

    attention: SelfAttention
    state_space: StateSpace


@dataclass(frozen=True)
class DenseMlp:
    """Feed-forward layer."""

    intermediate_size: int  # Width between the projections
    bias: bool = False  # Whether all of them have biases
    gated: bool = True  # Whether a gate stands beside the projection up (Nemotron-H has none)


@dataclass(frozen=True)
class Experts:
    """Mixture of experts with its router."""

    # Experts, how many of them a token visits, and the width of each
    num_experts: int
    top_k: int
    intermediate_size: int
    bias: bool = False  # Whether experts and router have biases (gpt-oss)
    # Bytes an expert of the bias that balances the routing (DeepSeek: one float32); zero for none
    score_bias_bytes: int = 0
    shared_intermediate_size: int = 0  # Width of the experts that every token visits, together; zero for none
    shared_gate: bool = False  # Whether a gate weighs the shared experts (Qwen2-MoE, Qwen3-Next)
    router_in_float32: bool = False  # Whether the router keeps 32 bits (MiniMax M2, MiMo V2)
    # Whether what every token visits is an ordinary feed-forward layer, and the router scales its inputs and experts
    # (Gemma 4)
    beside_mlp: bool = False
    gated: bool = True  # Whether a gate stands beside each projection up (Nemotron-H has none)
    # Width that the hidden state is compressed to for the routed experts; None where it is not (Nemotron 3)
    latent_size: int | None = None
    latent_bias: bool = False  # Whether the projections to that width and back have biases
    # Whether quantization applies to the router (Qwen3-MoE; the other families keep it in 16 bits)
    quantizable_router: bool = False


SingleMixer = SelfAttention | LatentAttention | DeltaNet | StateSpace | SelectiveScan
Mixer = SingleMixer | ParallelMixers
FeedForward = DenseMlp | Experts


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    # Its two halves; None where it lacks one (Nemotron-H, Mamba 2)
    mixer: Mixer | None
    feed_forward: FeedForward | None
    norms: int = 2  # Norms over the hidden size
    input_multiple: int = 1  # How many hidden states side by side its attention reads (2 in EAGLE-3 heads)
    # Modules that a quantized checkpoint leaves in 16 bits, by their names in it
    unquantized: frozenset[str] = frozenset()
    # Width of an input of the token that each layer has for itself, whole on every rank; zero for none (Gemma 4)
    own_input_size: int = 0

    @property
    def mixers(self) -> tuple[SingleMixer, ...]:
        """What stands in the place of the mixer: nothing, one, or two side by side."""
        match self.mixer:
            case None:
                return ()
            case ParallelMixers() as both:
                return both.attention, both.state_space
            case mixer:
                return (mixer,)


def counted(layers: Sequence[Layer]) -> tuple[tuple[Layer, int], ...]:
    """Return layers that differ, each with how often it occurs, in their order."""
    objects = {id(layer): layer for layer in layers}
    counts: dict[Layer, int] = {}
    # To compare layers takes far longer than to see that two are one object.
    for place, count in Counter(map(id, layers)).items():
        layer = objects[place]
        counts[layer] = counts.get(layer, 0) + count
    return tuple(counts.items())


_INT32_BYTES: Final = 4

BLOCK_TOKENS: Final = 64
"""Tokens of which its blocks are multiples (vLLM, v1/attention/backends/mla/indexer.py and flashmla_sparse.py)."""


@dataclass(frozen=True)
class IndexRows:
    """How many rows of chosen tokens one step fills."""

    batch_tokens: int  # Tokens of a step
    decoding_tokens: int  # Those of requests that decode: K + 1 each


def index_buffer_bytes(layers: Sequence[Layer], rows: IndexRows) -> int:
    """Return the buffers of chosen tokens that the engine makes while it builds these layers of one stage.

    One table for all of them, and one for each indexer, which the layers
    that share its choice read (vLLM, models/deepseek_v32/nvidia/model.py and
    v1/attention/backends/mla/index_group.py): with 1024 requests and 61
    indexers of 2048 tokens more than half a GiB.
    """
    sparse = [layer.mixer for layer in layers if isinstance(layer.mixer, LatentAttention) and layer.mixer.sparse_tokens]
    if not sparse:
        return 0
    chosen = sparse[0].sparse_tokens
    # A stage that begins between two indexers makes a table for the layers before the first one.
    groups = sum(mixer.indexer is not None for mixer in sparse) + (sparse[0].indexer is None)
    physical_rows = min(rows.batch_tokens, rows.decoding_tokens) + 1
    return (rows.batch_tokens * chosen + groups * physical_rows * (chosen + 1)) * _INT32_BYTES


_TABLES: Final = frozenset(
    (
        *("embed_tokens", "embed_in", "embeddings", "embedding", "word_embeddings", "tok_embeddings", "wte"),
        *("lm_head", "embed_out", "output_layer", "output", "head"),
    )
)
"""Last words of the parts that hold an embedding or an output head."""

_ENCODER: Final = re.compile(
    r"(^|[._])(vision|visual|vit|image|img|audio|speech|sound|video|whisper|siglip|clip|patch)|"
    r"(projector|connector|resampler|aligner|abstractor|mm_embedder|merger|mlp1)",
    re.IGNORECASE,
)
"""Parts that encode other inputs than text, and what joins them to the language model."""

_UNUSED: Final = re.compile(r"(^|\.)(mtp|talker|code2wav|token2wav|tts)(\.|_|$)", re.IGNORECASE)
"""Parts that the engine does not load for text: modules for multi-token prediction, speech that comes out."""


_PREDICTION: Final = re.compile(r"(^|\.)mtp(\.|$)")
"""Parts that hold modules for multi-token prediction."""


@dataclass(frozen=True)
class StoredWeights:
    """Bytes of all tensors in the files, and the same by the type's name in safetensors and by part."""

    total_bytes: int
    output_head: bool  # Whether the files hold an output head of their own
    bytes_by_dtype: tuple[tuple[str, int], ...]
    bytes_by_part: tuple[tuple[str, int], ...] = ()  # The largest parts; empty if they are not known

    @classmethod
    def of(
        cls, total_bytes: int, by_dtype: Mapping[str, int], by_part: Mapping[str, int], *, output_head: bool
    ) -> "StoredWeights":
        """Return the same from mappings."""
        return cls(total_bytes, output_head, tuple(sorted(by_dtype.items())), tuple(sorted(by_part.items())))

    @property
    def encoder_bytes(self) -> int:
        """Bytes of what encodes images, sound or video."""
        return sum(size for part, size in self.bytes_by_part if _encodes(part))

    @property
    def unused_bytes(self) -> int:
        """Bytes of what the engine does not load to answer with text."""
        return sum(size for part, size in self.bytes_by_part if _UNUSED.search(part))

    @property
    def prediction_bytes(self) -> int:
        """Bytes of modules for multi-token prediction."""
        return sum(size for part, size in self.bytes_by_part if _PREDICTION.search(part))

    @property
    def table_bytes(self) -> int | None:
        """Bytes of embedding and output head; None if parts are not known."""
        parts = [(part, size) for part, size in self.bytes_by_part if not (_encodes(part) or _UNUSED.search(part))]
        sizes = [size for part, size in parts if part.rpartition(".")[2] in _TABLES]
        return sum(sizes) if sizes else None

    def loaded_bytes(self, *, quantized: bool) -> int:
        """Return the bytes of all tensors as the engine loads them: float32 as 16 bits unless they are scales.

        vLLM, config/model.py, _resolve_auto_dtype.
        """
        return self.total_bytes - (0 if quantized else dict(self.bytes_by_dtype).get("F32", 0) // 2)


def _encodes(part: str) -> bool:
    return bool(_ENCODER.search(part)) and not _UNUSED.search(part)


@dataclass(frozen=True)
class Tower:
    """Encoder of images or sound in front of a language model; it keeps the 16-bit type."""

    split_elements: int = 0  # Parameters divided over the ranks
    whole_elements: int = 0  # Parameters that each rank holds
    # Tokens that the largest image makes, and numbers in it; zero where neither is known
    item_tokens: int = 0
    item_elements: int = 0
    # Numbers alive for it at the encoder's peak: states of its patches, and what the ranks divide among them
    item_state_elements: int = 0
    item_inner_elements: int = 0
    longest_item: int = 1  # So many of the largest images the longest video may be, if the model's length allows
    # Whether no step may end within an item, because its tokens attend both ways (vLLM, disable_chunked_mm_input)
    whole_items: bool = False
    output_levels: int = 1  # Hidden states that it hands on for each token
    table_bytes: int = 0  # Tables that its first run makes and keeps
    ropes: tuple[RopeTable, ...] = ()  # The rotary tables it loads
    unknown_items: bool = False  # Whether sizing does not know what its largest item takes


@dataclass(frozen=True)
class Refiner:
    """What chooses the tokens of a proposed block anew, pass by pass (XPress); whole on each rank."""

    rank: int  # Width that it computes in
    places: int  # Of a block: the one of the token that was verified, and those to fill
    candidates: int  # Tokens that it chooses from at each place; 0 for all
    copied_elements: int  # Parameters that the engine keeps a second time, turned


@dataclass(frozen=True)
class HeadParts:
    """What a draft head (EAGLE, MTP) holds beside its layers."""

    # Rows of an output head that the engine builds for it (the draft vocabulary), and how many such there are
    output_rows: int
    # Whether the engine replaces its embedding and output heads by the target's
    shares_embedding: bool
    shares_output: bool
    whole_elements: int  # Parameters that each rank holds: the layer that joins hidden states, extra norms
    whole_bytes: int = 0  # Parameters of other types that each rank holds
    # Parameters divided over the ranks: the layer that joins hidden states in Qwen's MTP layers
    split_elements: int = 0
    output_heads: int = 1
    embeds: bool = True  # Whether it has an embedding at all (Medusa has none)
    # Whether it takes the target's embedding also where that lies on the last of several pipeline stages
    shares_on_last_stage: bool = True
    most_tokens: int | None = None  # Tokens that it can propose a step; None for as many as one likes
    # Heads of Medusa that the checkpoint holds, each for one token; the engine builds one a proposed token
    medusa_heads: int = 0
    # Hidden states of the target's layers that it joins; zero where it reads only the last one's
    auxiliary_states: int = 0
    # Whether the engine keeps a second copy of the key and value projections of all layers (DFlash, DSpark)
    copies_keys_and_values: bool = False
    # What of them is the table from draft to target vocabulary; a head of the target's vocabulary has none
    token_map_bytes: int = 0
    # Width of the target's hidden states that it was made for; None where it is part of the target
    reads_width: int | None = None
    verifier: str | None = None  # Hub id of the target that its file names (speculators library); None: it does not
    returns_width: int | None = None  # Width of the hidden states that it hands to its next step; None: its own
    # Rows of its output head that it copies for each token that it proposes (Gemma 4 assistants with centroids)
    copied_rows: int = 0
    embeds_images: bool = False  # Whether images reach it, put into the embeddings of a step
    refiner: Refiner | None = None  # What goes over its blocks again; None where they stay as proposed


MADE_UP_CLASS: Final = "AssumedForCausalLM"
"""Architecture of a model of which nothing is read (`families/assumed.py`)."""


@dataclass(frozen=True, eq=False)
class ModelGeometry:
    """Shape of one model. Compared by identity: it is the key of caches."""

    name: str  # What to call the model in messages
    architecture: str  # First entry of ``architectures`` in config.json
    # Width of the hidden states, and tokens known
    hidden_size: int
    vocab_size: int
    layers: tuple[Layer, ...]  # Decoder layers from first to last
    tie_word_embeddings: bool  # Whether the output head is the embedding
    max_position_embeddings: int  # Longest sequence the model was made for, in tokens
    ropes: tuple[RopeTable, ...]  # The rotary tables it loads
    dtype_bytes: int  # Bytes of an unquantized element
    checkpoint: WeightFormat | None  # How the checkpoint is quantized; None when it is not
    tower: Tower = Tower()  # Encoder of other inputs than text
    head: HeadParts | None = None  # What makes it a draft head; None for a model of its own
    final_norms: int = 1  # Norms after the last layer
    # Whether the engine's class makes embedding and output head, the embedding alone, or the final norm, on every
    # pipeline stage
    tables_on_every_stage: bool = False
    embedding_on_every_stage: bool = False
    norm_on_every_stage: bool = False
    # Parameters beside layers and tables, on every pipeline stage: divided over the ranks, and whole on each (inputs by
    # layer of Gemma 4)
    split_elements: int = 0
    whole_elements: int = 0
    mtp_layers: int = 0  # Layers for multi-token prediction that its checkpoint also holds (num_nextn_predict_layers)
    # What each of them is made of, where it is not one layer like the last (Nemotron 3)
    mtp_block: tuple[Layer, ...] = ()
    # Keys of its config.json that the engine must be told otherwise, as JSON; empty where it reads all in the file
    told_config: str = ""
    # Bytes of a number in the KV cache where the checkpoint asks for it (FP8); None: of the model's type
    cache_element_bytes: int | None = None
    # Whether it was trained to propose all tokens in one pass, from a token for the places to fill (PARD, P-EAGLE)
    drafts_in_parallel: bool = False
    knowledge: Knowledge = Knowledge.EXACT  # How well sizing knows it
    estimated_because: str = ""  # What sizing does not implement of it; empty for an exact model
    # What in its config.json contradicts itself or is unusual, a sentence for each. Found in estimated models alone.
    doubts: tuple[str, ...] = ()
    # What the headers of its files say; None if they were not read. Kept for estimated models alone.
    stored: StoredWeights | None = None
    # Bytes of its layers in the files, and as their shapes give them: the layers are scaled by it
    layer_scale: tuple[int, int] = (1, 1)
    # The same of the layers for multi-token prediction; (1, 1) if these are scaled as all layers
    mtp_scale: tuple[int, int] = (1, 1)
    # Bytes of a token in the KV cache, and of a request's states, on one GPU, if the user gives them
    assumed_token_bytes: int | None = None
    assumed_state_bytes: int | None = None

    @property
    def is_made_up(self) -> bool:
        """Whether nothing is read of it: its user gives numbers, and its class is not known."""
        return self.architecture == MADE_UP_CLASS

    @property
    def unscaled(self) -> "ModelGeometry":
        """The same with the layers that its shapes give, whatever its files hold."""
        # The model itself where it can be: it is the key of caches.
        return self if self.layer_scale == (1, 1) else replace(self, layer_scale=(1, 1))

    @cached_property
    def distinct_layers(self) -> tuple[tuple[Layer, int], ...]:
        """Layers that differ, each with how often it occurs."""
        return counted(self.layers)

    @cached_property
    def attentions(self) -> tuple[SelfAttention | LatentAttention, ...]:
        """The kinds of attention that occur."""
        mixers = (mixer for layer, _ in self.distinct_layers for mixer in layer.mixers)
        return tuple(dict.fromkeys(mixer for mixer in mixers if isinstance(mixer, SelfAttention | LatentAttention)))

    @cached_property
    def has_sparse_attention(self) -> bool:
        """Whether indexers choose the tokens that its layers attend to: such caches have blocks of 64 tokens."""
        return any(isinstance(mixer, LatentAttention) and mixer.sparse_tokens for mixer in self.attentions)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @cached_property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(isinstance(layer.feed_forward, Experts) for layer, _ in self.distinct_layers)

    @cached_property
    def widest_dense(self) -> int:
        """Largest width inside the feed-forward layers that every token visits."""
        return max((_dense_width(layer.feed_forward) for layer, _ in self.distinct_layers), default=0)

    @property
    def checkpoint_precision(self) -> Precision | None:
        """Precision that the checkpoint was quantized to; None when it was not."""
        return None if self.checkpoint is None else self.checkpoint.precision

    def weight_format(self, precision: Precision | None = None) -> WeightFormat:
        """Return how linear layers are stored when served in a precision; None: as in the checkpoint."""
        if self.checkpoint is not None and precision in (None, self.checkpoint.precision):
            return self.checkpoint
        return DEFAULT_FORMATS[precision or Precision.BF16]


def computed_in(geometry: ModelGeometry, dtype_bytes: int) -> ModelGeometry:
    """Return a model whose numbers that no quantization touches have so many bytes; itself where they do already."""
    return geometry if geometry.dtype_bytes == dtype_bytes else _computed_in(geometry, dtype_bytes)


@lru_cache(maxsize=MEMO_SIZE)
def _computed_in(geometry: ModelGeometry, dtype_bytes: int) -> ModelGeometry:
    return replace(geometry, dtype_bytes=dtype_bytes)


def _dense_width(feed_forward: FeedForward | None) -> int:
    match feed_forward:
        case DenseMlp():
            return feed_forward.intermediate_size
        case Experts():
            return feed_forward.shared_intermediate_size
        case None:
            return 0


__all__ = ["GeometryError", "HeadParts", "ModelGeometry", "Tower", "computed_in"]


VOCABULARY_PADDING: Final = 64
"""vLLM pads the vocabulary to it, whatever the tensor parallelism (vocab_parallel_embedding.py)."""


def padded_vocabulary(tokens: int) -> int:
    """Return the rows of an embedding as vLLM allocates it."""
    return round_up(tokens, VOCABULARY_PADDING)


TOKEN_ID_BYTES: Final = 8
"""The table from draft to target vocabulary holds int64 (vLLM, llama_eagle3.py, draft_id_to_target_id)."""
