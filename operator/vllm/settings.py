"""Resolved settings of one engine: every default is set explicitly, so none is left to vLLM."""

from dataclasses import dataclass
from typing import Any

from pydantic.alias_generators import to_snake

from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.deployment import Serving
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.enums import Dtype, Method, OnlineQuantization, Platform


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
class SpeculationSettings:
    """How the engine speculates; an engine that does not has None in its place."""

    spec: Speculation
    """As the user wrote it: rows of `SPECULATIVE_KEYS` without a function of their own pass its fields on."""
    schedule: tuple[ScheduleRange, ...] = ()
    draft_model: str | None = None
    draft_is_head: bool = False
    """Whether it is made for one target, as opposed to a model of its own."""
    drafts_in_parallel: bool = False
    maps_vocabulary: bool = False
    draft_online_quantization: OnlineQuantization | None = None
    draft_tensor_parallel_size: int | None = None
    extra_config: str | None = None

    @property
    def method(self) -> Method:
        """What proposes tokens."""
        return self.spec.method

    @property
    def num_speculative_tokens(self) -> int:
        """K; 0 if the spec does not set it."""
        return self.spec.num_speculative_tokens or 0


class FieldPath:
    """A field below a part of the spec, such as ``suffix.maxTreeDepth``."""

    def __init__(self, path: str) -> None:
        self._names = tuple(map(to_snake, path.split(".")))

    def value_in(self, part: ApiModel) -> Any:
        """Return the field's value; None if it, or the part around it, is not set."""
        found: Any = part
        for name in self._names:
            found = None if found is None else getattr(found, name)
        return found


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
    # As in ``spec.serving``, with the defaults of model, version and accelerator filled in.
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    tensor_parallel_size: int
    shutdown_timeout_s: int
    serving: Serving
    """As the user wrote it: rows of `ARGUMENTS` without a function of their own pass its fields on."""
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel: bool = False
    hf_overrides: str | None = None
    dtype: Dtype = Dtype.AUTO
    online_quantization: OnlineQuantization | None = None
    speculation: SpeculationSettings | None = None
    cpu: CpuSettings | None = None
    extra_args: tuple[str, ...] = ()
    group: NodeGroup | None = None
    target_on_v1: bool = False
    """Whether the version serves this target, with this method, on model runner V1 even of a GPU."""

    @property
    def tls(self) -> bool:
        """Whether it serves HTTPS."""
        return self.serving.tls_secret is not None

    @property
    def ranks(self) -> int:
        """Processes that compute, each on a device of its own."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def platform(self) -> Platform:
        """What this engine computes on."""
        return Platform.GPU if self.cpu is None else Platform.CPU
