"""What is known of each vLLM version: flags, names, numbers.

The facts lie beside this file in ``data/``: ``profiles.json`` is kept by hand,
says what holds for every version and what a version has of its own, and names
its sources; ``flags.json`` is written from the versions' own argument parsers.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from specdecode_operator.api.values import Method
from specdecode_operator.engine.settings import OnlineQuantization, Platform
from specdecode_operator.problems import Problem

KNOWN_VERSIONS = ("0.28", "0.29", "0.30", "0.31", "0.32")
"""Versions with a profile, oldest first."""

_DATA = Path(__file__).parent / "data"
_Value = TypeVar("_Value")
_VERSION = re.compile(r"(0|[1-9]\d{0,3})\.(0|[1-9]\d{0,3})")


class UnknownEngineVersionError(ValueError):
    """The version is malformed, or older than every version we know."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(frozen=True)
class Flag:
    """One option of the engine's parser.

    Attributes
    ----------
    names
        As the engine's parser lists them: long name, negation, aliases.
    values
        How many values follow: "0", "1", "?" (0 or 1), "*" or "+" (1 or more).
    """

    names: tuple[str, ...]
    values: str

    @property
    def name(self) -> str:
        """The long name, by which everybody speaks of it."""
        return next(name for name in self.names if name.startswith("--"))


@dataclass(frozen=True)
class MetricNames:
    """How samples and labels at the engine's /metrics are called."""

    prefix: str
    cache_config: str
    num_gpu_blocks_label: str
    block_size_label: str
    kv_cache_tokens_label: str
    kv_cache_max_concurrency_label: str
    drafts: str
    draft_tokens: str
    accepted_tokens: str
    accepted_tokens_per_position: str
    position_label: str
    generation_tokens: str
    requests_running: str
    requests_waiting: str


@dataclass(frozen=True)
class DraftSlots:
    """Token slots a request that drafting adds to a step: some, and some for each proposed token."""

    fixed: int = 0
    each_token: int = 0

    def at(self, num_speculative_tokens: int) -> int:
        """Return the slots for K proposed tokens."""
        return self.fixed + self.each_token * num_speculative_tokens


@dataclass(frozen=True)
class TargetLimits:
    """Architectures of targets with a limit, as ``architectures`` in config.json names them.

    Attributes
    ----------
    without_hidden_states
        Do not hand out hidden states of inner layers in any version, which eagle3, dflash and dspark read.
    later_with_hidden_states
        Do so only from a later version on.
    with_hidden_states_over_stages
        Alone hand them out over pipeline stages.
    without_stages
        Cannot be cut into pipeline stages.
    """

    without_hidden_states: frozenset[str]
    later_with_hidden_states: frozenset[str]
    with_hidden_states_over_stages: frozenset[str]
    without_stages: frozenset[str]


@dataclass(frozen=True)
class EngineProfile:
    """What is known of one vLLM version.

    Attributes
    ----------
    version
        Major and minor, as the user wrote them.
    tested
        False: the version is newer than any we know, and the newest known
        profile stands in for it.
    images
        Default image by platform; a platform without one must be given an image.
    flags
        Every accepted spelling of every option.
    removed_flags
        Options that only older versions have, with what to write instead.
    later_flags
        Options that only later versions have, with the first of them.
    speculative_keys
        Keys that ``--speculative-config`` may have.
    runners
        Model runner that speculates so on GPUs, V1 or V2, by method.
    flags_to_v1
        Flags that make model runner V1 serve what V2 would.
    async_scheduling
        Whether the scheduler may run ahead of the workers, by method.
    drafts_over_stages
        Whether a draft works where the target is cut into pipeline stages, by method.
    defaults
        What an H100 or H200 gets where a flag is left out, by flag.
    online_quantization
        Value of ``--quantization`` that makes a precision while loading.
    default_block_sizes
        Tokens in one KV cache block where nobody says, by platform.
    block_size_multiples
        Block sizes must be multiples of this, by platform.
    draft_path_markers
        Parts of a draft's path that flip the method, with the method they flip to.
    extra_draft_slots
        Token slots a request that drafting adds to a step, by method.
    method_packages
        Python packages that an image must hold beside vLLM, by method.
    targets
        Architectures with a limit that methods and splits run into.
    metrics
        Names at /metrics.
    """

    version: str
    tested: bool
    images: Mapping[Platform, str]
    flags: Mapping[str, Flag]
    removed_flags: Mapping[str, str]
    later_flags: Mapping[str, str]
    speculative_keys: frozenset[str]
    runners: Mapping[Method, str]
    flags_to_v1: frozenset[str]
    async_scheduling: Mapping[Method, bool]
    drafts_over_stages: Mapping[Method, bool]
    defaults: Mapping[str, str]
    online_quantization: Mapping[OnlineQuantization, str]
    default_block_sizes: Mapping[Platform, int]
    block_size_multiples: Mapping[Platform, int]
    draft_path_markers: Mapping[str, str]
    extra_draft_slots: Mapping[Method, DraftSlots]
    method_packages: Mapping[Method, str]
    targets: TargetLimits
    metrics: MetricNames


