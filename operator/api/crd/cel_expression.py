"""Evaluates the CEL that our rules are written in, so that a command line can refuse what the API server would.

This is the part of CEL and of Kubernetes' functions for it that the rules use,
and nothing else: an expression with more is an error, which a test raises over
all rules.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from operator import add, eq, ge, gt, le, lt, mod, mul, ne, sub
from typing import Any, Final

Scope = Mapping[str, Any]
Expression = Callable[[Scope], Any]

_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>\d+)|'(?P<text>(?:[^'\\]|\\.)*)'|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign>\|\||&&|[=!<>]=|[-+*%<>!?:.,()\[\]])|(?P<end>$))"
)
_RELATIONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "==": eq,
    "!=": ne,
    "<": lt,
    "<=": le,
    ">": gt,
    ">=": ge,
    "in": lambda item, items: item in items,
}
_SUMS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {"+": add, "-": sub}
# Python's % goes with CEL's where nothing is negative: counts are bounded from below.
_PRODUCTS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {"*": mul, "%": mod}
_CONSTANTS: Final = {"true": True, "false": False}


class CelError(Exception):
    """An expression that cannot be read, or has no value."""


@cache
def read_cel(text: str) -> Expression:
    """Return an expression as a function of its variables.

    Raises
    ------
    CelError
        When it is no CEL, or uses more of it than is known here.
    """
    reader = _Reader(text)
    expression = reader.expression()
    reader.expect("")
    return expression


class _Member:
    """A field of an object; to have none is an error, which ``has`` is there to avoid."""

    def __init__(self, owner: Expression, name: str) -> None:
        self._owner = owner
        self._name = name

    def __call__(self, scope: Scope) -> Any:
        owner = self._owner(scope)
        if self._name not in owner:
            raise CelError(f"no such key: {self._name}")
        return owner[self._name]

    def is_there(self, scope: Scope) -> bool:
        """Return whether the object has the field."""
        return bool(self._name in self._owner(scope))


class _Reader:
    """Reads an expression from the operators that bind least to those that bind most."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._next = 0

    def expression(self) -> Expression:
        """A choice by ``?``, or what stands alone."""
        condition = self._disjunction()
        if not self._take("?"):
            return condition
        then = self._disjunction()
        self.expect(":")
        otherwise = self.expression()
        return lambda scope: then(scope) if condition(scope) else otherwise(scope)

    def expect(self, sign: str) -> None:
        """Go past a sign that must stand here; the empty one is the end."""
        if not self._take(sign):
            raise CelError(f"{self._tokens[self._next][1]!r} stands where {sign or 'the end'} should")

    def _take(self, *signs: str) -> str | None:
        kind, text = self._tokens[self._next]
        if (kind in {"sign", "end"} or (kind, text) == ("name", "in")) and text in signs:
            self._next += 1
            return text or "end"
        return None

    def _disjunction(self) -> Expression:
        left = self._conjunction()
        while self._take("||"):
            left = _either(left, self._conjunction(), decisive=True)
        return left

    def _conjunction(self) -> Expression:
        left = self._relation()
        while self._take("&&"):
            left = _either(left, self._relation(), decisive=False)
        return left

    def _relation(self) -> Expression:
        return self._chain(_RELATIONS, self._sum)

    def _sum(self) -> Expression:
        return self._chain(_SUMS, self._product)

    def _product(self) -> Expression:
        return self._chain(_PRODUCTS, self._unary)

    def _chain(
        self, operators: Mapping[str, Callable[[Any, Any], Any]], operand: Callable[[], Expression]
    ) -> Expression:
        left = operand()
        while sign := self._take(*operators):
            left = _applied(operators[sign], left, operand())
        return left

    def _unary(self) -> Expression:
        if self._take("!"):
            operand = self._unary()
            return lambda scope: not operand(scope)
        return self._with_members(self._primary())

    def _with_members(self, expression: Expression) -> Expression:
        while sign := self._take(".", "["):
            if sign == "[":
                expression = _applied(_item, expression, self.expression())
                self.expect("]")
                continue
            name = self._name()
            expression = self._call(expression, name) if self._take("(") else _Member(expression, name)
        return expression

    def _name(self) -> str:
        kind, text = self._tokens[self._next]
        if kind != "name":
            raise CelError(f"{text!r} stands where a name should")
        self._next += 1
        return text

    def _call(self, owner: Expression, name: str) -> Expression:
        """A function of what stands before it, its arguments in parentheses."""
        if name in _MACROS:
            variable = self._name()
            self.expect(",")
            body = self.expression()
            self.expect(")")
            return _over(_MACROS[name], owner, variable, body)
        arguments = self._until(")")
        if name not in _FUNCTIONS or len(arguments) != (name == "matches"):
            raise CelError(f"{name} is no function that is known here")
        return _applied(_FUNCTIONS[name], owner, *arguments)

    def _primary(self) -> Expression:
        if self._take("("):
            inner = self.expression()
            self.expect(")")
            return inner
        if self._take("["):
            items = self._until("]")
            return lambda scope: [item(scope) for item in items]
        kind, text = self._tokens[self._next]
        if kind in {"number", "text"}:
            self._next += 1
            return _constant(int(text) if kind == "number" else re.sub(r"\\(.)", r"\1", text))
        name = self._name()
        if name == "has" and self._take("("):
            member = self.expression()
            self.expect(")")
            if not isinstance(member, _Member):
                raise CelError("has asks for a field")
            return member.is_there
        return _constant(_CONSTANTS[name]) if name in _CONSTANTS else _variable(name)

    def _until(self, closing: str) -> list[Expression]:
        items: list[Expression] = []
        while not self._take(closing):
            if items:
                self.expect(",")
            items.append(self.expression())
        return items


