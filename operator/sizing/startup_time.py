"""Estimate how long one engine takes to start on GPUs, phase by phase.

Each phase has a range, because most of its causes are unknown before a start: how fast the storage is, whether the page
cache holds the weights, how many CPU cores compile. The ranges contain the times of 45 public start-up logs, of vLLM
0.19 to 0.26 on A100, H100 and RTX 5060 Ti (``startup_s`` in tests/unit/sizing/groundtruth). The logs in comments are
these, unless another source is named. No log of a CPU has times, so there is no estimate for one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.arithmetic import GIB, MIB, ceil_div
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.memory.budget import Budget
from specdecode_operator.sizing.memory.buffers import captured_sizes, cost_profile_s, further_graphs
from specdecode_operator.sizing.pair import Pair, Parallelism, loaded_draft

SLOWEST_BYTES_PER_S: Final = 125 * MIB
"""Slowest supported storage and network: the baseline of a gp3 volume, or a 1 Gbit/s link.

https://docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html
"""
_FASTEST_DOWNLOAD_BYTES_PER_S: Final = 1250 * MIB
"""A 10 Gbit/s link. The fastest download in the logs has 0.7 GiB/s."""
_FASTEST_READ_BYTES_PER_S: Final = 8 * GIB
"""Of one rank from the page cache. The fastest in the logs has 6.5 GiB/s."""
_TRANSFER_S: Final = 30
"""Time of a transfer beside its bytes: requests, directories, conversion. A head of 0.5 GB took 24 s to download."""

IMAGE_PULL_S: Final = 600
"""Most time for scheduling, and for pulling an engine image of about 10 GB; our own assumption."""


class Seconds(NamedTuple):
    """A range of durations in seconds."""

    fastest: int
    slowest: int


_NONE: Final = Seconds(0, 0)
_PROCESS: Final = Seconds(5, 120)
"""Python imports, configuration, start of the ranks and of the API server. 9 to 64 s in the logs, on idle machines."""

_COMPILES_LAYER_S: Final = (0.15, 1.5)
_COMPILES_S: Final = (2, 30)
"""torch.compile without a cache, per layer and in addition. 10 to 42 s in the logs for 28 to 80 layers on H100, and
69 s for 64 layers on an RTX 5060 Ti."""
_READS_COMPILED_S: Final = 1
"""torch.compile with a cache. 2 to 9 s in the logs."""

_CAPTURE_S: Final = (0.02, 1.0)
_CAPTURES_S: Final = (0, 10)
"""CUDA graphs, per size and in addition. 2 to 15 s in the logs for 51 to 83 sizes, and 8 s for 5 sizes on four RTX 5060
Ti. A public log of Nemotron 3 Ultra has 69 s."""

_WARM_UP: Final = Seconds(1, 300)
"""Memory profiling and warm-up of kernels. 2 to 155 s in the logs."""
_BUILT_FOR: Final = (Precision.FP8, Precision.NVFP4, Precision.MXFP4)
_WARM_UP_OF_KERNELS_S: Final = 600
"""Most time if kernels for small floats or experts are compiled and tuned, such as DeepGEMM's.

https://github.com/vllm-project/vllm/issues/43189 (8 minutes in all), and
https://github.com/vllm-project/vllm/issues/44881 (210 s)
"""


class Phase(StrEnum):
    """A part of a start, in the order of their beginnings."""

    IMAGE = "image"
    DOWNLOAD = "download"
    PROCESS = "process"
    LOAD = "load"
    COMPILE = "compile"
    WARM_UP = "warm-up"
    GRAPHS = "graphs"


@dataclass(frozen=True)
class Rates:
    """Rates of transfers in bytes per second; None if unknown."""

    download: int | None = None
    read: int | None = None


UNKNOWN_RATES: Final = Rates()


@dataclass(frozen=True)
class StartConditions:
    """Properties of a start that do not change its memory."""

    downloads_target: bool = True
    downloads_draft: bool = True
    downloads_once: bool = False  # To a shared cache
    keeps_compiled: bool = False  # Whether later starts find the compiled code of earlier ones
    rates: Rates = UNKNOWN_RATES


@dataclass(frozen=True)
class StartupTime:
    """Estimated durations of a start."""

    before: Mapping[Phase, Seconds]  # Until the engine's container starts
    engine: Mapping[Phase, Seconds]  # From then on, until the engine serves

    @property
    def before_s(self) -> Seconds:
        """Time until the engine's container starts."""
        return _total(self.before)

    @property
    def engine_s(self) -> Seconds:
        """Time from the start of the engine's container until the engine serves."""
        return _total(self.engine)


