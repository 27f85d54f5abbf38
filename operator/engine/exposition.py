"""Reads the samples of some names on a /metrics page, in time that grows with the page's length alone.

prometheus_client's parser takes 0.2 to 0.4 µs a character, which is half a second for what one hostile engine may send.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from specdecode_operator.problems import shown

_MOST_LINES: Final = 40_000
"""Of a page: with 64 data-parallel ranks, as many as are served, vLLM 0.33 has some 30,000 (378 series a rank, and
when each was made)."""
_MOST_READ_LINES: Final = 8_000
"""Of these, with the names that are asked for: a rank has 66, and one for each of up to 32 draft positions."""
_MOST_READ_CHARACTERS: Final = 2**20
"""In these: 64 ranks have some 750,000."""
_LONGEST_LINE: Final = 8 * 1024
"""Of those that are read; that of the cache's configuration has 1,100."""

_LABEL: Final = r'[a-zA-Z_]\w*+="[^"\\]*+(?:\\.[^"\\]*+)*+"'
_SAMPLE: Final = re.compile(
    rf"[\w:]++[ \t]*+(?:\{{((?:{_LABEL}(?:,[ \t]*+|(?=\}})))*+)\}})?+[ \t]*+([^\s]++)(?:[ \t]++-?\d++)?+\s*+", re.ASCII
)
_NAMED_LABEL: Final = re.compile(r'(\w+)="([^"\\]*+(?:\\.[^"\\]*+)*+)"', re.ASCII)


class ExpositionError(ValueError):
    """The text is not what an engine's /metrics says."""


@dataclass(frozen=True)
class Sample:
    """One line; labels are as they stand there, nothing is unescaped."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Exposition:
    """What a page says under the names that are asked for."""

    samples: list[Sample]
    gauges: frozenset[str]
    """Names that it declares as gauges, with a sample or without."""


def read_exposition(text: str, names: Collection[str]) -> Exposition:
    """Return the samples of these names.

    Raises
    ------
    ExpositionError
        A line of them is not in Prometheus format, or there is more than engines say.
    """
    known = {name: name for name in names}
    samples, gauges = [], set()
    for name, line in _asked(text, frozenset(known)) if known else ():
        if not line.startswith("#"):
            samples.append(_sample(known[name], line))
        elif line.split()[3:] == ["gauge"]:
            gauges.add(known[name])
    return Exposition(samples, frozenset(gauges))


def _asked(text: str, names: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield the lines of some names, each with its name."""
    if text.count("\n") > _MOST_LINES:
        raise ExpositionError("more is said than an engine has to say: this is not vLLM")
    lines = characters = 0
    for found in _lines_of(names).finditer(f"\n{text}"):
        line = found[0][1:]
        lines, characters = lines + 1, characters + len(line)
        if lines > _MOST_READ_LINES or characters > _MOST_READ_CHARACTERS or len(line) > _LONGEST_LINE:
            raise ExpositionError("more is said than an engine has to say: this is not vLLM")
        yield found[1], line


@lru_cache(maxsize=16)
def _lines_of(names: frozenset[str]) -> re.Pattern[str]:
    """Return what finds their lines: one search through a page takes less than half of the time of one a line."""
    return re.compile(rf"\n(?:# TYPE )?({'|'.join(map(re.escape, sorted(names)))})(?![\w:]).*", re.ASCII)


def _sample(name: str, line: str) -> Sample:
    found = _SAMPLE.fullmatch(line)
    if found is None:
        raise ExpositionError(f"not in Prometheus format: {shown(line)}")
    try:
        value = float(found[2])
    except ValueError as error:
        raise ExpositionError(f"not in Prometheus format: {name} is {shown(found[2])}") from error
    return Sample(name, dict(_NAMED_LABEL.findall(found[1] or "")), value)
