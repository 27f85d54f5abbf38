"""The SpecDecodeDeployment kind: what a user writes.

The CRD is generated from these models (`specdecode crds`), so a bound, a
default or a description has one home: the field below.
"""

from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt, StringConstraints
from pydantic.config import JsonDict

from specdecode_operator.api.base import ApiModel, ObjectName, SecretKey, TlsSecret
from specdecode_operator.api.capture_schedule import CaptureSchedule
from specdecode_operator.api.golden import Against
from specdecode_operator.api.models import Models, ShortText, Target
from specdecode_operator.api.open_objects import BOUNDED
from specdecode_operator.api.patterns import ENGINE_VERSION, LABEL_VALUE, SERVED_NAME, TEMPERATURE, VARIABLE_NAME
from specdecode_operator.api.policy import Policy
from specdecode_operator.api.replay import Replay
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.api.values import AcceleratorType, CudagraphMode, Planning, RolloutStrategy
from specdecode_operator.vocabulary import Dtype, KvCacheDtype, Objective, Slo, WorkloadKind

_BY_NAME: JsonDict = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
KIND = "SpecDecodeDeployment"
PLURAL = "specdecodedeployments"

LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=LABEL_VALUE)]
EnvVarName = Annotated[str, StringConstraints(max_length=256, pattern=VARIABLE_NAME)]
EngineVersion = Annotated[str, StringConstraints(max_length=32, pattern=ENGINE_VERSION)]
ImageReference = Annotated[str, StringConstraints(min_length=1, max_length=512)]
ServedName = Annotated[str, StringConstraints(max_length=256, pattern=SERVED_NAME)]


class Parallelism(ApiModel):
    """Over how many GPUs one replica spreads."""

    tensor: StrictInt | None = Field(default=None, ge=1, le=64)
    """Tensor parallelism of the target, and so of the draft. Absent: the smallest that fits; on CPU: 1."""

    pipeline: StrictInt = Field(default=1, ge=1, le=64)
    """Stages of layers, each on GPUs of its own."""

    data: StrictInt = Field(default=1, ge=1, le=64)
    """Copies of the model behind one endpoint, each with a KV cache and requests of its own, of which all figures are;
    experts are not copied."""

    expert: StrictBool = False
    """Spread whole experts over the tensor x data GPUs of a stage, instead of slicing each."""

    draft_tensor: StrictInt | None = Field(default=None, ge=1, le=64)
    """What the engine is told of the draft's tensor parallelism: 1, or tensor. The draft is split like the target
    either way; status.plan.draftTensor says so."""


class Accelerator(ApiModel):
    """What one replica runs on."""

    type: AcceleratorType = AcceleratorType.GPU
    """GPU, or CPU for trying things out without one."""

    product: list[LabelValue] = Field(default=[], max_length=16)
    """Exact nvidia.com/gpu.product labels that may be used. Empty: any that fits."""

    per_node: StrictInt | None = Field(default=None, ge=1, le=64)
    """GPUs a node, where nodes cannot be asked."""

    memory_gib_per_gpu: StrictInt | None = Field(default=None, alias="memoryGiBPerGPU", ge=1, le=4096)
    """Memory of each GPU in whole GiB, as CUDA reports it, for products whose memory the operator does not know.
    Estimates for them are uncalibrated, with a wider margin. Known products keep their own figure."""

    cpu_cores: StrictInt | None = Field(default=None, ge=1, le=1024)
    """Cores a replica, for type CPU."""

    memory_gib: StrictInt | None = Field(default=None, alias="memoryGiB", ge=1, le=65_536)
    """Memory a replica in GiB, for type CPU; its ranks share it."""

    kv_cache_gib: StrictInt | None = Field(default=None, alias="kvCacheGiB", ge=1, le=65_536)
    """KV cache a replica in GiB, for type CPU: a multiple of parallelism.tensor, whose ranks share it."""


