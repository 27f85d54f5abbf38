"""The layers that decoder models are made of, as far as memory depends on them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SelfAttention:
    """Attention with heads of its own for keys and values (MHA, GQA, MQA).

    Attributes
    ----------
    num_heads, num_kv_heads, head_dim
        Query heads, key/value heads, and how wide each is.
    qkv_bias, output_bias
        Whether the projections have biases.
    qk_norm
        Whether queries and keys are normed a head.
    gated
        Whether the query projection also makes a gate of the same size (Qwen3-Next).
    sinks
        Whether each query head has a learned sink (gpt-oss).
    norm_over_heads, whole_norms
        Whether queries and keys have norms as wide as all heads instead, and whether each rank holds them whole.
    value_head_dim
        How wide a head of the values is; None: as the others (MiMo V2 differs).
    borrows_cache
        Whether it reads keys and values of an earlier layer of its kind instead of its own (Gemma 4 E2B, E4B).
    window_tokens
        Tokens of a sliding window; None for none.
    chunk_tokens
        Tokens of a local chunk (Llama 4); None for none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    gated: bool = False
    sinks: bool = False
    window_tokens: int | None = None
    chunk_tokens: int | None = None
    norm_over_heads: bool = False
    whole_norms: bool = False
    value_head_dim: int | None = None
    borrows_cache: bool = False

    @property
    def value_dim(self) -> int:
        """Width of a head of the values."""
        return self.value_head_dim or self.head_dim


@dataclass(frozen=True)
class Indexer:
    """Chooses the tokens that sparse attention reads (DeepSeek V3.2); it keeps keys of its own.

    Attributes
    ----------
    num_heads, head_dim
        Its heads and their width. All share one key a token.
    """

    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek, Kimi): one compressed vector a token.

    Attributes
    ----------
    num_heads
        Query heads.
    query_rank
        Width that queries are compressed to; None where they are not.
    kv_rank
        Width of the compressed keys and values.
    nope_head_dim, rope_head_dim, value_head_dim
        Parts of a head: without and with rotary positions, and of its values.
    sparse_tokens
        Tokens that it reads of a sequence; zero where it reads all.
    indexer
        What chooses them; None where it reads all, or those that a layer before it chose.
    """

    num_heads: int
    query_rank: int | None
    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    sparse_tokens: int = 0
    indexer: Indexer | None = None


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta rule: linear attention with a state of fixed size (Qwen3-Next, Qwen3.5).

    Attributes
    ----------
    num_key_heads, num_value_heads, key_head_dim, value_head_dim
        Heads and their widths.
    conv_kernel
        Tokens that the convolution before it looks at.
    state_element_bytes
        Bytes of a number in the state; None: of the model's type (Qwen3.5 keeps float32).
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    state_element_bytes: int | None = None

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class StateSpace:
    """Mamba 2: heads with a state of fixed size, which groups of them read and write alike.

    Attributes
    ----------
    num_heads, head_dim
        Heads and their width; together the width of the layer.
    num_groups, state_size
        Groups of heads that share what goes into the state and out of it, and columns of the state.
    conv_kernel
        Tokens that the convolution before it looks at.
    conv_bias, projection_bias
        Whether the convolution, and the projections in and out, have biases.
    output_norm
        Whether its output is normed (Falcon-H1 may leave that out).
    state_element_bytes
        Bytes of a number in the state; None: of the model's type.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_kernel: int
    conv_bias: bool = True
    projection_bias: bool = False
    output_norm: bool = True
    state_element_bytes: int | None = None

    @property
    def width(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class SelectiveScan:
    """Mamba 1 with norms inside (Jamba).

    Attributes
    ----------
    width, state_size
        Channels, and columns of the state of each.
    step_rank
        Width that the size of a time step is compressed to.
    conv_kernel
        Tokens that the convolution before it looks at.
    conv_bias, projection_bias
        Whether the convolution, and the projections in and out, have biases.
    """

    width: int
    state_size: int
    step_rank: int
    conv_kernel: int
    conv_bias: bool = True
    projection_bias: bool = False


@dataclass(frozen=True)
class ParallelMixers:
    """Attention and Mamba 2 side by side in one layer (Falcon-H1)."""

    attention: SelfAttention
    state_space: StateSpace


@dataclass(frozen=True)
class DenseMlp:
    """Feed-forward layer.

    Attributes
    ----------
    intermediate_size
        Width between the projections.
    bias
        Whether all of them have biases.
    gated
        Whether a gate stands beside the projection up (Nemotron-H has none).
    """

    intermediate_size: int
    bias: bool = False
    gated: bool = True


@dataclass(frozen=True)
class Experts:
    """Mixture of experts with its router.

    Attributes
    ----------
    num_experts, top_k, intermediate_size
        Experts, how many of them a token visits, and the width of each.
    bias
        Whether experts and router have biases (gpt-oss).
    score_bias_bytes
        Bytes an expert of the bias that balances the routing (DeepSeek: one float32); zero for none.
    shared_intermediate_size
        Width of the experts that every token visits, together; zero for none.
    shared_gate
        Whether a gate weighs the shared experts (Qwen2-MoE, Qwen3-Next).
    router_in_float32
        Whether the router keeps 32 bits (MiniMax M2, MiMo V2).
    beside_mlp
        Whether what every token visits is an ordinary feed-forward layer, and the router scales its inputs and
        experts (Gemma 4).
    gated
        Whether a gate stands beside each projection up (Nemotron-H has none).
    latent_size
        Width that the hidden state is compressed to for the routed experts; None where it is not (Nemotron 3).
    latent_bias
        Whether the projections to that width and back have biases.
    quantizable_router
        Whether quantization applies to the router (Qwen3-MoE; the other families keep it in 16 bits).
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    bias: bool = False
    score_bias_bytes: int = 0
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    router_in_float32: bool = False
    beside_mlp: bool = False
    gated: bool = True
    latent_size: int | None = None
    latent_bias: bool = False
    quantizable_router: bool = False


SingleMixer = SelfAttention | LatentAttention | DeltaNet | StateSpace | SelectiveScan
Mixer = SingleMixer | ParallelMixers
FeedForward = DenseMlp | Experts


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Attributes
    ----------
    mixer, feed_forward
        Its two halves; None where it lacks one (Nemotron-H, Mamba 2).
    norms
        Norms over the hidden size.
    input_multiple
        How many hidden states side by side its attention reads (2 in EAGLE-3 heads).
    unquantized
        Modules that a quantized checkpoint leaves in 16 bits, by their names in it.
    own_input_size
        Width of an input of the token that each layer has for itself, whole on every rank; zero for none (Gemma 4).
    """

    mixer: Mixer | None
    feed_forward: FeedForward | None
    norms: int = 2
    input_multiple: int = 1
    unquantized: frozenset[str] = frozenset()
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
