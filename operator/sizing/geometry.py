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
from specdecode_operator.sizing.result_cache import MEMO_SIZE

_MROPE_STRETCH: Final = 4
"""Factor of the rows of tables of positions in several dimensions (vLLM, mrope.py)."""

_INCLUDED: Final = ("llama3", "longrope", "su")
"""Types with which max_position_embeddings is the stretched length, in all versions."""

_YARN: Final = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")


@dataclass(frozen=True)
class RopeTable:
    """Table of sines and cosines; models whose tables are equal share one."""

    head_dim: int
    rotary_dim: int  # Columns: the rotated part of each head
    positions: int  # Rows
    parameters: tuple[tuple[str, str], ...]  # Type, base and scaling, in one canonical order
    element_bytes: int | None = None  # None: of the model's type
    stretch_once: int = 1  # Factor of the rows in versions that do not know that positions never exceed the tokens

    def size_bytes(self, dtype_bytes: int, *, stretched: bool = False) -> int:
        """Return the bytes of the table, a full copy on every rank; ``stretched``: in versions that know less."""
        rows = self.positions * (self.stretch_once if stretched else 1)
        return rows * self.rotary_dim * (self.element_bytes or dtype_bytes)


def rope_table(
    config: Fields, head_dim: int, max_position_embeddings: int, *, follows_tokens: bool = False
) -> RopeTable:
    """Return the table that vLLM builds for a config.json.

    The rows of each type follow vLLM 0.32's rotary_embedding package: default and llama3 cover
    max_position_embeddings, linear and yarn stretch by their factor. Positions in several dimensions may exceed the
    tokens unless it is known that they never do (``follows_tokens``).
    """
    parameters = config.section("rope_parameters") or config.section("rope_scaling") or Fields(config.model, {})
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

    def plain(value: object) -> object:
        # Files write numbers both ways: 8.0 and 8.
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return RopeTable(
        head_dim=head_dim,
        # Gemma 4 fills the part that is not rotated with ones and zeros (gemma4_rope.py).
        rotary_dim=head_dim if kind == "proportional" else int(head_dim * partial),
        positions=_rows(config, parameters, kind, max_position_embeddings) * (1 if follows_tokens else stretch),
        parameters=tuple(
            (key, json.dumps(plain(value), sort_keys=True, default=str))
            for key, value in sorted(facts.items())
            if value is not None
        ),
        stretch_once=stretch if follows_tokens else 1,
    )


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


def stretched_length(max_position_embeddings: int, ropes: Iterable[RopeTable], *, multiplies_yarn: bool) -> int:
    """Return the longest sequence that the engine takes (vLLM, config/model.py, _get_and_verify_max_len).

    Before 0.30 it is the original length of YaRN times its factor, from then on the length in the file.
    """

    def positive(value: object, default: float) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value if is_number and 0 < value <= MAX_TOKENS else default  # type: ignore[return-value,operator]

    length, factor = max_position_embeddings, 1.0
    for facts in ({key: json.loads(value) for key, value in rope.parameters} for rope in ropes):
        kind = facts["rope_type"]
        if kind in _INCLUDED or (kind in _YARN and not multiplies_yarn):
            continue
        factor = positive(facts.get("factor"), factor)
        if kind == "yarn":
            length = int(positive(facts.get("original_max_position_embeddings"), length))
    return min(int(length * factor), MAX_TOKENS)


class Scales(StrEnum):
    """Granularity of stored scales."""

    NONE = "none"
    TENSOR = "tensor"
    CHANNEL = "channel"
    BLOCK = "block"
    GROUP = "group"
    MICROSCALE = "microscale"


class QuantizationMethod(StrEnum):
    """vLLM's quantization method of the layers; each has its own small tensors."""

    NONE = "none"
    FP8 = "fp8"
    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"
    AWQ = "awq"
    GPTQ = "gptq"
    MXFP4 = "mxfp4"


def precision_name(precision: Precision, dtype_bytes: int) -> str:
    """Return the name of a precision: BF16 means unquantized, which may be float32."""
    return "FP32" if precision is Precision.BF16 and dtype_bytes == FLOAT32_BYTES else precision.value


class ExpertKernel(StrEnum):
    """Kernel that runs experts in MXFP4."""

    MARLIN = "Marlin"
    TRITON = "Triton"
    TRITON_BESIDE_SCALES = "Triton, beside the stored scales"
    """Up to vLLM 0.24 the scales of the checkpoint stay in memory with the scales that the kernel reads."""


