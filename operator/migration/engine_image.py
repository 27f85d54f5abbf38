"""Which vLLM an image holds, and whether the operator can launch it."""

from typing import Final

from specdecode_operator.api.deployment import Engine
from specdecode_operator.engine.image_version import split_reference, version_of_image
from specdecode_operator.engine.profiles import (
    KNOWN_VERSIONS,
    EngineProfile,
    UnknownEngineVersionError,
    find_profile,
)
from specdecode_operator.engine.settings import Platform
from specdecode_operator.migration.builder import MigrationError, Outcome, SpecBuilder

_OFFICIAL: Final = ("vllm/vllm-openai",)
_NEWEST: Final = KNOWN_VERSIONS[-1]


def take_image(image: str, platform: Platform, wanted: str | None, builder: SpecBuilder) -> EngineProfile:
    """Put image and version into the spec; return the profile that the arguments are read with.

    ``wanted`` is the version that the user gave, for images that do not tell.

    Raises
    ------
    MigrationError
        When the version that the user gave is none.
    """
    repository, tag = split_reference(image)
    version = wanted or version_of_image(image)
    if version is None:
        fix = f"does not tell the version of vLLM: give --engine-version, such as {_NEWEST}"
        builder.decide("spec.engine.version", tag or image or "nothing", fix)
        builder.set("engine.image", image)
        return find_profile(_NEWEST)
    try:
        profile = find_profile(version)
    except UnknownEngineVersionError as error:
        if wanted:
            raise MigrationError("--engine-version", wanted, error.problem.message) from error
        return _newer(image, repository, version, platform, builder)
    if _same(image, profile.images.get(platform)):
        builder.note(Outcome.OPERATOR, f"image {image}", f"is the operator's own image of vLLM {version}")
        if version != Engine().version:
            builder.set("engine.version", version)
    else:
        builder.take(f"image {image}", "engine.version", version)
        builder.set("engine.image", image)
    return profile


def _newer(image: str, repository: str, version: str, platform: Platform, builder: SpecBuilder) -> EngineProfile:
    """An old vLLM cannot be launched any more: the newest known one takes its place."""
    profile = find_profile(_NEWEST)
    if repository.endswith(_OFFICIAL) and platform in profile.images:
        reason = f"vLLM {version} is older than what the operator launches: {profile.images[platform]} takes its place"
        builder.drop(f"image {image}", f"{reason}; compare answers and speed before you move traffic")
    else:
        fix = f"holds vLLM {version}, which is older than what the operator launches: name an image of {_NEWEST}"
        builder.decide("spec.engine.image", image, fix)
    return profile


def _same(image: str, default: str | None) -> bool:
    return default is not None and image.removeprefix("docker.io/") == default.removeprefix("docker.io/")
