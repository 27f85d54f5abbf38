"""Convert engine arguments to spec fields, except for models and speculation."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import ROUND_FLOOR, Decimal
from typing import Any, Final

from specdecode_operator.enums import ENGINE_DTYPES, KvCacheDtype, RopeType
from specdecode_operator.importing.engine_container import take_secret
from specdecode_operator.importing.server_arguments import SECRET_FLAGS, Argument
from specdecode_operator.importing.server_command import secret_variable
from specdecode_operator.importing.spec_builder import HOLDS_ANYWAY, Object, Outcome, SpecBuilder
from specdecode_operator.sizing.catalogue import find_entry
from specdecode_operator.untrusted import mapping, name_of, objects
from specdecode_operator.vllm.arguments import ARGUMENTS, COMPILATION_CONFIG, HF_OVERRIDES, reserved_flag_problem
from specdecode_operator.vllm.extra_args_rules import extra_args_problems
from specdecode_operator.vllm.hf_overrides import positions_of
from specdecode_operator.vllm.profiles import EngineProfile

_ROPE: Final = frozenset({"rope_parameters", "rope_scaling"})
_LONGEST: Final = "max_position_embeddings"
_ORIGINAL: Final = "original_max_position_embeddings"
_KEYS: Final = frozenset({"rope_type", "type", "factor", _ORIGINAL})
_OWN: Final = frozenset({"rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"})
"""Keys that the field keeps as the model has them."""


def take_rope_scaling(given: Argument, model: str, builder: SpecBuilder) -> bool:
    """Take ``--hf-overrides`` that only scales a model's positions; return whether it does.

    An override must repeat the model's own rope parameters, so these may be part of it.
    """
    if given.name != HF_OVERRIDES or not given.known:
        return False
    try:
        said = read_json(given.value)
    except ValueError:
        return False
    for key in reversed(given.path):
        said = {key: said}
    entry = find_entry(model)
    config = entry.config if entry is not None else {}
    if isinstance(said, dict) and said.keys() == {"text_config"} and "text_config" in config:
        said = said["text_config"]
    scaling = _scaling(said, config) if isinstance(said, dict) else None
    if scaling is None:
        return False
    builder.take(given.text, "target.ropeScaling", scaling, "the model's other rope parameters are kept")
    return True


def _scaling(said: Object, config: Object) -> dict[str, Any] | None:
    rope = next((said[key] for key in sorted(_ROPE) if key in said), None)
    if not isinstance(rope, dict) or not said.keys() <= {*_ROPE, _LONGEST}:
        return None
    own = positions_of(config)
    if not rope.keys() <= _KEYS | {key for key in _OWN if key in own and rope.get(key) == own[key]}:
        return None
    kind, factor, original = rope.get("rope_type", rope.get("type")), rope.get("factor"), rope.get(_ORIGINAL)
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not isinstance(kind, str) or kind not in set(RopeType) or not is_number or not 1 <= factor < 10_000:  # type: ignore[operator]  # noqa: PLR2004
        return None
    scaling = {"type": kind, "factor": f"{factor:.3f}".rstrip("0").rstrip(".")}
    if float(scaling["factor"]) != factor:
        return None
    if not RopeType(kind).has_original_length:
        return scaling if original is None and _LONGEST not in said else None
    if original is not None:
        scaling["originalMaxPositionEmbeddings"] = original
    reached = said.get(_LONGEST)
    same = reached is None or (isinstance(original, int) and reached == math.ceil(original * factor))
    return scaling if same else None


_FIELDS: Final = {
    argument.flag: argument.field
    for argument in ARGUMENTS
    # A section is not a field. Its parts, and flags that express more than a field, are read elsewhere.
    if argument.field is not None and argument.field.count(".") > 1 and not argument.says_more
}
_OF_OPERATOR: Final = {argument.flag for argument in ARGUMENTS if argument.field is None}
_COMPILATION_FIELDS: Final[dict[str, str]] = {
    "cudagraph_mode": "serving.cudagraphMode",
    "max_cudagraph_capture_size": "serving.maxCudagraphCaptureSize",
}

_CERTIFICATE_FILES: Final = {"--ssl-certfile": "tls.crt", "--ssl-keyfile": "tls.key"}
"""Flags with the keys of a Secret of type kubernetes.io/tls."""

_SCALES: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
"""vllm/utils/argparse_utils.py, human_readable_int: small letters are decimal, capitals binary."""

_SHAPE: Final = (
    "--data-parallel-", "--decode-context-", "--prefill-context-",
    "--nnodes", "--node-rank", "--master-addr", "--master-port", "--headless",
)  # fmt: skip
"""Flags for the GPUs and nodes of a replica: without them it would be another server."""

OF_MODELS: Final = frozenset({"", "--model", "--revision"})
"""Arguments that name the target; the one by position has no name."""

_OF_SPECULATION: Final = re.compile(
    r"--(spec-(method|model|tokens)$|speculative-|num-speculative-tokens|ngram-prompt|spec-decoding|typical-)"
)
_SETTLED: Final = {
    "--host": "the engine listens on all addresses of its pod",
    "--shutdown-timeout": "requests get 60 s to end after the pod has left the Service",
    "--download-dir": "models come from spec.models; the engine does not download them",
    "--disable-log-stats": "statistics stay on: they show whether the engine drafts",
    "--help": "the server would print its help and exit",
}
OF_CHECKPOINTS: Final = frozenset(
    {
        "auto_awq", "auto_gptq", "awq", "awq_marlin", "compressed-tensors", "deepseek_v4_fp8", "fbgemm_fp8", "gptq",
        "gptq_marlin", "gpt_oss_mxfp4", "modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8", "moe_wna16",
        "mxfp4", "quark",
    }
)  # fmt: skip
"""Quantizations that vLLM reads from the checkpoint (model_executor/layers/quantization)."""

_JSON_LEVELS: Final = 16


def take_flags(
    flags: list[Argument], builder: SpecBuilder, profile: EngineProfile, secrets: Mapping[str, dict[str, str]]
) -> list[Argument]:
    """Take each flag to its place; return the flags of model and speculation, which belong together.

    ``secrets`` are the keys of Secrets by the variable that holds them.
    """
    left: list[Argument] = []
    extra: list[str] = []
    model = next((each.value for name in ("", "--model") for each in reversed(flags) if each.name == name), "")
    for given in _key_by_key(flags):
        if given.name in OF_MODELS or _OF_SPECULATION.match(given.name):
            left.append(given)
        elif given.known and not given.path and _take_special(given, builder):
            continue
        elif given.name == COMPILATION_CONFIG and given.path and given.path[0] in _COMPILATION_FIELDS:
            # vLLM also accepts names of modes in lower case.
            number = read_number(given.value)
            value = given.value.upper() if number is None else number
            builder.take(given.text, _COMPILATION_FIELDS[given.path[0]], value)
        elif given.name in SECRET_FLAGS:
            path = "serving.apiKeySecret" if given.name == "--api-key" else "models.hubTokenSecret"
            variable = secret_variable(given.value)
            what = given.name if variable is None else f"{given.name} of variable {variable}"
            take_secret(what, variable, path, secrets, builder)
        elif take_rope_scaling(given, model, builder):
            continue
        elif given.known and not given.path and given.name in _FIELDS:
            number = read_number(given.value)
            value = True if not given.values else given.value if number is None else number
            if given.negated:
                builder.own(given.text, HOLDS_ANYWAY)
            else:
                builder.take(given.text, _FIELDS[given.name].removeprefix("spec."), value)
        else:
            extra += _pass_on(given, builder, profile)
    if extra:
        builder.set("engine.extraArgs", extra)
    return left


def _key_by_key(flags: list[Argument]) -> list[Argument]:
    """Split ``--compilation-config`` into one flag per key if a key has a field.

    The operator then writes that key itself, and of two spellings vLLM would keep one (vllm/serving_rules.py).
    """
    apart = []
    for given in flags:
        values: Any = None
        if given.name == COMPILATION_CONFIG and given.known and given.values:
            with suppress(ValueError):
                values = {".".join(given.path): given.value} if given.path else read_json(given.value)
        if not isinstance(values, dict):
            apart.append(given)
            continue
        for key, value in values.items():
            name, text = f"{COMPILATION_CONFIG}.{key}", value if isinstance(value, str) else json.dumps(value)
            apart.append(Argument(COMPILATION_CONFIG, (text,), (name, text), tuple(key.split("."))))
    return apart if any(each.path and each.path[0] in _COMPILATION_FIELDS for each in apart) else flags


def _pass_on(given: Argument, builder: SpecBuilder, profile: EngineProfile) -> list[str]:
    if given.name in _SETTLED:
        builder.own(given.shown, _SETTLED[given.name])
    elif given.name.startswith(_SHAPE) and given.values == ("1",) and given.name.endswith(("-size", "--nnodes")):
        builder.own(given.text, HOLDS_ANYWAY)
    elif given.name.startswith(_SHAPE):
        message = reserved_flag_problem(given.name) or "the object has no such field"
        builder.decide("spec.parallelism", given.text, message)
    elif given.name in _OF_OPERATOR:
        builder.own(given.text, "the operator sets it from the plan")
    elif given.name == "--config":
        message = "contains arguments that import does not read: write them into the command line, then import again"
        builder.decide("spec.engine.extraArgs", given.text, message)
    elif problems := extra_args_problems(given.words, profile):
        # Without the flag, the new engine would differ.
        message = re.sub(r"^is not allowed in extraArgs; ", "", problems[0].message)
        builder.decide("spec.engine.extraArgs", given.shown, message)
    else:
        builder.note(Outcome.EXTRA, given.text, "as it is")
        return list(given.words)
    return []


def read_number(text: str) -> int | None:
    """Return a count as vLLM reads it, such as 8192, 8k (8000) or 8K (8192); None for any other text."""
    match = re.fullmatch(r"(-?\d{1,18}(?:\.\d{1,18})?)([kKmMgGtT]?)", text)
    if match is None or ("." in match[1] and (not match[2] or match[2].isupper())):
        return None
    return int(Decimal(match[1]) * _SCALES.get(match[2], 1))


def read_json(text: str) -> Any:
    """Return the JSON value of a flag; raise ValueError if it is nested deeper than any setting of vLLM."""
    too_deep = f"nested more than {_JSON_LEVELS} levels deep"
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    if _is_deeper(found, _JSON_LEVELS):
        raise ValueError(too_deep)
    return found


def _is_deeper(value: Any, levels: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deeper(part, levels - 1) for part in parts)


def _take_special(given: Argument, builder: SpecBuilder) -> bool:
    """Take a flag whose value does not simply become the field's; return whether it is one."""
    what, number = given.text, read_number(given.value)
    match given.name, given.value:
        case "--served-model-name", _:
            builder.take(what, "serving.servedModelNames", list(given.values))
        case "--port", _ if number is not None and 0 < number < 1024:  # noqa: PLR2004
            builder.drop(what, "below 1024 the engine would need root: it uses 8000, and a Service can use any port")
        case "--max-model-len", "auto" | "-1":
            message = (
                "the operator does not shorten the length until it fits: set the maximum number of tokens per request"
            )
            builder.decide("spec.serving.maxModelLen", what, message)
        case "--gpu-memory-utilization", text:
            _take_utilization(what, text, builder)
        case "--kv-cache-dtype", dtype if dtype not in set(KvCacheDtype):
            message = f"cannot be sized: choose one of {', '.join(KvCacheDtype)}"
            builder.decide("spec.serving.kvCacheDtype", what, message)
        case _:
            return _take_precision(given, builder)
    return True