def _tokens(text: str) -> Iterable[tuple[str, str]]:
    position = 0
    kind = ""
    while kind != "end":
        found = _TOKEN.match(text, position)
        if found is None or found.lastgroup is None:
            raise CelError(f"{text[position:]!r} is not understood")
        kind, position = found.lastgroup, found.end()
        yield kind, found[kind]


def _constant(value: Any) -> Expression:
    return lambda _: value


def _variable(name: str) -> Expression:
    def value(scope: Scope) -> Any:
        if name not in scope:
            raise CelError(f"undeclared reference to {name}")
        return scope[name]

    return value


def _applied(function: Callable[..., Any], *operands: Expression) -> Expression:
    return lambda scope: function(*(operand(scope) for operand in operands))


def _either(left: Expression, right: Expression, *, decisive: bool) -> Expression:
    """Return ``||`` or ``&&``: what decides on one side counts even where the other has no value."""

    def value(scope: Scope) -> Any:
        try:
            if left(scope) is decisive:
                return decisive
        except CelError:
            if right(scope) is decisive:
                return decisive
            raise
        return right(scope)

    return value


def _over(macro: Callable[[list[Any]], Any], items: Expression, variable: str, body: Expression) -> Expression:
    return lambda scope: macro([body({**scope, variable: item}) for item in items(scope)])


def _item(items: Any, index: Any) -> Any:
    if not 0 <= index < len(items):
        raise CelError(f"index out of bounds: {index}")
    return items[index]


def _matches(text: str, pattern: str) -> bool:
    """RE2 knows no end before a last line feed, and classes of ASCII alone."""
    return re.search(re.sub(r"(?<!\\)\$", r"\\Z", pattern), text, re.ASCII) is not None


def _is_sorted(items: list[Any]) -> bool:
    return bool(items == sorted(items))


_MACROS: Final[Mapping[str, Callable[[list[Any]], Any]]] = {
    "all": all,
    "exists": any,
    "exists_one": lambda found: found.count(True) == 1,
    "map": list,
}
_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "size": len,
    "matches": _matches,
    "isSorted": _is_sorted,
    "sum": sum,
}
