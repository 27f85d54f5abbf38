"""Which modules a checkpoint leaves in 16 bits: patterns that anybody may have written, asked of every layer.

Patterns become automata of pydantic's Rust engine for regular expressions, which never goes back: a name takes time in
proportion to its length times that of the patterns, whatever they are. Python's own would take for ever over some.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from pydantic_core import SchemaError, SchemaValidator, core_schema

from specdecode_operator.problems import shown
from specdecode_operator.sizing.base.fields import Fields

_EXPRESSION: Final = "re:"
_MOST_EXPRESSIONS: Final = 32
_LONGEST: Final = 128
"""Characters of one pattern, each of which costs time to compile: those of the catalogue have 50 at most."""

_MOST_COMPARED: Final = 131_072
"""Characters of patterns times the layers they are compared with: those of the catalogue come to 9,000 at most."""

_MOST_KEYS: Final = 4
"""Of one file, which is read for the model and once more for its layers for multi-token prediction."""

_DIGITS_COUNTED: Final = re.compile(r"(?:\\d|\[0-9\])\{\d(?:,\d?)?\}")
"""The only counts that may be repeated by number: each other one can make an automaton of any size of a few letters."""

_NEGATED: Final = re.compile(r"\^?\(\?!")
"""How some checkpoints say what they do quantize: ``re:^(?!.*experts).*`` excludes all else."""

_TOKENS: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]")
_LAYER_NUMBER: Final = re.compile(r"layers\.(\d+)(?=\.|$)")


@dataclass(frozen=True)
class Exclusions:
    """What stays in 16 bits, sorted so that thousands of entries can be asked: parts of names, and patterns.

    ``automata`` has one for the patterns that name a layer, by its number, and without a number one for the others.
    """

    parts: frozenset[str]
    lengths: Mapping[str, tuple[int, ...]]  # in words, of the parts by their first word, from the shortest
    automata: Mapping[str, SchemaValidator]
    negated: tuple[tuple[SchemaValidator, SchemaValidator], ...]  # What may not hold for a name, and what must

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Exclusions":
        """Return the exclusions of texts as files write them."""
        parts, patterns, negated = set(), defaultdict(list), []
        for text in texts:
            if not _is_pattern(text):
                parts.add(text)
                continue
            unwanted, wanted = _split(_written_for_rust(text))
            if unwanted is None:
                patterns[_number_in(text)].append(wanted)
            else:
                negated.append((_automaton([unwanted]), _automaton([wanted])))
        automata = {number: _automaton(found) for number, found in patterns.items()}
        return cls(frozenset(parts), _lengths(parts), automata, tuple(negated))

    def hold(self, name: str) -> bool:
        """Whether a module with this name stays in 16 bits."""
        # Of a checkpoint with many layers ten thousand names are asked: most have nothing of either.
        if self._holds_a_part(name):
            return True
        return bool(self.automata or self.negated) and self._holds_a_pattern(name)

    def _holds_a_part(self, name: str) -> bool:
        words = name.split(".")
        for start, word in enumerate(words):
            for length in self.lengths.get(word, ()):
                if start + length > len(words):
                    break
                if ".".join(words[start : start + length]) in self.parts:
                    return True
        return False

    def _holds_a_pattern(self, name: str) -> bool:
        for number in ("", _layer_number(name)):
            automaton = self.automata.get(number)
            if automaton is not None and automaton.isinstance_python(name):
                return True
        return any(
            wanted.isinstance_python(name) and not unwanted.isinstance_python(name) for unwanted, wanted in self.negated
        )


def _lengths(parts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    found: defaultdict[str, set[int]] = defaultdict(set)
    for part in parts:
        first, *more = part.split(".")
        found[first].add(1 + len(more))
    return {first: tuple(sorted(lengths)) for first, lengths in found.items()}


def read_exclusions(section: Fields, key: str, num_layers: int) -> Exclusions:
    """Return what a key of quantization_config excludes; patterns that cost more than any checkpoint's are refused."""
    texts = section.strings(key)
    patterns = [text for text in texts if _is_pattern(text)]
    expressions = [text.removeprefix(_EXPRESSION) for text in patterns if text.startswith(_EXPRESSION)]
    if len(expressions) > _MOST_EXPRESSIONS:
        raise section.error(key, f"has more than {_MOST_EXPRESSIONS} regular expressions: name the modules")
    for long in (pattern for pattern in patterns if len(pattern) > _LONGEST):
        raise section.error(key, f"{shown(long)} is a pattern of more than {_LONGEST} characters: name the modules")
    compared = sum(len(pattern) * (1 if _number_in(pattern) else num_layers) for pattern in patterns)
    if compared > _MOST_COMPARED:
        message = (
            f"{len(patterns):,} patterns, over {num_layers:,} layers, come to {compared:,} characters to compare names"
            f" with, {_MOST_COMPARED:,} at most: name the modules"
        )
        raise section.error(key, message)
    for expression in expressions:
        if problem := _problem(expression):
            raise section.error(key, f"{shown(expression)} {problem}: name the modules")
    try:
        return _exclusions(texts)
    except SchemaError as error:
        raise section.error(key, f"its {len(patterns):,} patterns are too many: name the modules") from error


@lru_cache(maxsize=_MOST_KEYS)
def _exclusions(texts: tuple[str, ...]) -> Exclusions:
    return Exclusions.of(texts)


def _problem(expression: str) -> str | None:
    if "{" in _DIGITS_COUNTED.sub("", expression):
        return r"counts by { and }, which only \d and [0-9] may, up to 9"
    try:
        for part in _split(expression):
            if part is not None:
                _compiled(part)
                _automaton([part])
    except SchemaError:
        return "is no regular expression, or looks back or around, which only one (?! ) at its beginning may"
    return None


def _is_pattern(text: str) -> bool:
    return text.startswith(_EXPRESSION) or "*" in text


def _written_for_rust(pattern: str) -> str:
    """Return the expression for a pattern: of a glob, that of part of a name."""
    if pattern.startswith(_EXPRESSION):
        return pattern.removeprefix(_EXPRESSION)
    glob = re.escape(pattern).replace(r"\*", ".*")
    return rf"(?:.*\.)?{glob}(?:\.|$)"


def _split(expression: str) -> tuple[str | None, str]:
    """Return what a negative look-ahead at the beginning of all does not want, and the rest: the engine has none."""
    start, end, depth = _NEGATED.match(expression), None, 1
    for token in _TOKENS.finditer(expression, start.end()) if start else ():
        if token[0] == "|" and depth == 0:
            return None, expression
        depth += (token[0] == "(") - (token[0] == ")")
        if depth == 0 and end is None:
            end = token
    if start is None or end is None:
        return None, expression
    return expression[start.end() : end.start()], expression[end.end() :]


def _automaton(expressions: Iterable[str]) -> SchemaValidator:
    """Return what tells whether a name begins with one of these."""
    return _compiled(rf"\A(?:{'|'.join(f'(?:{expression})' for expression in expressions)})")


def _compiled(expression: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=expression))


def _number_in(pattern: str) -> str:
    """Return the number of the only layer that a glob can hold for; nothing where it may hold for any."""
    return "" if pattern.startswith(_EXPRESSION) else _layer_number(pattern)


def _layer_number(name: str) -> str:
    found = _LAYER_NUMBER.search(name)
    return found[1] if found else ""
