"""The layers that decoder models are made of, as far as memory depends on them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


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