def _take_precision(given: Argument, builder: SpecBuilder) -> bool:
    what = given.text
    match given.name, given.value:
        case "--dtype", "auto":
            builder.own(what, HOLDS_ANYWAY)
        case "--dtype", dtype:
            # The checks of the spec name one that vLLM does not know.
            builder.take(what, "serving.dtype", str(ENGINE_DTYPES.get(dtype.lower(), dtype)))
        case "--quantization", "fp8" | "fp8_per_tensor":
            builder.take(what, "target.quantization", "FP8", "quantized while loading if the checkpoint is 16-bit")
        case "--quantization", scheme if scheme in OF_CHECKPOINTS:
            builder.own(what, "vLLM reads it from the checkpoint, as AsCheckpoint does")
        case "--quantization", _:
            message = "the operator quantizes while loading to FP8 only: name an INT4 checkpoint, or --quantization fp8"
            builder.decide("spec.target.quantization", what, message)
        case _:
            return False
    return True


def _take_utilization(what: str, text: str, builder: SpecBuilder) -> None:
    try:
        percent = Decimal(text) * 100
        # Above 1000 % it is not even a slip.
        is_share = 0 <= percent <= 1000  # noqa: PLR2004
    except ArithmeticError:
        is_share = False
    if not is_share:
        # The checks of the spec name it.
        builder.set("serving.gpuMemoryUtilizationPercent", text)
        return
    whole = int(percent.to_integral_value(ROUND_FLOOR))
    remark = "" if whole == percent else "whole percent, rounded down"
    builder.take(what, "serving.gpuMemoryUtilizationPercent", whole, remark)


