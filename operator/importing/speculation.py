"""Convert --speculative-config, dotted flags and the flags of 2024 to spec.speculation."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

from specdecode_operator.api.deployment import Serving
from specdecode_operator.enums import DraftSampling, Method, RejectionSampling
from specdecode_operator.importing.engine_fields import OF_CHECKPOINTS, OF_MODELS, read_json, read_number
from specdecode_operator.importing.server_arguments import OLDER_SETTINGS, Argument
from specdecode_operator.importing.spec_builder import HOLDS_ANYWAY, SpecBuilder
from specdecode_operator.problems import MISSING, shown
from specdecode_operator.vllm.profiles import EngineProfile
from specdecode_operator.vllm.speculative_config import SPECULATIVE_KEYS, read_lax, reserved_key_problem

_CONFIG: Final = "--speculative-config"
OLD_KEYS: Final[Mapping[str, str]] = OLDER_SETTINGS["speculation_flags"]
"""Flags with one key of --speculative-config each."""

_HINTS: Final = {"medusa": "medusa", "mlp-speculator": "mlp_speculator", "-mtp": "mtp", "-it-assistant": "mtp"}
"""Parts of a draft's name that identify its method, in addition to vLLM's own."""

_PERCENT_FIELDS: Final = {
    key.key: key.field.removeprefix("spec.") for key in SPECULATIVE_KEYS if key.field.endswith("Percent")
}
_CONVERTED: Final = frozenset(
    {"method", "model", "parallel_drafting", "quantization", "draft_tensor_parallel_size", "draft_sample_method"}
    | {"rejection_sample_method", "num_speculative_tokens_per_batch_size", *_PERCENT_FIELDS}
)
"""Keys whose value is converted for its field."""
_FIELDS: Final = {"revision": "speculation.draft.revision"} | {
    key.key: key.field.removeprefix("spec.") for key in SPECULATIVE_KEYS if key.key not in _CONVERTED
}
_OF_DRAFT: Final = frozenset(
    {"model", "max_model_len", "revision", "quantization", "draft_tensor_parallel_size", "parallel_drafting"}
)
"""Keys about a draft; a method without one does not read them (config/speculative.py)."""

_WITHOUT_DRAFT: Final = frozenset({Method.NGRAM, Method.NGRAM_GPU, Method.SUFFIX})

_INHERITED: Final = frozenset({"enforce_eager", "index_share_for_mtp_iteration"})
"""Switches whose absence is not false: vLLM takes the target's setting, or the checkpoint's."""


_SAMPLING: Final = {
    "draft_sample_method": ("speculation.draftSampling", tuple(DraftSampling)),
    "rejection_sample_method": ("speculation.rejectionSampling", tuple(RejectionSampling)),
}

_LAST: Final = frozenset(
    {
        "num_speculative_tokens_per_batch_size", "disable_by_batch_size",
        "fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k",
    }
)  # fmt: skip
"""Keys whose meaning depends on the number of tokens or on rejection_sample_method."""


@dataclass
class SpeculativeConfig:
    """All flags of speculation as one --speculative-config; empty without speculation."""

    config: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)

    @property
    def draft(self) -> str | None:
        """The model that drafts."""
        model = self.config.get("model")
        return str(model) if model else None

    def add(self, key: str, value: Any, written: str, builder: SpecBuilder, path: Sequence[str] = ()) -> None:
        """Set one key, or the part of its value that a dotted path names; a later value replaces an earlier one."""
        if path:
            known = self.config.get(key)
            whole = dict(known) if isinstance(known, dict) else {}
            place = whole
            *parents, last = path
            for parent in parents:
                inner = place.get(parent)
                place[parent] = dict(inner) if isinstance(inner, dict) else {}
                place = place[parent]
            place[last] = value
            value = whole
        elif key in self.config:
            builder.drop(self.written[key], f"{written} repeats it")
        self.config[key], self.written[key] = read_lax(key, value), written


def read_speculation(flags: Iterable[Argument], builder: SpecBuilder, profile: EngineProfile) -> SpeculativeConfig:
    """Collect the flags of speculation, in all their forms."""
    found = SpeculativeConfig()
    for given in flags:
        if given.name == _CONFIG and not given.path:
            for key, value in _json(given, builder).items():
                found.add(key, value, f"{_CONFIG} {key}", builder)
        elif given.name == _CONFIG or given.name in OLD_KEYS:
            key = given.path[0] if given.path else OLD_KEYS[given.name]
            parsed: Any = read_number(given.value)
            if parsed is None:
                parsed = given.value
                with suppress(ValueError):
                    parsed = read_json(given.value)
            found.add(key, parsed, given.shown, builder, given.path[1:])
        elif given.name not in OF_MODELS:
            message = f"{_of_none(profile)} has no such flag: set it in --speculative-config, and import again"
            builder.decide("spec.speculation", given.shown, message)
    if str(found.draft).strip("[]") == "ngram":
        if found.config.get("method") in (None, "draft_model"):
            found.config["method"], found.written["method"] = "ngram", found.written["model"]
        del found.config["model"]
    return found


def take_speculation(found: SpeculativeConfig, builder: SpecBuilder, profile: EngineProfile) -> None:
    """Take speculation into the fields of the spec, except the draft's location."""
    config = found.config
    if not config:
        return
    method = _method(config, profile)
    what = found.written.get("method") or f"{found.written.get('model', _CONFIG)}, which implies the method"
    builder.take(what, "speculation.method", method)
    if method not in {each.value for each in Method}:
        have = ", ".join(each.value for each in Method)
        why = "the operator does not support this method"
        if method == "mlp_speculator":
            # vllm/v1 has no drafter for it, and its entry in the model registry is commented out.
            why = "no vLLM version that the operator supports has this method"
        builder.decide("spec.speculation.method", method, f"{why}: use one of {have}, or keep the Deployment")
        for key in sorted(config.keys() - {"method"}):
            builder.drop(found.written[key], f"belongs to method {method}")
        return
    if method != Method.NONE and config.get("num_speculative_tokens") is None:
        # For suffix, vLLM uses the depth of its trees, by default 24 (config/speculative.py).
        depth = config.get("suffix_decoding_max_tree_depth") or 24
        if method == Method.SUFFIX and isinstance(depth, int):
            remark = "vLLM uses the depth of its trees"
            builder.take("num_speculative_tokens (absent)", "speculation.numSpeculativeTokens", depth, remark)
        else:
            message = "set how many tokens to propose in each step"
            builder.decide("spec.speculation.numSpeculativeTokens", MISSING, message)
    for key in sorted(config, key=_LAST.__contains__):
        if method in _WITHOUT_DRAFT and key in _OF_DRAFT:
            builder.drop(found.written[key], f"applies to drafts, and {method} has no draft")
        elif key not in {"method", "model"}:
            _take(found.written[key], key, config[key], builder, profile)


