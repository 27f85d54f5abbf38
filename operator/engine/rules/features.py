"""What of ``spec.engine.extraArgs`` does not go with speculation, or with its absence."""

import json
from collections.abc import Iterator

from specdecode_operator.api.values import Method
from specdecode_operator.engine.profiles import EngineProfile
from specdecode_operator.engine.rules.extra_args import Option, last_given, options
from specdecode_operator.engine.rules.runners import runs_on_v1
from specdecode_operator.engine.settings import EngineSettings, SpeculationSettings
from specdecode_operator.problems import Problem

_NO_PROBABILITY = 1e-5
"""What passes for none (vllm/sampling_params.py, _SAMPLING_EPS)."""

_READS_HIDDEN_STATES = (Method.EAGLE, Method.EAGLE3, Method.MTP, Method.DFLASH, Method.DSPARK)


def feature_problems(settings: EngineSettings, profile: EngineProfile) -> list[Problem]:
    """Return the further arguments that the engine refuses, or that make it refuse requests, beside speculation."""
    speculation = settings.speculation
    if speculation is None:
        return list(_metrics_problems(settings, profile))
    return [
        *_lora_problems(settings, speculation, profile),
        *_prefill_problems(settings, speculation, profile),
        *_processor_problems(settings, speculation, profile),
        *_sampling_problems(settings, profile),
    ]


def _metrics_problems(settings: EngineSettings, profile: EngineProfile) -> Iterator[Problem]:
    """vllm/config/vllm.py: per_request_spec_decode_metrics requires speculation, but for the value none."""
    given = _given("--per-request-spec-decode-metrics", settings, profile)
    if given is not None and given[1] != "none":
        yield _problem(given[0], settings, "there is no speculation to measure; remove it, or set spec.speculation")


def _lora_problems(
    settings: EngineSettings, speculation: SpeculationSettings, profile: EngineProfile
) -> Iterator[Problem]:
    """vllm/engine/arg_utils.py create_engine_config: adapters want room for every request's drafted tokens."""
    given = _given("--enable-lora", settings, profile)
    needed = settings.max_num_seqs * (speculation.num_speculative_tokens + 1)
    if given is not None and given[1] != "no" and settings.max_num_batched_tokens < needed:
        message = (
            f"with adapters vLLM wants maxNumSeqs x (K + 1) = {needed} or more; raise it, or lower maxNumSeqs or"
            " numSpeculativeTokens"
        )
        yield Problem("spec.serving.maxNumBatchedTokens", str(settings.max_num_batched_tokens), message)


def _prefill_problems(
    settings: EngineSettings, speculation: SpeculationSettings, profile: EngineProfile
) -> Iterator[Problem]:
    """vllm/config/vllm.py: such a prefill leaves no right hidden states for a draft to read."""
    given = _given("--kv-sharing-fast-prefill", settings, profile)
    if given is not None and given[1] != "no" and speculation.method in _READS_HIDDEN_STATES:
        message = f"method {speculation.method} reads hidden states that it leaves out; remove it"
        yield _problem(given[0], settings, message)


def _processor_problems(
    settings: EngineSettings, speculation: SpeculationSettings, profile: EngineProfile
) -> Iterator[Problem]:
    """vllm/v1/sample/logits_processor/__init__.py: model runner V1 refuses them with speculation."""
    given = _given("--logits-processors", settings, profile)
    if given is not None and runs_on_v1(settings, profile):
        message = f"vLLM {profile.version} has no logits processors of one's own with method {speculation.method}"
        yield _problem(given[0], settings, f"{message}; remove it")


def _sampling_problems(settings: EngineSettings, profile: EngineProfile) -> Iterator[Problem]:
    """vllm/sampling_params.py _validate_spec_decode: every request without a min_p of its own would be refused."""
    for option in options(settings.extra_args, profile):
        if option.flag.name == "--override-generation-config" and _least_probability(option) > _NO_PROBABILITY:
            message = "vLLM refuses requests with min_p while it speculates, so all would fail; leave min_p out"
            yield _problem(option.index, settings, message)


def _least_probability(option: Option) -> float:
    """Return the min_p that an option sets; 0 where it sets none, or what vLLM's parser will refuse."""
    try:
        value = json.loads(option.value)
    except ValueError:
        return 0
    told = {option.path: value} if option.path else value
    found = told.get("min_p") if isinstance(told, dict) else None
    return found if isinstance(found, int | float) else 0


def _given(name: str, settings: EngineSettings, profile: EngineProfile) -> tuple[int, str] | None:
    """Return where a flag is given last and its value, ``no`` where it is negated; None without."""
    flag = profile.flags.get(name)
    found = None if flag is None else last_given(flag, settings.extra_args, profile)
    if found is None:
        return None
    index, spelled = found
    if spelled.startswith("--no-"):
        return index, "no"
    _, equals, value = settings.extra_args[index].partition("=")
    following = settings.extra_args[index + 1 : index + 2]
    return index, value if equals else "".join(following)


def _problem(index: int, settings: EngineSettings, message: str) -> Problem:
    flag = settings.extra_args[index].partition("=")[0].partition(".")[0]
    return Problem(f"spec.engine.extraArgs[{index}]", flag, message)
