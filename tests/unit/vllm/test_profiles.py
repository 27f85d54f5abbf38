"""Which profile a version gets, and what is in it."""

import pytest

from specdecode_operator.enums import Method, Platform
from specdecode_operator.sizing.version_rules import find_version_rules
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, UnknownEngineVersionError, find_profile

NEWEST = KNOWN_VERSIONS[-1]


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_known_version_is_tested_and_has_an_image(version: str) -> None:
    profile = find_profile(version)
    assert profile.tested
    assert profile.version == version
    assert profile.images == {Platform.GPU: f"docker.io/vllm/vllm-openai:v{version}.0"}


@pytest.mark.parametrize("version", [f"0.{int(NEWEST.removeprefix('0.')) + 1}", "0.100", "1.0"])
def test_newer_version_borrows_the_newest_profile_and_says_so(version: str) -> None:
    profile = find_profile(version)
    assert not profile.tested
    assert profile.version == version
    assert profile.flags == find_profile(NEWEST).flags
    assert not profile.images, "nobody has seen an image of this version"


@pytest.mark.parametrize(
    ("version", "fix"),
    [
        ("0.27", "write 0.28 or newer"),
        ("0.9", "write 0.28 or newer"),
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


def test_a_switch_has_an_opposite_word_from_0_33_on() -> None:
    """vllm/utils/argparse_utils.py, EnableDisableAction: --disable-x undoes --enable-x, and the other way round."""
    before, after = find_profile("0.32").flags, find_profile("0.33").flags
    for name, opposite in (("--enable-lora", "--disable-lora"), ("--disable-cascade-attn", "--enable-cascade-attn")):
        assert opposite not in before
        assert after[opposite] is after[name]
        assert [spelling for spelling in after[name].names if after[name].is_undone_by(spelling)] == [
            f"--no-{name[2:]}",
            opposite,
        ]


def test_a_version_that_nobody_knows_is_known_as_the_newest() -> None:
    assert find_profile("0.99").known_as == NEWEST
    assert find_profile(KNOWN_VERSIONS[0]).known_as == KNOWN_VERSIONS[0]


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


def test_a_flag_that_never_was_there_has_not_gone() -> None:
    """0.28 is older than the flag that 0.31 removed, so it says neither that it has it nor that it had."""
    profile = find_profile("0.28")
    renamed = "--enable-mamba-fine-grained-prefix-cache"
    assert renamed not in profile.flags
    assert renamed not in profile.removed_flags
    assert profile.later_flags[renamed] == "0.30"


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_later_flags_are_ones_that_a_later_version_has(version: str) -> None:
    profile = find_profile(version)
    assert not set(profile.later_flags) & set(profile.flags)
    for name, first in profile.later_flags.items():
        assert name in find_profile(first).flags
        assert KNOWN_VERSIONS.index(first) > KNOWN_VERSIONS.index(version)
    assert bool(profile.later_flags) == (version != NEWEST)


def test_what_differs_by_version_differs() -> None:
    """vllm/v1/attention/backends/cpu_attn.py took blocks of 16 until 0.28; the CPU's matters to no other fact."""
    assert find_profile("0.28").block_size_multiples == {Platform.GPU: 16, Platform.CPU: 16}
    assert find_profile("0.29").block_size_multiples == {Platform.GPU: 16, Platform.CPU: 32}
    assert "disable_eagle_block_drop" not in find_profile("0.29").speculative_keys
    assert "disable_eagle_block_drop" in find_profile("0.30").speculative_keys


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize("method", [Method.DRAFT_MODEL, Method.NGRAM])
def test_the_runner_is_the_one_that_sizing_counts_with(version: str, method: Method) -> None:
    assert find_profile(version).runners[method] == find_version_rules(version, method.value).runner.value


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_the_default_memory_utilization_is_the_one_that_sizing_counts_with(version: str) -> None:
    percent = find_version_rules(version).default_memory_utilization_percent
    assert find_profile(version).defaults["--gpu-memory-utilization"] == f"0.{percent}"


def test_a_cached_profile_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        find_profile(NEWEST).removed_flags["--x"] = "y"  # type: ignore[index]
