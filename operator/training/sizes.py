"""Estimate the disk space of hidden states and the GPU memory of the trainer.

The estimates are rough: the trainer chooses the head's shape, and activations and fragmentation come on top. They
reject trainings that cannot fit.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from specdecode_operator.api.training import SpecDecodeTrainingSpec
from specdecode_operator.sizing.geometry import ModelGeometry, SelfAttention

HIDDEN_LAYERS: Final = 4
"""Layers of the target whose outputs are stored: three for the head's input, and the last one."""

HIDDEN_ELEMENT_BYTES: Final = 2
_STATE_BYTES_PER_PARAMETER: Final = 16
"""Weight, gradient and both moments of Adam in float32."""

_FROZEN_BYTES: Final = 2
"""Embedding and LM head of the target in 16 bits, which the trainer keeps in memory with the head."""
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,8}")


def hidden_state_bytes(target: ModelGeometry, tokens: int) -> int:
    """Return the bytes of the hidden states of this number of tokens."""
    return tokens * HIDDEN_LAYERS * target.hidden_size * HIDDEN_ELEMENT_BYTES


@dataclass(frozen=True)
class TrainerMemory:
    """Estimated memory of the trainer on each GPU, in bytes."""

    head_parameters: int
    head_bytes: int
    frozen_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.head_bytes + self.frozen_bytes


def trainer_memory(target: ModelGeometry, spec: SpecDecodeTrainingSpec) -> TrainerMemory:
    """Return the estimated memory of the trainer, whose head has the shape of the target's layers."""
    parameters = _head_parameters(target, spec)
    tables = 1 if target.tie_word_embeddings else 2
    frozen = tables * target.vocab_size * target.hidden_size * _FROZEN_BYTES
    return TrainerMemory(parameters, parameters * _STATE_BYTES_PER_PARAMETER, frozen)


def _head_parameters(target: ModelGeometry, spec: SpecDecodeTrainingSpec) -> int:
    """Return the estimated number of trained parameters: layers, the projection of hidden states, and an LM head."""
    hidden = target.hidden_size
    attention = next((each for each in target.attentions if isinstance(each, SelfAttention)), None)
    queries = attention.num_heads * attention.head_dim if attention else hidden
    keys = attention.num_kv_heads * attention.head_dim if attention else hidden
    # A head of a target with experts only gets a dense layer of its own.
    width = target.widest_dense or 4 * hidden
    inputs = 2 * hidden  # embedding and hidden state side by side
    layer = inputs * (queries + 2 * keys) + queries * hidden + 3 * hidden * width
    projection = (HIDDEN_LAYERS - 1) * hidden * hidden
    vocabulary = min(_argument(spec, "--draft-vocab-size") or target.vocab_size, target.vocab_size)
    return (_argument(spec, "--num-layers") or 1) * layer + projection + vocabulary * hidden


def _argument(spec: SpecDecodeTrainingSpec, flag: str) -> int | None:
    """Return the number that an argument of the trainer has; None without it."""
    words = [part for each in spec.trainer.args for part in each.split("=", 1)]
    return next((int(after) for word, after in pairwise(words) if word == flag and _NUMBER.fullmatch(after)), None)
