"""Validate an object as the API server would: evaluate its CEL rules and reject duplicate list keys.

`lint`, `plan` and the webhook use it to reject an object offline. The CEL library covers the language; `evaluator`
adds the Kubernetes functions that our rules use. A stub replaces the library's own command line on import, because
loading it takes longer than the rest.
"""

import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

from specdecode_operator.api.base import ApiModel, Body
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.capture_rules import JOB_NAME, RUN, SCHEDULE_RULES
from specdecode_operator.api.deployment_rules import RULES, SERVICE_NAME, Rule
from specdecode_operator.api.training import SpecDecodeTrainingSpec
from specdecode_operator.api.training_rules import NEW_TRAINING_RULES, REFRESH_RULES
from specdecode_operator.problems import MISSING, Problem, shown, shown_or_missing

# The package's own command line loads a terminal toolkit, which takes a third of the start time of ours.
_LEFT_OUT: Final = "cel.cli"
_is_stand_in = _LEFT_OUT not in sys.modules
sys.modules.setdefault(_LEFT_OUT, ModuleType(_LEFT_OUT))

import cel  # noqa: E402

if _is_stand_in:
    del sys.modules[_LEFT_OUT]

_KUBERNETES: Final[Mapping[str, Callable[..., Any]]] = {
    "isSorted": lambda items: items == sorted(items),
    "sum": sum,
    "split": lambda text, separator: text.split(separator),
    "upperAscii": str.upper,
    "join": lambda items, separator: separator.join(items),
}
"""CEL functions of the API server, beyond the language."""


class CelError(Exception):
    """An expression that is invalid, or has no value."""


class UnsupportedCelError(CelError):
    """An expression that the API server may accept, but that cannot be evaluated here."""


_UNSUPPORTED: Final = ("unsupported syntax", "Undefined variable or function")
"""Parts of the library's messages about optional fields (``.?``), and about functions that only Kubernetes has."""


def evaluator(self: Any = None, /, **others: Any) -> Callable[[str], Any]:
    """Return a function that evaluates expressions with these variables, or raises CelError."""
    return evaluator_with(_KUBERNETES, {"self": self, **others})