class Serving(ApiModel):
    """What the engine is told; every value is rendered explicitly."""

    max_model_len: StrictInt | None = Field(default=None, ge=1, le=16_777_216)
    """Longest sequence in tokens, prompt and output. Absent: the model's own."""

    max_num_seqs: StrictInt = Field(default=256, ge=1, le=65_536)
    """Requests that may run at once, in each copy of parallelism.data. A model with states (Mamba, linear attention)
    whose KV cache has fewer than 256 blocks runs 128, 64 or fewer in place of the default, so that vLLM starts."""

    max_num_batched_tokens: StrictInt = Field(default=8192, ge=1, le=16_777_216)
    """Tokens scheduled in one step, in each copy of parallelism.data."""

    dtype: Dtype = Dtype.AUTO
    """Element type of all that is not quantized, in target and draft; auto is the target's own, or bfloat16 where that
    is float32."""

    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO
    """Element type of the KV cache; auto is the model's."""

    block_size: StrictInt | None = Field(default=None, ge=1, le=1024)
    """Tokens in one KV cache block. Absent: vLLM's own on that accelerator, 16 on GPU and 128 on CPU."""

    memory_utilization_percent: StrictInt = Field(default=92, ge=1, le=100)
    """Share of the GPU's memory that the engine may use."""

    enforce_eager: StrictBool = False
    """Run without CUDA graphs and compilation."""

    cudagraph_mode: CudagraphMode | None = None
    """Which steps run as CUDA graphs: none; all in pieces, attention outside (PIECEWISE); all as a whole (FULL); decode
    as a whole and the rest without (FULL_DECODE_ONLY) or in pieces (FULL_AND_PIECEWISE). Absent: the engine's own,
    mostly the last."""

    max_cudagraph_capture_size: StrictInt | None = Field(default=None, ge=1, le=65_536)
    """Most tokens of a step that runs as a CUDA graph; larger steps run without, which saves memory and start-up time.
    Absent: the engine's, twice the tokens that a step of maxNumSeqs requests verifies, at most 512."""

    min_concurrency: StrictInt = Field(default=1, ge=1, le=65_536)
    """Requests of maxModelLen that must fit at once, in each copy of parallelism.data."""

    served_model_names: list[ServedName] = Field(default=[], max_length=16)
    """Names that clients may ask for. Empty: the last part of target.model."""

    api_key_secret: SecretKey | None = None
    """Key that clients of the OpenAI API must send."""

    tls_secret: TlsSecret | None = None
    """Certificate to serve HTTPS with. Absent: plain HTTP."""

    port: StrictInt = Field(default=8000, ge=1024, le=65_535)
    """Port of the engine and of the Service; below 1024 the engine would need root."""


class EnvVar(ApiModel):
    """An environment variable of the engine container."""

    name: EnvVarName
    """Name of the variable."""

    value: str = Field(default="", max_length=4096)
    """Its value. Use podTemplate for values from Secrets."""


class Engine(ApiModel):
    """Which vLLM runs, and what is passed to it as is."""

    version: EngineVersion = "0.33"
    """vLLM version, major and minor, such as 0.32."""

    image: ImageReference | None = None
    """Engine image with a tag or a digest. Absent: the project's image of that version."""

    extra_args: list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]] = Field(
        default=[], max_length=256
    )
    """Further vLLM arguments, for what has no field here."""

    env: list[EnvVar] = Field(
        default=[],
        max_length=256,
        json_schema_extra=_BY_NAME,
    )
    """Further environment variables of the engine container."""

    replay: Replay | None = None
    """A recording to replay in place of vLLM, on any node and without a GPU: to test clients, autoscalers and policies.
    What else the spec says is checked and planned as ever, for nodes that need not exist, but no model is loaded."""


