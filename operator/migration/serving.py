"""Takes a server's flags into the fields of a spec."""

import re
from collections.abc import Callable, Iterable, Mapping
from decimal import ROUND_FLOOR, Decimal, InvalidOperation
from typing import Final

from specdecode_operator.api.values import KvCacheDtype
from specdecode_operator.engine.arguments import ARGUMENTS, COMPILATION_CONFIG
from specdecode_operator.engine.profiles import EngineProfile
from specdecode_operator.engine.rules.extra_args import extra_args_problems
from specdecode_operator.engine.rules.refused_flags import refusal
from specdecode_operator.migration.builder import Outcome, SpecBuilder, plain
from specdecode_operator.migration.compilation import FIELDS, key_by_key
from specdecode_operator.migration.flags import SECRET_FLAGS, Given
from specdecode_operator.migration.server_command import secret_variable
from specdecode_operator.sizing.families.catalogue import find_geometry
from specdecode_operator.sizing.model.geometry import GeometryError

Secrets = Mapping[str, dict[str, str]]
"""Keys of Secrets by the variable that holds them."""

_FIELDS: Final = {argument.flag: argument.field for argument in ARGUMENTS if argument.field is not None}
_OF_OPERATOR: Final = {argument.flag for argument in ARGUMENTS if argument.field is None}
_SCALES: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
"""vllm/utils/argparse_utils.py, human_readable_int: small letters are decimal, capitals binary."""

_SHAPE: Final = ("--data-parallel-", "--decode-context-", "--prefill-context-", "--nnodes", "--headless")
"""Flags that say over how many GPUs and nodes a replica spreads: without them it would be another server."""

_FILES: Final = ("--config",)
"""Flags with a file of further flags."""

_LOWEST_PORT: Final = 1024
_SETTLED: Final = {
    "--host": "the engine listens on all addresses of its pod",
    "--shutdown-timeout": "requests get 60 s to end after the pod has left the Service",
    "--download-dir": "models come from spec.models; the engine itself downloads nothing",
    "--disable-log-stats": "statistics stay on: they show whether the engine drafts",
}
_LENGTH_OF_MODEL: Final = ("auto", "-1")
_OF_CHECKPOINT: Final = ("fp8", "fp8_per_tensor")


def take_flags(flags: Iterable[Given], builder: SpecBuilder, profile: EngineProfile, secrets: Secrets) -> list[Given]:
    """Take each flag to its place; return those of model and speculation, which belong together."""
    left: list[Given] = []
    extra: list[str] = []
    for given in key_by_key(flags):
        if _is_of_models(given):
            left.append(given)
        elif given.known and not given.path and given.name in _TAKERS:
            _TAKERS[given.name](given, builder)
        elif given.name == COMPILATION_CONFIG and given.path and given.path[0] in FIELDS:
            _take_key(given, builder)
        elif given.name in SECRET_FLAGS:
            _take_secret(given, builder, secrets)
        elif given.known and not given.path and given.name in _FIELDS:
            _take_plain(given, builder)
        else:
            extra += _pass_on(given, builder, profile)
    if extra:
        builder.set("engine.extraArgs", extra)
    return left


def _is_of_models(given: Given) -> bool:
    return (
        given.name in {"", "--model", "--revision"}
        or re.match(
            r"--(spec-(method|model|tokens)$|speculative-|num-speculative-tokens|ngram-prompt|spec-decoding|typical-)",
            given.name,
        )
        is not None
    )


def _pass_on(given: Given, builder: SpecBuilder, profile: EngineProfile) -> list[str]:
    """Return what goes to extraArgs as it is; say of the rest why it does not."""
    if given.name in _SETTLED:
        builder.note(Outcome.OPERATOR, given.shown, _SETTLED[given.name])
        return []
    if given.name in _OF_OPERATOR:
        builder.note(Outcome.OPERATOR, " ".join(given.words), "the operator writes it by the plan")
        return []
    if given.name.startswith(_SHAPE):
        return _shape(given, builder)
    if given.name in _FILES:
        message = "holds arguments that are not read here: write them into the command line, then import again"
        builder.decide("spec.engine.extraArgs", " ".join(given.words), message)
        return []
    problems = extra_args_problems(given.words, profile)
    if not problems:
        builder.note(Outcome.EXTRA, " ".join(given.words), "as it is")
        return list(given.words)
    builder.drop(given.shown, re.sub("is not for extraArgs; |remove it; ", "", problems[0].message))
    return []


def _shape(given: Given, builder: SpecBuilder) -> list[str]:
    if given.name.endswith("-size") and given.values == ("1",):
        builder.note(Outcome.OPERATOR, " ".join(given.words), "is what holds without it")
    else:
        message = refusal(given.name) or "no field of the object means it"
        builder.decide("spec.parallelism", " ".join(given.words), message)
    return []


def _take_plain(given: Given, builder: SpecBuilder) -> None:
    """A flag whose value is the field's: a number, a name, or a switch."""
    path, what = _FIELDS[given.name].removeprefix("spec."), " ".join(given.words)
    if given.negated:
        builder.note(Outcome.OPERATOR, what, "is what holds without it")
        return
    if not given.values:
        builder.take(what, path, True)
        return
    text = given.values[0]
    number = read_number(text)
    builder.take(what, path, text if number is None else number)


