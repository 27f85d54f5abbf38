"""What all data that commands print has in common."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Verdict = Literal["Fits", "Tight", "DoesNotFit", "Unknown", "Invalid"]


class Output(BaseModel):
    """A part of what a command prints as JSON or YAML; later versions may have further keys."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class ProblemOutput(Output):
    """One thing that is wrong with an object."""

    field: str
    """Path in the object, such as spec.parallelism.tensor."""
    value: str
    """What stands there."""
    message: str
    """What is wrong with it and what to write instead."""


class PerGpu(Output):
    """Memory of one GPU, on CPU of one rank, in bytes: requested less the six terms is available_kv."""

    total: int
    """Memory of the device, as CUDA reports it."""
    requested: int
    """What the engine claims of it; on CPU what it will take in all."""
    target_weights: int
    """Weights of the target."""
    draft_weights: int
    """Weights of the draft."""
    state: int
    """Buffers for the state of requests."""
    activation: int
    """Peak of one step."""
    cuda_graphs: int
    """CUDA graphs."""
    non_torch: int
    """Memory outside torch, corrections of a calibration among it."""
    available_kv: int
    """What is left for the KV cache, before the margin; negative where the rest is too much."""
