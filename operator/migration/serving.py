"""Takes a server's arguments into the fields of a spec, all but those of models and speculation."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import ROUND_FLOOR, Decimal, InvalidOperation
from typing import Any, Final

from specdecode_operator.api.values import KvCacheDtype
from specdecode_operator.engine.arguments import ARGUMENTS, COMPILATION_CONFIG
from specdecode_operator.engine.profiles import EngineProfile
from specdecode_operator.engine.rules.extra_args import extra_args_problems
from specdecode_operator.engine.rules.refused_flags import refusal
from specdecode_operator.kube.untyped import mapping, name_of, objects
from specdecode_operator.migration.arguments import SECRET_FLAGS, Argument
from specdecode_operator.migration.builder import Outcome, SpecBuilder, plain
from specdecode_operator.migration.environment import take_secret
from specdecode_operator.migration.server_command import secret_variable
from specdecode_operator.sizing.families.catalogue import find_geometry
from specdecode_operator.sizing.model.geometry import GeometryError

Secrets = Mapping[str, dict[str, str]]
"""Keys of Secrets by the variable that holds them."""

_FIELDS: Final = {argument.flag: argument.field for argument in ARGUMENTS if argument.field is not None}
_OF_OPERATOR: Final = {argument.flag for argument in ARGUMENTS if argument.field is None}
_COMPILATION_FIELDS: Final[dict[str, str]] = {
    "cudagraph_mode": "serving.cudagraphMode",
    "max_cudagraph_capture_size": "serving.maxCudagraphCaptureSize",
}
"""Keys of --compilation-config with a field."""

_CERTIFICATE_FILES: Final = {"--ssl-certfile": "tls.crt", "--ssl-keyfile": "tls.key"}
"""Flags with the keys of a Secret of type kubernetes.io/tls."""

_CERTIFICATE_REFRESH: Final = "--enable-ssl-refresh"
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


def take_flags(
    flags: Iterable[Argument], builder: SpecBuilder, profile: EngineProfile, secrets: Secrets
) -> list[Argument]:
    """Take each flag to its place; return those of model and speculation, which belong together."""
    left: list[Argument] = []
    extra: list[str] = []
    for given in _key_by_key(flags):
        if _is_of_models(given):
            left.append(given)
        elif given.known and not given.path and given.name in _TAKERS:
            _TAKERS[given.name](given, builder)
        elif given.name == COMPILATION_CONFIG and given.path and given.path[0] in _COMPILATION_FIELDS:
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


def _key_by_key(flags: Iterable[Argument]) -> list[Argument]:
    """Return the flags with ``--compilation-config`` as one flag a key, all under one name.

    Only where a key has a field: the operator then writes that key itself, and
    of two spellings vLLM would keep one (engine/rules/graphs.py).
    """
    given = list(flags)
    apart = [each for flag in given for each in _keys(flag)]
    return apart if any(each.path and each.path[0] in _COMPILATION_FIELDS for each in apart) else given


def _keys(given: Argument) -> Iterator[Argument]:
    if given.name != COMPILATION_CONFIG or not given.known or not given.values:
        yield given
    elif given.path:
        yield _key(given.path, given.values[0])
    else:
        try:
            values: Any = json.loads(given.values[0])
        except ValueError:
            values = None
        if not isinstance(values, dict):
            yield given
            return
        for key, value in values.items():
            yield _key((key,), value if isinstance(value, str) else json.dumps(value))


def _key(path: tuple[str, ...], value: str) -> Argument:
    name = ".".join((COMPILATION_CONFIG, *path))
    return Argument(COMPILATION_CONFIG, (value,), (name, value), path)


def _is_of_models(given: Argument) -> bool:
    return (
        given.name in {"", "--model", "--revision"}
        or re.match(
            r"--(spec-(method|model|tokens)$|speculative-|num-speculative-tokens|ngram-prompt|spec-decoding|typical-)",
            given.name,
        )
        is not None
    )


def _pass_on(given: Argument, builder: SpecBuilder, profile: EngineProfile) -> list[str]:
    """Return what goes to extraArgs as it is; say of the rest why it does not."""
    if given.name in _SETTLED:
        builder.note(Outcome.OPERATOR, given.shown, _SETTLED[given.name])
        return []
    if given.name in _OF_OPERATOR:
        builder.note(Outcome.OPERATOR, given.text, "the operator writes it by the plan")
        return []
    if given.name.startswith(_SHAPE):
        return _shape(given, builder)
    if given.name in _FILES:
        message = "holds arguments that are not read here: write them into the command line, then import again"
        builder.decide("spec.engine.extraArgs", given.text, message)
        return []
    problems = extra_args_problems(given.words, profile)
    if not problems:
        builder.note(Outcome.EXTRA, given.text, "as it is")
        return list(given.words)
    builder.drop(given.shown, re.sub("is not for extraArgs; |remove it; ", "", problems[0].message))
    return []


def _shape(given: Argument, builder: SpecBuilder) -> list[str]:
    if given.name.endswith("-size") and given.values == ("1",):
        builder.note(Outcome.OPERATOR, given.text, "is what holds without it")
    else:
        message = refusal(given.name) or "no field of the object means it"
        builder.decide("spec.parallelism", given.text, message)
    return []


def _take_plain(given: Argument, builder: SpecBuilder) -> None:
    """A flag whose value is the field's: a number, a name, or a switch."""
    path, what = _FIELDS[given.name].removeprefix("spec."), given.text
    if given.negated:
        builder.note(Outcome.OPERATOR, what, "is what holds without it")
        return
    if not given.values:
        builder.take(what, path, True)
        return
    text = given.values[0]
    number = read_number(text)
    builder.take(what, path, text if number is None else number)