def _method(config: dict[str, Any], profile: EngineProfile) -> str:
    named, model = str(config.get("method") or ""), str(config.get("model") or "").lower()
    if named in {"", Method.DRAFT_MODEL.value}:
        markers = {**profile.draft_path_markers, **({} if named else _HINTS)}
        by_path = next((method for marker, method in markers.items() if marker in model), None)
        return by_path or (Method.DRAFT_MODEL.value if model or named else "mtp")
    return "mtp" if named.endswith("_mtp") else named


def _take(what: str, key: str, value: Any, builder: SpecBuilder, profile: EngineProfile) -> None:
    if key == "parallel_drafting" and isinstance(value, bool):
        builder.own(f"{what} {shown(value)}", "the operator sets it for drafts whose config.json has it")
    elif key == "parallel_drafting" and value is not None:
        builder.decide("spec.speculation", f"{what}: {shown(value)}", "must be true or false")
    elif value is None or (value is False and key in profile.speculative_keys - _INHERITED):
        builder.own(what, HOLDS_ANYWAY)
    elif key in _FIELDS:
        builder.take(what, _FIELDS[key], value)
    elif key in _PERCENT_FIELDS and isinstance(value, int | float) and math.isfinite(value):
        percent = round(100 * value)
        remark = "" if math.isclose(percent, 100 * value) else "rounded to a whole percent"
        builder.take(f"{what} {shown(value)}", _PERCENT_FIELDS[key], percent, remark)
    elif key in _SAMPLING and value in _SAMPLING[key][1]:
        builder.take(what, _SAMPLING[key][0], value)
    elif key in _TAKERS:
        _TAKERS[key](what, value, builder)
    else:
        _take_without_field(what, key, value, builder, profile)


