"""Reject values of `spec.engine.extraArgs` and `spec.engine.env` that vLLM rejects at start-up.

Each entry of `flag_checks.json` corresponds to one `raise` in vLLM's configuration, in vLLM's order. An entry reports a
problem only if vLLM certainly rejects the value. Values of an unexpected type, and values that depend on the model,
are left to the engine.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from specdecode_operator.enums import CudagraphMode, Platform
from specdecode_operator.problems import Problem, shown
from specdecode_operator.untrusted import parse_json
from specdecode_operator.vllm.extra_args_parser import Option, json_or_text, json_value, options
from specdecode_operator.vllm.model_runner import runs_on_v1
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, EngineProfile
from specdecode_operator.vllm.settings import EngineSettings
from specdecode_operator.vllm.speculative_config import EXTRA_CONFIG
from specdecode_operator.vllm.versions import release

_SPECULATION: Final = "speculation."
_ENV: Final = "env."
_ENABLE_LORA: Final = "--enable-lora"


@dataclass(frozen=True)
class FlagCheck:
    """One check of a flag's value in vLLM."""

    source: str
    """File and line of the ``raise`` in vLLM 0.33, below ``vllm/``."""
    name: str
    """Flag, JSON key, variable or extraConfig key that the problem is reported for, as in `Given`."""
    when: Mapping[str, Any]
    """Test of each name in `Given`: vLLM rejects values that pass all tests."""
    fix: str
    words: str = ""
    """Part of vLLM's message that identifies this check; empty if the message names only the flag."""
    since: str = KNOWN_VERSIONS[0]
    note: str = ""

    @property
    def place(self) -> str:
        """Field of a spec that sets the name."""
        if self.name.startswith(_SPECULATION):
            return f"{EXTRA_CONFIG}.{self.name.removeprefix(_SPECULATION)}"
        if self.name.startswith(_ENV):
            return f"spec.engine.env {self.name.removeprefix(_ENV)}"
        return f"spec.engine.extraArgs {self.name}"


FLAG_CHECKS: Final = tuple(
    FlagCheck(**row) for row in json.loads(Path(__file__).with_name("flag_checks.json").read_text(encoding="utf-8"))
)


class Given:
    """Flags, variables, extraConfig keys and facts of one engine, by name.

    Names are ``--flag``, ``--flag.key`` for a key of a JSON value, ``env.NAME``, ``speculation.key`` and the names in
    `_DERIVED`. A switch is True or False. A name is None if it is absent, or if it is written in two ways that vLLM
    does not merge.
    """

    def __init__(self, settings: EngineSettings, profile: EngineProfile, env: Mapping[str, str | None]) -> None:
        self.settings = settings
        self.profile = profile
        self.env = env
        self._options: dict[str, list[Option]] = {}
        for option in options(settings.extra_args, profile):
            self._options.setdefault(option.flag.name, []).append(option)
        further = settings.speculation.extra_config if settings.speculation else None
        self._further: Mapping[str, Any] = parse_json(further) if further else {}

    def __getitem__(self, name: str) -> Any:
        if name in _DERIVED:
            return _DERIVED[name](self)
        if name == _ENABLE_LORA and self.settings.adapters is not None:
            return True
        part, _, path = name.partition(".")
        if not name.startswith("--"):
            return (self._further if f"{part}." == _SPECULATION else self.env).get(path)
        given = self._options.get(part, [])
        if given and path:
            # vLLM keeps only one of several spellings.
            one_spelling = len({(option.spelled, bool(option.path)) for option in given}) == 1
            value: Any = json_value(given) if one_spelling else None
            for key in path.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            return value
        if given and given[-1].flag.values == "0":
            return not given[-1].negated
        return json_or_text(given[-1].value) if given and not given[-1].path else None

    def option(self, name: str) -> Option | None:
        """Return the last option that sets a flag; None if it is absent."""
        given = self._options.get(name.partition(".")[0], [])
        return given[-1] if given else None

    def passes(self, name: str, test: Any) -> bool:
        """Apply a test of `FlagCheck.when`: an expected value, or operands by `_TESTS`."""
        value = self[name]
        if not isinstance(test, dict):
            return isinstance(value, bool) == isinstance(test, bool) and bool(value == test)
        for kind, operand in test.items():
            if kind == "object":
                # Some flags treat None and an empty text as no value (engine/arg_utils.py, optional_type).
                option = self.option(name)
                if option is None or option.path or option.value in ("", "None") or json_value([option]) is not None:
                    return False
            elif not _TESTS[kind](value, self[operand] if kind in _OF_TWO and isinstance(operand, str) else operand):
                return False
        return True


