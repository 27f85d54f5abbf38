"""The condition SpeculationActive: whether the engines really draft, and do so as they were asked to."""

from collections.abc import Mapping
from typing import Final

from specdecode_operator.api.status.deployment import ConditionStatus, ObservedStatus, SpeculationFeature
from specdecode_operator.api.values import METHODS_OF_FREE_LENGTH, METHODS_WITH_LOOKUP
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.proof.acceptance import LOW_BY_DESIGN
from specdecode_operator.deployment.proof.features import OTHER_SETTING, REASONS, speculation_features
from specdecode_operator.deployment.proof.observed import answering_engines, no_engine_condition
from specdecode_operator.deployment.proof.recent import Recent
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.engine.metrics import Reading
from specdecode_operator.vocabulary import Method

_ENOUGH_STEPS: Final = 64
"""Tokens without a draft after which a drafter that proposed nothing is called idle: a few requests may be short."""

_ENOUGH_DRAFTED_TOKENS: Final = 256
_USELESS: Final = (
    "nothing of it is accepted: the draft is not made for this target, or gets no KV cache of the prompt, as may be"
    " with --kv-transfer-config in spec.engine.extraArgs (vllm-project/vllm#54926)"
)

_STOPPED: Final = (
    "the engines drafted before and do so no longer: a whole window of their steps had no draft. On model runner V1 a"
    " request that is longer than the draft goes stops it for all; else look at the engine's log, and start it anew"
    " with kubectl rollout restart"
)
"""For V1: vllm/v1/worker/gpu_model_runner.py, _input_fits_in_drafter."""


def prove_speculation(
    facts: Facts, tensor: int, readings: Mapping[str, Reading], observed: ObservedStatus | None, recent: Recent
) -> tuple[ConditionUpdate, list[SpeculationFeature]]:
    """Return whether the engines really draft, in the figures that the status shows, and what of it is in force.

    ``tensor`` is the tensor parallelism of the plan.
    """
    drafting = _drafts(facts, readings, observed, recent)
    features = speculation_features(facts, tensor, readings, observed, recent=recent, drafting=drafting)
    missing = [each for each in features if each.in_force is FALSE]
    if drafting.status is FALSE or not missing:
        return drafting, features
    first = missing[0].feature
    messages = [f"{each.feature} {each.asked} is not in force: {each.message}" for each in missing]
    if drafting.status is TRUE:
        messages.append(drafting.message)
    return _condition(FALSE, REASONS.get(first, OTHER_SETTING), ". ".join(messages)), features


def _drafts(
    facts: Facts, readings: Mapping[str, Reading], observed: ObservedStatus | None, recent: Recent
) -> ConditionUpdate:
    if facts.method is Method.NONE:
        return _condition(FALSE, "Disabled", "not asked for: spec.speculation is absent or its method is none")
    engines = answering_engines(readings)
    if not engines:
        return no_engine_condition("SpeculationActive", readings)
    # An engine that speculates has the counters from its start on.
    without = [name for name, engine in engines.items() if engine.speculation is None]
    if without:
        return _condition(FALSE, "NotDrafting", _without_counters(facts, without[0]))
    if observed is not None and observed.draft_tokens:
        if recent.stopped_drafting and _drafts_in_each_step(facts):
            return _condition(FALSE, "NotDrafting", _STOPPED)
        return _drafting(facts, observed)
    # No request has a draft for its first token, and some have no other.
    steps = [
        engine.generation_tokens if engine.decode_steps is None else engine.decode_steps for engine in engines.values()
    ]
    return _nothing_drafted(facts, sum(steps))


def _drafts_in_each_step(facts: Facts) -> bool:
    """Whether no step is without a draft: a lookup may find nothing, and a schedule or a recording say so."""
    finds = facts.method in METHODS_OF_FREE_LENGTH
    return not finds and 0 not in facts.pair.other_draft_lengths and facts.replay is None


def _without_counters(facts: Facts, engine: str) -> str:
    if facts.replay is not None:
        return "the recording that is replayed is of an engine without speculation"
    return (
        f"{engine} publishes no speculation counters: it serves without spec.speculation.method {facts.method};"
        " look for what turned it off in its log, in spec.engine.extraArgs and in spec.podTemplate"
    )


def _drafting(facts: Facts, observed: ObservedStatus) -> ConditionUpdate:
    message = f"acceptance {observed.acceptance}, mean acceptance length {observed.mean_acceptance_length}"
    if facts.replay is not None:
        recorded = f"{message} with K={observed.num_speculative_tokens}, of the recording that is replayed"
        return _condition(TRUE, "Replayed", f"{recorded}: no model runs")
    message += f" with K={facts.pair.num_speculative_tokens}"
    # The engine's counters leave out steps without a draft (vllm/v1/core/sched/scheduler.py).
    if facts.pair.other_draft_lengths:
        message += ", or what numSpeculativeTokensByBatchSize says"
    if observed.accepted_tokens == 0 and (observed.draft_tokens or 0) >= _ENOUGH_DRAFTED_TOKENS:
        message += f"; {_USELESS}"
    if facts.pair.adaptive_verification:
        message += f"; {LOW_BY_DESIGN}"
    if facts.pair.checks_by_entropy:
        message += "; with rejectionSampling fly tokens count as accepted that the target would have rejected"
    return _condition(TRUE, "Drafting", message)


def _nothing_drafted(facts: Facts, tokens: int) -> ConditionUpdate:
    """Return what it means that no engine has proposed a token yet, although it generated some where it might have."""
    if tokens < _ENOUGH_STEPS:
        return _condition(UNKNOWN, "NoTraffic", "ready to draft; too little has been asked of the engines to see it")
    if facts.method in METHODS_WITH_LOOKUP:
        return _condition(UNKNOWN, "NoMatches", "the engines generate, but no n-gram of a prompt came up again yet")
    if facts.method is Method.SUFFIX:
        return _condition(
            UNKNOWN, "NoMatches", "the engines generate, but nothing of an earlier answer came up again yet"
        )
    message = f"the engines generated {tokens} tokens, but drafted none with spec.speculation.method {facts.method}"
    ranges = facts.spec.speculation.num_speculative_tokens_by_batch_size if facts.spec.speculation else []
    if any(part.num_speculative_tokens == 0 for part in ranges):
        message += "; spec.speculation.numSpeculativeTokensByBatchSize says so for some numbers of requests"
    else:
        message += ": look for what turned it off in the engine's log and in spec.engine.extraArgs"
    return _condition(FALSE, "NotDrafting", message)


def _condition(status: ConditionStatus, reason: str, message: str) -> ConditionUpdate:
    return ConditionUpdate("SpeculationActive", status, reason, message)
