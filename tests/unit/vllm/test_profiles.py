"""Versions and profiles."""

import re

import pytest

from specdecode_operator.enums import Method, Platform
from specdecode_operator.sizing.version_rules import find_version_rules
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, UnknownEngineVersionError, find_profile
from specdecode_operator.vllm.versions import LAUNCHED_VERSIONS, SIZED_VERSIONS, changes, version_facts

NEWEST = KNOWN_VERSIONS[-1]


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_known_version_is_tested_and_has_a_gpu_image(version: str) -> None:
    profile = find_profile(version)
    assert profile.tested
    assert profile.version == version
    assert profile.images == {Platform.GPU: f"docker.io/vllm/vllm-openai:v{version}.0"}


@pytest.mark.parametrize("version", [f"0.{int(NEWEST.removeprefix('0.')) + 1}", "0.100", "1.0"])
def test_newer_version_uses_the_newest_flags_and_is_untested(version: str) -> None:
    profile = find_profile(version)
    assert not profile.tested
    assert profile.version == version
    assert profile.flags == find_profile(NEWEST).flags
    assert not profile.images, "nobody has seen an image of this version"


@pytest.mark.parametrize(
    ("version", "fix"),
    [
        ("0.3", 'did you mean "0.30"?'),
        ("0.27", 'write "0.28" or newer'),
        ("0.9", 'write "0.28" or newer'),
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
    flags = find_profile(NEWEST).flags
    assert flags["-tp"].name == "--tensor-parallel-size"
    assert flags["--no-async-scheduling"].name == "--async-scheduling"
    assert flags["--enforce-eager"].values == "0"
    assert flags["--served-model-name"].values == "+"
    assert flags["--hf-token"].values == "?"


def test_switches_have_an_opposite_flag_since_0_33() -> None:
    """vllm/utils/argparse_utils.py, EnableDisableAction: --disable-x undoes --enable-x, and the other way round."""
    before, after = find_profile("0.32").flags, find_profile("0.33").flags
    for name, opposite in (("--enable-lora", "--disable-lora"), ("--disable-cascade-attn", "--enable-cascade-attn")):
        assert opposite not in before
        assert after[opposite] is after[name]
        assert [spelling for spelling in after[name].names if after[name].is_undone_by(spelling)] == [
            f"--no-{name[2:]}",
            opposite,
        ]


def test_each_version_has_the_flags_of_its_own_parser() -> None:
    """vllm/engine/arg_utils.py of 0.30 and 0.31: an alias came, one flag was renamed, another went."""
    before, after = find_profile("0.30"), find_profile("0.31")
    assert "--device-memory-utilization" not in before.flags
    assert after.flags["--device-memory-utilization"].name == "--gpu-memory-utilization"
    assert before.flags["--gpu-memory-utilization"].names == ("--gpu-memory-utilization",)
    renamed, router = "--enable-mamba-fine-grained-prefix-cache", "--enable-bf16x3-router-gemm"
    assert renamed in before.flags
    assert "--enable-mamba-shared-prefix-checkpoint" in after.removed_flags[renamed]
    assert router in find_profile("0.29").flags
    assert router in before.removed_flags


def test_flag_that_a_version_never_had_is_not_removed() -> None:
    """0.28 is older than the flag that 0.31 removed, so it says neither that it has it nor that it had."""
    profile = find_profile("0.28")
    renamed = "--enable-mamba-fine-grained-prefix-cache"
    assert renamed not in profile.flags
    assert renamed not in profile.removed_flags
    assert profile.later_flags[renamed] == "0.30"


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_later_flags_exist_in_a_later_version(version: str) -> None:
    profile = find_profile(version)
    assert not set(profile.later_flags) & set(profile.flags)
    for name, first in profile.later_flags.items():
        assert name in find_profile(first).flags
        assert KNOWN_VERSIONS.index(first) > KNOWN_VERSIONS.index(version)
    assert bool(profile.later_flags) == (version != NEWEST)


def test_profile_facts_differ_by_version() -> None:
    """vllm/v1/attention/backends/cpu_attn.py took blocks of 16 until 0.28; the CPU's matters to no other fact."""
    assert find_profile("0.28").block_size_multiples == {Platform.GPU: 16, Platform.CPU: 16}
    assert find_profile("0.29").block_size_multiples == {Platform.GPU: 16, Platform.CPU: 32}
    assert "disable_eagle_block_drop" not in find_profile("0.29").speculative_keys
    assert "disable_eagle_block_drop" in find_profile("0.30").speculative_keys


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize("method", [Method.DRAFT_MODEL, Method.NGRAM])
def test_model_runner_matches_sizing(version: str, method: Method) -> None:
    assert find_profile(version).runners[method] == find_version_rules(version, method.value).runner.value


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_default_memory_utilization_matches_sizing(version: str) -> None:
    percent = find_version_rules(version).default_memory_utilization_percent
    assert find_profile(version).defaults["--gpu-memory-utilization"] == f"0.{percent}"


def test_cached_profile_is_immutable() -> None:
    with pytest.raises(TypeError):
        find_profile(NEWEST).removed_flags["--x"] = "y"  # type: ignore[index]


# The table of vLLM versions: what each file says, and what holds for a version.


def test_sized_versions_are_consecutive() -> None:
    minors = [int(version.removeprefix("0.")) for version in SIZED_VERSIONS]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert SIZED_VERSIONS[-len(LAUNCHED_VERSIONS) :] == LAUNCHED_VERSIONS


@pytest.mark.parametrize("version", SIZED_VERSIONS)
def test_every_version_change_has_content_and_a_source(version: str) -> None:
    for change in changes(version):
        assert re.search(r"\w+\.py|vllm/|docs|documentation|sources|Options", change["source"]), change
        assert len(change) > 1 or "changes nothing" in change["source"], change


@pytest.mark.parametrize("version", SIZED_VERSIONS)
def test_every_version_change_differs_from_the_version_before(version: str) -> None:
    """What a version has from the one before it does not stand in its file again."""
    if version == SIZED_VERSIONS[0]:
        return
    before = version_facts(SIZED_VERSIONS[SIZED_VERSIONS.index(version) - 1])
    now = version_facts(version)
    for change in changes(version):
        for name in change.keys() - {"source"}:
            assert name not in before or now[name] != before[name], f"{version}: {name}"


@pytest.mark.parametrize("version", LAUNCHED_VERSIONS)
def test_every_launched_version_has_its_own_image(version: str) -> None:
    (image,) = (change["images"] for change in changes(version) if "images" in change)
    assert version in image["gpu"]


def test_version_changes_add_replace_and_remove_facts() -> None:
    limits = [version_facts(version)["targets"]["without_hidden_states"] for version in ("0.28", "0.29")]
    assert limits[0].keys() - limits[1].keys() == {"Olmo3ForCausalLM"}
    assert version_facts("0.28")["block_size_multiples"] == {"gpu": 16, "cpu": 16}
    assert version_facts("0.29")["block_size_multiples"] == {"gpu": 16, "cpu": 32}
    assert "--grpc-port" in version_facts("0.32")["flags"]
    assert "--grpc-port" not in version_facts("0.31")["flags"]


def test_unknown_versions_use_the_facts_of_the_nearest_version() -> None:
    assert version_facts("0.100.1") == version_facts("1.0") == version_facts(SIZED_VERSIONS[-1])
    assert version_facts("0.16.9") == version_facts("0.9") == version_facts(SIZED_VERSIONS[0])