def _take_without_field(what: str, key: str, value: Any, builder: SpecBuilder, profile: EngineProfile) -> None:
    if key in _SAMPLING:
        path, words = _SAMPLING[key]
        builder.decide(f"spec.{path}", f"{what}: {shown(value)}", f"must be one of {', '.join(words)}")
    elif key in _FLY:
        tokens, default = builder.get("speculation.numSpeculativeTokens"), _FLY[key]
        if key == "fly_window_size" and isinstance(tokens, int):
            default = min(default, tokens - 1)
        if builder.get("speculation.rejectionSampling") != RejectionSampling.FLY.value:
            builder.drop(f"{what} {shown(value)}", "only applies to rejection_sample_method fly")
        elif value == default:
            builder.own(f"{what} {shown(value)}", HOLDS_ANYWAY)
        else:
            builder.take(what, f"speculation.extraConfig.{key}", value)
    elif key in profile.speculative_keys and (advice := reserved_key_problem(key)):
        builder.decide("spec.speculation", f"{what}: {shown(value)}", advice)
    elif key in profile.speculative_keys:
        builder.take(what, f"speculation.extraConfig.{key}", value)
    elif key in OLDER_SETTINGS["speculation_keys_gone"]:
        builder.drop(f"{what}: {shown(value)}", OLDER_SETTINGS["speculation_keys_gone"][key])
    else:
        close = get_close_matches(key, profile.speculative_keys, n=1)
        fix = f"did you mean {close[0]}? Correct it, or remove it" if close else "correct it, or remove it"
        message = f"{_of_none(profile)} has no such key: {fix}"
        builder.decide("spec.speculation", f"{what}: {shown(value)}", message)


def _of_none(profile: EngineProfile) -> str:
    version = f"vLLM {profile.version}"
    return version if profile.tested else f"{version} is newer than the supported versions, and {profile.known_as}"


def _take_quantization(what: str, value: Any, builder: SpecBuilder) -> None:
    if value in ("fp8", "fp8_per_tensor"):
        builder.take(what, "speculation.draft.quantization", "FP8")
    elif value in OF_CHECKPOINTS:
        builder.own(f"{what} {shown(value)}", "vLLM reads it from the draft's checkpoint")
    else:
        message = "the operator quantizes a draft while loading to FP8 only: name a quantized checkpoint, or fp8"
        builder.decide("spec.speculation.draft.quantization", str(value), message)


def _take_draft_split(what: str, value: Any, builder: SpecBuilder) -> None:
    if value == (builder.get("parallelism.tensor") or 1):
        builder.own(f"{what} {shown(value)}", "the draft is split as the target is")
    else:
        builder.take(what, "parallelism.draftTensor", value)


def _take_schedule(what: str, value: Any, builder: SpecBuilder) -> None:
    try:
        given = sorted((int(first), int(last), int(tokens)) for first, last, tokens in value)
    except (TypeError, ValueError, OverflowError):
        given = []
    if not given:
        message = "must be a list of [first, last, tokens]"
        builder.decide("spec.speculation.numSpeculativeTokensByBatchSize", f"{what}: {shown(value)}", message)
        return
    most, general = _most_requests(builder), builder.get("speculation.numSpeculativeTokens")
    ends = [*(first - 1 for first, _, _ in given[1:]), most]
    ranges = [
        {
            "from": first,
            # vLLM rejects overlapping ranges, and so do the checks of the spec.
            "to": min(max(last, end), most),
            "numSpeculativeTokens": min(tokens, general) if isinstance(general, int) else tokens,
        }
        for (first, last, tokens), end in zip(given, ends, strict=True)
        if first <= most
    ]
    builder.take(what, "speculation.numSpeculativeTokensByBatchSize", ranges)


def _take_limit(what: str, value: Any, builder: SpecBuilder) -> None:
    """Older vLLM stops drafting for running_queue_size >= the limit (0.6, vllm/spec_decode/spec_decode_worker.py)."""
    most = _most_requests(builder)
    if not isinstance(value, int) or not 0 < value <= most:
        builder.drop(f"{what}: {shown(value)}", f"is above spec.serving.maxNumSeqs, {most}: it would never count")
        return
    ranges = [{"from": value, "to": most, "numSpeculativeTokens": 0}]
    builder.take(what, "speculation.numSpeculativeTokensByBatchSize", ranges)


def _most_requests(builder: SpecBuilder) -> int:
    given = builder.get("serving.maxNumSeqs")
    return given if isinstance(given, int) else Serving().max_num_seqs


def _json(given: Argument, builder: SpecBuilder) -> dict[str, Any]:
    problem = "must be one JSON object"
    try:
        found = read_json(given.value)
    except ValueError as error:
        found, problem = None, f"is not valid JSON ({error}): write one JSON object"
    if isinstance(found, dict):
        return {str(key).replace("-", "_"): value for key, value in found.items()}
    builder.decide("spec.speculation", f"{_CONFIG} {given.value}", problem)
    return {}


_TAKERS: Final[Mapping[str, Callable[[str, Any, SpecBuilder], None]]] = {
    "quantization": _take_quantization,
    "draft_tensor_parallel_size": _take_draft_split,
    "num_speculative_tokens_per_batch_size": _take_schedule,
    "disable_by_batch_size": _take_limit,
}

_FLY: Final = {"fly_window_size": 6, "fly_entropy_threshold": 0.3, "fly_entropy_top_k": 3}
"""Parameters of rejection_sample_method fly, with vLLM's defaults (config/speculative.py)."""