def take_tls(
    flags: Sequence[Argument], pod: Object, container: Object, builder: SpecBuilder
) -> tuple[list[Argument], set[str]]:
    """Take the certificate; return the other flags, and the volumes that the operator mounts itself."""
    rest, paths = [], {}
    for given in flags:
        if given.name == "--enable-ssl-refresh":
            builder.own(given.text, "a renewed certificate is used without a restart")
        elif given.name not in _CERTIFICATE_FILES:
            rest.append(given)
        elif given.values:
            paths[given.name] = given.values[0]
    if not paths:
        return rest, set()
    found = {name: _secret_file(path, pod, container) for name, path in paths.items()}
    secrets = {each[0] for each in found.values() if each is not None}
    keys = {name: each[1] for name, each in found.items() if each is not None}
    shown = " ".join(f"{name} {path}" for name, path in paths.items())
    if len(secrets) == 1 and keys == _CERTIFICATE_FILES:
        builder.take(shown, "serving.tlsSecret", {"name": secrets.pop()})
        return rest, {each[2] for each in found.values() if each is not None}
    fix = "put both into one Secret of type kubernetes.io/tls, with the keys tls.crt and tls.key, and name it here"
    builder.decide("spec.serving.tlsSecret", shown, fix)
    return rest, set()


def _secret_file(path: str, pod: Object, container: Object) -> tuple[str, str, str] | None:
    folder, _, file = path.rpartition("/")
    mounts = [each for each in objects(container, "volumeMounts") if str(each.get("mountPath")).rstrip("/") == folder]
    mount = mounts[0] if mounts else {}
    volume = next((each for each in objects(pod, "volumes") if name_of(each) == mount.get("name")), {})
    secret = mapping(volume, "secret")
    if not isinstance(secret.get("secretName"), str) or mount.get("subPath"):
        return None
    keys = {str(each.get("path")): str(each.get("key")) for each in objects(secret, "items")}
    return secret["secretName"], keys.get(file, file), name_of(volume)
