"""Whether a checkpoint's bytes are those of the model that its config.json describes."""

from typing import Final

from specdecode_operator.sizing.base.units import format_gib
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.model.stored import StoredWeights
from specdecode_operator.sizing.weights.rank_layers import Split
from specdecode_operator.sizing.weights.weights import loaded_head_bytes, padded_vocabulary, weight_bytes
from specdecode_operator.vocabulary import Precision

TOLERANCE_PERCENT: Final = 1
"""Files hold what the engine never loads or stores otherwise: rotary frequencies, a scale a tensor instead of one
a channel, group indices of GPTQ. All of that is well below one percent of a model."""

TOLERANCE_BYTES: Final = 64 * 1024
"""For models so small that their norms and scales count."""

_SHOWN_PARTS: Final = 4


def checkpoint_disagreement(geometry: ModelGeometry, stored: StoredWeights) -> str | None:
    """Return a sentence if the tensors in a model's files and the geometry of its config.json differ, else None.

    The sentence names the largest parts of the files if they are known.
    """
    loaded = stored.loaded_bytes(quantized=geometry.checkpoint is not None)
    least, most = expected_file_bytes(geometry, output_head=stored.output_head)
    if least - _tolerance(least) <= loaded <= most + _tolerance(most):
        return None
    described = most if loaded > most else least
    more = "more" if loaded > described else "less"
    percent = 100 * abs(loaded - described) / max(described, 1)
    largest = sorted(stored.bytes_by_part, key=lambda part: -part[1])[:_SHOWN_PARTS]
    parts = ", ".join(f"{name} {format_gib(part_bytes)}" for name, part_bytes in largest)
    return (
        f"the safetensors files of {geometry.name} hold {format_gib(loaded)} GiB as the engine loads them,"
        f" {percent:.1f} % {more} than the {format_gib(described)} GiB that its config.json describes"
        + (f" (largest parts in GiB: {parts})" if parts else "")
    )


def expected_file_bytes(geometry: ModelGeometry, *, output_head: bool) -> tuple[int, int]:
    """Return the least and most bytes of the files that hold a model as its config.json describes it.

    They are in the checkpoint's own precision. What an estimate scales to the files is not scaled here.
    """
    geometry = geometry.unscaled
    precision = geometry.checkpoint_precision or Precision.BF16
    loaded = weight_bytes(geometry, precision, Split(1))
    table = geometry.vocab_size * geometry.hidden_size * geometry.dtype_bytes
    if geometry.head is not None:
        # Draft heads are published with or without the tables that they share with the target.
        return loaded_head_bytes(geometry, precision, Split(1)), loaded + table
    tables = 1 if geometry.tie_word_embeddings else 2
    padding = padded_vocabulary(geometry.vocab_size) - geometry.vocab_size
    at_rest = loaded - tables * padding * geometry.hidden_size * geometry.dtype_bytes
    if geometry.tie_word_embeddings and output_head:
        at_rest += table  # a copy that the engine passes over
    # Layers for multi-token prediction come with tables of their own, or without.
    layer = at_rest // max(geometry.num_layers, 1)
    return at_rest, at_rest + geometry.mtp_layers * (layer + 2 * table)


def _tolerance(expected_bytes: int) -> int:
    return max(TOLERANCE_BYTES, expected_bytes * TOLERANCE_PERCENT // 100)
