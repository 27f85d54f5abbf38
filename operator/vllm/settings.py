"""Resolved settings of one engine. Every default is explicit, so that the engine does not depend on vLLM's defaults."""

from dataclasses import dataclass
from typing import Any

from pydantic.alias_generators import to_snake

from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.deployment import Serving
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.enums import Dtype, Method, OnlineQuantization, Platform


@dataclass(frozen=True)
class CpuSettings:
    """Resource limits of an engine on the CPU."""

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
    """How the engine speculates. An engine without speculation has None instead."""

    spec: Speculation
    """As the user wrote it: rows of `SPECULATIVE_KEYS` without a function of their own pass its fields on."""
    schedule: tuple[ScheduleRange, ...] = ()
    draft_model: str | None = None
    draft_is_head: bool = False
    """Whether the draft is a head made for one target, and not a separate model."""
    drafts_in_parallel: bool = False
    maps_vocabulary: bool = False
    draft_online_quantization: OnlineQuantization | None = None
    draft_tensor_parallel_size: int | None = None
    extra_config: str | None = None

    @property
    def method(self) -> Method:
        """The method that proposes tokens."""
        return self.spec.method

    @property
    def num_speculative_tokens(self) -> int:
        """K; 0 if the spec does not set it."""
        return self.spec.num_speculative_tokens or 0


@dataclass(frozen=True)
class AdapterSettings:
    """LoRA adapters that the engine loads when it starts, and what it reserves for them."""

    paths: tuple[tuple[str, str], ...]
    """Name that clients request, and path in the engine's container, of each adapter."""
    gpu_slots: int
    host_slots: int
    max_rank: int
    target_modules: tuple[str, ...] = ()
    """Layers that get adapters; empty for all."""


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
    """Reference to a variable of the container, ``$(NAME)``, which the kubelet expands."""

    __slots__ = ()


@dataclass(frozen=True)
class NodeGroup:
    """The pods of one engine on several nodes, as one pod sees them."""

    nodes: int
    rank: str
    leader_address: str
    leads: bool
    meeting_timeout_s: int


@dataclass(frozen=True)
class EngineSettings:
    """All settings behind the command line and the environment of one engine.

    ``speculation`` is None without speculation, ``adapters`` without adapters, ``cpu`` on GPUs, and ``group`` on one
    node.
    """

    model: str
    """Hub id, or path in the engine's container."""
    served_model_names: tuple[str, ...]
    # As in ``spec.serving``, after the defaults of model, version and accelerator.
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
    adapters: AdapterSettings | None = None
    target_on_v1: bool = False
    """Whether this version serves this target with this method on model runner V1, even on a GPU."""

    @property
    def tls(self) -> bool:
        """Whether the engine serves HTTPS."""
        return self.serving.tls_secret is not None

    @property
    def ranks(self) -> int:
        """Worker processes, each with its own device."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def platform(self) -> Platform:
        """The device type of this engine."""
        return Platform.GPU if self.cpu is None else Platform.CPU