def _take_key(given: Argument, builder: SpecBuilder) -> None:
    """A key of a JSON value that has a field; vLLM takes names of modes in small letters, too."""
    text = given.values[0]
    number = read_number(text)
    builder.take(given.text, _COMPILATION_FIELDS[given.path[0]], text.upper() if number is None else number)


def read_number(text: str) -> int | None:
    """Return a count as vLLM reads it, such as 8192, 8k (8000) or 8K (8192); None for anything else."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kKmMgGtT]?)", text)
    if match is None or ("." in match[1] and (not match[2] or match[2].isupper())):
        return None
    return int(Decimal(match[1]) * _SCALES.get(match[2], 1))


def _take_length(given: Argument, builder: SpecBuilder) -> None:
    if given.values and given.values[0] in _LENGTH_OF_MODEL:
        why = (
            "the operator does not shorten the length until it fits: the model's own holds, or spec.serving.maxModelLen"
        )
        builder.drop(given.text, why)
    else:
        _take_plain(given, builder)


def _take_names(given: Argument, builder: SpecBuilder) -> None:
    builder.take(given.text, "serving.servedModelNames", list(given.values))


def _take_port(given: Argument, builder: SpecBuilder) -> None:
    port = read_number(given.values[0]) if given.values else None
    if port is not None and 0 < port < _LOWEST_PORT:
        builder.drop(given.text, "below 1024 the engine would need root: it serves on 8000, Services on any")
    else:
        _take_plain(given, builder)


def _take_utilization(given: Argument, builder: SpecBuilder) -> None:
    text = given.value
    try:
        percent = Decimal(text) * 100
    except InvalidOperation:
        builder.set("serving.memoryUtilizationPercent", text)
        return
    whole = int(percent.to_integral_value(ROUND_FLOOR))
    remark = "" if whole == percent else "whole percent, rounded down"
    builder.take(given.text, "serving.memoryUtilizationPercent", whole, remark)


def _take_kv_dtype(given: Argument, builder: SpecBuilder) -> None:
    known = [each.value for each in KvCacheDtype]
    if given.values and given.values[0] in known:
        _take_plain(given, builder)
    else:
        builder.drop(given.text, f"cannot be sized; the engine takes auto: choose one of {', '.join(known)}")


def _take_dtype(given: Argument, builder: SpecBuilder) -> None:
    what, wanted = given.text, given.value
    if wanted == "bfloat16":
        # Only a model that is known to be 16-bit may be asked for it; of others it is the checkpoint's anyway.
        builder.set("target.quantization", "BF16")
        builder.note(Outcome.FIELD, what, "spec.target.quantization: BF16, where the checkpoint is not quantized")
    elif wanted == "auto":
        builder.note(Outcome.OPERATOR, what, "is what holds without it")
    else:
        builder.drop(what, "only bfloat16 and the checkpoint's own precision are sized: the checkpoint's own is served")


def _take_quantization(given: Argument, builder: SpecBuilder) -> None:
    what, wanted = given.text, given.value
    if wanted in _OF_CHECKPOINT:
        builder.take(what, "target.quantization", "FP8", "made while loading, where the checkpoint is 16-bit")
    elif wanted == "bitsandbytes":
        builder.drop(what, "the operator quantizes while loading to FP8 only: name an INT4 checkpoint, or FP8")
    else:
        builder.note(Outcome.OPERATOR, what, "vLLM reads it from the checkpoint, as AsCheckpoint does")


def _take_secret(given: Argument, builder: SpecBuilder, secrets: Secrets) -> None:
    path = "serving.apiKeySecret" if given.name == "--api-key" else "models.hubTokenSecret"
    variable = secret_variable(given.value)
    what = given.name if variable is None else f"{given.name} of variable {variable}"
    take_secret(what, variable, path, secrets, builder)


def take_tls(
    flags: Iterable[Argument], pod: Mapping[str, Any], container: Mapping[str, Any], builder: SpecBuilder
) -> tuple[list[Argument], set[str]]:
    """Take the certificate; return the other flags, and the volumes that the operator mounts itself."""
    flags = list(flags)
    paths = {given.name: given.values[0] for given in flags if given.name in _CERTIFICATE_FILES and given.values}
    for given in flags:
        if given.name == _CERTIFICATE_REFRESH:
            builder.note(Outcome.OPERATOR, given.text, "a renewed certificate counts without a restart")
    rest = [given for given in flags if given.name not in {*_CERTIFICATE_FILES, _CERTIFICATE_REFRESH}]
    if not paths:
        return rest, set()
    found = {name: _secret_file(path, pod, container) for name, path in paths.items()}
    secrets = {each[0] for each in found.values() if each is not None}
    keys = {name: each[1] for name, each in found.items() if each is not None}
    shown = " ".join(f"{name} {path}" for name, path in paths.items())
    if len(secrets) == 1 and keys == _CERTIFICATE_FILES:
        (secret,) = secrets
        builder.take(shown, "serving.tlsSecret", {"name": secret})
        return rest, {each[2] for each in found.values() if each is not None}
    fix = "put both into one Secret of type kubernetes.io/tls, whose keys are tls.crt and tls.key, and name it here"
    builder.decide("spec.serving.tlsSecret", shown, fix)
    return rest, set()


def _secret_file(path: str, pod: Mapping[str, Any], container: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return Secret, key and volume of a file; None for one that comes from elsewhere."""
    folder, _, file = path.rpartition("/")
    mount = next(
        (each for each in objects(container, "volumeMounts") if str(each.get("mountPath")).rstrip("/") == folder), {}
    )
    volume = next((each for each in objects(pod, "volumes") if name_of(each) == mount.get("name")), {})
    secret = mapping(volume, "secret")
    if not isinstance(secret.get("secretName"), str) or mount.get("subPath"):
        return None
    keys = {str(each.get("path")): str(each.get("key")) for each in objects(secret, "items")}
    return secret["secretName"], keys.get(file, file), name_of(volume)


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


_TAKERS: Final[Mapping[str, Callable[[Argument, SpecBuilder], None]]] = {
    "--served-model-name": _take_names,
    "--port": _take_port,
    "--dtype": _take_dtype,
    "--quantization": _take_quantization,
    "--max-model-len": _take_length,
    "--kv-cache-dtype": _take_kv_dtype,
    "--gpu-memory-utilization": _take_utilization,
}
