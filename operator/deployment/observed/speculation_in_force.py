"""What was asked of speculation, field by field, and whether engines do it: ``status.speculation``.

Three witnesses tell of it, and none of them is the command line: what an engine counts, which settings it noted that
it changed, and the configuration that its core started with. An engine that only says so may still do otherwise, so
counters go first where there are any.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from specdecode_operator.api.status.deployment import ConditionStatus, ObservedStatus, SpeculationFeature
from specdecode_operator.api.values import METHODS_OF_FREE_LENGTH
from specdecode_operator.deployment.conditions import FALSE, MESSAGE_LIMIT, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.proof.observed import answering_engines, decimal, no_engine_condition
from specdecode_operator.deployment.proof.recent import Recent
from specdecode_operator.deployment.proof.settings_in_force import change_message
from specdecode_operator.deployment.spec.engine_settings import engine_settings
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.engine.metrics import EngineReading, Reading
from specdecode_operator.engine.settings_watch import word
from specdecode_operator.engine.speculative_config import SPECULATIVE_KEYS, SPOKEN_KEYS, SpeculativeKey
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip
from specdecode_operator.vocabulary import Method

METHOD: Final = "method"
_LENGTH: Final = "numSpeculativeTokens"
_SCHEDULE: Final = "numSpeculativeTokensByBatchSize"
_DRAFT_TENSOR: Final = "parallelism.draftTensor"

REASONS: Final[Mapping[str, str]] = {
    METHOD: "OtherMethod",
    _LENGTH: "OtherDraftLength",
    _SCHEDULE: "ScheduleDropped",
    _DRAFT_TENSOR: "OtherDraftTensor",
    "adaptiveVerification": "NotAdaptive",
    "rejectionSampling": "OtherRejectionSampling",
    "draftSampling": "OtherDraftSampling",
    "draftLmHeadQuantization": "OtherDraftHead",
}
"""Why SpeculationActive is False, by the field that is not in force; of the others OTHER_SETTING."""
OTHER_SETTING: Final = "OtherSetting"
OTHERWISE: Final = frozenset({*REASONS.values(), OTHER_SETTING})
"""All of them: engines draft, and not as they were asked to."""

_ENOUGH_DRAFTED_TOKENS: Final = 64
"""Before that a length on average says little: the ends of a few requests decide it."""
_ROUNDED: Final = 0.02
"""How far an average of drafts of one length may be from it, as it stands in the status."""
_MOSTLY: Final = 0.9
"""Share of K that drafts have on average although all that can be is drafted."""

_WHERE: Final = "look for what says so in spec.engine.extraArgs, spec.engine.env and spec.podTemplate"
_SHORTER: Final = (
    "drafts are shortened at the end of spec.serving.maxModelLen, by structured output, and where a step has no room"
    " left in spec.serving.maxNumBatchedTokens"
)


@dataclass(frozen=True)
class _Engines:
    """What engines show of one deployment."""

    facts: Facts
    tensor: int
    readings: Mapping[str, EngineReading]
    observed: ObservedStatus | None
    recent: Recent
    drafting: ConditionUpdate
    """What is known of drafting at all."""

    @property
    def drafted(self) -> float | None:
        """Tokens of a draft on average, once there are enough of them."""
        seen = self.observed
        enough = seen is not None and (seen.draft_tokens or 0) >= _ENOUGH_DRAFTED_TOKENS
        return decimal(seen.mean_draft_length) if enough and seen is not None else None


_Finding = tuple[ConditionStatus, str]


def speculation_features(  # noqa: PLR0913  three witnesses
    facts: Facts,
    tensor: int,
    readings: Mapping[str, Reading],
    observed: ObservedStatus | None,
    *,
    recent: Recent,
    drafting: ConditionUpdate,
) -> list[SpeculationFeature]:
    """Return what was asked for and whether it is in force; nothing without speculation, and of a replay.

    ``tensor`` is the plan's tensor parallelism, ``drafting`` what is known of drafting at all.
    """
    engines = _Engines(facts, tensor, answering_engines(readings), observed, recent, drafting)
    if facts.method is Method.NONE or facts.replay is not None:
        return []
    none_answers = None if engines.readings else no_engine_condition("SpeculationActive", readings).message
    found = []
    for key, value in _asked(facts, tensor):
        feature = key.field.removeprefix("spec.").removeprefix("speculation.")
        judge = _JUDGES.get(feature, _by_its_word)
        in_force, message = (UNKNOWN, none_answers) if none_answers else judge(engines, key, value)
        told = clip(printable(message), MESSAGE_LIMIT)
        found.append(SpeculationFeature(feature=feature, asked=_text(value), in_force=in_force, message=told))
    return found


def _asked(facts: Facts, tensor: int) -> Iterator[tuple[SpeculativeKey, Any]]:
    """Return the keys of vLLM that fields of the spec decide, with their values."""
    settings = engine_settings(facts.spec, facts.pair, tensor)
    if settings.speculation is None:
        return
    # Follows from the models, and the target's split goes for the draft where none is asked for.
    unasked = {"parallel_drafting", *([] if facts.spec.parallelism.draft_tensor else ["draft_tensor_parallel_size"])}
    for key in SPECULATIVE_KEYS:
        value = key.value(settings, settings.speculation, facts.profile)
        if value is not None and key.key in SPOKEN_KEYS and key.key not in unasked:
            yield key, value


def _method(engines: _Engines, key: SpeculativeKey, value: Any) -> _Finding:
    other = _otherwise(engines, key, value)
    return (FALSE, other) if other else (engines.drafting.status, engines.drafting.message)


def _length(engines: _Engines, key: SpeculativeKey, value: Any) -> _Finding:
    """K: how long drafts are."""
    wrong = _other_places(engines, value) or _otherwise(engines, key, value)
    if wrong:
        return FALSE, wrong
    drafted, method = engines.drafted, engines.facts.method
    if drafted is None:
        return UNKNOWN, "too little has been drafted to see it"
    seen = f"drafts have {drafted:.2f} tokens on average"
    if method in METHODS_OF_FREE_LENGTH:
        return TRUE, f"{seen}: method {method} proposes as many as it finds, {value} at most"
    if engines.facts.pair.other_draft_lengths:
        return TRUE, f"{seen}: as many as {_SCHEDULE} says, {value} at most"
    if drafted < value * _MOSTLY and abs(drafted - round(drafted)) <= _ROUNDED:
        return FALSE, f"each draft has {round(drafted)} tokens; {_WHERE}, or set spec.speculation.{_LENGTH} to that"
    return (TRUE, seen) if drafted >= value * _MOSTLY else (UNKNOWN, f"{seen}: {_SHORTER}")


def _other_places(engines: _Engines, tokens: int) -> str | None:
    """Return which engine has counters for more or fewer places of a draft than are asked for."""
    for name, engine in engines.readings.items():
        places = len(engine.speculation.accepted_per_position) if engine.speculation is not None else 0
        if places not in (0, tokens):
            return f"{name} drafts up to {places} tokens; {_WHERE}, or set spec.speculation.{_LENGTH} to {places}"
    return None


def _schedule(engines: _Engines, key: SpeculativeKey, value: Any) -> _Finding:
    """K by the number of requests: vLLM drops it with a line in its log, and drafts K always."""
    wrong = _dropped(engines) or _otherwise(engines, key, value)
    if wrong:
        return FALSE, wrong
    tokens, drafted, method = engines.facts.pair.num_speculative_tokens, engines.drafted, engines.facts.method
    lengths = {length for _, _, length in value}
    without = _steps_without_draft(engines) if 0 in lengths else None
    if method in METHODS_OF_FREE_LENGTH:
        return UNKNOWN, f"method {method} proposes as many tokens as it finds, so that lengths of drafts tell nothing"
    if without:
        starved = f"{_STARVED}; " if engines.recent.acceptance_collapsed else ""
        return TRUE, f"{without} % of decoding steps had no draft; {starved}{_NOT_OFF}"
    if lengths == {tokens}:
        return TRUE, f"it asks for {tokens} tokens at each number of requests"
    if drafted is not None and abs(drafted - tokens) > _ROUNDED:
        return TRUE, f"drafts have {drafted:.2f} tokens on average, and not always {tokens}"
    return UNKNOWN, f"no draft of another length than {tokens} was seen: so many requests may not have run yet"


def _dropped(engines: _Engines) -> str | None:
    for name, engine in engines.readings.items():
        for change in _DROPPED:
            if change in (engine.changed_settings or ()):
                return f"{name}: {change_message(change)}"
    return None


_DROPPED: Final = ("schedule_with_data_parallel", "schedule_on_v1")

_STARVED: Final = "less than half of what was accepted once is accepted now"
_NOT_OFF: Final = (
    "0 tokens are not the same as none: a draft with layers still runs once each step and keeps its memory, and one"
    " that is starved meanwhile resumes with collapsed acceptance: use 1 in place of 0, or spec.speculation.method none"
)


def _steps_without_draft(engines: _Engines) -> int | None:
    drafted = engines.observed.drafted_steps_percent if engines.observed else None
    return None if drafted is None else 100 - drafted


def _draft_tensor(engines: _Engines, _: SpeculativeKey, value: Any) -> _Finding:
    """No version gives a draft another split, and none says so (status.plan.draftTensor)."""
    if value == engines.tensor:
        return TRUE, "vLLM splits the draft like the target"
    return FALSE, (
        f"vLLM splits the draft like the target, over {engines.tensor} GPUs, whatever it is told; remove"
        f" spec.{_DRAFT_TENSOR}"
    )


def _by_its_word(engines: _Engines, key: SpeculativeKey, value: Any) -> _Finding:
    """What no counter shows, an engine says at its start."""
    other = _otherwise(engines, key, value)
    if other:
        return FALSE, other
    silent = [name for name, engine in engines.readings.items() if key.key not in engine.speculation_settings]
    if silent:
        return UNKNOWN, (
            f"no counter shows it, and {silent[0]} does not say how it speculates: another logging configuration is in"
            " the way, or VLLM_LOGGING_LEVEL in spec.engine.env is above INFO"
        )
    return TRUE, "no counter shows it; the engines started with it, by their own word"


def _otherwise(engines: _Engines, key: SpeculativeKey, value: Any) -> str | None:
    """Return which engine says that it has something else, and what helps."""
    for name, engine in engines.readings.items():
        said = engine.speculation_settings.get(key.key)
        if said is not None and said != word(value):
            return f"{name} started with {key.key} {said}; {_WHERE}"
    return None


def _text(value: Any) -> str:
    """Return a value as people write it in the spec."""
    if isinstance(value, list):
        return clip(", ".join(f"{first}-{last}: {length}" for first, last, length in value), _LONGEST)
    return str(value).lower() if isinstance(value, bool) else word(value)


_LONGEST: Final = 256

_JUDGES: Final[Mapping[str, Callable[[_Engines, SpeculativeKey, Any], _Finding]]] = {
    METHOD: _method,
    _LENGTH: _length,
    _SCHEDULE: _schedule,
    _DRAFT_TENSOR: _draft_tensor,
}
"""What is told by more than the engine's word."""
