"""What is known of each vLLM version: flags, names, numbers.

The facts lie beside this file in ``data/``: ``vllm-<version>.json`` is kept by
hand and names its sources, ``vllm-<version>.flags.json`` is dumped from that
version's own argument parser.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specdecode_operator.api.deployment import Method
from specdecode_operator.api.problems import Problem
from specdecode_operator.engine.settings import OnlineQuantization, Platform

KNOWN_VERSIONS = ("0.32",)
"""Versions with a profile, oldest first."""

_DATA = Path(__file__).parent / "data"
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
        Options of older versions, with what to write instead.
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
    metrics
        Names at /metrics.
    """

    version: str
    tested: bool
    images: Mapping[Platform, str]
    flags: Mapping[str, Flag]
    removed_flags: Mapping[str, str]
    online_quantization: Mapping[OnlineQuantization, str]
    default_block_sizes: Mapping[Platform, int]
    block_size_multiples: Mapping[Platform, int]
    draft_path_markers: Mapping[str, str]
    extra_draft_slots: Mapping[Method, int]
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
    newest = KNOWN_VERSIONS[-1]
    if _order(version) < _order(newest):
        raise _unknown(version, f"is a vLLM version that this operator does not know; write {newest} or newer")
    return replace(_load(newest), version=version, tested=False, images=MappingProxyType({}))


def _unknown(version: str, message: str) -> UnknownEngineVersionError:
    return UnknownEngineVersionError(Problem("spec.engine.version", version, message))


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@cache
def _load(version: str) -> EngineProfile:
    """Return the profile that the data files of a known version describe."""
    facts = _read(f"vllm-{version}.json")
    options = _read(f"vllm-{version}.flags.json")["flags"]
    flags = [Flag(tuple(option["names"]), option["values"]) for option in options]
    return EngineProfile(
        version=version,
        tested=True,
        images=MappingProxyType({Platform(name): image for name, image in facts["images"].items() if image}),
        flags=MappingProxyType({name: flag for flag in flags for name in flag.names}),
        removed_flags=MappingProxyType(facts["removed_flags"]),
        online_quantization=MappingProxyType(
            {OnlineQuantization(name): value for name, value in facts["online_quantization"].items()}
        ),
        default_block_sizes=MappingProxyType(
            {Platform(name): tokens for name, tokens in facts["default_block_sizes"].items()}
        ),
        block_size_multiples=MappingProxyType(
            {Platform(name): tokens for name, tokens in facts["block_size_multiples"].items()}
        ),
        draft_path_markers=MappingProxyType(facts["draft_path_markers"]),
        extra_draft_slots=MappingProxyType({Method(name): slots for name, slots in facts["extra_draft_slots"].items()}),
        metrics=MetricNames(**facts["metrics"]),
    )


def _read(name: str) -> Any:
    return json.loads((_DATA / name).read_text(encoding="utf-8"))
