"""Schema of the output of `specdecode plan --batch`."""

from typing import Literal

from pydantic import RootModel

from specdecode_operator.cli.outputs import Output


class CasePerGpu(Output):
    """Memory of one GPU in bytes. If the case sets available_kv_gib, all fields except available_kv are null."""

    total: int | None
    """Memory of the device."""
    requested: int | None
    """Budget of the engine."""
    target_weights: int | None
    """Weights of the target."""
    draft_weights: int | None
    """Weights of the draft."""
    state: int | None
    """Buffers for the state of requests."""
    activation: int | None
    """Peak activation memory of one step."""
    cuda_graphs: int | None
    """CUDA graphs."""
    non_torch: int | None
    """Memory outside torch, including the correction of a calibration."""
    available_kv: int
    """Memory left for the KV cache, before the margin."""


class CaseOutput(Output):
    """Result of a case that was sized."""

    id: str | int | None
    """Id of the case."""
    verdict: Literal["Fits", "Tight", "DoesNotFit"]
    """Whether the case fits."""
    per_gpu: CasePerGpu
    """Budget of each GPU."""
    margin_bytes: int
    """Memory that must be to spare for Fits, because estimates may be wrong."""
    kv_cache_tokens: int
    """Tokens that the KV cache of each data-parallel copy holds, before the margin."""
    max_concurrency: float
    """Requests of full length that the KV cache of each copy holds."""
    calibration: str | None = None
    """Measurements that correct the estimates; absent if none do."""
    error: None
    """Null for a case that was sized."""


class CaseErrorOutput(Output):
    """Result of a case that could not be sized."""

    id: str | int | None
    """Id of the case; null if the line cannot be parsed."""
    error: str
    """Reason."""


class BatchOutput(RootModel[CaseOutput | CaseErrorOutput]):
    """Output of `plan --batch`: one line of the results."""
