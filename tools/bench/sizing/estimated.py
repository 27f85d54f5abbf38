"""How far estimates of models are from what sizing knows exactly, for each model of the catalogue.

The catalogue's files are not here, so their headers are those of the exact layout on one GPU: compared is what an
estimate makes of equal bytes when they are split, and what it reads of attention and states.
All entries: `python -m bench.sizing.estimated`.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

from bench.figures import Figure, at_least, at_most
from specdecode_operator.enums import Knowledge, Method, Precision
from specdecode_operator.sizing.catalogue import CatalogueEntry, find_entry, find_geometry, known_models
from specdecode_operator.sizing.config_fields import Fields
from specdecode_operator.sizing.devices import Device, find_device
from specdecode_operator.sizing.errors import SizingError, UnmodelledError
from specdecode_operator.sizing.families.estimated import estimated_geometry
from specdecode_operator.sizing.geometry import ModelGeometry, StoredWeights
from specdecode_operator.sizing.memory.budget import Budget, EngineLimits, Pair, Parallelism, estimate
from specdecode_operator.sizing.weights import expected_file_bytes

PRODUCT: Final = "NVIDIA-H200"
_TENSORS: Final = (1, 2, 4, 8)
_REQUESTS: Final = 64
_STEP_TOKENS: Final = 8192
_LONGEST: Final = 8192
_WEIGHT_TOLERANCE: Final = 0.005


@dataclass(frozen=True)
class Comparison:
    """One entry of the catalogue at one setting, estimated and exact."""

    model: str
    tensor: int
    exact: Budget
    estimated: Budget

    @property
    def weights_error(self) -> float:
        """Signed error of the weights on one GPU, as a share."""
        return self.estimated.target_weights_bytes / self.exact.target_weights_bytes - 1

    @property
    def same_kv(self) -> bool:
        """Whether a token takes as many bytes of the KV cache."""
        return self.estimated.kv_bytes_per_token == self.exact.kv_bytes_per_token

    @property
    def promises_more(self) -> bool:
        """Whether the estimate promises more concurrency than the exact sizing does, both after their margins."""
        return _promised(self.estimated) > _promised(self.exact)


def _promised(budget: Budget) -> float:
    return max(0, budget.available_kv_bytes - budget.margin_bytes) / max(budget.needed_kv_bytes, 1)


@cache
def comparisons() -> tuple[Comparison, ...]:
    """Return all entries that sizing knows exactly, at each tensor parallelism that divides them."""
    return tuple(each for name in known_models() for each in _compared(name))


def _compared(name: str) -> Iterator[Comparison]:
    entry = find_entry(name)
    try:
        exact = find_geometry(name)
    except SizingError:
        return  # vLLM refuses it
    if entry is None or exact is None or exact.head is not None or exact.knowledge is not Knowledge.EXACT:
        return
    estimated = estimated_of(entry, exact, with_headers=True)
    for tensor in _TENSORS:
        try:
            yield Comparison(name, tensor, _budget(exact, tensor), _budget(estimated, tensor))
        except SizingError:
            continue


def figures() -> Iterator[Figure]:
    """Yield how far estimates are from exact sizing, over the catalogue."""
    rows = comparisons()
    models = dict.fromkeys(row.model for row in rows)
    whole = [row for row in rows if row.tensor == 1] or list(rows)
    off = {row.model for row in whole if abs(row.weights_error) > _WEIGHT_TOLERANCE}
    sized = len({row.model for row in whole})
    yield Figure(
        "weights of estimated models within 0.5 % on one GPU",
        100 * (1 - len(off) / sized),
        "%",
        at_least(95),
        f"{sized - len(off)} of {sized} entries; not {', '.join(sorted(off))}",
    )
    worst = max(rows, key=lambda row: abs(row.weights_error))
    yield Figure(
        "its worst case over all splits", 100 * abs(worst.weights_error), "%", None, f"{worst.model}, TP {worst.tensor}"
    )
    unequal = {row.model for row in rows if not row.same_kv}
    yield Figure(
        "KV bytes of a token equal",
        100 * (1 - len(unequal) / len(models)),
        "%",
        at_least(95),
        f"{len(models) - len(unequal)} of {len(models)} entries",
    )
    broken = [f"{row.model}, TP {row.tensor}" for row in rows if row.promises_more]
    yield Figure(
        "more promised than by exact sizing", len(broken), f"of {len(rows)} rows", at_most(0), ", ".join(broken)
    )


def report() -> Iterator[str]:
    """Return the lines that this program prints: every row."""
    yield f"{'model':60}{'TP':>4}{'weights':>10}{'KV a token':>12}{'promised':>10}{'exact':>10}"
    for row in comparisons():
        same = "equal" if row.same_kv else "differs"
        yield (
            f"{row.model:60}{row.tensor:4}{row.weights_error:+10.2%}{same:>12}"
            f"{_promised(row.estimated):10.1f}{_promised(row.exact):10.1f}"
        )


def estimated_of(entry: CatalogueEntry, exact: ModelGeometry, *, with_headers: bool) -> ModelGeometry:
    """Return what an estimate would make of an entry of the catalogue."""
    because = UnmodelledError("architectures", exact.architecture, "compared")
    stored = headers_of(exact) if with_headers else None
    return estimated_geometry(Fields(entry.model_id, entry.config), exact.architecture, because, stored, None)


def headers_of(exact: ModelGeometry) -> StoredWeights:
    """Return what the headers of a model's files say, by its exact layout."""
    table = exact.vocab_size * exact.hidden_size * exact.dtype_bytes
    tower = (exact.tower.split_elements + exact.tower.whole_elements) * exact.dtype_bytes
    total, _ = expected_file_bytes(exact, output_head=not exact.tie_word_embeddings)
    parts = {"model.embed_tokens": table, "lm_head": 0 if exact.tie_word_embeddings else table, "visual.blocks": tower}
    rest = total - sum(parts.values())
    kept = {name: size for name, size in {**parts, "model.layers": rest}.items() if size}
    return StoredWeights.of(total, {"BF16": total}, kept, output_head=not exact.tie_word_embeddings)


@cache
def _device() -> Device:
    device = find_device(PRODUCT)
    if device is None:
        raise LookupError(PRODUCT)
    return device


def _budget(model: ModelGeometry, tensor: int) -> Budget:
    limits = EngineLimits(
        max_model_len=min(_LONGEST, model.max_position_embeddings),
        max_num_seqs=_REQUESTS,
        max_num_batched_tokens=_STEP_TOKENS,
        block_size=16,
        kv_cache_element_bytes=None,
        memory_utilization_percent=92,
        enforce_eager=False,
        min_concurrency=1,
    )
    precision = model.checkpoint_precision or Precision.BF16
    pair = Pair(model, precision, None, None, Method.NONE.value, 0, limits)
    return estimate(pair, _device(), Parallelism(tensor))


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in report()))
