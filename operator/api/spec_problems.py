"""Parse and validate a spec as the API server would; report each problem with field, value and fix.

Unknown fields are an error, as for `kubectl apply`, unless the caller accepts fields of a newer CRD. `admitted_*`
also evaluate the CEL rules of the CRD, for files that were never sent to an API server.
"""

import difflib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from specdecode_operator.api.base import MEANINGS, ApiModel
from specdecode_operator.api.capture import CaptureRun, SpecDecodeCaptureSpec
from specdecode_operator.api.crd_validation import broken_rules, metadata_problems, name_refusals, object_problems
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.renamed_fields import renamed_in
from specdecode_operator.api.training import SpecDecodeTrainingSpec, TrainingRun
from specdecode_operator.enums import Quantization
from specdecode_operator.problems import MISSING, InvalidSpecError, Problem, shown, shown_or_missing
from specdecode_operator.untrusted import MOST_VALUES, TOO_LARGE, UnreadableTextError, parse_json

_Spec = TypeVar("_Spec", bound=ApiModel)

_SHOWN_CHARACTERS: Final = 64
_MOST_PROBLEMS: Final = 50
"""Limit of the report, because finding names close to misspelt ones takes time."""

UNKNOWN_FIELD: Final = "extra_forbidden"
"""Pydantic's error type for an unknown field."""

_ALIKE: Final = 0.85
"""Minimum similarity of a misspelt field that belongs to another object."""

_OF_TEMPLATES: Final[Mapping[type[BaseModel], type[BaseModel]]] = {
    CaptureRun: SpecDecodeCaptureSpec,
    TrainingRun: SpecDecodeTrainingSpec,
}
"""Spec with the fields that a schedule sets, or does not use, by the model of its template."""

_NOT_TEXT: Final = ("bool_type", "int_type", "float_type")

_WORDS: Final = {
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "string_type": "must be text: put it in quotes",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must have {min_length} characters or more",
    "string_too_long": "must have {max_length} characters at most",
    "too_short": "must have {min_length} entries or more",
    "too_long": "must have {max_length} entries at most",
    "string_pattern_mismatch": "must match the pattern of {pattern}",
    "enum": "use one of {expected}",
    "literal_error": "use one of {expected}",
}
"""Messages by pydantic's error type; others keep pydantic's own message."""

_POD_FIELDS: Final = (
    *("affinity", "imagePullSecrets", "nodeSelector", "priorityClassName", "runtimeClassName", "schedulerName"),
    *("securityContext", "serviceAccountName", "tolerations", "topologySpreadConstraints", "volumes"),
)
_CONTAINER_FIELDS: Final = ("resources", "volumeMounts")
SYNONYMS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("tensorparallelsize", "tensorparallelism", "tp", "gpus", "gpucount", "numgpus", "requestgpu"),
                    "parallelism.tensor"),
    **dict.fromkeys(("pipelineparallelsize", "pipelineparallelism", "pp"), "parallelism.pipeline"),
    **dict.fromkeys(("dataparallelsize", "dataparallelism", "dp"), "parallelism.data"),
    **dict.fromkeys(("enableexpertparallel", "expertparallel", "ep"), "parallelism.expert"),
    **dict.fromkeys(("gputype", "gpuproduct", "gpumodel"), "accelerator.products"),
    **dict.fromkeys(("modelid", "modelname", "modelurl", "targetmodel"), "target.model"),
    **dict.fromkeys(("draftmodel", "speculativemodel", "specmodel"), "speculation.draft.model"),
    **dict.fromkeys(("speculativetokens", "spectokens"), "speculation.numSpeculativeTokens"),
    **dict.fromkeys(("specmethod", "speculativemethod"), "speculation.method"),
    **dict.fromkeys(("speculativeconfig", "speculativedecoding"), "speculation"),
    **dict.fromkeys(("gpumemoryutilization", "memoryutilization"), "serving.gpuMemoryUtilizationPercent"),
    **dict.fromkeys(("contextlength", "maxcontextlength"), "serving.maxModelLen"),
    **dict.fromkeys(("servedmodelname", "modelalias"), "serving.servedModelNames"),
    **dict.fromkeys(("hftoken", "hftokensecret", "huggingfacetoken"), "models.hubTokenSecret"),
    **dict.fromkeys(("minreplicas", "replicacount"), "replicas"),
    **dict.fromkeys(("args", "vllmargs", "additionalargs", "engineargs"), "engine.extraArgs"),
    **dict.fromkeys(("vllmversion", "engineversion"), "engine.version"),
    **dict.fromkeys(("environment", "envvars"), "engine.env"),
    **{field.lower(): f"podTemplate.spec.{field}" for field in _POD_FIELDS},
    **{field.lower(): f"podTemplate.spec.containers[name=engine].{field}" for field in _CONTAINER_FIELDS},
    **{field: f"podTemplate.metadata.{field}" for field in ("labels", "annotations")},
}  # fmt: skip
"""Fields of a deployment by the name that vLLM, Kubernetes or another project has for them, as `_folded`."""


