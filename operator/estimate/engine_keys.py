"""Engine settings of startup logs: encoders that are not loaded, types of states, CUDA graphs.

`unmodelled` lists the settings that are accepted and do not change the result.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from specdecode_operator.api.values import CudagraphMode
from specdecode_operator.estimate.fields import CaseFields
from specdecode_operator.sizing.model.geometry import ModelGeometry, Tower
from specdecode_operator.sizing.model.layers import DeltaNet, Layer, ParallelMixers, StateSpace
from specdecode_operator.vocabulary import DTYPE_BYTES, ENGINE_DTYPES, Dtype

_LARGEST_GRAPH: Final = 65_536
MOST_RANKS: Final = 1024

_MOST_ITEMS: Final = 65_536
_MOST_SETTING: Final = 2**31 - 1

_SIZES_KEY: Final = "cudagraph_capture_sizes"
_GRAPH_KEY: Final = "max_cudagraph_capture_size"
_COMPILATION_KEY: Final = "compilation_config"
_LIMIT_KEY: Final = "limit_mm_per_prompt"
_STATE_KEY: Final = "mamba_ssm_cache_dtype"
CONTEXT_KEY: Final = "decode_context_parallel_size"

_MODELLED_OF_COMPILATION: Final = frozenset({"cudagraph_mode", _GRAPH_KEY})

_PICTURES: Final = ("image", "video")


def served_target(fields: CaseFields, target: ModelGeometry) -> ModelGeometry:
    """Return the target as it is served: without its encoder if no item may be asked, states in the asked type.

    vLLM builds no encoder then (model_executor/models/interfaces.py, _mark_tower_model).

    Raises
    ------
    CaseError
        For a value that vLLM does not take.
    """
    if fields.flag("language_model_only") or _takes_no_items(fields):
        target = replace(target, tower=Tower())
    dtype = fields.text(_STATE_KEY)
    if dtype is None or dtype == Dtype.AUTO:
        return target
    if dtype not in ENGINE_DTYPES:
        raise fields.error(_STATE_KEY, f"is not known: use one of {', '.join(ENGINE_DTYPES)}")
    width = DTYPE_BYTES[ENGINE_DTYPES[dtype]]
    return replace(target, layers=tuple(_with_state_type(layer, width) for layer in target.layers))


def graph_settings(fields: CaseFields) -> dict[str, Any]:
    """Return which CUDA graphs are captured, by the fields of EngineLimits; what the case leaves out is left out.

    Raises
    ------
    CaseError
        For a value that vLLM does not take.
    """
    found: dict[str, Any] = {}
    largest = fields.whole(_GRAPH_KEY, _LARGEST_GRAPH)
    section = fields.section(_COMPILATION_KEY)
    if section is not None:
        inner = section.whole(_GRAPH_KEY, _LARGEST_GRAPH)
        if largest is not None and inner is not None and inner != largest:
            raise section.error(_GRAPH_KEY, f"contradicts {_GRAPH_KEY}, {largest}: remove one of the two")
        largest = largest or inner
        _refuse_sizes(section, largest)
        if mode := section.text("cudagraph_mode"):
            if mode.upper() not in tuple(CudagraphMode):
                raise section.error("cudagraph_mode", f"is not known: use one of {', '.join(CudagraphMode)}")
            found["graph_mode"] = mode.upper()
    if largest is not None:
        found["max_graph_tokens"] = largest
    return found


def _refuse_sizes(section: CaseFields, largest: int | None) -> None:
    """Refuse numbers that no engine takes, and sizes of graphs that contradict the largest (vLLM, config/vllm.py)."""
    for key, value in section.values.items():
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, int | float) and not -_MOST_SETTING <= each <= _MOST_SETTING:
                raise section.error(key, f"must lie between -{_MOST_SETTING:,} and {_MOST_SETTING:,}")
    sizes = section.values.get(_SIZES_KEY)
    if sizes is None:
        return
    if not isinstance(sizes, list) or not sizes or not all(type(each) is int and each > 0 for each in sizes):
        raise section.error(_SIZES_KEY, "must be a list of whole numbers from 1, with at least one")
    if max(sizes) > _LARGEST_GRAPH:
        raise section.error(_SIZES_KEY, f"must lie between 1 and {_LARGEST_GRAPH:,}")
    if largest is not None and largest not in sizes:
        raise section.error(_SIZES_KEY, f"contradicts {_GRAPH_KEY}, {largest}: remove one of the two")


def unmodelled(fields: CaseFields) -> list[str]:
    """Return a sentence for each key of a case that is accepted, and whose effect on memory is not modelled.

    Raises
    ------
    CaseError
        For a value that vLLM does not take.
    """
    return list(_unmodelled(fields))


def _unmodelled(fields: CaseFields) -> Iterator[str]:
    ranks = fields.whole(CONTEXT_KEY, MOST_RANKS) or 1
    if ranks > 1:
        yield (f"{CONTEXT_KEY}: {ranks} ranks share each sequence, so the cache holds up to {ranks} times the tokens")
    limits = fields.section(_LIMIT_KEY)
    if limits is not None and limits.values and not _takes_no_items(fields):
        yield f"{_LIMIT_KEY}: the encoder is sized for its largest items, whatever a request may have of them"
    section = fields.section(_COMPILATION_KEY)
    for key in () if section is None else section.values:
        if key not in _MODELLED_OF_COMPILATION and section is not None and section.values[key] is not None:
            yield f"{_COMPILATION_KEY}.{key}: graphs and compilation are sized as if it were left out"


def _takes_no_items(fields: CaseFields) -> bool:
    """Whether neither images nor videos may be asked; what is left out may (vLLM, config/multimodal.py)."""
    section = fields.section(_LIMIT_KEY)
    if section is None:
        return False
    counts = {}
    for key, value in section.values.items():
        count = value.get("count") if isinstance(value, dict) else value
        if type(count) is not int or not 0 <= count <= _MOST_ITEMS:
            raise section.error(
                key, f"must be a whole number from 0 to {_MOST_ITEMS:,}, or an object with such a count"
            )
        counts[key] = count
    return all(counts.get(kind) == 0 for kind in _PICTURES) and not any(counts.values())


def _with_state_type(layer: Layer, width: int) -> Layer:
    match layer.mixer:
        case DeltaNet() | StateSpace() as mixer:
            return replace(layer, mixer=replace(mixer, state_element_bytes=width))
        case ParallelMixers() as both:
            inner = replace(both.state_space, state_element_bytes=width)
            return replace(layer, mixer=replace(both, state_space=inner))
        case _:
            return layer