class Workload(ApiModel):
    """What is known of the requests. It changes no plan, only the advice."""

    kind: WorkloadKind | None = None
    """What most requests are."""

    temperature: Annotated[str, StringConstraints(max_length=4, pattern=TEMPERATURE)] | None = None
    """Sampling temperature that most requests ask for, as a decimal: 0.7."""

    primary_slo: Slo | None = None
    """What the service promises first of all: time to the first token, time for each further one, or throughput."""

    prompt_tokens: StrictInt | None = Field(default=None, ge=1, le=16_777_216)
    """Tokens of a usual prompt."""

    output_tokens: StrictInt | None = Field(default=None, ge=1, le=16_777_216)
    """Tokens of a usual answer."""


class Override(ApiModel):
    """A person goes on against the plan, visibly."""

    planning: Planning
    """Ignore: launch although the plan says DoesNotFit."""

    reason: ShortText
    """Why; shown in the status."""


class GateOverride(ApiModel):
    """A person goes on without a judgement, visibly."""

    reason: ShortText
    """Why; shown in the status."""


class Gate(Against):
    """A golden capture that the engines of a new spec are judged by before they roll out."""

    capture: ObjectName
    """A SpecDecodeCapture of one arm in this namespace that succeeded, of engines that served well. The engines of a
    new spec are sent its workload once more, with its seed."""

    override: GateOverride | None = None
    """Roll out without being judged, as long as this is here."""


class Rollout(ApiModel):
    """How engines of a new spec take the place of the old ones."""

    strategy: RolloutStrategy = RolloutStrategy.REPLACE
    """Replace: an old engine ends before its successor starts, so no more GPUs are needed. Surge: one engine more
    than replicas is started first, so none is missing meanwhile."""

    gate: Gate | None = None
    """Engines that differ from those that serve are first captured with the workload of a golden capture, and roll out
    only if they serve as well. Absent: they roll out at once."""

    paused: StrictBool = False
    """Change nothing in the running engines but their number until it is false again."""


class PodTemplate(ApiModel):
    """What is merged into the engine pods."""

    metadata: Annotated[dict[str, Any], Field(max_length=16), BOUNDED] | None = None
    """Labels and annotations to add."""

    spec: Annotated[dict[str, Any], Field(max_length=64), BOUNDED] | None = None
    """Pod spec to merge: tolerations, volumes, priorityClassName, …"""


class SpecDecodeDeploymentSpec(ApiModel):
    """A target model, how to speculate for it, and where."""

    target: Target
    """The model whose outputs are served."""

    speculation: Speculation | None = None
    """How the engine speculates. Absent: it does not."""

    parallelism: Parallelism = Parallelism()
    """Over how many GPUs one replica spreads."""

    accelerator: Accelerator = Accelerator()
    """What one replica runs on."""

    serving: Serving = Serving()
    """What the engine is told."""

    objective: Objective = Objective.QUALITY
    """What the plan aims at where it may choose: the least quantized target, the most KV cache tokens for each GPU,
    or the fewest GPUs."""

    workload: Workload | None = None
    """What is known of the requests, for advice."""

    replicas: StrictInt = Field(default=1, ge=0, le=1000)
    """Engine replicas; leave it out when an autoscaler owns it."""

    rollout: Rollout = Rollout()
    """How engines of a new spec take the place of the old ones."""

    models: Models = Models()
    """Where models come from."""

    engine: Engine = Engine()
    """Which vLLM runs."""

    suspend: StrictBool = False
    """Zero pods, everything else kept."""

    override: Override | None = None
    """Go on against a plan that does not fit."""

    policy: Policy | None = None
    """What is done about speculation by measured goodput and the load now. Absent: nothing."""

    captures: list[CaptureSchedule] = Field(
        default=[],
        max_length=8,
        json_schema_extra=_BY_NAME,
    )
    """Captures of this deployment that are started by the clock."""

    pod_template: PodTemplate | None = None
    """Merged into the engine pods, lists by the names of their elements: the engine's container is called engine, any
    other is a further container and needs an image."""
