"""The memory of a GPU as it was planned, against what the engine said that it has for the KV cache."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from matplotlib.axes import Axes

from specdecode_operator.pictures.figures.drawing import (
    LeftOut,
    Picture,
    Series,
    legend_above,
    measured,
    new_figure,
    per_series,
)

_GIB: Final = 2**30
_MOST_BYTES: Final = 2**50
_BAR: Final = 0.6
_LABEL_SHARE: Final = 0.045
_KV: Final = ("KV cache", "#009E73", "", ("availableKvBytes",))
_PARTS: Final = (
    ("target weights", "#0072B2", "", ("targetWeightsBytes",)),
    ("draft weights", "#56B4E9", "xxxx", ("draftWeightsBytes",)),
    (
        "state, activation, graphs, NCCL",
        "#E69F00",
        "////",
        ("stateBytes", "activationBytes", "cudaGraphsBytes", "nonTorchBytes"),
    ),
    _KV,
)
_REST: Final = ("all but the KV cache", "#BBBBBB", "\\\\\\\\")


def budgets(series: Sequence[Series]) -> Picture | LeftOut:
    """Draw the plan's budget term by term, beside what the engine reported."""
    title = "Memory: the plan against the engine"
    known = [each for each in series if _memory(each) is not None]
    if not known:
        return LeftOut(title, "no manifest holds the plan of the deployment that was captured")
    figure, axes = new_figure(height_in=1.7 + 0.75 * len(known))
    names: list[str] = []
    for each in known:
        _draw_plan(axes, each, len(names))
        names.append(f"{each.label}\nplan" if len(known) > 1 else "plan")
        if each.capture.identity.kv_cache_tokens is not None:
            _draw_engine(axes, each, len(names))
            names.append("engine")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(left=0)
    axes.set_xlabel("memory of one GPU (GiB)" if _on_gpu(known) else "memory (GiB)")
    legend_above(figure, axes, columns=3)
    return Picture("budget", title, per_series(known, _words), figure, tuple(each.capture for each in known))


def _memory(each: Series) -> Mapping[str, float] | None:
    """Return the terms of a plan in bytes; None where the manifest has none, or none that can be."""
    per_gpu = each.capture.identity.plan.get("perGpu")
    needed = {"requestedBytes", *(term for *_, terms in _PARTS for term in terms)}
    if not isinstance(per_gpu, dict) or not all(_sane(per_gpu.get(term)) for term in needed):
        return None
    return per_gpu


def _sane(value: Any) -> bool:
    return isinstance(value, int) and abs(value) < _MOST_BYTES


def _on_gpu(known: Sequence[Series]) -> bool:
    return all(each.capture.identity.plan.get("product") != "CPU" for each in known)


def _draw_plan(axes: Axes, each: Series, place: int) -> None:
    memory = _memory(each) or {}
    left = 0.0
    for name, colour, hatch, terms in _PARTS:
        size = max(0.0, sum(memory[term] for term in terms) / _GIB)
        _draw_part(axes, place, left, size, (name, colour, hatch), memory["requestedBytes"] / _GIB)
        left += size


def _draw_engine(axes: Axes, each: Series, place: int) -> None:
    memory = _memory(each) or {}
    reported = _reported_gib(each)
    requested = memory["requestedBytes"] / _GIB
    _draw_part(axes, place, 0.0, max(0.0, requested - reported), _REST, requested)
    _draw_part(axes, place, max(0.0, requested - reported), reported, _KV[:3], requested)


def _draw_part(  # noqa: PLR0913, PLR0917  where, how wide, and how
    axes: Axes, place: int, left: float, size: float, looks: tuple[str, str, str], whole: float
) -> None:
    name, colour, hatch = looks
    if size <= 0:
        return
    given = axes.get_legend_handles_labels()[1]
    label = name if name not in given else None
    axes.barh(place, size, _BAR, left, color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=label)
    if size > _LABEL_SHARE * whole:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
        axes.text(left + size / 2, place, measured(size), ha="center", va="center", fontsize=8, bbox=box)


def _reported_gib(each: Series) -> float:
    """Return what the engine's KV cache takes on a GPU: its tokens in the bytes that the plan has for one."""
    identity = each.capture.identity
    memory, planned = _memory(each) or {}, identity.plan.get("kvCacheTokens")
    tokens = identity.kv_cache_tokens or 0
    if not isinstance(planned, int) or planned <= 0:
        return 0.0
    return tokens / planned * memory["availableKvBytes"] / _GIB


def _words(each: Series) -> str:
    identity = each.capture.identity
    planned, reported = identity.plan.get("kvCacheTokens"), identity.kv_cache_tokens
    if not isinstance(planned, int) or planned <= 0 or reported is None:
        return "the engine's own figure is not in the capture, so the plan stands alone"
    return (
        f"planned were {planned:,} tokens of KV cache, the engine reported {reported:,} ({reported / planned - 1:+.1%})"
    )