def estimate_startup(pair: Pair, budget: Budget, split: Parallelism, given: StartConditions) -> StartupTime:
    """Return the durations of a start of one replica on GPUs; ``budget`` is that of the pair at this split.

    A range covers the first start and later ones: its fastest end applies if models and compiled code are cached.
    """
    target_bytes, draft_bytes = _stored_bytes(pair, budget, split)
    fetched = (target_bytes if given.downloads_target else 0) + (draft_bytes if given.downloads_draft else 0)
    download = _transfer(fetched, given.rates.download, _FASTEST_DOWNLOAD_BYTES_PER_S)
    before = {Phase.IMAGE: Seconds(0, IMAGE_PULL_S)}
    if fetched:
        before[Phase.DOWNLOAD] = Seconds(0, download.slowest) if given.downloads_once else download
    read = _transfer(target_bytes + draft_bytes, given.rates.read, _FASTEST_READ_BYTES_PER_S * split.gpus)
    engine = {Phase.PROCESS: _PROCESS, Phase.LOAD: read}
    if not pair.limits.enforce_eager:
        engine[Phase.COMPILE] = _compile(pair, split, cached=given.keeps_compiled)
    engine[Phase.WARM_UP] = _warm_up(pair, budget)
    if pair.limits.captures_graphs:
        engine[Phase.GRAPHS] = _graphs(pair)
    return StartupTime(before, engine)


def _stored_bytes(pair: Pair, budget: Budget, split: Parallelism) -> tuple[int, int]:
    """Return the bytes of the files of target and draft: weights that vLLM quantizes to FP8 are stored in 16 bits."""

    def stored(geometry: ModelGeometry | None, precision: Precision | None, size_bytes: int) -> int:
        quantizes = geometry is not None and geometry.checkpoint_precision is None and precision is Precision.FP8
        return size_bytes * split.gpus * (2 if quantizes else 1)

    return (
        stored(pair.target, pair.target_precision, budget.target_weights_bytes),
        stored(pair.draft, pair.draft_precision, budget.draft_weights_bytes),
    )


def _transfer(size_bytes: int, rate: int | None, fastest_rate: int) -> Seconds:
    """Return the time to download or read bytes: by a rate that is known, or from the fastest to the slowest."""
    slowest = _TRANSFER_S + ceil_div(size_bytes, rate or SLOWEST_BYTES_PER_S)
    return Seconds(size_bytes // (rate or fastest_rate), slowest)


def _compile(pair: Pair, split: Parallelism, *, cached: bool) -> Seconds:
    layers, draft = ceil_div(pair.target.num_layers, split.pipeline), loaded_draft(pair)
    models = [layers, *([draft[0].num_layers] if draft else [])]
    fastest, slowest = (
        fixed * len(models) + each * sum(models) for fixed, each in zip(_COMPILES_S, _COMPILES_LAYER_S, strict=True)
    )
    return Seconds(_READS_COMPILED_S if cached else math.floor(fastest), math.ceil(slowest))


def _warm_up(pair: Pair, budget: Budget) -> Seconds:
    builds_kernels = pair.target.has_experts or pair.target_precision in _BUILT_FOR
    slowest = _WARM_UP_OF_KERNELS_S if builds_kernels else _WARM_UP.slowest
    return Seconds(_WARM_UP.fastest, slowest + cost_profile_s(pair, budget.weights_bytes))


def _graphs(pair: Pair) -> Seconds:
    sizes = len(captured_sizes(pair)) + further_graphs(pair)
    sizes *= 1 if pair.adapters is None else 2
    models = 2 if loaded_draft(pair) else 1
    fastest, slowest = (fixed + each * sizes for fixed, each in zip(_CAPTURES_S, _CAPTURE_S, strict=True))
    return Seconds(math.floor(fastest), math.ceil(slowest * models))


def _total(phases: Mapping[Phase, Seconds]) -> Seconds:
    return Seconds(*map(sum, zip(*phases.values(), strict=True))) if phases else _NONE