def find_profile(version: str) -> EngineProfile:
    """Return the profile for a vLLM version, given as major and minor.

    A version newer than all known ones gets the newest profile, marked as not
    tested and without default images, since nobody has seen those images.

    Raises
    ------
    UnknownEngineVersionError
        The version is malformed or older than the oldest known one.
    """
    if not _VERSION.fullmatch(version):
        raise _unknown(version, "is not a vLLM version; write major and minor, such as 0.32")
    if version in KNOWN_VERSIONS:
        return _load(version)
    oldest, newest = KNOWN_VERSIONS[0], KNOWN_VERSIONS[-1]
    if _order(version) < _order(oldest):
        raise _unknown(version, f"is a vLLM version that this operator does not know; write {oldest} or newer")
    return replace(_load(newest), version=version, tested=False, images=MappingProxyType({}))


def _unknown(version: str, message: str) -> UnknownEngineVersionError:
    return UnknownEngineVersionError(Problem("spec.engine.version", version, message))


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@cache
def _load(version: str) -> EngineProfile:
    """Return the profile that the data files describe for a known version."""
    facts = _facts(version)
    table = _read("flags.json")
    flags = {
        name: Flag(tuple(row["names"]), row["values"])
        for row in table["flags"]
        if _has(row, version)
        for name in row["names"]
    }
    firsts = {name: row.get("first", KNOWN_VERSIONS[0]) for row in table["flags"] for name in row["names"]}
    later = {name: first for name, first in firsts.items() if name not in flags and _order(first) > _order(version)}
    return EngineProfile(
        version=version,
        tested=True,
        images=_by_platform(facts["images"]),
        flags=MappingProxyType(flags),
        removed_flags=MappingProxyType(
            {name: advice for name, advice in facts["removed_flags"].items() if name not in flags | later}
        ),
        later_flags=MappingProxyType(later),
        speculative_keys=frozenset(row["key"] for row in table["speculative_keys"] if _has(row, version)),
        runners=_by_method(facts["runners"]),
        flags_to_v1=frozenset(facts["flags_to_v1"]),
        async_scheduling=_by_method(facts["async_scheduling"]),
        drafts_over_stages=_by_method(facts["drafts_over_stages"]),
        defaults=MappingProxyType(facts["defaults"]),
        online_quantization=MappingProxyType(
            {OnlineQuantization(name): value for name, value in facts["online_quantization"].items()}
        ),
        default_block_sizes=_by_platform(facts["default_block_sizes"]),
        block_size_multiples=_by_platform(facts["block_size_multiples"]),
        draft_path_markers=MappingProxyType(facts["draft_path_markers"]),
        extra_draft_slots=_by_method(
            {method: DraftSlots(**slots) for method, slots in facts["extra_draft_slots"].items()}
        ),
        method_packages=_by_method(facts["method_packages"]),
        targets=TargetLimits(**{limit: frozenset(names) for limit, names in facts["targets"].items()}),
        metrics=MetricNames(**facts["metrics"]),
    )


def _facts(version: str) -> dict[str, dict[str, Any]]:
    """Return what holds for every version, with the version's own differences on top."""
    profiles = _read("profiles.json")
    own = profiles["versions"][version]
    return {name: fact | own.get(name, {}) for name, fact in profiles["every_version"].items()}


def _has(row: Mapping[str, Any], version: str) -> bool:
    """Whether a row of the flag table holds for a version: from its first version to its last."""
    first, last = row.get("first", version), row.get("last", version)
    return _order(first) <= _order(version) <= _order(last)


def _by_platform(values: Mapping[str, _Value]) -> Mapping[Platform, _Value]:
    return MappingProxyType({Platform(name): value for name, value in values.items()})


def _by_method(values: Mapping[str, _Value]) -> Mapping[Method, _Value]:
    return MappingProxyType({Method(name): value for name, value in values.items()})


def _read(name: str) -> Any:
    return json.loads((_DATA / name).read_text(encoding="utf-8"))