@dataclass(frozen=True)
class WeightFormat:
    """Storage format of a linear layer in a checkpoint or the loader."""

    precision: Precision
    scales: Scales = Scales.NONE
    # Inputs a group, or edge of a block. Zero if scales are not grouped: a group is then a whole channel.
    group_size: int = 0
    zero_points: bool = False  # Whether each group stores a zero point next to its scale (AWQ, GPTQ)
    method: QuantizationMethod = QuantizationMethod.NONE
    static_inputs: bool = False  # Whether scales of activations are stored
    experts_only: bool = False  # Whether only the layers of experts are quantized
    expert_format: "WeightFormat | None" = None  # Of the experts; None: as all linear layers
    ordered_by_activation: bool = False  # Whether GPTQ sorted the inputs before it grouped them (desc_act)
    expert_kernel: ExpertKernel = ExpertKernel.MARLIN  # Decides the padding


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
"""Formats of precisions without a checkpoint.

Symmetric w4a16 with groups of 128 is 4.125 bits a weight. FP8 made while loading has at most one scale a channel, so
this is an upper bound.
"""


@dataclass(frozen=True)
class SelfAttention:
    """Attention with separate heads for keys and values (MHA, GQA, MQA)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # Norm of queries and keys per head
    gated: bool = False  # Whether the query projection also makes a gate of the same size (Qwen3-Next)
    sinks: bool = False  # Whether each query head has a learned sink (gpt-oss)
    window_tokens: int | None = None  # Sliding window
    chunk_tokens: int | None = None  # Local chunk (Llama 4)
    # Whether queries and keys have norms as wide as all heads instead, and whether each rank holds them whole
    norm_over_heads: bool = False
    whole_norms: bool = False
    value_head_dim: int | None = None  # None: as head_dim (MiMo V2 differs)
    borrows_cache: bool = False  # Whether it reads keys and values of an earlier layer (Gemma 4 E2B, E4B)

    @property
    def value_dim(self) -> int:
        """Width of a head of the values."""
        return self.value_head_dim or self.head_dim


@dataclass(frozen=True)
class Indexer:
    """Chooses the tokens that sparse attention reads (DeepSeek V3.2), with its own keys."""

    # All heads share one key a token.
    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek, Kimi): one compressed vector a token."""

    num_heads: int
    query_rank: int | None  # Width of compressed queries; None if they are not
    kv_rank: int  # Width of the compressed keys and values
    # Parts of a head without and with rotary positions, and of its values
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    sparse_tokens: int = 0  # Tokens that it reads of a sequence; zero for all
    indexer: Indexer | None = None  # None if it reads all, or the choice of an earlier layer
    packs_cache: bool = True  # Whether an FP8 cache has scales and a rotary part of 16 bits (fp8_ds_mla)


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta rule: linear attention with a state of fixed size (Qwen3-Next, Qwen3.5)."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int  # Tokens
    state_element_bytes: int | None = None  # None: of the model's type (Qwen3.5 keeps float32)

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class StateSpace:
    """Mamba 2: heads with a state of fixed size, which groups of them read and write alike."""

    num_heads: int
    head_dim: int
    num_groups: int  # Groups of heads that share the input and output of the state
    state_size: int  # Columns
    conv_kernel: int  # Tokens
    conv_bias: bool = True
    projection_bias: bool = False
    output_norm: bool = True  # Falcon-H1 may lack it
    state_element_bytes: int | None = None  # None: of the model's type

    @property
    def width(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class SelectiveScan:
    """Mamba 1 with norms inside (Jamba)."""

    width: int  # Channels
    state_size: int  # Columns per channel
    step_rank: int  # Width of the compressed time step
    conv_kernel: int  # Tokens
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

    intermediate_size: int
    bias: bool = False
    gated: bool = True  # Nemotron-H has no gate


@dataclass(frozen=True)
class Experts:
    """Mixture of experts with its router."""

    num_experts: int
    top_k: int  # Experts per token
    intermediate_size: int
    bias: bool = False  # Of experts and router (gpt-oss)
    score_bias_bytes: int = 0  # Per expert, of the bias that balances the routing (DeepSeek: one float32)
    shared_intermediate_size: int = 0  # Total width of the experts that every token visits
    shared_gate: bool = False  # Qwen2-MoE, Qwen3-Next
    router_in_float32: bool = False  # MiniMax M2, MiMo V2
    # Whether the shared part is an ordinary feed-forward layer, and the router scales its inputs and experts (Gemma 4)
    beside_mlp: bool = False
    gated: bool = True  # Nemotron-H has no gate
    latent_size: int | None = None  # Width of the compressed input of the routed experts (Nemotron 3)
    latent_bias: bool = False  # Of the projections to that width and back
    # Whether quantization applies to the router (Qwen3-MoE; the other families keep it in 16 bits)
    quantizable_router: bool = False


SingleMixer = SelfAttention | LatentAttention | DeltaNet | StateSpace | SelectiveScan
Mixer = SingleMixer | ParallelMixers
FeedForward = DenseMlp | Experts


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    # None if it lacks one of the two (Nemotron-H, Mamba 2)
    mixer: Mixer | None
    feed_forward: FeedForward | None
    norms: int = 2  # Norms over the hidden size
    input_multiple: int = 1  # Hidden states side by side that its attention reads (2 in EAGLE-3 heads)
    unquantized: frozenset[str] = frozenset()  # Names of modules that a quantized checkpoint leaves in 16 bits
    # Width of an input of the token that each layer has for itself, whole on every rank; zero for none (Gemma 4)
    own_input_size: int = 0

    @property
    def mixers(self) -> tuple[SingleMixer, ...]:
        """The mixers of the layer: up to two side by side."""
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
    # Comparing layers takes far longer than comparing identities.
    for place, count in Counter(map(id, layers)).items():
        layer = objects[place]
        counts[layer] = counts.get(layer, 0) + count
    return tuple(counts.items())


BLOCK_TOKENS: Final = 64
"""Divisor of its block sizes (vLLM, v1/attention/backends/mla/indexer.py and flashmla_sparse.py)."""


@dataclass(frozen=True)
class IndexRows:
    """Rows of chosen tokens that one step fills."""

    batch_tokens: int
    decoding_tokens: int  # K + 1 per decoding request


def index_buffer_bytes(layers: Sequence[Layer], rows: IndexRows) -> int:
    """Return the bytes of the buffers of chosen tokens that the engine makes for these layers of one stage.

    One table for all of them, and one for each indexer, which the layers that share its choice read (vLLM,
    models/deepseek_v32/nvidia/model.py and v1/attention/backends/mla/index_group.py): with 1024 requests and 61
    indexers of 2048 tokens more than half a GiB.
    """
    sparse = [layer.mixer for layer in layers if isinstance(layer.mixer, LatentAttention) and layer.mixer.sparse_tokens]
    if not sparse:
        return 0
    chosen = sparse[0].sparse_tokens
    # A stage that begins between two indexers makes a table for the layers before the first one.
    groups = sum(mixer.indexer is not None for mixer in sparse) + (sparse[0].indexer is None)
    physical_rows = min(rows.batch_tokens, rows.decoding_tokens) + 1
    return (rows.batch_tokens * chosen + groups * physical_rows * (chosen + 1)) * 4


_TABLES: Final = (
    *("embed_tokens", "embed_in", "embeddings", "embedding", "word_embeddings", "tok_embeddings", "wte"),
    *("lm_head", "embed_out", "output_layer", "output", "head"),
)
"""Last words of the parts that hold an embedding or an output head."""

_ENCODER: Final = re.compile(
    r"(^|[._])(vision|visual|vit|image|img|audio|speech|sound|video|whisper|siglip|clip|patch)|"
    r"(projector|connector|resampler|aligner|abstractor|mm_embedder|merger|mlp1)",
    re.IGNORECASE,
)
"""Parts that encode other inputs than text, and their connectors to the language model."""

_UNUSED: Final = re.compile(r"(^|\.)(mtp|talker|code2wav|token2wav|tts)(\.|_|$)", re.IGNORECASE)
"""Parts that the engine does not load for text: modules for multi-token prediction, speech output."""

_PREDICTION: Final = re.compile(r"(^|\.)mtp(\.|$)")


@dataclass(frozen=True)
class StoredWeights:
    """Bytes of all tensors in the files, and the same by the type's name in safetensors and by part."""

    total_bytes: int
    output_head: bool  # Whether the files hold one
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
        """Bytes of encoders of images, sound or video."""
        return sum(size for part, size in self.bytes_by_part if _encodes(part))

    @property
    def unused_bytes(self) -> int:
        """Bytes of parts that the engine does not load for text."""
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
    # Tokens and numbers of the largest image; zero if unknown
    item_tokens: int = 0
    item_elements: int = 0
    # Numbers alive for it at the encoder's peak: states of its patches, and the part divided over the ranks
    item_state_elements: int = 0
    item_inner_elements: int = 0
    longest_item: int = 1  # Length of the longest video in largest images, if the model's length allows
    # Whether no step may end within an item, because its tokens attend both ways (vLLM, disable_chunked_mm_input)
    whole_items: bool = False
    output_levels: int = 1  # Hidden states per token
    table_bytes: int = 0  # Tables that its first run makes and keeps
    ropes: tuple[RopeTable, ...] = ()
    unknown_items: bool = False  # Whether the memory of its largest item is unknown


@dataclass(frozen=True)
class Refiner:
    """Refines the tokens of a proposed block, pass by pass (XPress); whole on each rank."""

    rank: int  # Width that it computes in
    places: int  # Of a block: the one of the verified token, and those to fill
    candidates: int  # Tokens that it chooses from at each place; 0 for all
    copied_elements: int  # Parameters that the engine also keeps transposed


@dataclass(frozen=True)
class HeadParts:
    """Parts of a draft head (EAGLE, MTP) in addition to its layers."""

    output_rows: int  # Rows of an output head that the engine builds for it (the draft vocabulary)
    # Whether the engine replaces them by the target's
    shares_embedding: bool
    shares_output: bool
    whole_elements: int  # Parameters that each rank holds: the layer that joins hidden states, extra norms
    whole_bytes: int = 0  # Parameters of other types that each rank holds
    split_elements: int = 0  # Parameters divided over the ranks: the joining layer in Qwen's MTP layers
    output_heads: int = 1
    embeds: bool = True  # Medusa has no embedding
    # Whether it takes the target's embedding also from the last of several pipeline stages
    shares_on_last_stage: bool = True
    most_tokens: int | None = None  # Maximum tokens that it can propose a step
    medusa_heads: int = 0  # Heads in the checkpoint; the engine builds one per proposed token
    auxiliary_states: int = 0  # Hidden states of target layers that it joins; zero if it reads only the last
    # Whether the engine keeps a second copy of the key and value projections of all layers (DFlash, DSpark)
    copies_keys_and_values: bool = False
    token_map_bytes: int = 0  # Part of whole_bytes: the table from draft to target vocabulary
    reads_width: int | None = None  # Width of the target's hidden states; None if it is part of the target
    verifier: str | None = None  # Hub id of the target that its file names (speculators library)
    returns_width: int | None = None  # Width of the hidden states for its next step; None: its own
    copied_rows: int = 0  # Rows of its output head copied per proposed token (Gemma 4 assistants with centroids)
    embeds_images: bool = False  # Whether the embeddings of a step include images
    refiner: Refiner | None = None


@dataclass(frozen=True)
class DSparkStages:
    """Stages of DSpark in a target's own checkpoint."""

    layers: tuple[Layer, ...]  # One per stage
    parts: HeadParts


MADE_UP_CLASS: Final = "AssumedForCausalLM"
"""Architecture of a model without a config.json (`families/assumed.py`)."""


@dataclass(frozen=True, eq=False)
class ModelGeometry:
    """Shape of one model. Compared by identity: it is the key of caches."""

    name: str
    architecture: str  # First entry of ``architectures`` in config.json
    hidden_size: int
    vocab_size: int
    layers: tuple[Layer, ...]  # Decoder layers from first to last
    tie_word_embeddings: bool
    max_position_embeddings: int  # Longest sequence the model was made for, in tokens
    ropes: tuple[RopeTable, ...]
    dtype_bytes: int  # Bytes of an unquantized element
    checkpoint: WeightFormat | None  # None if it is not quantized
    tower: Tower = Tower()
    head: HeadParts | None = None  # None for a model of its own
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
    mtp_block: tuple[Layer, ...] = ()  # Layers of each, if it is not one layer like the last (Nemotron 3)
    dspark: DSparkStages | None = None  # None if its checkpoint holds none
    told_config: str = ""  # Overrides of its config.json that the engine needs, as JSON
    cache_element_bytes: int | None = None  # In the KV cache, if the checkpoint asks for FP8; None: the model's type
    drafts_in_parallel: bool = False  # Whether it was trained to propose all tokens in one pass (PARD, P-EAGLE)
    knowledge: Knowledge = Knowledge.EXACT
    # The next four are set for estimated models only.
    estimated_because: str = ""  # The part that sizing does not implement
    doubts: tuple[str, ...] = ()  # Contradictions and oddities of its config.json, a sentence for each
    stored: StoredWeights | None = None  # None if the headers of its files were not read
    layer_scale: tuple[int, int] = (1, 1)  # Bytes of its layers in the files, and by their shapes
    # The same of MTP layers or stages of DSpark; (1, 1) if they are scaled as all layers
    mtp_scale: tuple[int, int] = (1, 1)
    # Bytes of a token in the KV cache, and of a request's states, on one GPU, if the user gives them
    assumed_token_bytes: int | None = None
    assumed_state_bytes: int | None = None

    @property
    def is_made_up(self) -> bool:
        """True if its user gives numbers, without a config.json."""
        return self.architecture == MADE_UP_CLASS

    @property
    def unscaled(self) -> "ModelGeometry":
        """The same model with layers by their shapes instead of their files; itself if possible, as a key of caches."""
        return self if self.layer_scale == (1, 1) else replace(self, layer_scale=(1, 1))

    @cached_property
    def distinct_layers(self) -> tuple[tuple[Layer, int], ...]:
        """Layers that differ, each with how often it occurs."""
        return counted(self.layers)

    @cached_property
    def mixers(self) -> tuple[SingleMixer, ...]:
        """Mixers that differ."""
        return tuple(dict.fromkeys(mixer for layer, _ in self.distinct_layers for mixer in layer.mixers))

    @cached_property
    def attentions(self) -> tuple[SelfAttention | LatentAttention, ...]:
        """Kinds of attention that differ."""
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, SelfAttention | LatentAttention))

    @cached_property
    def has_sparse_attention(self) -> bool:
        """True if indexers choose the tokens that its layers attend to: such caches have blocks of 64 tokens."""
        return any(isinstance(mixer, LatentAttention) and mixer.sparse_tokens for mixer in self.attentions)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @cached_property
    def has_experts(self) -> bool:
        """True if any layer is a mixture of experts."""
        return any(isinstance(layer.feed_forward, Experts) for layer, _ in self.distinct_layers)

    @cached_property
    def has_states(self) -> bool:
        """True if any layer keeps a state of a fixed size (Mamba, linear attention)."""
        return len(self.attentions) < len(self.mixers)

    @cached_property
    def widest_dense(self) -> int:
        """Largest width inside the feed-forward layers that every token visits."""
        parts = [layer.feed_forward for layer, _ in self.distinct_layers]
        dense = [part.intermediate_size for part in parts if isinstance(part, DenseMlp)]
        return max(dense + [part.shared_intermediate_size for part in parts if isinstance(part, Experts)], default=0)

    @property
    def checkpoint_precision(self) -> Precision | None:
        """Precision that the checkpoint was quantized to."""
        return None if self.checkpoint is None else self.checkpoint.precision

    def weight_format(self, precision: Precision | None = None) -> WeightFormat:
        """Return how linear layers are stored when served in a precision; None: as in the checkpoint."""
        if self.checkpoint is not None and precision in (None, self.checkpoint.precision):
            return self.checkpoint
        return DEFAULT_FORMATS[precision or Precision.BF16]


@lru_cache(maxsize=MEMO_SIZE)
def computed_in(geometry: ModelGeometry, dtype_bytes: int) -> ModelGeometry:
    """Return the model with another size of unquantized elements; itself if they have it already."""
    return geometry if geometry.dtype_bytes == dtype_bytes else replace(geometry, dtype_bytes=dtype_bytes)


VOCABULARY_PADDING: Final = 64
"""vLLM pads the vocabulary to a multiple of it, for any tensor parallelism (vocab_parallel_embedding.py)."""


def padded_vocabulary(tokens: int) -> int:
    """Return the rows of an embedding as vLLM allocates it."""
    return round_up(tokens, VOCABULARY_PADDING)


TOKEN_ID_BYTES: Final = 8
"""The table from draft to target vocabulary holds int64 (vLLM, llama_eagle3.py, draft_id_to_target_id)."""
