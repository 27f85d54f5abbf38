"""The rows of a step: the product that the peak of a model's forward pass is."""

from collections.abc import Iterator

from specdecode_operator.sizing.base.devices import memory_coefficients
from specdecode_operator.sizing.base.units import ceil_div
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.model.layers import DenseMlp, Experts, LatentAttention, Layer, SelfAttention
from specdecode_operator.sizing.model.precision import Precision
from specdecode_operator.sizing.pair.pair import Pair, Parallelism


def step_formula(pair: Pair, model: ModelGeometry, precision: Precision, split: Parallelism, counted: int) -> str:
    """Return the product that the counted peak is; tokens and bytes of a token where no short product gives it."""
    tokens = pair.limits.max_num_batched_tokens
    for formula, value in _products(pair, model, precision, split):
        if value == counted:
            return formula
    each, rest = divmod(counted, tokens)
    return f"{tokens:,} tokens x {each:,}" + (f" + {rest:,}" if rest else "")


def _products(pair: Pair, model: ModelGeometry, precision: Precision, split: Parallelism) -> Iterator[tuple[str, int]]:
    """Yield the product of each kind of layer, by era: its rows alone, or with what the attention returned."""
    tokens, width = pair.limits.max_num_batched_tokens, model.dtype_bytes
    tuning = 0 if pair.limits.enforce_eager or not pair.era.peaks_in_pieces else memory_coefficients().l2_bytes
    of_tuning = f" + {tuning:,} of the L2 cache" if tuning else ""
    for layer, _ in model.distinct_layers:
        rows, value = _rows(model, layer, split.tensor)
        if not pair.era.peaks_in_pieces:
            yield f"{tokens:,} tokens x ({rows}) x {width} bytes", tokens * value * width
            continue
        returned, returned_value = _returned(layer, split.tensor)
        copies, copies_value = _copies(model, layer, precision, split.tensor)
        formula = f"{tokens:,} tokens x (({rows}{returned}) x {width} bytes{copies}){of_tuning}"
        yield formula, tokens * ((value + returned_value) * width + copies_value) + tuning


def _rows(model: ModelGeometry, layer: Layer, tensor: int) -> tuple[str, int]:
    """The residual before and after, and the rows of the feed-forward layer (docs/explanation/sizing.md, forward)."""
    match layer.feed_forward:
        case DenseMlp() as mlp:
            return _inner(2, model.hidden_size, 3 if mlp.gated else 2, mlp.intermediate_size, tensor)
        case Experts() as experts:
            return _inner(3, model.hidden_size, 3 if experts.gated else 2, experts.shared_intermediate_size, tensor)
        case None:
            return f"2 x {model.hidden_size:,}", 2 * model.hidden_size


def _inner(states: int, hidden_size: int, rows: int, width: int, tensor: int) -> tuple[str, int]:
    value = states * hidden_size + rows * width // tensor
    if not width:
        return f"{states} x {hidden_size:,}", value
    return f"{rows} x {width:,}{f' / {tensor}' if tensor > 1 else ''} + {states} x {hidden_size:,}", value


def _returned(layer: Layer, tensor: int) -> tuple[str, int]:
    """What the attention handed on, which its caller holds."""
    formula, value = "", 0
    for mixer in layer.mixers:
        match mixer:
            case SelfAttention():
                heads, dim = ceil_div(mixer.num_heads, tensor), mixer.value_dim
            case LatentAttention():
                heads, dim = ceil_div(mixer.num_heads, tensor), mixer.value_head_dim
            case _:
                # No short product: the caller then finds that the value differs.
                continue
        formula += f" + {heads} heads x {dim}"
        value += heads * dim
    return formula, value


def _copies(model: ModelGeometry, layer: Layer, precision: Precision, tensor: int) -> tuple[str, int]:
    """Inputs in eight bits, which INT8 copies with an operator of its own."""
    if precision is not Precision.INT8 or not isinstance(layer.feed_forward, DenseMlp):
        return "", 0
    inner = layer.feed_forward.intermediate_size
    return f" + {model.hidden_size:,} + {inner:,} / {tensor}", model.hidden_size + inner // tensor
