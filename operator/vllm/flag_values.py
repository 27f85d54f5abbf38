"""Reject values of `spec.engine.extraArgs` and `spec.engine.env` that vLLM rejects at start-up.

Each row of `FLAG_CHECKS` corresponds to one `raise` in vLLM's configuration. A row reports a problem only if vLLM
certainly rejects the value. Values of an unexpected type, and values that depend on the model, are left to the
engine.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from specdecode_operator.enums import CudagraphMode, Dtype, Method
from specdecode_operator.problems import Problem, shown
from specdecode_operator.untrusted import parse_json
from specdecode_operator.vllm.extra_args_parser import Option, json_or_text, json_value, options
from specdecode_operator.vllm.model_runner import runs_on_v1
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, EngineProfile
from specdecode_operator.vllm.settings import EngineSettings, Platform
from specdecode_operator.vllm.speculative_config import EXTRA_CONFIG
from specdecode_operator.vllm.versions import release

_OF_SPECULATION: Final = "speculation."
"""Prefix of keys of spec.speculation.extraConfig in `Given`."""
_OF_ENVIRONMENT: Final = "env."
"""Prefix of variables of spec.engine.env in `Given`."""


class Given:
    """Flags, variables and extraConfig keys of one engine, by name.

    Names are ``--flag``, ``--flag.key`` for a key of a JSON value, ``env.NAME`` and ``speculation.key``. A switch is
    True or False. What is absent, or written in two ways that vLLM does not merge, is None.
    """

    def __init__(
        self,
        settings: EngineSettings,
        profile: EngineProfile,
        env: Mapping[str, str],
    ) -> None:
        self.settings = settings
        self.profile = profile
        self.env = env
        self._options: dict[str, list[Option]] = {}
        for option in options(settings.extra_args, profile):
            self._options.setdefault(option.flag.name, []).append(option)
        further = settings.speculation.extra_config if settings.speculation else None
        self._further: Mapping[str, Any] = parse_json(further) if further else {}

    def __getitem__(self, name: str) -> Any:
        if name.startswith(_OF_SPECULATION):
            return self._further.get(name.removeprefix(_OF_SPECULATION))
        if name.startswith(_OF_ENVIRONMENT):
            return self.env.get(name.removeprefix(_OF_ENVIRONMENT))
        flag, _, path = name.partition(".")
        given = self._options.get(flag, [])
        if not given:
            return None
        if path:
            return self._key(given, path.split("."))
        last = given[-1]
        if last.flag.values == "0":
            return not last.negated
        return None if last.path else json_or_text(last.value)

    def option(self, name: str) -> Option | None:
        """Return the last option that sets a flag; None if it is absent."""
        given = self._options.get(name.partition(".")[0], [])
        return given[-1] if given else None

    def text_of(self, flag: str) -> str | None:
        """Return the value of a flag as it is written; None if it is absent or has a dotted path."""
        option = self.option(flag)
        return None if option is None or option.path else option.value

    @property
    def on_cpu(self) -> bool:
        """Whether the engine runs on the CPU."""
        return self.settings.platform is Platform.CPU

    @property
    def on_v1(self) -> bool:
        """Whether model runner V1 serves the engine."""
        return runs_on_v1(self.settings, self.profile)

    @property
    def method(self) -> Method | None:
        """The method of speculation; None without speculation."""
        return self.settings.speculation.method if self.settings.speculation else None

    @staticmethod
    def _key(given: list[Option], path: list[str]) -> Any:
        """Return a key of a JSON value; None if it is written in several ways, of which vLLM would keep only one."""
        if len({(option.spelled, bool(option.path)) for option in given}) > 1:
            return None
        value: Any = json_value(given)
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True)
class FlagCheck:
    """One check that vLLM makes of a flag's value.

    Attributes
    ----------
    source
        File and line of the ``raise`` in vLLM 0.33, below ``vllm/``.
    name
        Flag, JSON key, variable or extraConfig key that the problem is reported for, as in `Given`.
    rejects
        Whether vLLM rejects what is given.
    words
        Part of vLLM's message that no other check has; empty if the message names the flag, but not this check.
    fix
        What is wrong and how to fix it.
    since
        First vLLM version with the check.
    """

    source: str
    name: str
    rejects: Callable[[Given], bool]
    words: str
    fix: str
    since: str = KNOWN_VERSIONS[0]

    @property
    def place(self) -> str:
        """Where a spec sets it."""
        for prefix, field in ((_OF_SPECULATION, f"{EXTRA_CONFIG}."), (_OF_ENVIRONMENT, "spec.engine.env ")):
            if self.name.startswith(prefix):
                return f"{field}{self.name.removeprefix(prefix)}"
        return f"spec.engine.extraArgs {self.name}"


def flag_value_problems(
    settings: EngineSettings,
    profile: EngineProfile,
    env: Mapping[str, str] | None = None,
) -> list[Problem]:
    """Return a problem for each row of the table that vLLM's version rejects.

    Parameters
    ----------
    env
        Variables of spec.engine.env.
    """
    return [
        Problem(*_place(check.name, given), check.fix)
        for given in [Given(settings, profile, env or {})]
        for check in rejecting(given)
    ]


def rejecting(given: Given) -> Iterator[FlagCheck]:
    """Yield the rows that reject what is given, one for each name."""
    seen: set[str] = set()
    for check in FLAG_CHECKS:
        if check.name not in seen and release(given.profile.version) >= release(check.since) and check.rejects(given):
            seen.add(check.name)
            yield check


def _place(name: str, given: Given) -> tuple[str, str]:
    """Return the field and the value of a problem. Values of flags are not shown, for they may be secrets."""
    if name.startswith(_OF_SPECULATION):
        return f"{EXTRA_CONFIG}.{name.removeprefix(_OF_SPECULATION)}", shown(given[name])
    if name.startswith(_OF_ENVIRONMENT):
        variable = name.removeprefix(_OF_ENVIRONMENT)
        return f"spec.engine.env[{list(given.env).index(variable)}].value", given.env[variable]
    option = given.option(name)
    flag, _, path = name.partition(".")
    if option is None:
        return "spec.engine.extraArgs", name
    return f"spec.engine.extraArgs[{option.index}]", f"{flag}.{path}" if path else option.shown


def _below(value: Any, least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value < least


def _above(value: Any, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > most


def _outside(value: Any, known: Collection[str]) -> bool:
    return isinstance(value, str) and value not in known


def _texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _any_below_one(value: Any) -> bool:
    return isinstance(value, list) and any(_below(each, 1) for each in value)


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


_KV: Final = "--kv-transfer-config"
_KV_ROLES: Final = ("kv_producer", "kv_consumer", "kv_both")
_EC: Final = "--ec-transfer-config"
_EC_ROLES: Final = ("ec_producer", "ec_consumer", "ec_both")
_CC: Final = "--compilation-config"
_MODES: Final = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")
_PROFILER: Final = "--profiler-config"
_OUTPUTS: Final = "--structured-outputs-config"
_EPLB: Final = "--eplb-config"
_ROUTED: Final = "--enable-return-routed-experts"
_SAMPLING_MASK: Final = "--return-sampling-mask"
_ROUNDING: Final = "--enable-mamba-cache-stochastic-rounding"
_MOONEP: Final = "moonep"
_EP_BACKENDS: Final = ("flashinfer_moe_ep_cutedsl", "flashinfer_moe_ep_mega_deep_gemm")
_MEGA_BACKENDS: Final = (*_EP_BACKENDS, "deep_gemm_mega_moe", "aiter_mega_moe")
_POINT_TO_POINT: Final = (
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "MoRIIOConnector",
    "MooncakeConnector",
)
_HISPARSE: Final = "HiSparseConnector"
_KEEP_CACHE_PLACES: Final = ("NixlPushConnector", "MoRIIOConnector", "MooncakeStoreConnector")
"""Connectors whose class says that it cannot follow a cache that sleep mode moves (supports_sleep_mode)."""
_BUCKETS: Final = "--custom-histogram-buckets"
_BUCKET_FAMILIES: Final = (
    *("request_latency", "time_to_first_token", "inter_token_latency", "iteration_tokens"),
    *("request_params_n", "request_num_preemptions", "request_tokens", "kv_cache_residency"),
)
"""vllm/v1/metrics/buckets.py, BucketFamilyKey."""
_CPU_LIST: Final = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*", re.ASCII)
"""Form of an entry of --numa-bind-cpus."""
_LAYOUTS: Final = ("LBNHC", "LBHNC", "LHBNC", "NHD", "HND", "BLHNC", "BLNHC", "BHLNC")
_ENGRAM: Final = "--engram-config"
_READS_MAPPED: Final = (Method.DRAFT_MODEL, Method.EAGLE, Method.EAGLE3, Method.DFLASH, Method.MTP)
"""Methods with a draft whose keys config/speculative.py reads, other than dspark."""


def _connectors(given: Given) -> list[str]:
    """Return the KV connectors, those inside a MultiConnector too (KVTransferConfig.has_connector)."""
    name, inner = given[f"{_KV}.kv_connector"], given[f"{_KV}.kv_connector_extra_config.connectors"]
    children = (
        [each.get("kv_connector") for each in inner or [] if isinstance(each, Mapping)]
        if (name == "MultiConnector" and isinstance(inner, list))
        else []
    )
    return _texts([name, *children])


def _hisparse_pools(given: Given) -> list[Any]:
    """Return the host memory of each HiSparseConnector as it is given (config/kv_transfer.py)."""
    extra = given[f"{_KV}.kv_connector_extra_config"]
    name, inner = given[f"{_KV}.kv_connector"], extra.get("connectors") if isinstance(extra, Mapping) else None
    if name == _HISPARSE:
        found = [extra]
    elif name == "MultiConnector" and isinstance(inner, list):
        same = [each for each in inner if isinstance(each, Mapping) and each.get("kv_connector") == _HISPARSE]
        found = [each.get("kv_connector_extra_config") for each in same]
    else:
        found = []
    return [each.get("host_pool_gib") if isinstance(each, Mapping) else None for each in found]


def _buckets(given: Given) -> list[list[Any]]:
    """Return the lists of bounds of histograms."""
    families = given[_BUCKETS]
    return [each for each in families.values() if isinstance(each, list)] if isinstance(families, Mapping) else []


def _bounds(given: Given) -> list[list[float]]:
    """Return the lists of bounds that hold numbers alone."""
    return [each for each in _buckets(given) if all(type(bound) in (int, float) for bound in each)]


def _cpu_list(given: Given) -> str:
    return given.text_of("--numa-bind-cpus") or ""


def _descends(given: Given) -> bool:
    if _CPU_LIST.fullmatch(_cpu_list(given)) is None:
        return False
    ends = [part.split("-") for part in _cpu_list(given).split(",")]
    return any(int(each[0]) > int(each[-1]) for each in ends)


def _captures_graphs(given: Given) -> bool:
    """Whether nothing that is given turns CUDA graphs off."""
    settings, named = given.settings, (_CC, "--optimization-level", "--enforce-eager")
    off = given.on_cpu or settings.enforce_eager or settings.cudagraph_mode is CudagraphMode.NONE
    return not off and not any(given.option(name) for name in named)


def _proton(given: Given, key: str) -> Any:
    """Return a key of the Proton profiler; None if another one is asked for."""
    return given[f"{_PROFILER}.{key}"] if _profiles_with("proton")(given) else None


def _attributes_graphs(given: Given) -> bool:
    return _proton(given, "proton_graph_attribution") is True


def _proton_mode(given: Given) -> str:
    return str(_proton(given, "proton_mode") or "").partition(":")[0].lower()


def _expands_segments(given: Given) -> bool:
    asked = given.env.get("PYTORCH_CUDA_ALLOC_CONF", "")
    moves = given["--enable-cumem-allocator"] or given["--enable-sleep-mode"]
    return "expandable_segments:True" in asked and bool(_connectors(given)) and not moves


def _splits_small_batches(given: Given) -> bool:
    parts = 2 if given["--enable-dbo"] else _number(given["--ubatch-size"], 0)
    thresholds = (given["--dbo-decode-token-threshold"], given["--dbo-prefill-token-threshold"])
    return parts > 1 and any(_below(each, parts) for each in thresholds)


def _splits_heads(given: Given) -> bool:
    return bool(given["--enable-hc-sp"]) and given.settings.tensor_parallel_size > 1


def _prefetches(given: Given) -> bool:
    return given["--offload-backend"] == "prefetch" or _above(given["--offload-group-size"], 0)


def _both_ways(given: Given) -> bool:
    operations = _texts(given[f"{_CC}.custom_ops"])
    return any(f"-{each[1:]}" in operations for each in operations if each.startswith("+"))


def _no_object(flag: str) -> Callable[[Given], bool]:
    """Return a check for a whole JSON value that is a number, a list or a text that is no JSON.

    Some flags take ``None`` and an empty text for no value (engine/arg_utils.py, optional_type).
    """

    def rejects(given: Given) -> bool:
        option = given.option(flag)
        if option is None or option.path or option.value in ("", "None"):
            return False
        return json_value([option]) is None

    return rejects


def _profiles_with(name: str) -> Callable[[Given], bool]:
    return lambda given: given[f"{_PROFILER}.profiler"] == name


def _unlike(profiler: str, key: str) -> Callable[[Given], bool]:
    """Return a check for a key of the profiler that only one kind of profiler reads."""
    return lambda given: bool(given[f"{_PROFILER}.{key}"]) and given[f"{_PROFILER}.profiler"] != profiler


def _without(profiler: str, key: str) -> Callable[[Given], bool]:
    """Return a check for a profiler without the folder that it writes to."""
    return lambda given: _profiles_with(profiler)(given) and not given[f"{_PROFILER}.{key}"]


FLAG_CHECKS: Final = (
    # A number, a list or bare text in the place of a JSON object; --compilation-config 3 was valid before 0.12.
    *(
        FlagCheck(
            "engine/arg_utils.py",
            flag,
            _no_object(flag),
            "",
            f"must be a JSON object, such as '{example}'; correct it, or use {flag}.KEY VALUE",
        )
        for flag, example in (
            (_CC, '{"mode": 3}'),
            (_KV, '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'),
            (_OUTPUTS, '{"backend": "xgrammar"}'),
            (_EPLB, '{"num_redundant_experts": 32}'),
            (_PROFILER, '{"profiler": "torch", "torch_profiler_dir": "/tmp/profile"}'),
        )
    ),
    # KV connectors
    FlagCheck(
        "config/kv_transfer.py:115",
        f"{_KV}.kv_role",
        lambda given: _outside(given[f"{_KV}.kv_role"], _KV_ROLES),
        "",
        f"must be one of {', '.join(_KV_ROLES)}",
    ),
    FlagCheck(
        "config/kv_transfer.py:121",
        f"{_KV}.kv_connector",
        lambda given: bool(_connectors(given)) and given[f"{_KV}.kv_role"] is None,
        "Please specify kv_role when kv_connector is set",
        f"needs kv_role; add it with one of {', '.join(_KV_ROLES)}",
    ),
    FlagCheck(
        "config/kv_transfer.py:38",
        f"{_KV}.kv_connector_extra_config",
        lambda given: len(_hisparse_pools(given)) > 1,
        "Only one HiSparseConnector may be configured",
        "holds several HiSparseConnectors; keep one",
        "0.30",
    ),
    FlagCheck(
        "config/kv_transfer.py:43",
        f"{_KV}.kv_connector_extra_config",
        lambda given: None in _hisparse_pools(given),
        "HiSparseConnector requires host_pool_gib",
        "HiSparseConnector needs host_pool_gib, the host memory of its pool in GiB; add it",
        "0.30",
    ),
    FlagCheck(
        "config/kv_transfer.py:46",
        f"{_KV}.kv_connector_extra_config",
        lambda given: any(_below(each, 1e-300) for each in _hisparse_pools(given)),
        "HiSparseConnector host_pool_gib must be positive",
        "host_pool_gib must be above 0; raise it",
        "0.30",
    ),
    FlagCheck(
        "config/vllm.py:1264",
        "--enable-sleep-mode",
        lambda given: (
            bool(given["--enable-sleep-mode"])
            and not given.on_cpu
            and any(each in _KEEP_CACHE_PLACES for each in _connectors(given))
        ),
        "does not support sleep mode.",
        f"moves the KV cache, which {', '.join(_KEEP_CACHE_PLACES)} do not follow; remove one of the two",
        "0.33",
    ),
    FlagCheck(
        "config/vllm.py:1291",
        "env.PYTORCH_CUDA_ALLOC_CONF",
        _expands_segments,
        "is incompatible with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "expandable_segments cannot be combined with a KV connector, because it moves memory that the connector"
        " registers; remove it, or add --enable-cumem-allocator to spec.engine.extraArgs",
    ),
    FlagCheck(
        "config/vllm.py:1885",
        f"{_KV}.kv_connector",
        lambda given: _HISPARSE in _connectors(given) and given.on_cpu,
        "HiSparse currently requires NVIDIA CUDA",
        "HiSparseConnector needs GPUs; remove it",
        "0.30",
    ),
    FlagCheck(
        "config/vllm.py:1887",
        f"{_KV}.kv_connector",
        lambda given: _HISPARSE in _connectors(given) and given.settings.pipeline_parallel_size > 1,
        "HiSparse does not support pipeline parallelism",
        "HiSparseConnector does not support pipeline parallelism; set spec.parallelism.pipeline to 1, or remove it",
        "0.30",
    ),
    FlagCheck(
        "config/vllm.py:1893",
        f"{_KV}.kv_connector",
        lambda given: _HISPARSE in _connectors(given) and given.settings.cudagraph_mode == "FULL",
        "HiSparse does not support cudagraph_mode=FULL",
        "HiSparseConnector does not support CUDA graph mode FULL; set spec.serving.cudagraphMode to"
        " FULL_AND_PIECEWISE, or remove it",
        "0.32",
    ),
    FlagCheck(
        "config/vllm.py:1902",
        "--scheduler-reserve-full-isl",
        lambda given: _HISPARSE in _connectors(given) and given["--scheduler-reserve-full-isl"] is False,
        "HiSparse requires --scheduler-reserve-full-isl",
        "HiSparseConnector needs --scheduler-reserve-full-isl (the default); remove --no-scheduler-reserve-full-isl",
        "0.31",
    ),
    # Routed experts beside answers
    FlagCheck(
        "config/vllm.py:1199",
        _ROUTED,
        lambda given: bool(given[_ROUTED]) and given.on_v1,
        "AuxOutput Connector requires Model Runner V2",
        "needs model runner V2, but this engine runs on V1; remove it",
        "0.31",
    ),
    FlagCheck(
        "config/vllm.py:1208",
        _ROUTED,
        lambda given: bool(given[_ROUTED]) and given["--enable-prefix-caching"] is False,
        "AuxOutput Connector requires prefix caching",
        "needs prefix caching; remove --no-enable-prefix-caching or this flag",
        "0.31",
    ),
    FlagCheck(
        "config/vllm.py:1218",
        _ROUTED,
        lambda given: bool(given[_ROUTED]) and given.settings.pipeline_parallel_size > 1,
        "--enable-return-routed-experts is incompatible with pipeline parallelism",
        "does not support pipeline parallelism; set spec.parallelism.pipeline to 1, or remove it",
    ),
    FlagCheck(
        "config/vllm.py:1241",
        _ROUTED,
        lambda given: bool(given[_ROUTED]) and any(each in _POINT_TO_POINT for each in _connectors(given)),
        "--enable-return-routed-experts is incompatible with",
        f"cannot be combined with the KV connectors {', '.join(_POINT_TO_POINT)}; remove one of the two",
    ),
    # Samples' distributions beside answers
    FlagCheck(
        "config/vllm.py:1309",
        _SAMPLING_MASK,
        lambda given: bool(given[_SAMPLING_MASK]) and given.on_v1,
        "sampling distribution replay requires Model Runner V2",
        "needs model runner V2, but this engine runs on V1; remove it",
    ),
    FlagCheck(
        "config/vllm.py:1325",
        _SAMPLING_MASK,
        lambda given: bool(given[_SAMPLING_MASK]) and given["--logits-processors"] is not None,
        "sampling distribution replay does not support custom logits processors",
        "cannot be combined with --logits-processors; remove one of the two",
    ),
    FlagCheck(
        "config/vllm.py:1329",
        _SAMPLING_MASK,
        lambda given: bool(given[_SAMPLING_MASK]) and given["--logprobs-mode"] != "processed_logprobs",
        "sampling distribution replay requires logprobs_mode='processed_logprobs'",
        "needs --logprobs-mode processed_logprobs; add it, or remove this flag",
    ),
    # Structured outputs
    FlagCheck(
        "config/structured_outputs.py:68",
        f"{_OUTPUTS}.disable_any_whitespace",
        lambda given: (
            given[f"{_OUTPUTS}.disable_any_whitespace"] is True
            and given[f"{_OUTPUTS}.backend"] not in ("xgrammar", "guidance")
        ),
        "disable_any_whitespace is only supported for",
        'needs "backend": "xgrammar" or "guidance"; add one, or remove this key',
    ),
    FlagCheck(
        "config/structured_outputs.py:73",
        f"{_OUTPUTS}.disable_additional_properties",
        lambda given: (
            given[f"{_OUTPUTS}.disable_additional_properties"] is True and given[f"{_OUTPUTS}.backend"] != "guidance"
        ),
        "disable_additional_properties is only supported",
        'needs "backend": "guidance"; add it, or remove this key',
    ),
    # Models with states
    FlagCheck(
        "config/mamba.py:20",
        "--mamba-backend",
        lambda given: _outside(str(given["--mamba-backend"] or "cpu").lower(), ("triton", "flashinfer", "cpu")),
        "Unknown Mamba SSU backend",
        "must be triton, flashinfer or cpu",
    ),
    FlagCheck(
        "config/mamba.py:72",
        "--mamba-ssu-algorithm",
        lambda given: _outside(given["--mamba-ssu-algorithm"], ("auto", "simple", "vertical", "horizontal")),
        "",
        "must be auto, simple, vertical or horizontal",
    ),
    FlagCheck(
        "config/mamba.py:77",
        "--mamba-ssu-algorithm",
        lambda given: (
            given["--mamba-ssu-algorithm"] is not None and str(given["--mamba-backend"]).lower() != "flashinfer"
        ),
        "Mamba SSU algorithm selection is only supported with the FlashInfer backend",
        "needs --mamba-backend flashinfer; add it, or remove this flag",
    ),
    FlagCheck(
        "config/vllm.py:1599",
        "--mamba-ssm-cache-dtype",
        lambda given: bool(given[_ROUNDING]) and _outside(given["--mamba-ssm-cache-dtype"], ("auto", "float16")),
        "Stochastic rounding for Mamba cache requires",
        f"{_ROUNDING} needs float16 here; set float16, or remove that flag",
    ),
    FlagCheck(
        "config/vllm.py:3449",
        "--mamba-block-size",
        lambda given: (
            given["--enable-prefix-caching"] is False
            and isinstance(given["--mamba-block-size"], int)
            and given.settings.max_model_len is not None
            and given["--mamba-block-size"] != given.settings.max_model_len
        ),
        "--mamba-block-size can only be set with --enable-prefix-caching",
        "needs prefix caching; remove --no-enable-prefix-caching or this flag",
    ),
    # Weights on the host
    FlagCheck(
        "config/offload.py:102",
        "--offload-num-in-group",
        lambda given: (
            _prefetches(given)
            and _number(given["--offload-num-in-group"], 1) > _number(given["--offload-group-size"], 0)
        ),
        "must be <= offload_group_size",
        "must not exceed --offload-group-size, the number of layers per group; lower it, or raise --offload-group-size",
    ),
    FlagCheck(
        "config/offload.py:108",
        "--offload-prefetch-step",
        lambda given: _prefetches(given) and _below(given["--offload-prefetch-step"], 1),
        "must be >= 1 when prefetch offloading is enabled",
        "must be 1 or more if layers are prefetched; raise it, or remove --offload-group-size",
    ),
    # Experts
    FlagCheck(
        "config/parallel.py:123",
        f"{_EPLB}.policy",
        lambda given: _outside(given[f"{_EPLB}.policy"], ("default",)) and given[f"{_EPLB}.use_async"] is not False,
        "",
        'needs "use_async": false (default: true); add it, or use policy default',
    ),
    FlagCheck(
        "config/parallel.py:125",
        f"{_EPLB}.communicator",
        lambda given: (
            given[f"{_EPLB}.communicator"] in ("torch_nccl", "pynccl") and given[f"{_EPLB}.use_async"] is not False
        ),
        "communicator is incompatible with async EPLB",
        'needs "use_async": false (default: true); add it, or use communicator torch_gloo or nixl',
    ),
    FlagCheck(
        "config/parallel.py:132",
        f"{_EPLB}.log_balancedness_interval",
        lambda given: _below(given[f"{_EPLB}.log_balancedness_interval"], 1),
        "",
        "must be 1 or more",
    ),
    FlagCheck(
        "config/parallel.py:587",
        f"{_EPLB}.num_redundant_experts",
        lambda given: _above(given[f"{_EPLB}.num_redundant_experts"], 0) and not given["--enable-eplb"],
        "but EPLB is not enabled",
        "needs --enable-eplb; add it, or remove this key",
    ),
    FlagCheck(
        "config/parallel.py:565",
        "--enable-eplb",
        lambda given: bool(given["--enable-eplb"]) and given.on_cpu and given.settings.expert_parallel,
        "Expert parallelism load balancing is only supported on",
        "needs GPUs; remove it",
    ),
    FlagCheck(
        "config/parallel.py:976",
        "--enable-elastic-ep",
        lambda given: bool(given["--enable-elastic-ep"]) and not given["--enable-eplb"],
        "Elastic EP is only supported with enable_eplb=True",
        "needs --enable-eplb; add it, or remove this flag",
    ),
    FlagCheck(
        "config/parallel.py:978",
        "--enable-elastic-ep",
        lambda given: bool(given["--enable-elastic-ep"]) and given.settings.pipeline_parallel_size > 1,
        "Elastic EP is not supported with pipeline parallelism",
        "does not support pipeline parallelism; set spec.parallelism.pipeline to 1, or remove it",
    ),
    FlagCheck(
        "config/parallel.py:1043",
        "--elastic-ep-max-dp-size",
        lambda given: (
            bool(given["--enable-elastic-ep"])
            and _below(given["--elastic-ep-max-dp-size"], given.settings.data_parallel_size)
        ),
        "--elastic-ep-max-dp-size must be greater than or equal to",
        "must be at least spec.parallelism.data; raise it, or lower spec.parallelism.data",
        "0.30",
    ),
    FlagCheck(
        "config/parallel.py:531",
        "--enable-fault-tolerance",
        lambda given: bool(given["--enable-fault-tolerance"]) and _above(given["--api-server-count"], 1),
        "Fault tolerance requires a single API server",
        "needs a single API server; set --api-server-count 1, or remove this flag",
    ),
    FlagCheck(
        "config/parallel.py:1184",
        "--enable-dbo",
        _splits_small_batches,
        "dbo_decode_token_threshold and dbo_prefill_token_threshold must be at least",
        "needs --dbo-decode-token-threshold and --dbo-prefill-token-threshold of at least the number of microbatches;"
        " raise them, or remove them",
        "0.30",
    ),
    FlagCheck(
        "config/parallel.py:559",
        "--numa-bind-nodes",
        lambda given: given["--numa-bind-nodes"] is not None and not given["--numa-bind"],
        "numa_bind_nodes and numa_bind_cpus require numa_bind=True",
        "needs --numa-bind; add it, or remove this flag",
    ),
    FlagCheck(
        "config/parallel.py:559",
        "--numa-bind-cpus",
        lambda given: given["--numa-bind-cpus"] is not None and not given["--numa-bind"],
        "numa_bind_nodes and numa_bind_cpus require numa_bind=True",
        "needs --numa-bind; add it, or remove this flag",
    ),
    FlagCheck(
        "config/kernel.py:211",
        "--all2all-backend",
        lambda given: (
            given["--moe-backend"] in _EP_BACKENDS
            # vLLM takes the last two for the first (config/parallel.py).
            and _outside(given["--all2all-backend"], ("allgather_reducescatter", "naive", "pplx"))
        ),
        "dispatches and combines itself and cannot be paired with",
        "cannot be combined with this --moe-backend, which has its own all-to-all; remove one of the two",
        "0.32",
    ),
    FlagCheck(
        "config/lora.py:142",
        "--moe-backend",
        lambda given: given["--moe-backend"] in _MEGA_BACKENDS and bool(given["--enable-lora"]),
        "LoRA is not supported with moe_backend",
        "does not support LoRA adapters; remove it or --enable-lora",
        "0.33",
    ),
    FlagCheck(
        "config/vllm.py:2111",
        "--all2all-backend",
        lambda given: given["--all2all-backend"] == _MOONEP and given.settings.online_quantization is not None,
        "moonep all2all backend currently supports unquantized",
        "moonep supports only unquantized BF16 models; set spec.target.quantization to BF16, or use another backend",
        "0.31",
    ),
    FlagCheck(
        "config/vllm.py:2121",
        "--all2all-backend",
        lambda given: given["--all2all-backend"] == _MOONEP and given.settings.dtype in (Dtype.FLOAT16, Dtype.FLOAT32),
        "moonep all2all backend currently supports BF16 models",
        "moonep supports only bfloat16 models; set spec.serving.dtype to bfloat16, or use another backend",
        "0.31",
    ),
    FlagCheck(
        "config/vllm.py:2127",
        "--all2all-backend",
        lambda given: given["--all2all-backend"] == _MOONEP and bool(given["--enable-eplb"]),
        "moonep all2all backend does not support EPLB yet",
        "moonep cannot be combined with --enable-eplb; remove one of the two",
        "0.31",
    ),
    FlagCheck(
        "config/vllm.py:2134",
        "--all2all-backend",
        lambda given: (
            given["--all2all-backend"] == _MOONEP and _outside(given["--expert-placement-strategy"], ("linear",))
        ),
        "moonep all2all backend requires linear expert placement",
        "moonep needs --expert-placement-strategy linear (the default); remove one of the two",
        "0.31",
    ),
    # Compilation
    FlagCheck(
        "config/compilation.py:865",
        f"{_CC}.mode",
        lambda given: isinstance(given[f"{_CC}.mode"], str) and given[f"{_CC}.mode"].upper() not in _MODES,
        "Invalid compilation mode",
        f"must be one of {', '.join(_MODES)}, or 0 to 3",
    ),
    FlagCheck(
        "config/compilation.py:893",
        f"{_CC}.compile_cache_save_format",
        lambda given: _outside(given[f"{_CC}.compile_cache_save_format"], ("binary", "unpacked")),
        "",
        "must be binary or unpacked",
    ),
    FlagCheck(
        "config/compilation.py:1015",
        f"{_CC}.custom_ops",
        lambda given: any(
            each not in ("all", "none") and (not each[1:] or each[0] not in "+-")
            for each in _texts(given[f"{_CC}.custom_ops"])
        ),
        "for custom op, must be 'all', 'none', '+op' or '-op'",
        "each entry must be all, none, +NAME or -NAME",
    ),
    FlagCheck(
        "config/compilation.py:1023",
        f"{_CC}.custom_ops",
        lambda given: sum(each in ("all", "none") for each in _texts(given[f"{_CC}.custom_ops"])) > 1,
        "custom_ops can contain only one base mode",
        "must contain only one of all and none, and only once; remove the other entry",
    ),
    FlagCheck(
        "config/compilation.py:1031",
        f"{_CC}.custom_ops",
        _both_ways,
        "custom_ops cannot both enable and disable the same operation",
        "enables and disables the same operation; remove +NAME or -NAME",
    ),
    FlagCheck(
        "config/compilation.py:1044",
        f"{_CC}.backend",
        lambda given: (
            given[f"{_CC}.mode"] in (3, "VLLM_COMPILE") and _outside(given[f"{_CC}.backend"], ("", "eager", "inductor"))
        ),
        "Invalid backend for piecewise compilation",
        "must be eager or inductor with mode VLLM_COMPILE; change it, or set another mode",
    ),
    FlagCheck(
        "config/compilation.py:1049",
        f"{_CC}.decoder_replay_cudagraph_capture_sizes",
        lambda given: _any_below_one(given[f"{_CC}.decoder_replay_cudagraph_capture_sizes"]),
        "All decoder_replay_cudagraph_capture_sizes must be positive",
        "each size must be 1 or more",
        "0.32",
    ),
    FlagCheck(
        "config/compilation.py:1058",
        f"{_CC}.encoder_cudagraph_max_vision_items_per_batch",
        lambda given: (
            given[f"{_CC}.cudagraph_mm_encoder"] is True
            and _below(given[f"{_CC}.encoder_cudagraph_max_vision_items_per_batch"], 0)
        ),
        "encoder_cudagraph_max_vision_items_per_batch must be",
        "must be 0 or more; 0 lets vLLM choose",
    ),
    FlagCheck(
        "config/compilation.py:1067",
        f"{_CC}.encoder_cudagraph_max_frames_per_batch",
        lambda given: (
            given[f"{_CC}.cudagraph_mm_encoder"] is True
            and _below(given[f"{_CC}.encoder_cudagraph_max_frames_per_batch"], 0)
        ),
        "encoder_cudagraph_max_frames_per_batch must be",
        "must be 0 or more; remove it to let vLLM choose",
    ),
    FlagCheck(
        "config/compilation.py:1075",
        f"{_CC}.encoder_cudagraph_token_budgets",
        lambda given: _any_below_one(given[f"{_CC}.encoder_cudagraph_token_budgets"]),
        "All encoder_cudagraph_token_budgets must be positive",
        "each budget must be 1 token or more",
    ),
    # Profiler
    FlagCheck(
        "config/profiler.py:220",
        f"{_PROFILER}.torch_profiler_activities",
        _unlike("torch", "torch_profiler_activities"),
        "torch_profiler_activities is only applicable",
        "needs profiler torch; add it, or remove this key",
        "0.31",
    ),
    FlagCheck(
        "config/profiler.py:236",
        f"{_PROFILER}.torch_profiler_dir",
        _unlike("torch", "torch_profiler_dir"),
        "torch_profiler_dir is only applicable",
        "needs profiler torch; add it, or remove this key",
    ),
    FlagCheck(
        "config/profiler.py:240",
        f"{_PROFILER}.profiler",
        _without("torch", "torch_profiler_dir"),
        "torch_profiler_dir must be set when profiler is 'torch'",
        "torch needs torch_profiler_dir, the directory for its traces; add it",
    ),
    FlagCheck(
        "config/profiler.py:266",
        f"{_PROFILER}.proton_profiler_dir",
        _unlike("proton", "proton_profiler_dir"),
        "only applicable when profiler is set to 'proton'",
        "needs profiler proton; add it, or remove this key",
    ),
    FlagCheck(
        "config/profiler.py:270",
        f"{_PROFILER}.profiler",
        _without("proton", "proton_profiler_dir"),
        "proton_profiler_dir must be set when profiler is 'proton'",
        "proton needs proton_profiler_dir, the directory for its traces; add it",
    ),
    FlagCheck(
        "config/profiler.py:225",
        f"{_PROFILER}.torch_profiler_activities",
        lambda given: (
            len(set(_texts(given[f"{_PROFILER}.torch_profiler_activities"])))
            < len(_texts(given[f"{_PROFILER}.torch_profiler_activities"]))
        ),
        "torch_profiler_activities must not contain duplicates",
        "names an activity twice; remove one",
        "0.31",
    ),
    FlagCheck(
        "config/profiler.py:275",
        f"{_PROFILER}.proton_profiler_dir",
        lambda given: (
            len(str(_proton(given, "proton_profiler_dir")).partition("://")[0]) > 1
            and "://" in str(_proton(given, "proton_profiler_dir"))
        ),
        "proton_profiler_dir must be a local directory",
        "must be a local directory; Proton does not write to a URI",
    ),
    FlagCheck(
        "config/profiler.py:283",
        f"{_PROFILER}.proton_graph_attribution",
        lambda given: _attributes_graphs(given) and _proton(given, "proton_data") == "trace",
        "proton_graph_attribution requires proton_data='tree'",
        "needs proton_data tree (the default); remove proton_data, or this key",
        "0.30",
    ),
    FlagCheck(
        "config/profiler.py:289",
        f"{_PROFILER}.proton_graph_attribution",
        lambda given: _attributes_graphs(given) and _proton_mode(given) == "periodic_flushing",
        "proton_graph_attribution is incompatible with periodic_flushing",
        "cannot be combined with proton_mode periodic_flushing; remove one of the two",
        "0.30",
    ),
    FlagCheck(
        "config/profiler.py:294",
        f"{_PROFILER}.proton_output_format",
        lambda given: (
            _proton(given, "proton_output_format") == "chrome_trace" and _proton(given, "proton_data") in (None, "tree")
        ),
        "chrome_trace output requires proton_data='trace'",
        "chrome_trace needs proton_data trace; add it, or use another format",
    ),
    FlagCheck(
        "config/profiler.py:299",
        f"{_PROFILER}.proton_output_format",
        lambda given: (
            _proton(given, "proton_output_format") in ("hatchet", "hatchet_msgpack")
            and _proton(given, "proton_data") == "trace"
        ),
        "output requires proton_data='tree'",
        "hatchet and hatchet_msgpack need proton_data tree (the default); remove proton_data, or use chrome_trace",
    ),
    FlagCheck(
        "config/vllm.py:3271",
        f"{_PROFILER}.profiler",
        lambda given: _profiles_with("proton")(given) and given.on_cpu,
        "The Proton profiler currently supports NVIDIA CUDA only",
        "proton needs GPUs; use torch",
    ),
    FlagCheck(
        "config/vllm.py:3276",
        f"{_PROFILER}.proton_graph_attribution",
        lambda given: _attributes_graphs(given) and given.on_v1,
        "Proton CUDA graph attribution requires the V2 model runner",
        "needs model runner V2, but this engine runs on V1; remove it, and set spec.serving.enforceEager to true",
        "0.30",
    ),
    FlagCheck(
        "config/vllm.py:3291",
        f"{_PROFILER}.proton_mode",
        lambda given: _proton_mode(given) == "pcsampling" and _captures_graphs(given),
        "Proton PC sampling requires CUDA graphs to be disabled",
        "pcsampling needs an engine without CUDA graphs; set spec.serving.enforceEager to true, or remove it",
        "0.30",
    ),
    FlagCheck(
        "config/vllm.py:3296",
        f"{_PROFILER}.profiler",
        lambda given: (
            _profiles_with("proton")(given)
            and _captures_graphs(given)
            and _proton(given, "proton_graph_attribution") in (None, False)
        ),
        "Proton profiling with CUDA graphs requires",
        "proton sees kernels in CUDA graphs only with proton_graph_attribution; set that to true, or set"
        " spec.serving.enforceEager to true",
        "0.30",
    ),
    FlagCheck(
        "config/profiler.py:302",
        f"{_PROFILER}.capture_torch_profiler",
        _unlike("torch", "capture_torch_profiler"),
        "capture_torch_profiler is only applicable",
        "needs profiler torch; add it, or remove this key",
    ),
    # Buckets of histograms
    FlagCheck(
        "config/observability.py:177",
        _BUCKETS,
        lambda given: any(isinstance(bound, bool) for each in _buckets(given) for bound in each),
        "must be a number, not a boolean",
        "each bound must be a number; replace true and false",
        "0.32",
    ),
    FlagCheck(
        "config/observability.py:194",
        _BUCKETS,
        lambda given: isinstance(given[_BUCKETS], Mapping) and not set(given[_BUCKETS]) <= set(_BUCKET_FAMILIES),
        "custom_histogram_buckets: unknown bucket family",
        f"each key must be one of {', '.join(_BUCKET_FAMILIES)}",
        "0.32",
    ),
    FlagCheck(
        "config/observability.py:199",
        _BUCKETS,
        lambda given: [] in _buckets(given),
        "bucket list must not be empty",
        "each list must hold a bound; add one, or remove the key",
        "0.32",
    ),
    FlagCheck(
        "config/observability.py:205",
        _BUCKETS,
        lambda given: any(bound <= 0 for each in _bounds(given) for bound in each),
        "must be finite and greater than 0",
        "each bound must be above 0; raise it, or remove it",
        "0.32",
    ),
    FlagCheck(
        "config/observability.py:210",
        _BUCKETS,
        lambda given: any(first >= second for each in _bounds(given) for first, second in pairwise(each)),
        "must be strictly increasing",
        "bounds must increase from one to the next; sort them, and write each once",
        "0.32",
    ),
    # Others
    FlagCheck(
        "config/cache.py:38",
        "env.VLLM_KV_CACHE_LAYOUT",
        lambda given: _outside(given["env.VLLM_KV_CACHE_LAYOUT"], _LAYOUTS),
        "for VLLM_KV_CACHE_LAYOUT. Valid options",
        f"must be one of {', '.join(_LAYOUTS)}",
    ),
    FlagCheck(
        "config/engram.py:61",
        f"{_ENGRAM}.dp_shared_memory",
        lambda given: given[f"{_ENGRAM}.dp_shared_memory"] is True and given[f"{_ENGRAM}.cpu_offload"] is False,
        "dp_shared_memory requires cpu_offload=True",
        "needs cpu_offload true (the default); remove cpu_offload, or this key",
        "0.30",
    ),
    FlagCheck(
        "config/engram.py:63",
        f"{_ENGRAM}.use_thp",
        lambda given: (
            given[f"{_ENGRAM}.use_thp"] is True
            and (given[f"{_ENGRAM}.cpu_offload"] is False or given[f"{_ENGRAM}.dp_shared_memory"] is True)
        ),
        "use_thp requires cpu_offload=True",
        "needs cpu_offload true and dp_shared_memory false (the defaults); remove them, or this key",
        "0.31",
    ),
    FlagCheck(
        "config/lora.py:129",
        "env.VLLM_LORA_ENABLE_DUAL_STREAM",
        lambda given: (
            given["env.VLLM_LORA_ENABLE_DUAL_STREAM"] == "1" and bool(given["--enable-lora"]) and given.on_cpu
        ),
        "Dual CUDA streams are only supported on CUDA platforms",
        "needs GPUs; remove it",
    ),
    FlagCheck(
        "config/parallel.py:492",
        "--numa-bind-nodes",
        lambda given: _below(given["--numa-bind-nodes"], 0),
        "numa_bind_nodes must contain non-negative integers",
        "each NUMA node must be 0 or more",
    ),
    FlagCheck(
        "config/parallel.py:507",
        "--numa-bind-cpus",
        lambda given: bool(_cpu_list(given)) and _CPU_LIST.fullmatch(_cpu_list(given)) is None,
        "numa_bind_cpus entries must use numactl CPU list syntax",
        "each entry must be a list of CPUs, such as 0-3 or 0,2,4-7",
    ),
    FlagCheck(
        "config/parallel.py:516",
        "--numa-bind-cpus",
        _descends,
        "numa_bind_cpus ranges must be ascending",
        "each range must begin with its lower CPU, such as 0-3",
    ),
    FlagCheck(
        "config/ec_transfer.py:85",
        f"{_EC}.ec_role",
        lambda given: _outside(given[f"{_EC}.ec_role"], _EC_ROLES),
        "",
        f"must be one of {', '.join(_EC_ROLES)}",
    ),
    FlagCheck(
        "config/ec_transfer.py:91",
        f"{_EC}.ec_connector",
        lambda given: isinstance(given[f"{_EC}.ec_connector"], str) and given[f"{_EC}.ec_role"] is None,
        "Please specify ec_role when ec_connector is set",
        f"needs ec_role; add it with one of {', '.join(_EC_ROLES)}",
    ),
    FlagCheck(
        "config/ec_manager_config.py:22",
        "--ec-manager-config.manager_config",
        lambda given: (
            bool(given["--ec-manager-config.manager_config"])
            and given["--ec-manager-config.encoder_cache_manager_cls"] is None
        ),
        "manager_config requires encoder_cache_manager_cls",
        "needs encoder_cache_manager_cls, the class that reads it; add it, or remove this key",
    ),
    FlagCheck(
        "config/watermarking.py:61",
        "--watermark-config.key",
        lambda given: _above(given["--watermark-config.key"], 2**64 - 1),
        "philox keys must fit in 64 bits",
        "must fit in 64 bits; use a smaller number",
        "0.30",
    ),
    FlagCheck(
        "v1/core/sched/request_queue.py:207",
        "--scheduling-policy",
        lambda given: _outside(given.text_of("--scheduling-policy"), ("fcfs", "priority")),
        "",
        "must be fcfs or priority",
    ),
    FlagCheck(
        "config/model.py:668",
        "--enable-sleep-mode",
        lambda given: bool(given["--enable-sleep-mode"]) and given.on_cpu,
        "Sleep mode is not supported on current platform",
        "needs GPUs; remove it",
    ),
    FlagCheck(
        "config/model.py:678",
        "--enable-cumem-allocator",
        lambda given: bool(given["--enable-cumem-allocator"]) and given.on_cpu,
        "cumem allocator is not supported on current platform",
        "needs GPUs; remove it",
    ),
    FlagCheck(
        "config/model.py:1551",
        "--enable-hc-sp",
        lambda given: _splits_heads(given) and given.on_cpu,
        "--enable-hc-sp currently requires CUDA",
        "needs GPUs; remove it",
        "0.32",
    ),
    FlagCheck(
        "config/model.py:1555",
        "--enable-hc-sp",
        lambda given: _splits_heads(given) and given.settings.pipeline_parallel_size > 1,
        "",
        "does not support pipeline parallelism; set spec.parallelism.pipeline to 1, or remove it",
        "0.32",
    ),
    # Keys of --speculative-config
    FlagCheck(
        "config/speculative.py:1641",
        "speculation.dspark_draft_topk",
        lambda given: given["speculation.dspark_draft_topk"] is not None and given.method in _READS_MAPPED,
        "dspark_draft_topk is only supported by DSpark",
        "applies only to method dspark; remove it",
    ),
    FlagCheck(
        "config/speculative.py:1706",
        "speculation.index_share_for_mtp_iteration",
        lambda given: given["speculation.index_share_for_mtp_iteration"] is not None and given.method is not Method.MTP,
        "index_share_for_mtp_iteration is only supported with",
        "applies only to method mtp; remove it",
        "0.29",
    ),
    FlagCheck(
        "config/speculative.py:1718",
        "speculation.use_local_argmax_reduction",
        lambda given: (
            given["speculation.use_local_argmax_reduction"] is True
            and given.settings.speculation is not None
            and bool(given.settings.speculation.adaptive_verification)
            and given.method is not Method.DSPARK
        ),
        "Adaptive verification estimates per-position acceptance from the draft logits",
        "omits the logits that spec.speculation.adaptiveVerification needs; remove one of the two",
        "0.30",
    ),
    FlagCheck(
        "config/speculative.py:2008",
        "speculation.use_local_argmax_reduction",
        lambda given: (
            given["speculation.use_local_argmax_reduction"] is True
            and given.settings.speculation is not None
            and given.settings.speculation.maps_vocabulary
        ),
        "use_heterogeneous_vocab is not compatible with",
        "omits the logits that spec.speculation.useHeterogeneousVocab needs; remove one of the two",
        "0.33",
    ),
)
"""Checks of vLLM 0.33, in the order of vLLM's own where several are about one name."""
