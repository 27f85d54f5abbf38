"""The condition SettingsInForce: whether engines do what the spec asks for, or changed it by themselves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.proof.observed import answering_engines, no_engine_condition
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.deployment.spec.rules.runner import runs_on_v1
from specdecode_operator.engine.metrics import Reading
from specdecode_operator.engine.rules.runners import waits_for_steps
from specdecode_operator.sizing.pair.pair import effective_batch

_TYPE: Final = "SettingsInForce"
_SCHEDULE: Final = "spec.speculation.numSpeculativeTokensByBatchSize"


@dataclass(frozen=True)
class _Change:
    """What holds instead of what was asked for, and what helps."""

    reason: str
    what: str
    fix: str


_CHANGES: Final = {
    "schedule_with_data_parallel": _Change(
        "ScheduleDropped",
        "K does not follow the number of requests, because data-parallel ranks must draft alike",
        f"remove {_SCHEDULE}, or serve by spec.replicas instead of data parallelism",
    ),
    "schedule_on_v1": _Change(
        "ScheduleDropped",
        "K does not follow the number of requests, because model runner V1 cannot shorten drafts of this method",
        f"remove {_SCHEDULE}, or use another method",
    ),
    "max_model_len": _Change(
        "LengthReduced",
        "requests may be no longer than the draft goes, which is less than spec.serving.maxModelLen",
        "lower spec.serving.maxModelLen, or use a draft that goes as far",
    ),
    "max_num_seqs": _Change(
        "FewerRequests",
        "fewer requests than spec.serving.maxNumSeqs run together, because each takes several tokens of a draft's step",
        "raise spec.serving.maxNumBatchedTokens, or lower spec.serving.maxNumSeqs",
    ),
    "model_runner": _Change(
        "RunnerChanged",
        "model runner V1 serves, and the plan counts on V2",
        "look for what needs V1 in spec.engine.extraArgs and spec.engine.env",
    ),
    "async_scheduling": _Change(
        "NotAsynchronous",
        "the scheduler waits for each step, which takes time",
        "look for what turned that off in spec.engine.extraArgs and spec.engine.env",
    ),
    "cudagraph_mode_with_schedule": _Change(
        "GraphsReduced",
        "CUDA graphs are in pieces, because K follows the number of requests on model runner V1",
        f"remove {_SCHEDULE}, or look for what needs V1 in spec.engine.extraArgs and spec.engine.env",
    ),
    "cudagraph_mode_with_drafts": _Change(
        "GraphsReduced",
        "CUDA graphs are in pieces or there are none, because the attention backend replays one token a request",
        "name another --attention-backend in spec.engine.extraArgs",
    ),
    "draft_graphs": _Change(
        "GraphsReduced",
        "the draft runs without CUDA graphs, which its attention backend does not have",
        "leave --attention-backend out of spec.engine.extraArgs, or use another draft",
    ),
}
"""By the engine's changed settings; what costs most first."""


def change_message(setting: str) -> str:
    """Return what holds instead of what was asked for, and what helps."""
    change = _CHANGES[setting]
    return f"{change.what}; {change.fix}"


def settings_condition(facts: Facts, readings: Mapping[str, Reading]) -> ConditionUpdate:
    """Return whether engines changed a setting by themselves that the plan does not count with."""
    if facts.replay is not None:
        return ConditionUpdate(_TYPE, UNKNOWN, "Replayed", "what a replay has no need of is not looked for")
    engines = answering_engines(readings)
    if not engines:
        return no_engine_condition(_TYPE, readings)
    planned = _planned(facts)
    made = {
        setting: [name for name, engine in engines.items() if setting in (engine.changed_settings or ())]
        for setting in _CHANGES
        if setting not in planned
    }
    told = [(setting, names[0]) for setting, names in made.items() if names]
    if told:
        messages = [f"{name}: {change_message(setting)}" for setting, name in told]
        return ConditionUpdate(_TYPE, FALSE, _CHANGES[told[0][0]].reason, ". ".join(messages))
    silent = [name for name, engine in engines.items() if engine.changed_settings is None]
    if silent:
        message = (
            f"{silent[0]} does not say at /metrics what it changed: look at VLLM_LOGGING_LEVEL and other variables of"
            " its logging in spec.engine.env and spec.podTemplate, or at its log"
        )
        return ConditionUpdate(_TYPE, UNKNOWN, "NotSaid", message)
    return ConditionUpdate(_TYPE, TRUE, "AsAsked", "the engines changed no setting by themselves that was not planned")


def _planned(facts: Facts) -> set[str]:
    """Return what vLLM changes for such a spec, as the plan knows; warnings tell of it where it matters."""
    planned = set()
    on_v1 = runs_on_v1(facts.spec, facts.pair)
    if on_v1:
        planned |= {"model_runner", "cudagraph_mode_with_schedule"}
    # On V1 as of 0.31, with stages too.
    if waits_for_steps(facts.method, facts.profile, on_v1=on_v1) or (on_v1 and facts.spec.parallelism.pipeline > 1):
        planned.add("async_scheduling")
    if effective_batch(facts.pair) < facts.pair.limits.max_num_seqs:
        planned.add("max_num_seqs")
    return planned
