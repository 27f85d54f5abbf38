"""Profile of one vLLM version: its flags, metric names, draft slots, runners and limits."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from specdecode_operator.enums import Method, OnlineQuantization, Platform
from specdecode_operator.problems import Problem
from specdecode_operator.vllm.versions import LAUNCHED_VERSIONS, release, version_facts

KNOWN_VERSIONS = LAUNCHED_VERSIONS

_OPPOSITES = (("--enable-", "--disable-"), ("--disable-", "--enable-"))
_VERSION = re.compile(r"(0|[1-9]\d{0,3})\.(0|[1-9]\d{0,3})")


class UnknownEngineVersionError(ValueError):
    """The version is malformed, or older than every version we know."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(frozen=True)
class Flag:
    """One option of the engine's parser."""

    name: str
    values: str
    """Number of values: "0", "1", "?" (0 or 1), "*" or "+" (1 or more)."""
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All spellings, the long name first."""
        return (self.name, *self.aliases)

    def is_undone_by(self, name: str) -> bool:
        """Test whether a full name turns the flag off: --no-enable-x, and since 0.33 --disable-x."""
        undone = any(self.name.startswith(on) and name.startswith(off) for on, off in _OPPOSITES)
        return name.startswith("--no-") or undone


@dataclass(frozen=True)
class MetricNames:
    """Names of samples and labels on the engine's /metrics page."""

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
    prompt_tokens: str
    decode_steps: str
    requests_running: str
    requests_waiting: str
    finished_requests: str
    finished_reason_label: str
    time_to_first_token: str
    time_per_output_token: str
    prefix_cache_queries: str
    prefix_cache_hits: str
    kv_cache_usage: str
    preemptions: str

    @property
    def decode_seconds(self) -> str:
        """The sum of the histogram whose count is the number of steps."""
        return f"{self.decode_steps.removesuffix('_count')}_sum"

    @property
    def first_tokens(self) -> str:
        """The count of the histogram of first tokens."""
        return f"{self.time_to_first_token}_count"

    @property
    def first_token_seconds(self) -> str:
        """The sum of the histogram of first tokens."""
        return f"{self.time_to_first_token}_sum"


@dataclass(frozen=True)
class DraftSlots:
    """Token slots per request that drafting adds to a step: a constant, and slots for each proposed token."""

    fixed: int = 0
    each_token: int = 0

    def at(self, num_speculative_tokens: int) -> int:
        """Return the slots for K proposed tokens."""
        return self.fixed + self.each_token * num_speculative_tokens


@dataclass(frozen=True)
class TargetLimits:
    """Architectures of targets with a limit, by their names in ``architectures`` of config.json."""

    without_hidden_states: frozenset[str]
    """Architectures that do not expose the hidden states of inner layers, which eagle3, dflash and dspark read."""
    with_hidden_states_over_stages: frozenset[str]
    without_stages: frozenset[str]


@dataclass(frozen=True)
class AdaptiveVerification:
    """Support for adaptive verification, except what depends on the model (sizing/kernel_support.py)."""

    methods: frozenset[Method]
    later_methods: Mapping[str, str]
    rejected_flags: frozenset[str]


@dataclass(frozen=True)
class EngineProfile:
    """Known facts of one vLLM version; the table of versions names the source of each fact."""

    version: str
    """Major and minor, as the user wrote them."""
    tested: bool
    """False for a version newer than all known ones, which uses the newest known profile."""
    images: Mapping[Platform, str]
    flags: Mapping[str, Flag]
    removed_flags: Mapping[str, str]
    """Options that only older versions have, with their replacement."""
    later_flags: Mapping[str, str]
    speculative_keys: frozenset[str]
    later_speculative_keys: Mapping[str, str]
    variables: frozenset[str]
    runners: Mapping[Method, str]
    cache_follows_dtype: bool
    """Whether a KV cache of 16-bit floats must have the model's own type."""
    ends_with_draft: bool
    ended_methods: Mapping[str, str]
    """Methods that only older versions have, by vLLM's names, with the best replacement in this version."""
    flags_to_v1: frozenset[str]
    async_scheduling: Mapping[Method, bool]
    """Whether the scheduler may run ahead of the workers."""
    drafts_over_stages: Mapping[Method, bool]
    shortens_drafts_on_v2: frozenset[Method]
    """Methods whose draft on model runner V2 can propose fewer tokens if fewer are requested."""
    drafts_blocks_over_copies: bool
    """Whether dflash and dspark start with a mixture-of-experts target and data-parallel ranks."""
    watermarked_methods: frozenset[Method]
    loses_sampling_on_cpu: bool
    """Whether speculation on a CPU loses temperature, top-p and top-k of the requests."""
    defaults: Mapping[str, str]
    """Defaults of flags on an H100 or H200."""
    online_quantization: Mapping[OnlineQuantization, str]
    default_block_sizes: Mapping[Platform, int]
    block_size_multiples: Mapping[Platform, int]
    draft_path_markers: Mapping[str, str]
    """Parts of a draft's path for which vLLM changes the method, with the resulting method."""
    extra_draft_slots: Mapping[Method, DraftSlots]
    """Token slots per request that drafting adds to a step."""
    parallel_draft_slots: Mapping[Method, DraftSlots]
    asynchronous_over_stages_on_v1: bool
    """Whether model runner V1 prepares a step while pipeline stages run another."""
    maps_vocabularies: bool
    """Whether a draft model on a GPU may have another vocabulary."""
    method_packages: Mapping[Method, str]
    """Python packages that an image must have in addition to vLLM."""
    targets: TargetLimits
    adaptive_verification: AdaptiveVerification
    metrics: MetricNames

    @property
    def known_as(self) -> str:
        """The version with these facts: its own, or the newest known one."""
        return self.version if self.tested else KNOWN_VERSIONS[-1]

    def lacks(self, since: str | None) -> str:
        """Return the message about a setting that the version lacks; ``since`` is the first version that has it."""
        fix = "remove it" if since is None else f'remove it, or set engine.version: "{since}" or later'
        return f"vLLM {self.version} does not have it; {fix}"


