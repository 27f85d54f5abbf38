"""Which profile a version gets, and what is in it."""

import pytest

from specdecode_operator.engine.profiles import KNOWN_VERSIONS, UnknownEngineVersionError, find_profile
from specdecode_operator.engine.settings import Platform


def test_known_version_is_tested_and_has_an_image() -> None:
    profile = find_profile("0.32")
    assert profile.tested
    assert profile.version == "0.32"
    assert profile.images == {Platform.GPU: "docker.io/vllm/vllm-openai:v0.32.0"}


@pytest.mark.parametrize("version", ["0.33", "0.100", "1.0"])
def test_newer_version_borrows_the_newest_profile_and_says_so(version: str) -> None:
    profile = find_profile(version)
    assert not profile.tested
    assert profile.version == version
    assert profile.flags == find_profile(KNOWN_VERSIONS[-1]).flags
    assert not profile.images, "nobody has seen an image of this version"


@pytest.mark.parametrize(
    ("version", "fix"),
    [
        ("0.31", "write 0.32 or newer"),
        ("0.9", "write 0.32 or newer"),
        ("0.32.0", "write major and minor"),
        ("v0.32", "write major and minor"),
        ("latest", "write major and minor"),
        ("0.032", "write major and minor"),
        ("0.32\n", "write major and minor"),
        ("", "write major and minor"),
    ],
)
def test_older_or_malformed_version_is_refused_with_the_fix(version: str, fix: str) -> None:
    with pytest.raises(UnknownEngineVersionError, match=fix) as caught:
        find_profile(version)
    assert caught.value.problem.field == "spec.engine.version"
    assert caught.value.problem.value == version


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_no_flag_is_both_accepted_and_removed(version: str) -> None:
    profile = find_profile(version)
    assert not set(profile.flags) & set(profile.removed_flags)


def test_flags_have_their_aliases_and_arity() -> None:
    flags = find_profile("0.32").flags
    assert flags["-tp"].name == "--tensor-parallel-size"
    assert flags["--no-async-scheduling"].name == "--async-scheduling"
    assert flags["--enforce-eager"].values == "0"
    assert flags["--served-model-name"].values == "+"
    assert flags["--hf-token"].values == "?"


def test_a_cached_profile_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        find_profile("0.32").removed_flags["--x"] = "y"  # type: ignore[index]