def parsed_spec(kind: type[_Spec], document: Any, *, newer: bool = False) -> _Spec:
    """Return the spec of an object, or raise InvalidSpecError; ``newer`` ignores fields of a newer CRD."""
    if isinstance(document, dict) and TOO_LARGE in document:
        message = f"has more than {MOST_VALUES:,} values: remove some"
        raise InvalidSpecError([Problem("the object", document[TOO_LARGE], message)])
    try:
        return kind.parse(document, newer=newer)
    except ValidationError as error:
        raise InvalidSpecError(spec_problems(error, kind)) from error


def spec_problems(error: ValidationError, spec: type[BaseModel] = SpecDecodeDeploymentSpec) -> list[Problem]:
    """Return the problems of a spec, each with its field, its value and what to write instead."""
    found = error.errors(include_url=False)
    problems = [_problem(detail, spec) for detail in found[:_MOST_PROBLEMS]]
    if len(found) > _MOST_PROBLEMS:
        problems.append(
            Problem("spec", f"{len(found):,} problems", f"only the first {_MOST_PROBLEMS} are shown; fix them first")
        )
    return problems


def _problem(detail: ErrorDetails, spec: type[BaseModel]) -> Problem:
    place = detail["loc"]
    field = _path(place)
    if detail["type"] == "missing":
        # Pydantic hands over the object that lacks the field.
        return Problem(field, MISSING, MISSING)
    value = shown_or_missing(detail["input"], _SHOWN_CHARACTERS)
    if detail["type"] == UNKNOWN_FIELD:
        owner = _model_at(spec, place[:-1])
        renamed = next((each for each in renamed_in(owner.__name__) if each.name == place[-1]), None)
        if renamed is not None:
            return Problem(field, value, renamed.message)
        fields = [info.alias or name for name, info in owner.model_fields.items()]
        whole = _OF_TEMPLATES.get(owner)
        if whole is not None and any(info.alias == place[-1] for info in whole.model_fields.values()):
            return Problem(field, value, "unknown field: the template of a schedule does not have it: remove it")
        meant = _meant_field(place, fields, spec)
        known = f"did you mean {meant}?" if meant else f"use one of {', '.join(fields)}"
        return Problem(field, value, f"unknown field: {known}")
    info = _field_at(place, spec)
    return Problem(field, value, _quotes_problem(detail, info) or f"{_message(detail)}{_form(detail, spec)}")


def _meant_field(place: tuple[int | str, ...], fields: list[str], spec: type[BaseModel]) -> str | None:
    """Return the field that an unknown one was meant to be: its name in the same object, or its path in the spec."""
    name = _folded(str(place[-1]))
    if same := next((field for field in fields if _folded(field) == name), None):
        return same
    if any(isinstance(step, int) for step in place):
        # Items of a list have common names, such as kind, that other objects have for something else.
        close = difflib.get_close_matches(str(place[-1]), fields, n=1)
        return close[0] if close else None
    known, parent = _paths(spec), _path(place[:-1])
    synonym = SYNONYMS.get(name) if spec is SpecDecodeDeploymentSpec else None
    if synonym is not None:
        return f"spec.{synonym}"
    if elsewhere := _nearest(known.get(name, []), parent):
        return elsewhere
    if close := difflib.get_close_matches(str(place[-1]), fields, n=1):
        return close[0]
    close = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
    return _nearest(known[close[0]], parent) if close else None


def _folded(name: str) -> str:
    return re.sub(r"[-_]", "", name).lower()


def _nearest(paths: list[str], parent: str) -> str | None:
    """Return the path below ``parent``, or otherwise below the spec, with the fewest parts; None in case of a tie."""
    below = [path for path in paths if path.startswith(f"{parent}.")] or paths
    fewest = min((path.count(".") for path in below), default=0)
    nearest = [path for path in below if path.count(".") == fewest]
    return nearest[0] if len(nearest) == 1 else None


