"""The shape of a model, as far as memory depends on it."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final

from specdecode_operator.sizing.base.errors import GeometryError
from specdecode_operator.sizing.base.remembered import MOST_REMEMBERED
from specdecode_operator.sizing.model.layers import (
    DenseMlp,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    SelfAttention,
    counted,
)
from specdecode_operator.sizing.model.precision import DEFAULT_FORMATS, WeightFormat
from specdecode_operator.sizing.model.rope import RopeTable
from specdecode_operator.sizing.model.stored import StoredWeights
from specdecode_operator.vocabulary import Knowledge, Precision


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
"""Architecture of a model of which nothing is read (`estimated/assumed.py`)."""


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


@lru_cache(maxsize=MOST_REMEMBERED)
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
