"""What a model loads, part by part: vocabulary, layers, encoder, rotary tables, and what the allocator adds."""

from collections.abc import Sequence
from typing import Final

from specdecode_operator.cli.plan.terms import TermLine, exact
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.model.precision import Precision
from specdecode_operator.sizing.model.rope import RopeTable
from specdecode_operator.sizing.pair.pair import DRAFT_MODEL, Pair, Parallelism, loaded_draft
from specdecode_operator.sizing.weights.weights import layer_bytes, padded_vocabulary, weight_bytes

_EMBEDDING_AND_HEAD: Final = 2
_MOST_KINDS: Final = 3


def target_terms(pair: Pair, split: Parallelism, counted_bytes: int) -> list[TermLine]:
    """Return the terms of the target; together they are what was counted."""
    return _model_terms("target", pair.target, pair.target_precision, split, pair.target.ropes, counted_bytes)


def draft_terms(pair: Pair, split: Parallelism, counted_bytes: int) -> list[TermLine]:
    """Return the terms of the draft; together they are what was counted. None where nothing is loaded for it."""
    draft = loaded_draft(pair)
    if draft is None or not counted_bytes:
        return []
    geometry, precision = draft
    if pair.method != DRAFT_MODEL:
        return [_whole("draft", f"{pair.method} in {precision}, without what it shares with the target", counted_bytes)]
    own = [rope for rope in geometry.ropes if rope not in pair.target.ropes]
    return _model_terms("draft", geometry, precision, split, own, counted_bytes)


def _model_terms(  # noqa: PLR0913, PLR0917  one fact each
    role: str,
    geometry: ModelGeometry,
    precision: Precision,
    split: Parallelism,
    ropes: Sequence[RopeTable],
    counted: int,
) -> list[TermLine]:
    tensor = split.tensor
    weights = weight_bytes(geometry, precision, split.layer_split)
    rotary = sum(rope.size_bytes(geometry.dtype_bytes) for rope in ropes)
    if split.pipeline > 1 or weights + rotary > counted:
        return [_whole(role, f"its part of {geometry.num_layers} layers in {precision}", counted)]
    vocabulary, encoder = _vocabulary(role, geometry, tensor), _encoder(role, geometry, tensor)
    layers = weights - vocabulary.size_bytes - encoder.size_bytes
    lines = [
        vocabulary,
        TermLine(f"{role}: layers", _layers(geometry, precision, split, layers), layers),
        encoder,
        TermLine(f"{role}: rotary table", _rotary(geometry, ropes, tensor), rotary),
        TermLine(f"{role}: allocator", "torch reserves large tensors in whole 2 MiB", counted - weights - rotary),
    ]
    return [line for line in lines if line.size_bytes]


def _whole(role: str, words: str, counted_bytes: int) -> TermLine:
    return TermLine(f"{role}: weights", words, counted_bytes)


def _vocabulary(role: str, geometry: ModelGeometry, tensor: int) -> TermLine:
    rows, width = padded_vocabulary(geometry.vocab_size), geometry.dtype_bytes
    tables = 1 if geometry.tie_word_embeddings else _EMBEDDING_AND_HEAD
    split = f" / {tensor}" if tensor > 1 else ""
    return TermLine(
        f"{role}: {'embedding' if tables == 1 else 'embedding, output head'}",
        f"{tables} x {rows:,}{split} x {geometry.hidden_size:,} x {width} bytes",
        tables * (rows // tensor) * geometry.hidden_size * width,
    )


def _layers(geometry: ModelGeometry, precision: Precision, split: Parallelism, size_bytes: int) -> str:
    """Return the bytes of a layer of each kind, part by part; scales and biases are with what they belong to."""
    held = f", in {precision}" + (", a GPU's part of each layer" if split.tensor > 1 else "")
    words = f"{geometry.num_layers} layers of {len(geometry.distinct_layers)} kinds, and norms{held}"
    if len(geometry.distinct_layers) > _MOST_KINDS:
        return words
    stored = geometry.weight_format(precision)
    total = norms = geometry.final_norms * geometry.hidden_size * geometry.dtype_bytes
    kinds = []
    for layer, count in geometry.distinct_layers:
        parts = layer_bytes(layer, geometry, stored, split.layer_split)
        rest = "norms" if precision is Precision.BF16 else "norms and scales"
        named = zip(parts, ("attention" if geometry.attentions else "mixer", "feed-forward", rest), strict=True)
        kinds.append(f"{count} layers x ({' + '.join(f'{size:,} {name}' for size, name in named if size)})")
        total += count * sum(parts)
    return exact(f"{' + '.join(kinds)} + {norms:,} of the last norm{held}", total, size_bytes, words)


def _encoder(role: str, geometry: ModelGeometry, tensor: int) -> TermLine:
    tower, width = geometry.tower, geometry.dtype_bytes
    return TermLine(
        f"{role}: encoder",
        f"({tower.split_elements:,} / {tensor} + {tower.whole_elements:,}) x {width} bytes",
        (tower.split_elements // tensor + tower.whole_elements) * width,
    )


def _rotary(geometry: ModelGeometry, ropes: Sequence[RopeTable], tensor: int) -> str:
    tables = " + ".join(
        f"{rope.positions:,} positions x {rope.rotary_dim} x {rope.element_bytes or geometry.dtype_bytes} bytes"
        for rope in ropes
    )
    return f"{tables}, whole on every GPU" if tensor > 1 else tables
