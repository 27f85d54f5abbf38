"""What one layer keeps of a sequence, on one GPU."""

from dataclasses import dataclass
from enum import StrEnum


class CacheKind(StrEnum):
    """How much of a sequence a layer remembers."""

    FULL = "full"
    """Every token: keys and values of each head."""

    LATENT = "latent"
    """Every token: one compressed vector for all heads (MLA), whole on every rank."""

    SLIDING = "sliding"
    """The tokens of a window."""

    CHUNKED = "chunked"
    """The tokens of the chunk that is being filled."""

    STATE = "state"
    """A state of fixed size, whatever the length (Mamba, linear attention)."""


@dataclass(frozen=True)
class KvLayer:
    """The cache of one layer on one rank."""

    kind: CacheKind  # How much of a sequence it remembers
    token_bytes: int = 0  # Bytes of one token; zero for kind STATE
    reach_tokens: int = 0  # Window or chunk in tokens; zero for the other kinds
    state_bytes: int = 0  # Bytes of one state with no tokens speculated; zero but for kind STATE
    # What each speculated token adds to one state (the convolution's columns)
    state_bytes_per_speculated_token: int = 0
    # Keys and values are this wide: layers of unequal width are unequal to the engine even where their bytes agree.
    # Zero for kind STATE.
    head_width: int = 0
    element_bytes: int = 0  # Bytes of one number in it, for the same reason. Zero for kind STATE.
    # Whether a state can be stored from inside a prefill (Mamba 2 from vLLM 0.32 on, Kimi K3), which takes one more
    # with prefix caching
    exports_checkpoint: bool = False
    # Whether it is a gated delta net, whose states FlashInfer exports so from vLLM 0.33 on, each 64 tokens
    delta_rule: bool = False
    of_draft: bool = False  # Whether the layer belongs to the draft


@dataclass(frozen=True)
class LayerRun:
    """Equal layers in a row."""

    layer: KvLayer  # What each of them keeps
    count: int  # How many there are
