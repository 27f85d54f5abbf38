"""The engine's rules about CUDA graphs, checked before it starts."""

from collections.abc import Iterator

from specdecode_operator.api.values import CudagraphMode
from specdecode_operator.engine.arguments import COMPILATION_CONFIG
from specdecode_operator.engine.profiles import EngineProfile
from specdecode_operator.engine.rules.extra_args import options
from specdecode_operator.engine.rules.runners import runs_on_v1
from specdecode_operator.engine.settings import EngineSettings, Platform
from specdecode_operator.problems import Problem

_MODE = "spec.serving.cudagraphMode"
_LARGEST = "spec.serving.maxCudagraphCaptureSize"

_FIELD_OF_KEY = {"cudagraph_mode": _MODE, "max_cudagraph_capture_size": _LARGEST}
"""Keys of ``--compilation-config`` that have a field, which the plan counts on."""

_WHOLE_GRAPHS = (CudagraphMode.FULL, CudagraphMode.FULL_DECODE_ONLY, CudagraphMode.FULL_AND_PIECEWISE)
"""Modes with a graph of a whole step, whose tokens a request may not change (vLLM, has_full_cudagraphs)."""


_WITHOUT_PIECES = {
    CudagraphMode.PIECEWISE: CudagraphMode.NONE,
    CudagraphMode.FULL_AND_PIECEWISE: CudagraphMode.FULL_DECODE_ONLY,
}
"""What is left of modes with pieces where nothing is compiled (CUDAGraphMode.without_piecewise)."""

_IN_PIECES = ("3", "VLLM_COMPILE")
"""The one mode of compilation that cuts a model into pieces (CompilationMode)."""


_SMALL_SIZES, _SIZES_APART = (1, 2, 4), 8
"""The sizes of graphs in tokens: some, then every so many, up to 256 (vllm/config/vllm.py, _set_cudagraph_sizes)."""


def graph_problems(settings: EngineSettings, profile: EngineProfile) -> list[Problem]:
    """Return what the engine would refuse, or silently change, about CUDA graphs."""
    return [
        *_needless_problems(settings),
        *_size_problems(settings, profile),
        *_schedule_problems(settings, profile),
        *_compilation_problems(settings, profile),
        *_option_problems(settings, profile),
    ]


def _needless_problems(settings: EngineSettings) -> Iterator[Problem]:
    """Where there are no graphs at all (vllm/platforms/cpu.py; vllm/config/vllm.py, __post_init__)."""
    mode, largest = settings.cudagraph_mode, settings.max_cudagraph_capture_size
    given = {_MODE: mode, _LARGEST: largest}
    for field, value in given.items():
        if value is None:
            continue
        if settings.platform is Platform.CPU:
            yield Problem(field, str(value), "there are no CUDA graphs on the CPU; remove it")
        elif settings.enforce_eager:
            message = "there are no CUDA graphs with serving.enforceEager; remove one of the two"
            yield Problem(field, str(value), message)
    if mode is CudagraphMode.NONE and largest is not None:
        message = "there are no CUDA graphs with serving.cudagraphMode NONE; remove one of the two"
        yield Problem(_LARGEST, str(largest), message)


def _size_problems(settings: EngineSettings, profile: EngineProfile) -> Iterator[Problem]:
    """vllm/config/compilation.py, adjust_cudagraph_sizes_for_spec_decode: multiples of K + 1, on model runner V1.

    V2 takes fewer: it then has no graph of a step that verifies.
    """
    largest, speculation = settings.max_cudagraph_capture_size, settings.speculation
    in_pieces = settings.cudagraph_mode not in (None, *_WHOLE_GRAPHS) or settings.enforce_eager
    if largest is None or speculation is None or in_pieces or settings.platform is Platform.CPU:
        return
    needed = _next_size(speculation.num_speculative_tokens + 1)
    # Lengths that change leave pieces only.
    if largest < needed and not speculation.schedule and runs_on_v1(settings, profile):
        message = (
            f"must be at least {needed}, the first size that takes the {speculation.num_speculative_tokens + 1} tokens "
            "that one request has verified"
        )
        yield Problem(_LARGEST, str(largest), message)


def _next_size(tokens: int) -> int:
    """Return the first size, no smaller than so many tokens, that vLLM captures (vllm/config/vllm.py)."""
    return next((size for size in _SMALL_SIZES if size >= tokens), -(-tokens // _SIZES_APART) * _SIZES_APART)


def _schedule_problems(settings: EngineSettings, profile: EngineProfile) -> Iterator[Problem]:
    """vllm/config/vllm.py, _maybe_override_dynamic_sd_cudagraph_mode: V1 goes over to PIECEWISE and only logs it."""
    mode, speculation = settings.cudagraph_mode, settings.speculation
    if speculation is None or not speculation.schedule or mode not in _WHOLE_GRAPHS:
        return
    if runs_on_v1(settings, profile):
        message = (
            f"with numSpeculativeTokensByBatchSize and method {speculation.method} vLLM {profile.version} captures in"
            " pieces only; write PIECEWISE, or remove it"
        )
        yield Problem(_MODE, str(mode), message)


def _compilation_problems(settings: EngineSettings, profile: EngineProfile) -> Iterator[Problem]:
    """vllm/config/vllm.py, _normalize_piecewise_cudagraph_mode: the pieces are those of its compilation."""
    mode = settings.cudagraph_mode
    if mode not in _WITHOUT_PIECES:
        return
    given = {(option.flag.name, option.path): option.value.upper() for option in options(settings.extra_args, profile)}
    level = given.get(("--optimization-level", ""))
    compiled = given.get((COMPILATION_CONFIG, "mode"), "NONE" if level == "0" else "VLLM_COMPILE")
    if compiled not in _IN_PIECES:
        message = (
            f"extraArgs turn off the compilation that makes the pieces; write {_WITHOUT_PIECES[mode]}, or leave it on"
        )
        yield Problem(_MODE, str(mode), message)


def _option_problems(settings: EngineSettings, profile: EngineProfile) -> Iterator[Problem]:
    """Whole JSON values with keys that have a field, and spellings that undo one.

    vllm/utils/argparse_utils.py gathers dotted paths by the spelling of the
    flag and passes each gathering on as a flag of its own, of which the last
    counts: ``-cc.mode=3`` would undo what stands under the long name.
    """
    for option in options(settings.extra_args, profile):
        if option.flag.name != COMPILATION_CONFIG:
            continue
        place = f"spec.engine.extraArgs[{option.index}]"
        fields = [field for key, field in _FIELD_OF_KEY.items() if not option.path and f'"{key}"' in option.value]
        if fields:
            yield Problem(place, option.shown, f"has what is not for extraArgs; use {' and '.join(fields)}")
        elif settings.cudagraph_mode is not None and (option.spelled != COMPILATION_CONFIG or not option.path):
            message = (
                f"vLLM keeps only one of this and serving.cudagraphMode; write {COMPILATION_CONFIG}.KEY VALUE for each"
                " key"
            )
            yield Problem(place, option.shown, message)
