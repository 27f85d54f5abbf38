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
    """The cache of one layer on one rank.

    Attributes
    ----------
    kind
        How much of a sequence it remembers.
    token_bytes
        Bytes of one token; zero for kind STATE.
    reach_tokens
        Window or chunk in tokens; zero for the other kinds.
    state_bytes
        Bytes of one state with no tokens speculated; zero but for kind STATE.
    state_bytes_per_speculated_token
        What each speculated token adds to one state (the convolution's columns).
    head_width
        Keys and values are this wide: layers of unequal width are unequal to the engine even where
        their bytes agree. Zero for kind STATE.
    element_bytes
        Bytes of one number in it, for the same reason. Zero for kind STATE.
    exports_checkpoint
        Whether a state can be stored from inside a prefill (Mamba 2 from vLLM 0.32 on, Kimi K3),
        which takes one more with prefix caching.
    of_draft
        Whether the layer belongs to the draft.
    """

    kind: CacheKind
    token_bytes: int = 0
    reach_tokens: int = 0
    state_bytes: int = 0
    state_bytes_per_speculated_token: int = 0
    head_width: int = 0
    element_bytes: int = 0
    exports_checkpoint: bool = False
    of_draft: bool = False


@dataclass(frozen=True)
class LayerRun:
    """Equal layers in a row.

    Attributes
    ----------
    layer
        What each of them keeps.
    count
        How many there are.
    """

    layer: KvLayer
    count: int