def find_profile(version: str) -> EngineProfile:
    """Return the profile for a vLLM version, given as major and minor.

    A version newer than all known ones gets the newest profile, marked as not tested and without default images.

    Raises UnknownEngineVersionError if the version is malformed or older than the oldest known one.
    """
    if version in KNOWN_VERSIONS:
        return _profile(version)
    oldest, newest, problem = KNOWN_VERSIONS[0], KNOWN_VERSIONS[-1], ""
    if not _VERSION.fullmatch(version):
        problem = 'is not a vLLM version; write major and minor in quotes, such as "0.32"'
    elif release(version) < release(oldest):
        meant = f'did you mean "{version}0"? ' if f"{version}0" in KNOWN_VERSIONS else ""
        problem = f'is a vLLM version that this operator does not know; {meant}write "{oldest}" or newer'
    if problem:
        raise UnknownEngineVersionError(Problem("spec.engine.version", version, problem))
    return replace(_profile(newest), version=version, tested=False, images=MappingProxyType({}))


_BY_METHOD: Final = ("async_scheduling", "drafts_over_stages", "method_packages")
_BY_PLATFORM: Final = ("images", "default_block_sizes", "block_size_multiples")
_METHODS: Final = ("shortens_drafts_on_v2", "watermarked_methods")
_TEXTS: Final = ("speculative_keys", "variables", "flags_to_v1")


@cache
def _profile(version: str) -> EngineProfile:
    facts = version_facts(version)
    adaptive, percent = facts["adaptive_verification"], facts["default_memory_utilization_percent"]
    slots = {method: {} for method in facts["async_scheduling"]} | facts["extra_draft_slots"]
    on_v2 = facts["model_runner_v2"]["methods"]
    tables: dict[str, Any] = {
        "flags": _flags(facts),
        "removed_flags": facts["removed_flags"],
        "later_flags": _later(version, _flags),
        "later_speculative_keys": _later(version, lambda each: each["speculative_keys"]),
        "runners": {Method(each): "V2" if runs else "V1" for each, runs in on_v2.items() if each != Method.NONE},
        "ended_methods": facts["ended_methods"],
        "defaults": facts["defaults"] | {"--gpu-memory-utilization": f"0.{percent}"},
        "online_quantization": {OnlineQuantization(name): to for name, to in facts["online_quantization"].items()},
        "draft_path_markers": facts["draft_path_markers"],
        "extra_draft_slots": {Method(method): DraftSlots(**each) for method, each in slots.items()},
        "parallel_draft_slots": {
            Method(each): DraftSlots(**row) for each, row in facts["parallel_draft_slots"].items()
        },
        **{name: {Method(method): value for method, value in facts[name].items()} for name in _BY_METHOD},
        **{name: {Platform(platform): value for platform, value in facts[name].items()} for name in _BY_PLATFORM},
    }
    other: dict[str, Any] = {
        "version": version,
        "tested": True,
        "targets": TargetLimits(**{name: frozenset(classes) for name, classes in facts["targets"].items()}),
        "adaptive_verification": AdaptiveVerification(
            methods=frozenset(map(Method, adaptive["methods"])),
            later_methods=_later(version, lambda each: each["adaptive_verification"]["methods"]),
            rejected_flags=frozenset(adaptive["refused_flags"]),
        ),
        "metrics": MetricNames(**facts["metrics"]),
        **{name: frozenset(map(Method, facts[name])) for name in _METHODS},
        **{name: frozenset(facts[name]) for name in _TEXTS},
    }
    other |= {name: MappingProxyType(table) for name, table in tables.items()}
    plain = {field.name: facts[field.name] for field in fields(EngineProfile) if field.name not in other}
    return EngineProfile(**other, **plain)


def _flags(facts: Mapping[str, Any]) -> Mapping[str, Flag]:
    flags = [Flag(name, row["values"], tuple(row.get("aliases", ()))) for name, row in sorted(facts["flags"].items())]
    return {spelling: flag for flag in flags for spelling in flag.names}


def _later(version: str, keys: Callable[[Mapping[str, Any]], Iterable[str]]) -> Mapping[str, str]:
    """Return the keys that a version lacks and a later one has, with the first that has them."""
    own, later = set(keys(version_facts(version))), dict[str, str]()
    for known in KNOWN_VERSIONS[KNOWN_VERSIONS.index(version) + 1 :]:
        for key in keys(version_facts(known)):
            if key not in own:
                later.setdefault(key, known)
    return later