def flag_value_problems(
    settings: EngineSettings, profile: EngineProfile, env: Mapping[str, str | None] | None = None
) -> list[Problem]:
    """Return a problem for each name that vLLM's version rejects; ``env`` are the variables of spec.engine.env.

    A variable without a known value counts as absent. Problems do not show values of flags, which may be secrets.
    """
    given, problems = Given(settings, profile, env or {}), dict[str, Problem]()
    for check in FLAG_CHECKS:
        name = check.name
        if name in problems or release(profile.version) < release(check.since):
            continue
        if not all(given.passes(*test) for test in check.when.items()):
            continue
        option, (flag, _, path) = given.option(name), name.partition(".")
        if name.startswith(_SPECULATION):
            field, value = check.place, shown(given[name])
        elif name.startswith(_ENV):
            field, value = f"spec.engine.env[{list(given.env).index(path)}].value", given.env[path] or ""
        elif option is None:
            field, value = "spec.engine.extraArgs", name
        else:  # show only the flag: its value may be a secret
            field, value = f"spec.engine.extraArgs[{option.index}]", f"{flag}.{path}" if path else option.shown
        problems[name] = Problem(field, value, check.fix)
    return list(problems.values())


def _below(value: Any, least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value < least


def _above(value: Any, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > most


def _texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


_OF_TWO: Final = ("below", "differs_from")
"""Tests whose operand may be the name of another value."""

_TESTS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "above": _above,
    "absent_or": lambda value, other: value in (None, other),
    "any_below": lambda value, least: isinstance(value, list) and any(_below(each, least) for each in value),
    "any_of": lambda value, known: any(each in known for each in _texts(value)),
    "below": _below,
    "contains": lambda value, part: value is not None and part in value,
    "differs_from": lambda value, other: isinstance(value, int) and other is not None and value != other,
    "given": lambda value, expected: (value is not None) is expected,
    "has_none": lambda value, expected: (None in value) is expected,
    "in": lambda value, known: value in known,
    "longer": lambda value, most: len(value) > most,
    "matches": lambda value, pattern: value is not None and re.match(pattern, str(value)) is not None,
    "not": lambda value, other: not (isinstance(value, bool) == isinstance(other, bool) and value == other),
    "not_in": lambda value, known: value not in known,
    "repeats": lambda value, expected: (len(set(_texts(value))) < len(_texts(value))) is expected,
    "some": lambda value, expected: bool(value) is expected,
    "text": lambda value, expected: isinstance(value, str) is expected,
    "unknown": lambda value, known: isinstance(value, str) and value not in known,
}

_KV: Final = "--kv-transfer-config"
_CC: Final = "--compilation-config"
_BUCKETS: Final = "--custom-histogram-buckets"
_BUCKET_FAMILIES: Final = (
    *("request_latency", "time_to_first_token", "inter_token_latency", "iteration_tokens"),
    *("request_params_n", "request_num_preemptions", "request_tokens", "kv_cache_residency"),
)
"""vllm/v1/metrics/buckets.py, BucketFamilyKey."""
_CPU_LIST: Final = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*", re.ASCII)
"""Format of an entry of --numa-bind-cpus."""


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _text_of(given: Given, flag: str) -> str | None:
    """Return the value of a flag as written."""
    option = given.option(flag)
    return None if option is None or option.path else option.value


def _connectors(given: Given) -> list[str]:
    """Return the KV connectors, including those inside a MultiConnector (KVTransferConfig.has_connector)."""
    name, inner = given[f"{_KV}.kv_connector"], given[f"{_KV}.kv_connector_extra_config.connectors"]
    children = inner if name == "MultiConnector" and isinstance(inner, list) else []
    return _texts([name, *(each.get("kv_connector") for each in children if isinstance(each, Mapping))])


def _hisparse_pools(given: Given) -> list[Any]:
    """Return the host memory of each HiSparseConnector as written (config/kv_transfer.py)."""
    name, extra = given[f"{_KV}.kv_connector"], given[f"{_KV}.kv_connector_extra_config"]
    inner = extra.get("connectors") if isinstance(extra, Mapping) else None
    found: list[Any] = []
    if name == "HiSparseConnector":
        found = [extra]
    elif name == "MultiConnector" and isinstance(inner, list):
        same = [each for each in inner if isinstance(each, Mapping) and each.get("kv_connector") == "HiSparseConnector"]
        found = [each.get("kv_connector_extra_config") for each in same]
    return [each.get("host_pool_gib") if isinstance(each, Mapping) else None for each in found]


def _bounds(given: Given) -> list[list[Any]]:
    families = given[_BUCKETS]
    return [each for each in families.values() if isinstance(each, list)] if isinstance(families, Mapping) else []


def _numeric_bounds(given: Given) -> list[list[float]]:
    return [each for each in _bounds(given) if all(type(bound) in (int, float) for bound in each)]


def _descends(given: Given) -> bool:
    cpus = _text_of(given, "--numa-bind-cpus") or ""
    ends = [part.split("-") for part in cpus.split(",")] if _CPU_LIST.fullmatch(cpus) else []
    return any(int(each[0]) > int(each[-1]) for each in ends)


def _splits_small_batches(given: Given) -> bool:
    parts = 2 if given["--enable-dbo"] else _number(given["--ubatch-size"], 0)
    thresholds = (given["--dbo-decode-token-threshold"], given["--dbo-prefill-token-threshold"])
    return parts > 1 and any(_below(each, parts) for each in thresholds)


def _captures_graphs(given: Given) -> bool:
    settings, named = given.settings, (_CC, "--optimization-level", "--enforce-eager")
    off = given["engine.cpu"] or settings.serving.enforce_eager or settings.serving.cudagraph_mode is CudagraphMode.NONE
    return not off and not any(given.option(name) for name in named)


_DERIVED: Final[Mapping[str, Callable[[Given], Any]]] = {
    "engine.adapts": lambda given: bool(
        given.settings.speculation and given.settings.speculation.spec.adaptive_verification
    ),
    "engine.captures_graphs": _captures_graphs,
    "engine.cpu": lambda given: given.settings.platform is Platform.CPU,
    "engine.cudagraph_mode": lambda given: given.settings.serving.cudagraph_mode,
    "engine.data": lambda given: given.settings.data_parallel_size,
    "engine.dtype": lambda given: given.settings.dtype,
    "engine.expert_parallel": lambda given: given.settings.expert_parallel,
    "engine.maps_vocabulary": lambda given: bool(
        given.settings.speculation and given.settings.speculation.maps_vocabulary
    ),
    "engine.max_model_len": lambda given: given.settings.max_model_len,
    "engine.method": lambda given: given.settings.speculation and given.settings.speculation.method,
    "engine.online_quantization": lambda given: given.settings.online_quantization,
    "engine.pipeline": lambda given: given.settings.pipeline_parallel_size,
    "engine.tensor": lambda given: given.settings.tensor_parallel_size,
    "engine.v1": lambda given: runs_on_v1(given.settings, given.profile),
    "buckets.boolean": lambda given: any(isinstance(bound, bool) for each in _bounds(given) for bound in each),
    "buckets.empty": lambda given: [] in _bounds(given),
    "buckets.not_increasing": lambda given: any(a >= b for each in _numeric_bounds(given) for a, b in pairwise(each)),
    "buckets.not_positive": lambda given: any(bound <= 0 for each in _numeric_bounds(given) for bound in each),
    "buckets.unknown_family": lambda given: (
        isinstance(given[_BUCKETS], Mapping) and not set(given[_BUCKETS]) <= set(_BUCKET_FAMILIES)
    ),
    "compilation.mode": lambda given: (
        given[f"{_CC}.mode"].upper() if isinstance(given[f"{_CC}.mode"], str) else given[f"{_CC}.mode"]
    ),
    "custom_ops.base_modes": lambda given: sum(each in ("all", "none") for each in _texts(given[f"{_CC}.custom_ops"])),
    "custom_ops.both_ways": lambda given: any(
        each.startswith("+") and f"-{each[1:]}" in _texts(given[f"{_CC}.custom_ops"])
        for each in _texts(given[f"{_CC}.custom_ops"])
    ),
    "custom_ops.malformed": lambda given: any(
        each not in ("all", "none") and (not each[1:] or each[0] not in "+-")
        for each in _texts(given[f"{_CC}.custom_ops"])
    ),
    "dbo.splits_small_batches": _splits_small_batches,
    "engram.not_offloaded": lambda given: (
        given["--engram-config.cpu_offload"] is False or given["--engram-config.dp_shared_memory"] is True
    ),
    "hisparse.pools": _hisparse_pools,
    "kv.connectors": _connectors,
    "mamba.backend": lambda given: str(given["--mamba-backend"] or "cpu").lower(),
    "numa.descends": _descends,
    "numa.malformed": lambda given: _CPU_LIST.fullmatch(_text_of(given, "--numa-bind-cpus") or "0") is None,
    "offload.exceeds_group": lambda given: (
        _number(given["--offload-num-in-group"], 1) > _number(given["--offload-group-size"], 0)
    ),
    "offload.prefetches": lambda given: (
        given["--offload-backend"] == "prefetch" or _above(given["--offload-group-size"], 0)
    ),
    "proton.mode": lambda given: (
        str(given["--profiler-config.proton_mode"] or "").partition(":")[0].lower()
        if given["--profiler-config.profiler"] == "proton"
        else ""
    ),
    "scheduling.policy": lambda given: _text_of(given, "--scheduling-policy"),
}
