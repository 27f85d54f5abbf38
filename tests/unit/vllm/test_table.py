"""The table of vLLM versions: what each file says, and what holds for a version."""

import re

import pytest

from specdecode_operator.vllm.versions import LAUNCHED_VERSIONS, SIZED_VERSIONS, changes, version_facts


def test_no_version_is_left_out() -> None:
    minors = [int(version.removeprefix("0.")) for version in SIZED_VERSIONS]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert SIZED_VERSIONS[-len(LAUNCHED_VERSIONS) :] == LAUNCHED_VERSIONS


@pytest.mark.parametrize("version", SIZED_VERSIONS)
def test_every_change_says_something_and_names_its_source(version: str) -> None:
    for change in changes(version):
        assert re.search(r"\w+\.py|vllm/|docs|documentation|sources|Options", change["source"]), change
        assert len(change) > 1 or "changes nothing" in change["source"], change


@pytest.mark.parametrize("version", SIZED_VERSIONS)
def test_every_change_changes(version: str) -> None:
    """What a version has from the one before it does not stand in its file again."""
    if version == SIZED_VERSIONS[0]:
        return
    before = version_facts(SIZED_VERSIONS[SIZED_VERSIONS.index(version) - 1])
    now = version_facts(version)
    for change in changes(version):
        for name in change.keys() - {"source"}:
            assert name not in before or now[name] != before[name], f"{version}: {name}"


@pytest.mark.parametrize("version", LAUNCHED_VERSIONS)
def test_each_launched_version_has_an_image_of_its_own(version: str) -> None:
    (image,) = (change["images"] for change in changes(version) if "images" in change)
    assert version in image["gpu"]


def test_a_change_adds_replaces_and_removes() -> None:
    limits = [version_facts(version)["targets"]["without_hidden_states"] for version in ("0.28", "0.29")]
    assert limits[0].keys() - limits[1].keys() == {"Olmo3ForCausalLM"}
    assert version_facts("0.28")["block_size_multiples"] == {"gpu": 16, "cpu": 16}
    assert version_facts("0.29")["block_size_multiples"] == {"gpu": 16, "cpu": 32}
    assert "--grpc-port" in version_facts("0.32")["flags"]
    assert "--grpc-port" not in version_facts("0.31")["flags"]


def test_beyond_what_is_known_the_nearest_version_stands_in() -> None:
    assert version_facts("0.100.1") == version_facts("1.0") == version_facts(SIZED_VERSIONS[-1])
    assert version_facts("0.16.9") == version_facts("0.9") == version_facts(SIZED_VERSIONS[0])


@pytest.mark.parametrize("version", ["latest", "0", "", "0.x", "v0.32"])
def test_what_is_no_version_is_told(version: str) -> None:
    with pytest.raises(ValueError, match="write it as"):
        version_facts(version)
