"""The CEL that the rules are written in: the library has each construct as the language's definition has it."""

import re
from typing import Any

import cel
import pytest

from specdecode_operator.api.capture_rules import CAPTURE_RULES
from specdecode_operator.api.crd_validation import DEPLOYMENT_RULES, CelError, evaluator
from specdecode_operator.api.training_rules import TRAINING_RULES

SELF = {"a": 3, "b": 5, "name": "org/x", "empty": [], "list": [4, 2, 9], "parts": [{"n": 1}, {"n": 2, "m": 1}]}

VALUES: dict[str, Any] = {
    "self.a < self.b && self.a <= 3 && self.b > 4 && self.b >= 5": True,
    "self.a == 3 || self.missing == 1": True,
    "self.missing == 1 || self.a == 3": True,
    "self.missing == 1 && self.a == 4": False,
    "self.a == 4 || self.b == 5 && self.b == 4": False,
    "!has(self.missing) && has(self.empty)": True,
    "!(self.a == 3)": False,
    "!has(self.a) || self.a != 3": False,
    "self.a + self.b * 2 - 1": 12,
    "self.b % self.a == 2": True,
    "(self.a + self.b) * 2": 16,
    "self.a == 3 ? 'yes' : 'no'": "yes",
    "self.name in ['org/x', 'org/y']": True,
    "'in' in ['in']": True,
    "self.list[1] + self.list.size()": 5,
    "self.list[0] + self.list[2]": 13,
    "self.name.size()": 5,
    "self.name.matches('^org/[a-z]$')": True,
    "self.name.matches('x')": True,
    r"'a$b'.matches('^a\\$b$')": True,
    "self.name.matches('^[^[:space:]/]+$')": False,
    "'a\u00a0b'.matches('^[^[:space:]/]+$')": True,
    r"'line\\n' + '\'quoted\''": "line\\n'quoted'",
    "self.empty.all(e, e > 1) && !self.empty.exists(e, e > 1)": True,
    "self.list.all(e, e > 1)": True,
    "self.list.exists(e, e > 8)": True,
    "self.list.exists_one(e, e > 3)": False,
    "self.parts.map(p, p.n).sum()": 3,
    "self.parts.map(p, p.n).isSorted()": True,
    "self.list.isSorted()": False,
    "self.list.all(a, self.list.exists_one(b, a == b))": True,
    "self.parts.exists(p, has(p.m))": True,
}


@pytest.mark.parametrize(("text", "value"), VALUES.items(), ids=VALUES)
def test_expression_evaluates_to_the_expected_value(text: str, value: Any) -> None:
    assert evaluator(SELF)(text) == value


def test_dollar_sign_does_not_match_before_a_line_feed() -> None:
    # RE2, which CEL takes: $ without the flag m is the end of the text. Python's own would match.
    assert evaluator("a\n")("self.matches('^a$')") is False


@pytest.mark.parametrize(
    "text", ["self.missing", "self.list[3]", "self.list[0 - 1]", "other", "self.missing || self.a == 4"]
)
def test_expression_without_a_value_is_an_error(text: str) -> None:
    with pytest.raises(CelError):
        evaluator(SELF)(text)


@pytest.mark.parametrize(
    "text", ["", "self.", "self.a ==", "(self.a", "self.a self.b", "has(self)", "self.a.trim()", "a ^ b", "[1 2]", "'x"]
)
def test_invalid_or_unsupported_syntax_is_an_error(text: str) -> None:
    with pytest.raises(CelError):
        evaluator(SELF)(text)


def test_every_rule_uses_only_portable_cel() -> None:
    for rules in (*DEPLOYMENT_RULES.values(), *CAPTURE_RULES.values(), *TRAINING_RULES.values()):
        for text in [text for rule in rules for text in (rule.holds, *rule.values)]:
            functions = {name for name in cel.compile(text).functions() if name.isidentifier()}
            assert functions <= {"has", "size", "matches", "isSorted", "sum"}, text
            # RE2's classes are of ASCII, those of the library of Unicode: [:space:] is the same for both.
            assert not re.search(r"\\[sdwbSDWB]", text), text
