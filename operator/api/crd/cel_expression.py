"""Evaluates the CEL that our rules are written in, so that a command line can refuse what the API server would.

The library is CEL itself; what Kubernetes adds to it, and our rules use, stands here.
"""

import sys
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any, Final

# The package loads a command line of its own, whose toolkit for terminals takes a third of the time of ours.
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
"""Functions of lists and texts that the API server has and CEL has not."""


class CelError(Exception):
    """An expression that cannot be read, or has no value."""


def evaluator(self: Any = None, /, **others: Any) -> Callable[[str], Any]:
    """Return what evaluates expressions; ``self``, and others, are what their variables of these names stand for.

    It raises CelError where one is no CEL, or has no value: a field is missing, for example, which ``has`` is there to
    ask.
    """
    # It takes longer to hand over a value than to evaluate most expressions.
    context = cel.Context({"self": self, **others}, dict(_KUBERNETES))

    def evaluate(text: str) -> Any:
        try:
            return _compiled(text).execute(context)
        except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise CelError(str(error)) from error

    return evaluate


@cache
def _compiled(text: str) -> cel.Program:
    return cel.compile(text)