def evaluator_with(functions: Mapping[str, Callable[..., Any]], variables: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a function that evaluates expressions with these functions beyond the language, or raises CelError.

    An expression has no value if, for example, it reads a missing field without ``has``.
    """
    # Converting a value takes longer than evaluating most expressions.
    context = cel.Context(dict(variables), dict(functions))

    def evaluate(text: str) -> Any:
        try:
            return _compiled(text).execute(context)
        except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise _cel_error(error) from error

    return evaluate


def syntax_error(text: str) -> str | None:
    """Return what is wrong with the syntax of an expression, in one line; None if it is valid."""
    try:
        _compiled(text)
    except ValueError as error:
        found = _cel_error(error)
        return None if isinstance(found, UnsupportedCelError) else str(error).partition("ERROR: ")[2].splitlines()[0]
    return None


def _cel_error(error: Exception) -> CelError:
    kind = UnsupportedCelError if any(part in str(error) for part in _UNSUPPORTED) else CelError
    return kind(str(error))


@lru_cache(maxsize=1024)  # users write selectors of devices, so their number has no bound
def _compiled(text: str) -> cel.Program:
    return cel.compile(text)


DEPLOYMENT_RULES: Final[Mapping[type[ApiModel], Sequence[Rule]]] = {**RULES, **SCHEDULE_RULES, **REFRESH_RULES}
"""Rules about one version of an object, without the rules about changes of a SpecDecodeCapture."""
_RULES: Final[Mapping[type[ApiModel], Sequence[Rule]]] = {**DEPLOYMENT_RULES, **NEW_TRAINING_RULES}

_KEYS: Final = "x-kubernetes-list-map-keys"
_LONGEST_SHOWN: Final = 64


def object_problems(spec: ApiModel, metadata: Any = None) -> list[Problem]:
    """Return the problems for which the API server rejects an object with this spec, in the order of its fields.

    A missing name in ``metadata`` is ignored.
    """
    return [*broken_rules(spec, "spec"), *name_refusals(type(spec), metadata)]


def name_refusals(kind: type[ApiModel], metadata: Any) -> list[Problem]:
    """Return the problems of the name of an object with a spec of this kind."""
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        return []
    rule = JOB_NAME if issubclass(kind, SpecDecodeCaptureSpec | SpecDecodeTrainingSpec) else SERVICE_NAME
    return list(_judged({"metadata": metadata}, (rule,), ""))


def metadata_problems(metadata: Any) -> list[Problem]:
    """Return the problems for which the API server rejects the metadata of an object in a file."""
    given = metadata if isinstance(metadata, dict) else {}
    problems = [
        Problem(f"metadata.{field}", json.dumps(given[field], default=str), "must be text: write it in quotes")
        for field in ("name", "namespace")
        if not isinstance(given.get(field), str | None)
    ]
    if given.get("name") in (None, ""):
        problems.append(Problem("metadata.name", MISSING, "name the object, for example metadata: {name: chat}"))
    return problems


def as_stored(model: ApiModel) -> Body:
    """Return a model as the API server stores it, with the defaults that the CRD has (``api/crds.py``)."""
    stored = {}
    for name, field in type(model).model_fields.items():
        value, given = getattr(model, name, None), name in model.model_fields_set
        if not given and isinstance(value, ApiModel):
            # An absent object gets the defaults of its fields, whatever the model's own default is.
            value = type(value).model_construct()
        plain = _plain(value)
        if value is not None and (given or (plain not in ("", [], {}) and field.default_factory is None)):
            stored[field.alias or name] = plain
    return stored


def _judged(stored: Body, rules: Sequence[Rule], place: str, model: ApiModel | None = None) -> Iterator[Problem]:
    """Yield the rules that one part of an object breaks, as the API server words them.

    ``model`` is the part without the defaults that ``stored`` has; None if both are the same.
    """
    evaluate = evaluator(stored)
    for rule in rules:
        if not evaluate(rule.holds):
            written = stored if model is None else model.model_dump(mode="json", by_alias=True, exclude_unset=True)
            default, given = (
                shown_or_missing(_value_at(each, rule.field), _LONGEST_SHOWN) for each in (stored, written)
            )
            value = f"{default} (default)" if given == MISSING != default else given
            message = rule.words(shown(evaluate(each)) for each in rule.values)
            # The API server's message stands alone; a problem already has the value.
            message = re.sub(rf"^is {re.escape(default)}(: |, (which |but |and )?)", "", message)
            yield Problem(f"{place}{rule.field}", value, message)


def _value_at(body: Body, field: str) -> Any:
    found: Any = body
    for name in field.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, ApiModel):
        return as_stored(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Enum):
        return value.value
    # YAML has dates and more, which are text once they are JSON.
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def broken_rules(model: ApiModel, place: str, left_out: Collection[str] = ()) -> Iterator[Problem]:
    """Yield the CRD's rules that a model and its parts break; ``place`` is its path in the object.

    ``left_out`` are wrong fields that the model lacks: rules that read one are skipped.
    """
    # The other rules of a capture are about changes.
    rules = RUN if isinstance(model, SpecDecodeCaptureSpec) else _RULES.get(type(model), ())
    if rules := [rule for rule in rules if not any(rule.reads(field) for field in left_out)]:
        yield from _judged(as_stored(model), rules, f"{place}.", model)
    for name, field in type(model).model_fields.items():
        value, path = getattr(model, name), f"{place}.{field.alias or name}"
        if isinstance(value, ApiModel):
            yield from broken_rules(value, path)
        elif isinstance(value, list):
            extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            yield from _repeated(value, extra.get(_KEYS), path)
            for index, each in enumerate(value):
                if isinstance(each, ApiModel):
                    yield from broken_rules(each, f"{path}[{index}]")


def _repeated(items: list[Any], keys: Any, path: str) -> Iterator[Problem]:
    """Yield the entries of a list with the keys of an earlier one."""
    seen = set()
    for index, item in enumerate(items if isinstance(keys, list) else []):
        own = tuple(str(_plain(item).get(key, "")) for key in keys)
        if own in seen:
            shown, named = ", ".join(own), ", ".join(map(str, keys))
            yield Problem(f"{path}[{index}]", shown, f"Duplicate value: an entry before it has the same {named}")
        seen.add(own)
