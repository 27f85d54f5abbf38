"""What is worth knowing of a spec whose plan holds, although its engine starts."""

from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.deployment.spec.model_sources import KnownModels, checkpoint_doubts
from specdecode_operator.deployment.spec.pairing_rules import pairing_doubts
from specdecode_operator.deployment.spec.runner_rules import schedule_warnings
from specdecode_operator.engine.image_version import version_of_image
from specdecode_operator.engine.profiles import KNOWN_VERSIONS, EngineProfile


def plan_doubts(facts: Facts, known: KnownModels, tensor: int) -> list[str]:
    """Return a sentence for each doubt about facts that are settled on what the plan chose.

    ``known`` is what was read of the models, ``tensor`` the tensor parallelism of the plan.
    """
    return [
        *_engine_doubts(facts.profile, facts.spec.engine.image),
        *checkpoint_doubts(facts.spec, facts.pair, known),
        *pairing_doubts(facts.spec, facts.profile, known, tensor),
        *schedule_warnings(facts.spec, facts.profile, facts.pair),
    ]


def _engine_doubts(profile: EngineProfile, image: str | None) -> list[str]:
    """Return a sentence for each doubt about the version of an engine.

    ``image`` is what the spec names, None where it is the operator's own.
    """
    doubts = []
    if not profile.tested:
        doubts.append(
            f"vLLM {profile.version} is untested: it is launched and sized as {KNOWN_VERSIONS[-1]}, "
            "the newest version that is known"
        )
    told = version_of_image(image) if image else None
    if told is not None and told != profile.version:
        doubts.append(
            f"engine.image {image} is vLLM {told} by its name, and is launched and sized as engine.version "
            f"{profile.version}: set engine.version to {told}, unless the name misleads"
        )
    return doubts
