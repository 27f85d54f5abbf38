"""What one engine is told, resolved: no defaults left to the engine."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from specdecode_operator.api.values import CudagraphMode, DraftSampling, Method, RejectionSampling


class Platform(StrEnum):
    """What the engine computes on."""

    GPU = "gpu"
    CPU = "cpu"


class OnlineQuantization(StrEnum):
    """Precision that the engine itself makes of a 16-bit checkpoint while loading it.

    A checkpoint that is already quantized says so in its own config and needs
    nothing on the command line.
    """

    FP8 = "FP8"


@dataclass(frozen=True)
class CpuSettings:
    """What an engine on the CPU may take.

    Attributes
    ----------
    kv_cache_gib
        Memory for the KV cache.
    cores
        Cores of the container.
    """

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
    """How method suffix looks proposals up; None is the engine's own.

    Attributes
    ----------
    max_tree_depth, max_cached_requests
        As in ``spec.speculation.suffix``.
    max_spec_factor_percent, min_token_probability_percent
        In percent of 1.
    """

    max_tree_depth: int | None = None
    max_cached_requests: int | None = None
    max_spec_factor_percent: int | None = None
    min_token_probability_percent: int | None = None


@dataclass(frozen=True)
class SpeculationSettings:
    """How the engine speculates; an engine that does not has None in its place.

    Attributes
    ----------
    method
        Who proposes tokens; never ``Method.NONE``.
    num_speculative_tokens
        K: tokens proposed a step.
    schedule
        K by the number of running requests; K above holds elsewhere.
    draft_model
        Hub id or path as the engine sees it, for methods with a checkpoint of their own.
    draft_online_quantization
        As for the target, for method draft_model.
    draft_max_model_len
        As for the target, for methods with a checkpoint of their own.
    draft_tensor_parallel_size
        What to say of the draft's split; None: the target's.
    prompt_lookup_min, prompt_lookup_max
        Bounds of the n-gram, for methods ngram and ngram_gpu.
    suffix
        Bounds of the lookup, for method suffix.
    rejection_sampling, draft_sampling
        How tokens are checked and picked; None: as the engine does.
    """

    method: Method
    num_speculative_tokens: int
    schedule: tuple[ScheduleRange, ...] = ()
    draft_model: str | None = None
    draft_online_quantization: OnlineQuantization | None = None
    draft_max_model_len: int | None = None
    draft_tensor_parallel_size: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix: SuffixSettings | None = None
    rejection_sampling: RejectionSampling | None = None
    draft_sampling: DraftSampling | None = None


class ContainerVariable(str):
    """A reference to a variable of the container, ``$(NAME)``: the kubelet puts the value in."""

    __slots__ = ()


@dataclass(frozen=True)
class NodeGroup:
    """The pods of one engine on several nodes, as one of them sees it.

    Attributes
    ----------
    nodes
        How many there are.
    rank
        Which one this is; 0 leads.
    leader_address
        Where the leader is reached.
    leads
        Whether this one answers clients; the others only compute.
    meeting_timeout_s
        How long they wait for each other.
    """

    nodes: int
    rank: str
    leader_address: str
    leads: bool
    meeting_timeout_s: int


@dataclass(frozen=True)
class EngineSettings:
    """All that the command line and the environment of one engine say.

    Attributes
    ----------
    model
        Hub id or path as the engine sees it.
    served_model_names
        Names that clients may ask for; at least one.
    max_model_len, max_num_seqs, max_num_batched_tokens, kv_cache_dtype, block_size
        As in ``spec.serving``, with the model's own length filled in.
    memory_utilization_percent
        Share of each GPU that the engine may use; without meaning on the CPU.
    tensor_parallel_size, pipeline_parallel_size, data_parallel_size
        GPUs that share each layer, stages of layers, and copies of all but the experts.
    expert_parallel
        Whether whole experts are spread over the GPUs of a stage.
    dtype
        Precision of what is not quantized; ``auto`` is the checkpoint's.
    online_quantization
        Precision to make while loading.
    cudagraph_mode
        Which steps run as CUDA graphs; None: the engine's own.
    max_cudagraph_capture_size
        Most tokens of a step that runs as a CUDA graph; None: the engine's own.
    speculation
        None: the engine does not speculate.
    cpu
        None: the engine runs on GPUs.
    shutdown_timeout_s
        How long open requests may go on after TERM.
    tls
        Whether it serves HTTPS, with the files of TLS_PATH.
    extra_args
        Passed as they are, after everything else.
    group
        None: the engine runs on one node.
    target_on_v1
        Whether the version serves this target, with this method, on model runner V1 even of a GPU.
    """

    model: str
    served_model_names: tuple[str, ...]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: str
    block_size: int
    memory_utilization_percent: int
    tensor_parallel_size: int
    port: int
    shutdown_timeout_s: int
    tls: bool = False
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel: bool = False
    dtype: Literal["auto", "bfloat16"] = "auto"
    online_quantization: OnlineQuantization | None = None
    enforce_eager: bool = False
    cudagraph_mode: CudagraphMode | None = None
    max_cudagraph_capture_size: int | None = None
    speculation: SpeculationSettings | None = None
    cpu: CpuSettings | None = None
    extra_args: tuple[str, ...] = ()
    group: NodeGroup | None = None
    target_on_v1: bool = False

    @property
    def ranks(self) -> int:
        """Processes that compute, each on a device of its own."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def platform(self) -> Platform:
        """What this engine computes on."""
        return Platform.GPU if self.cpu is None else Platform.CPU