@cache
def _paths(spec: type[BaseModel]) -> Mapping[str, list[str]]:
    """Return the paths of all fields that are in no list, by their names as `_folded`."""
    found = defaultdict(list)
    pending = [("spec", spec)]
    while pending:
        parent, model = pending.pop()
        for name, info in model.model_fields.items():
            alias = info.alias or name
            found[_folded(alias)].append(f"{parent}.{alias}")
            inner = inner_model(model, alias)
            if inner is not None and not _is_list(info.annotation):
                pending.append((f"{parent}.{alias}", inner))
    return found


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(_is_list(each) for each in get_args(annotation))


def _form(detail: ErrorDetails, spec: type[BaseModel]) -> str:
    """Return the form that a list or an object must have, made from the value; empty for other errors."""
    given, place = detail["input"], detail["loc"]
    is_text = isinstance(given, str)
    if not place or detail["type"] not in ("list_type", "model_type"):
        return ""
    if is_text and place[-1] == "extraArgs":
        return f" with one item per word: {shown(given.split(), _SHOWN_CHARACTERS)}"
    form = shown(given, _SHOWN_CHARACTERS) if is_text else ""
    inner = inner_model(_model_at(spec, place[:-1]), str(place[-1]))
    if inner is not None:
        names = [info.alias or name for name, info in inner.model_fields.items() if info.is_required()]
        values = [form or None, *(None for _ in names[1:])]
        pairs = [f"{name}: {value or name.upper()}" for name, value in zip(names, values, strict=False)]
        form = f"{{{', '.join(pairs)}}}" if pairs else ""
    if not form:
        return ""
    return f", such as [{form}]" if detail["type"] == "list_type" else f", such as {form}"


def _message(detail: ErrorDetails) -> str:
    given, words = detail["input"], _WORDS.get(detail["type"])
    if detail["type"] == "enum" and isinstance(given, str):
        expected = re.findall("'([^']+)'", str(detail["ctx"]["expected"]))
        by_folded = {_folded(each): each for each in expected}
        if meant := difflib.get_close_matches(_folded(given), by_folded, n=1, cutoff=0.8):
            return f"did you mean {by_folded[meant[0]]}? {words}".format_map(detail["ctx"])
        if detail["loc"][-1] == "quantization" and Quantization.AS_CHECKPOINT.value in expected:
            words = f"{words}; for a checkpoint that is quantized already, leave it out"
    if _path(detail["loc"]).endswith("Percent") and isinstance(given, float) and 0 < given <= 1:
        return f"is in percent: write {100 * given:.0f}"
    if _path(detail["loc"]) == "spec.autoscaling.target" and isinstance(given, float) and 0 < given < 1:
        return f"must be a whole number: write {100 * given:.0f} for {100 * given:.0f} %"
    context = {key: f"{value:,}" if isinstance(value, int) else value for key, value in detail.get("ctx", {}).items()}
    if "pattern" in context:
        context["pattern"] = MEANINGS.get(context["pattern"], context["pattern"])
    if detail["type"] == "string_type" and isinstance(given, dict | list):
        return "must be text"
    if detail["type"] == "string_type" and isinstance(given, float) and _path(detail["loc"]).endswith(".version"):
        # vLLM 0.30 is a number that loses its zero; its versions below 0.10 are none that this operator launches.
        written = f"{given}0" if re.fullmatch(r"0\.[1-9]", str(given)) else str(given)
        return f'must be text, and {written} without quotes is the number {given}: write "{written}"'
    return detail["msg"] if words is None else words.format_map(context)


def _quotes_problem(detail: ErrorDetails, field: FieldInfo | None) -> str | None:
    """Return the message about missing or superfluous quotes, and perhaps a wrong value; otherwise None."""
    given, message = detail["input"], _message(detail)
    if isinstance(given, str) and detail["type"] in _NOT_TEXT:
        try:
            other = parse_json(given)
        except UnreadableTextError:
            return message
        message = f"{message}, without quotes"
    elif detail["type"] == "string_type" and isinstance(given, bool | int | float):
        other = json.dumps(given)
    else:
        return None
    if field is None:
        return message
    bounded: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    try:
        TypeAdapter(bounded).validate_python(other)
    except ValidationError as error:
        return _message(error.errors(include_url=False)[0])
    return message


def _path(place: tuple[int | str, ...]) -> str:
    """Return a place in the notation of users: target.checkpoints[0].model."""
    return "spec" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)


