"""What is worth knowing of the engine that a spec names, although it starts."""

from specdecode_operator.engine.image_version import version_of_image
from specdecode_operator.engine.profiles import KNOWN_VERSIONS, EngineProfile


def engine_doubts(profile: EngineProfile, image: str | None) -> list[str]:
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
