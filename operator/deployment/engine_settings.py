"""Settings of an engine's command line and environment, and the timeouts of its pod, from a spec and its pair."""

import json
from dataclasses import dataclass

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.models.checkpoints import short_name
from specdecode_operator.deployment.models.model_locations import downloads_in_pods, engine_model_path
from specdecode_operator.deployment.pod_template_merge import PRE_STOP_S, SHORTEST_GRACE_S, TEARDOWN_S
from specdecode_operator.enums import AcceleratorType, Dtype, Method, OnlineQuantization, Precision, Quantization
from specdecode_operator.sizing.families.draft_heads import method_of_head
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.pair import Pair
from specdecode_operator.sizing.startup_time import IMAGE_PULL_S, SLOWEST_BYTES_PER_S
from specdecode_operator.sizing.version_rules import Runner
from specdecode_operator.vllm import settings

PROBE_PERIOD_S = 5
# Time of a start without reading weights: imports, compilation, kernel warm-up, CUDA graphs. Cold starts of 120B-class
# models took 545 to 600 s in all; this is 1.5 times that, although reading is counted separately.
_WARM_UP_S = 900
_SHUTDOWN_TIMEOUT_S = 60  # Default time for running requests after TERM


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of one engine pod in seconds."""

    startup_s: int
    progress_deadline_s: int
    pre_stop_s: int  # How long an engine keeps serving after its pod left the Service
    shutdown_timeout_s: int
    termination_grace_s: int


def timeouts(
    spec: SpecDecodeDeploymentSpec,
    weights_bytes: int,
    measuring_s: int = 0,
    slowest_s: int = 0,
    *,
    together: bool = False,
) -> Timeouts:
    """Return the timeouts of an engine that loads ``weights_bytes`` and then profiles its steps for ``measuring_s``.

    startup = 900 s + bytes / 125 MiB/s + measuring, at least the estimate ``slowest_s``; a download counts as much as
    reading. Pods that start ``together`` wait for each other: one may still pull or download while another is ready
    to load.
    """
    reading_s = -(-weights_bytes // SLOWEST_BYTES_PER_S)
    before_s = IMAGE_PULL_S + (reading_s if downloads_in_pods(spec) else 0)
    needed_s = max(_WARM_UP_S + reading_s + measuring_s, slowest_s) + (before_s if together else 0)
    # The startup probe counts whole periods.
    startup_s = -(-needed_s // PROBE_PERIOD_S) * PROBE_PERIOD_S
    shutdown_s = shutdown_timeout_s(spec)
    return Timeouts(
        startup_s=startup_s,
        progress_deadline_s=before_s + startup_s,
        pre_stop_s=PRE_STOP_S,
        shutdown_timeout_s=shutdown_s,
        termination_grace_s=PRE_STOP_S + shutdown_s + TEARDOWN_S,
    )


def shutdown_timeout_s(spec: SpecDecodeDeploymentSpec) -> int:
    """Return the time for running requests after TERM, derived from a grace period in podTemplate if it has one."""
    grace_s = (spec.pod_template.spec or {}).get("terminationGracePeriodSeconds") if spec.pod_template else None
    if not isinstance(grace_s, int) or grace_s < SHORTEST_GRACE_S:
        return _SHUTDOWN_TIMEOUT_S
    return grace_s - PRE_STOP_S - TEARDOWN_S


def engine_settings(
    spec: SpecDecodeDeploymentSpec, pair: Pair, tensor: int, group: settings.NodeGroup | None = None
) -> settings.EngineSettings:
    """Return the settings of an engine's command line and environment; with ``group``, of one pod of a group."""
    limits, accelerator = pair.limits, spec.accelerator
    cpu = settings.CpuSettings(kv_cache_gib=accelerator.kv_cache_gib or 0, cores=accelerator.cpu_cores or 0)
    return settings.EngineSettings(
        model=engine_model_path(spec, spec.target),
        served_model_names=served_names(spec),
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=spec.parallelism.pipeline,
        data_parallel_size=spec.parallelism.data,
        expert_parallel=spec.parallelism.expert,
        shutdown_timeout_s=shutdown_timeout_s(spec),
        serving=spec.serving,
        # Overrides in extraArgs reach the engine as they are.
        hf_overrides=pair.target.told_config if spec.target.rope_scaling else None,
        dtype=Dtype.BFLOAT16 if spec.target.quantization is Quantization.BF16 else spec.serving.dtype,
        online_quantization=_online_quantization(pair.target, pair.target_precision),
        speculation=_speculation(spec, pair),
        cpu=None if accelerator.type is AcceleratorType.GPU else cpu,
        extra_args=tuple(spec.engine.extra_args),
        group=group,
        adapters=_adapters(spec, pair),
        target_on_v1=pair.era.runner is Runner.V1,
    )


def served_names(spec: SpecDecodeDeploymentSpec) -> tuple[str, ...]:
    """Return the model names that clients may use."""
    return tuple(spec.serving.served_model_names) or (short_name(spec.target.model),)


def _adapters(spec: SpecDecodeDeploymentSpec, pair: Pair) -> settings.AdapterSettings | None:
    slots = pair.adapters
    if slots is None:
        return None
    return settings.AdapterSettings(
        paths=tuple((each.name, engine_model_path(spec, each)) for each in spec.adapters),
        gpu_slots=slots.gpu,
        host_slots=slots.host,
        max_rank=slots.rank,
        target_modules=tuple(sorted(slots.modules)),
    )


def _online_quantization(geometry: ModelGeometry, wanted: Precision | None) -> OnlineQuantization | None:
    made = wanted is Precision.FP8 and geometry.checkpoint_precision is None
    return OnlineQuantization.FP8 if made else None


def _speculation(spec: SpecDecodeDeploymentSpec, pair: Pair) -> settings.SpeculationSettings | None:
    speculation = spec.speculation
    if speculation is None or speculation.method is Method.NONE:
        return None
    draft = speculation.draft
    return settings.SpeculationSettings(
        spec=speculation,
        schedule=tuple(
            settings.ScheduleRange(range_.from_, range_.to, range_.num_speculative_tokens)
            for range_ in speculation.num_speculative_tokens_by_batch_size
        ),
        draft_model=engine_model_path(spec, draft) if draft else None,
        draft_is_head=pair.draft is not None and method_of_head(pair.draft) is not None,
        drafts_in_parallel=pair.drafts_in_parallel,
        maps_vocabulary=pair.maps_vocabulary,
        draft_online_quantization=_online_quantization(pair.draft, pair.draft_precision) if pair.draft else None,
        draft_tensor_parallel_size=spec.parallelism.draft_tensor,
        extra_config=json.dumps(speculation.extra_config, sort_keys=True) if speculation.extra_config else None,
    )
