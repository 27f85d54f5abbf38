"""Resolved settings of one engine: every default is set explicitly, so none is left to vLLM."""

from dataclasses import dataclass
from enum import StrEnum

from specdecode_operator.enums import (
    CudagraphMode,
    DraftHeadQuantization,
    DraftSampling,
    Dtype,
    Method,
    RejectionSampling,
)


class Platform(StrEnum):
    """What the engine computes on."""

    GPU = "gpu"
    CPU = "cpu"


class OnlineQuantization(StrEnum):
    """Precision to which the engine quantizes a 16-bit checkpoint while loading it."""

    FP8 = "FP8"


@dataclass(frozen=True)
class CpuSettings:
    """What an engine on the CPU may take."""

    kv_cache_gib: int
    cores: int


@dataclass(frozen=True)
class ScheduleRange:
    """K for one range of running requests, both ends inclusive."""

    first: int
    last: int
    num_speculative_tokens: int


@dataclass(frozen=True)
class SuffixSettings:
    """How method suffix looks proposals up, as in ``spec.speculation.suffix``; None is the engine's own."""

    max_tree_depth: int | None = None
    max_cached_requests: int | None = None
    max_spec_factor_percent: int | None = None
    min_token_probability_percent: int | None = None


@dataclass(frozen=True)
class SpeculationSettings:
    """How the engine speculates; an engine that does not has None in its place."""

    method: Method
    num_speculative_tokens: int
    schedule: tuple[ScheduleRange, ...] = ()
    draft_model: str | None = None
    draft_is_head: bool = False
    """Whether it is made for one target, as opposed to a model of its own."""
    drafts_in_parallel: bool = False
    maps_vocabulary: bool = False
    draft_online_quantization: OnlineQuantization | None = None
    draft_max_model_len: int | None = None
    draft_tensor_parallel_size: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix: SuffixSettings | None = None
    # None: as the engine does.
    rejection_sampling: RejectionSampling | None = None
    loss_accepted: bool = False
    """Whether answers may be others than the target's own; nothing of it is rendered."""
    draft_sampling: DraftSampling | None = None
    adaptive_verification: bool | None = None
    draft_head_quantization: DraftHeadQuantization | None = None
    xpress_top_c: int | None = None
    extra_config: str | None = None


class ContainerVariable(str):
    """A reference to a variable of the container, ``$(NAME)``: the kubelet puts the value in."""

    __slots__ = ()


@dataclass(frozen=True)
class NodeGroup:
    """The pods of one engine on several nodes, as one of them sees it."""

    nodes: int
    rank: str
    leader_address: str
    leads: bool
    meeting_timeout_s: int


@dataclass(frozen=True)
class EngineSettings:
    """All that the command line and the environment of one engine say.

    Without ``speculation`` it does not speculate, without ``cpu`` it runs on GPUs, without ``group`` on one node.
    """

    model: str
    """Hub id or path as the engine sees it."""
    served_model_names: tuple[str, ...]
    # As in ``spec.serving``, with the model's own length filled in.
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: str
    block_size: int
    memory_utilization_percent: int
    """Of each GPU; without meaning on the CPU."""
    tensor_parallel_size: int
    port: int
    shutdown_timeout_s: int
    tls: bool = False
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel: bool = False
    hf_overrides: str | None = None
    dtype: Dtype = Dtype.AUTO
    online_quantization: OnlineQuantization | None = None
    enforce_eager: bool = False
    cudagraph_mode: CudagraphMode | None = None
    max_cudagraph_capture_size: int | None = None
    speculation: SpeculationSettings | None = None
    cpu: CpuSettings | None = None
    extra_args: tuple[str, ...] = ()
    group: NodeGroup | None = None
    target_on_v1: bool = False
    """Whether the version serves this target, with this method, on model runner V1 even of a GPU."""

    @property
    def ranks(self) -> int:
        """Processes that compute, each on a device of its own."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def platform(self) -> Platform:
        """What this engine computes on."""
        return Platform.GPU if self.cpu is None else Platform.CPU
