"""What `estimate` prints, a line a case."""

from typing import Literal

from pydantic import RootModel

from specdecode_operator.cli.outputs.base import Output


class CasePerGpu(Output):
    """Memory of one GPU in bytes; null but for available_kv where a case gives the KV cache alone."""

    total: int | None
    """Memory of the device."""
    requested: int | None
    """What the engine claims of it."""
    target_weights: int | None
    """Weights of the target."""
    draft_weights: int | None
    """Weights of the draft."""
    state: int | None
    """Buffers for the state of requests."""
    activation: int | None
    """Peak of one step."""
    cuda_graphs: int | None
    """CUDA graphs."""
    non_torch: int | None
    """Memory outside torch, corrections of a calibration among it."""
    available_kv: int
    """What is left for the KV cache, before the margin."""


class CaseOutput(Output):
    """A case that could be sized."""

    id: str | int | None
    """That of the case."""
    verdict: Literal["Fits", "Tight", "DoesNotFit"]
    """Whether it fits."""
    per_gpu: CasePerGpu
    """The budget of each GPU."""
    margin_bytes: int
    """What the verdict keeps back because estimates err."""
    kv_cache_tokens: int
    """Tokens that the KV cache of each data-parallel copy holds, before the margin."""
    max_concurrency: float
    """Requests of full length that it holds, in each copy."""
    calibration: str | None = None
    """Which measurements correct it; absent without any."""
    error: None
    """Nothing is wrong with it."""


class CaseErrorOutput(Output):
    """A case that could not be sized."""

    id: str | int | None
    """That of the case; null where the line cannot be read."""
    error: str
    """Why."""


class EstimateOutput(RootModel[CaseOutput | CaseErrorOutput]):
    """One line of the results."""