def _field_at(place: tuple[int | str, ...], spec: type[BaseModel]) -> FieldInfo | None:
    """Return the field at a place; None for an entry of a list and for the whole spec."""
    if not place:
        return None
    fields = _model_at(spec, place[:-1]).model_fields
    return next((info for name, info in fields.items() if (info.alias or name) == place[-1]), None)


def _model_at(model: type[BaseModel], place: tuple[int | str, ...]) -> type[BaseModel]:
    # Skip numbers of list entries: the model of a list is that of its entries.
    for name in filter(lambda part: isinstance(part, str), place):
        inner = inner_model(model, str(name))
        model = model if inner is None else inner
    return model


def inner_model(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Return the model of a field, or of the entries of its list; None for other types."""
    for info in model.model_fields.values():
        if info.alias == name:
            return next((each for each in _types_in(info.annotation) if issubclass(each, BaseModel)), None)
    return None


def _types_in(annotation: Any) -> list[type]:
    """Return the classes that an annotation such as ``list[Model] | None`` names."""
    if isinstance(annotation, type) and not get_args(annotation):
        return [annotation]
    return [found for each in get_args(annotation) for found in _types_in(each)]


def admitted_spec(spec: Any, metadata: Any = None) -> SpecDecodeDeploymentSpec:
    """Return a spec that an API server would admit, without unknown fields, or raise InvalidSpecError."""
    return _admitted(SpecDecodeDeploymentSpec, spec, metadata)


def admitted_object(body: Mapping[str, Any]) -> SpecDecodeDeploymentSpec:
    """Return the spec of a SpecDecodeDeployment that an API server would admit, or raise InvalidSpecError."""
    return _admitted_object(SpecDecodeDeploymentSpec, body)


def admitted_capture(body: Mapping[str, Any]) -> SpecDecodeCaptureSpec:
    """Return the spec of a SpecDecodeCapture that an API server would admit, or raise InvalidSpecError."""
    return _admitted_object(SpecDecodeCaptureSpec, body)


def admitted_training(body: Mapping[str, Any]) -> SpecDecodeTrainingSpec:
    """Return the spec of a SpecDecodeTraining that an API server would admit, or raise InvalidSpecError."""
    return _admitted_object(SpecDecodeTrainingSpec, body)


def _admitted(kind: type[_Spec], spec: Any, metadata: Any) -> _Spec:
    try:
        admitted = parsed_spec(kind, spec)
    except InvalidSpecError as error:
        rules = [*_rules_of_sound_parts(kind, spec, "spec")] if isinstance(spec, dict) else []
        raise InvalidSpecError([*error.problems, *rules, *name_refusals(kind, metadata)], error.reason) from error
    if problems := object_problems(admitted, metadata):
        raise InvalidSpecError(problems)
    return admitted


def _admitted_object(kind: type[_Spec], body: Mapping[str, Any]) -> _Spec:
    of_metadata: list[Problem] = metadata_problems(body.get("metadata"))
    try:
        spec = _admitted(kind, body.get("spec"), body.get("metadata"))
    except InvalidSpecError as error:
        raise InvalidSpecError([*of_metadata, *error.problems], error.reason) from error
    if of_metadata:
        raise InvalidSpecError(of_metadata)
    return spec


def _rules_of_sound_parts(kind: type[ApiModel], document: Any, place: str) -> Iterator[Problem]:
    """Yield the rules that a document breaks, without rules that read a wrong field.

    Rules of an object with an unknown field, which may be misspelt, or without a required field are skipped.
    """
    wrong: set[str] = set()
    try:
        kind.parse(document)
    except ValidationError as error:
        details = error.errors(include_url=False)
        unknown = any(detail["type"] == UNKNOWN_FIELD and len(detail["loc"]) == 1 for detail in details)
        wrong = set(document) if unknown else {str(detail["loc"][0]) for detail in details if detail["loc"]}
    try:
        sound = kind.parse({name: value for name, value in document.items() if name not in wrong})
    except ValidationError:
        wrong = set(document)
    else:
        yield from broken_rules(sound, place, wrong)
    for name in filter(wrong.__contains__, document):
        inner, value = inner_model(kind, name), document[name]
        if inner is None or not issubclass(inner, ApiModel):
            continue
        parts = {f"[{index}]": item for index, item in enumerate(value)} if isinstance(value, list) else {"": value}
        for part, item in parts.items():
            if isinstance(item, dict):
                yield from _rules_of_sound_parts(inner, item, f"{place}.{name}{part}")
