"""The condition EngineDiffers: engines that say they are another vLLM than they are launched and sized as."""

from collections import Counter
from collections.abc import Mapping

from specdecode_operator.deployment.conditions import TRUE, ConditionUpdate
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.engine.image_version import version_of_engine
from specdecode_operator.engine.metrics import EngineReading, Reading

ENGINE_DIFFERS = "EngineDiffers"
_MOST_NAMED = 3
"""During a rollout there are two; engines may say anything."""


def said_versions(readings: Mapping[str, Reading]) -> list[str]:
    """Return the versions that engines say, the most frequent first."""
    said = Counter(each.version for each in readings.values() if isinstance(each, EngineReading) and each.version)
    return [version for version, _ in said.most_common(_MOST_NAMED)]


def version_conditions(facts: Facts, readings: Mapping[str, Reading]) -> list[ConditionUpdate]:
    """Return the condition while it is so; a replay is no vLLM, and says the version of what was recorded."""
    planned = facts.profile.version
    others = {version: version_of_engine(version) for version in said_versions(readings)}
    differing = [version for version, minor in others.items() if minor not in (None, planned)]
    if not differing or facts.replay is not None:
        return []
    message = (
        f"the engines say that they are vLLM {', '.join(differing)}, and are launched and sized as spec.engine.version"
        f" {planned}: set it to {others[differing[0]]}, or name an image of {planned} (spec.engine.image)"
    )
    return [ConditionUpdate(ENGINE_DIFFERS, TRUE, "OtherVersion", message)]