def _take_key(given: Given, builder: SpecBuilder) -> None:
    """A key of a JSON value that has a field; vLLM takes names of modes in small letters, too."""
    text = given.values[0]
    number = read_number(text)
    builder.take(" ".join(given.words), FIELDS[given.path[0]], text.upper() if number is None else number)


def read_number(text: str) -> int | None:
    """Return a count as vLLM reads it, such as 8192, 8k (8000) or 8K (8192); None for anything else."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgGtT]?)", text)
    if match is None or ("." in match[1] and (not match[2] or match[2].isupper())):
        return None
    return int(Decimal(match[1]) * _SCALES.get(match[2], 1))


def _take_length(given: Given, builder: SpecBuilder) -> None:
    if given.values and given.values[0] in _LENGTH_OF_MODEL:
        why = (
            "the operator does not shorten the length until it fits: the model's own holds, or spec.serving.maxModelLen"
        )
        builder.drop(" ".join(given.words), why)
    else:
        _take_plain(given, builder)


def _take_names(given: Given, builder: SpecBuilder) -> None:
    builder.take(" ".join(given.words), "serving.servedModelNames", list(given.values))


def _take_port(given: Given, builder: SpecBuilder) -> None:
    port = read_number(given.values[0]) if given.values else None
    if port is not None and 0 < port < _LOWEST_PORT:
        builder.drop(" ".join(given.words), "below 1024 the engine would need root: it serves on 8000, Services on any")
    else:
        _take_plain(given, builder)


def _take_utilization(given: Given, builder: SpecBuilder) -> None:
    text = given.values[0] if given.values else ""
    try:
        percent = Decimal(text) * 100
    except InvalidOperation:
        builder.set("serving.memoryUtilizationPercent", text)
        return
    whole = int(percent.to_integral_value(ROUND_FLOOR))
    remark = "" if whole == percent else "whole percent, rounded down"
    builder.take(" ".join(given.words), "serving.memoryUtilizationPercent", whole, remark)


def _take_kv_dtype(given: Given, builder: SpecBuilder) -> None:
    known = [each.value for each in KvCacheDtype]
    if given.values and given.values[0] in known:
        _take_plain(given, builder)
    else:
        builder.drop(" ".join(given.words), f"cannot be sized; the engine takes auto: choose one of {', '.join(known)}")


def _take_dtype(given: Given, builder: SpecBuilder) -> None:
    what, wanted = " ".join(given.words), given.values[0] if given.values else ""
    if wanted == "bfloat16":
        # Only a model that is known to be 16-bit may be asked for it; of others it is the checkpoint's anyway.
        builder.set("target.quantization", "BF16")
        builder.note(Outcome.FIELD, what, "spec.target.quantization: BF16, where the checkpoint is not quantized")
    elif wanted == "auto":
        builder.note(Outcome.OPERATOR, what, "is what holds without it")
    else:
        builder.drop(what, "only bfloat16 and the checkpoint's own precision are sized: the checkpoint's own is served")


def _take_quantization(given: Given, builder: SpecBuilder) -> None:
    what, wanted = " ".join(given.words), given.values[0] if given.values else ""
    if wanted in _OF_CHECKPOINT:
        builder.take(what, "target.quantization", "FP8", "made while loading, where the checkpoint is 16-bit")
    elif wanted == "bitsandbytes":
        builder.drop(what, "the operator quantizes while loading to FP8 only: name an INT4 checkpoint, or FP8")
    else:
        builder.note(Outcome.OPERATOR, what, "vLLM reads it from the checkpoint, as AsCheckpoint does")


def _take_secret(given: Given, builder: SpecBuilder, secrets: Secrets) -> None:
    path = "serving.apiKeySecret" if given.name == "--api-key" else "models.hubTokenSecret"
    variable = secret_variable(given.values[0]) if given.values else None
    if variable is not None and variable in secrets:
        builder.take(f"{given.name} of variable {variable}", path, secrets[variable])
    else:
        message = "stands in the Deployment as plain text: put it into a Secret and name that here, {name, key}"
        builder.decide(f"spec.{path}", f"the value of {given.name}", message)


def settle_precision(builder: SpecBuilder) -> None:
    """Leave BF16 out again where the target's checkpoint is quantized, or nobody knows."""
    if builder.get("target.quantization") != "BF16":
        return
    try:
        geometry = find_geometry(plain(builder.get("target.model")))
    except GeometryError:
        geometry = None
    if geometry is None or geometry.checkpoint is not None or geometry.checkpoint_precision is not None:
        del builder.spec["target"]["quantization"]


_TAKERS: Final[Mapping[str, Callable[[Given, SpecBuilder], None]]] = {
    "--served-model-name": _take_names,
    "--port": _take_port,
    "--dtype": _take_dtype,
    "--quantization": _take_quantization,
    "--max-model-len": _take_length,
    "--kv-cache-dtype": _take_kv_dtype,
    "--gpu-memory-utilization": _take_utilization,
}
