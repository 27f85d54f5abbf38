"""Check whether vLLM serves LoRA adapters with a target and its settings, and say what they change."""

from collections.abc import Iterator

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.engine_settings import served_names
from specdecode_operator.deployment.models.model_locations import ADAPTERS
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.problems import Problem
from specdecode_operator.sizing.arithmetic import GIB, format_gib
from specdecode_operator.sizing.memory.adapters import (
    LARGEST_VOCABULARY,
    LoraSupport,
    adapters_are_exact,
    adapts_output_head,
    first_version,
    host_bytes,
    lora_support,
)
from specdecode_operator.vllm import arguments
from specdecode_operator.vllm.environment import known_values
from specdecode_operator.vllm.extra_args_parser import last_option, options
from specdecode_operator.vllm.profiles import EngineProfile

_ENABLE = "--enable-lora"
_FUSES_REDUCTIONS, _FUSED = "inkling", "INKLING_MULTIMEM_AR"
RUNTIME_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_LORA_FLAGS = frozenset(each.flag for each in arguments.ARGUMENTS if each.field == arguments.ADAPTERS)
_MUCH_ON_HOST_BYTES = 8 * GIB
"""Less is usual for the host of a GPU. Our own choice."""

_ONLY_BACKEND = "allgather_reducescatter"


def adapter_problems(facts: Facts) -> Iterator[Problem]:
    """Yield why vLLM would not start with the adapters of a spec whose models are known."""
    target, slots = facts.pair.target, facts.pair.adapters
    if facts.replay is not None:
        return
    yield from _class_problems(facts)
    if slots is None:
        return
    # vllm/lora/layers/logits_processor.py, create_lora_weights.
    if adapts_output_head(target, slots) and target.vocab_size > LARGEST_VOCABULARY:
        message = (
            f"the target has {target.vocab_size} tokens, and vLLM supports adapters on output heads of at most"
            f" {LARGEST_VOCABULARY}: set targetModules of all adapters, without lm_head"
        )
        yield Problem(ADAPTERS, f"{len(facts.spec.adapters)} of {target.name}", message)
    if target.has_experts:
        yield from _expert_problems(facts)


def _class_problems(facts: Facts) -> Iterator[Problem]:
    """Yield why the class of the target takes no adapters (vllm/config/lora.py, verify_with_model_config)."""
    target, version, spec = facts.pair.target, facts.pair.limits.engine_version, facts.spec
    option = last_option(_ENABLE, spec.engine.extra_args, facts.profile)
    if facts.pair.adapters is not None:
        field, value = ADAPTERS, f"{len(spec.adapters)} of {target.name}"
    elif option is not None and not option.negated:
        field, value = f"spec.engine.extraArgs[{option.index}]", option.name
    else:
        return
    fuses = target.architecture.lower().startswith(_FUSES_REDUCTIONS)
    if lora_support(target.architecture, version) is LoraSupport.NO:
        since = first_version(target.architecture)
        later = f"use vLLM {since} or newer, or merge" if since else "merge"
        message = (
            f"vLLM {version} does not support LoRA adapters for {target.architecture}: {later} each adapter into a copy"
            " of the model, or remove them"
        )
        yield Problem(field, value, message)
    elif fuses and known_values(spec.engine.env).get(_FUSED, "1") not in (None, "0"):
        message = f"{target.architecture} supports adapters only without fused reductions: set {_FUSED}=0 in engine.env"
        yield Problem(field, value, message)


def _expert_problems(facts: Facts) -> Iterator[Problem]:
    """Yield settings with which vLLM's layers of experts take no adapters (vllm/lora/layers/fused_moe.py)."""
    spec, slots = facts.spec, facts.pair.adapters
    if facts.on_cpu:
        # Monolithic kernels are refused (__init__), and all of the CPU are.
        message = f"{facts.pair.target.name} has experts, and their kernels for CPUs do not support adapters: use a GPU"
        yield Problem(ADAPTERS, str(len(spec.adapters)), message)
    if not spec.parallelism.expert:
        return
    if slots is not None and slots.fully_sharded:
        message = "vLLM does not combine it with parallelism.expert for adapters of experts; remove one of the two"
        yield Problem("spec.engine.extraArgs", "--fully-sharded-loras", message)
    backend = last_option("--all2all-backend", spec.engine.extra_args, facts.profile)
    if backend is not None and backend.value != _ONLY_BACKEND:
        message = f"with adapters and parallelism.expert vLLM only supports {_ONLY_BACKEND}; write that, or remove it"
        yield Problem("spec.engine.extraArgs", f"{backend.name} {backend.value}", message)


def adapter_problems_without_models(spec: SpecDecodeDeploymentSpec, profile: EngineProfile) -> Iterator[Problem]:
    """Yield names that clients cannot tell apart, and LoRA flags in extraArgs together with adapters.

    An adapter hides the target of its name (vllm/entrypoints/openai/models/serving.py).
    """
    names = served_names(spec)
    for index, adapter in enumerate(spec.adapters):
        if adapter.name in names:
            message = "is also a name of the target, and clients could not tell the two apart; rename one"
            yield Problem(f"{ADAPTERS}[{index}].name", adapter.name, message)
    given = [option for option in options(spec.engine.extra_args, profile) if option.flag.name in _LORA_FLAGS]
    if spec.adapters and given:
        flags = " and ".join(dict.fromkeys(option.name for option in given))
        message = f"conflicts with spec.adapters, from which the operator sets it; remove {flags}"
        yield Problem(f"spec.engine.extraArgs[{given[0].index}]", given[0].shown, message)


def adapter_notes(facts: Facts) -> Iterator[str]:
    """Yield what adapters change: memory of the host, acceptance, and the API that loads further ones."""
    slots, target = facts.pair.adapters, facts.pair.target
    if slots is not None:
        on_host = 0 if facts.on_cpu else host_bytes(target, slots)
        if on_host >= _MUCH_ON_HOST_BYTES:
            size = format_gib(on_host)
            yield f"adapters: each engine process keeps up to {slots.host} in host memory, which takes up to {size} GiB"
        if not adapters_are_exact(target):
            yield (
                f"adapters: sizing does not know which layers of {target.architecture} vLLM adapts, so their memory is"
                " an upper estimate with a wider margin"
            )
        if facts.pair.num_speculative_tokens:
            yield (
                "adapters: the draft is not adapted, so acceptance of requests with an adapter is unknown and usually"
                " lower; captures, golden captures and canary prompts use the base model"
            )
    loads = any(each.name == RUNTIME_VARIABLE and each.value not in ("", "0") for each in facts.spec.engine.env)
    if loads:
        yield (
            f"engine.env {RUNTIME_VARIABLE}: every client of the engines' port can load files of the pod as adapters"
            " (POST /v1/load_lora_adapter), and a restart forgets them; use spec.adapters instead"
        )
