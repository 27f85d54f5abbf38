"""Figures of an object's engines: from Prometheus if one is configured, otherwise from engine samples."""

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from specdecode_operator.api.deployment import Key
from specdecode_operator.api.deployment_status import FiguresSource, FiguresStatus, FigureStatus
from specdecode_operator.cluster.bounded_fetch import NoAnswerError, WrongAnswerError, in_time, place_of
from specdecode_operator.redaction import clip
from specdecode_operator.stats.figures import FIGURES_WITHOUT_LIMIT, WINDOW_S, SampleBuffer
from specdecode_operator.stats.measures import Scope, Values

_DEADLINE_S: Final = 5
_REST_S: Final = 60.0
"""Pause after an error or a timeout, so that a slow Prometheus does not hold up other objects."""

_ASKS_FOR: Final = "--prometheus-token-file"
_LONGEST_TOKEN: Final = 16 * 1024
_LONGEST_WHY: Final = 400
_MOVED: Final = 0.02
"""Minimum relative change of a figure that is written."""


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus that scrapes the engines."""

    url: str
    token_file: Path | None = None
    """Read at each request, because tokens are renewed."""


@dataclass
class KeptFigures:
    """Figures of one object between reconciles."""

    looks: SampleBuffer = field(default_factory=SampleBuffer)
    taken_s: float | None = None
    """On the monotonic clock; None while an earlier process's figures are shown."""
    _shown: bytes | None = None
    """JSON; the parsed status takes ten times the memory."""

    @property
    def shown(self) -> FiguresStatus | None:
        """The figures to show."""
        return None if self._shown is None else FiguresStatus.model_validate_json(self._shown)

    @shown.setter
    def shown(self, figures: FiguresStatus | None) -> None:
        self._shown = None if figures is None else figures.model_dump_json(by_alias=True, exclude_unset=True).encode()


class FiguresReader:
    """Reads the same figures from Prometheus or from engine samples."""

    def __init__(self, prometheus: Prometheus | None = None) -> None:
        self._prometheus = prometheus
        self._silent_until_s = -math.inf
        self._why = ""

    async def update(self, key: Key, kept: KeptFigures, before: FiguresStatus | None, now_s: float) -> bool:
        """Update the shown figures, at most once per window and only if one moved; return whether they changed.

        Updates are rare because each is written to the status, which causes events. ``before`` are the figures in the
        status.
        """
        if kept.taken_s is not None and now_s - kept.taken_s < WINDOW_S:
            return False
        taken, known = await self.read(key, kept.looks), kept.shown or before
        has_moved = taken is not None and (known is None or _moved(known, taken))
        kept.shown = taken if has_moved else known
        kept.taken_s = kept.taken_s if taken is None else now_s
        return has_moved

    async def read(self, key: Key, looks: SampleBuffer) -> FiguresStatus | None:
        """Return the figures of an object; None if no source has any yet."""
        why = None
        if self._prometheus is not None:
            try:
                values = await self._ask(self._prometheus, key)
                return _status(FiguresSource.PROMETHEUS, values, WINDOW_S)
            except NoAnswerError as error:
                why = f"{clip(str(error), _LONGEST_WHY)}; until then the figures come from the engines"
        found = looks.figures(time.monotonic())
        return None if found is None else _status(FiguresSource.PODS, *found, why)

    async def _ask(self, prometheus: Prometheus, key: Key) -> Mapping[str, Values]:
        """Query all figures; raise NoAnswerError if it does not answer, did not lately, or lacks the object."""
        if time.monotonic() < self._silent_until_s:
            raise NoAnswerError(self._why)
        # It takes a second to import.
        from specdecode_operator.cluster.prometheus import ask_prometheus  # noqa: PLC0415

        scope = Scope(window=f"{WINDOW_S}s", namespace=key.namespace, deployment=key.name)
        try:
            token = _read_token(prometheus.token_file)
            values = await asyncio.to_thread(
                in_time,
                prometheus.url,
                lambda _: ask_prometheus(prometheus.url, token, scope, FIGURES_WITHOUT_LIMIT, asks_for=_ASKS_FOR),
                _DEADLINE_S,
            )
        except WrongAnswerError:
            raise  # engines write their own series: queries for other objects may work
        except NoAnswerError as error:
            self._silent_until_s, self._why = time.monotonic() + _REST_S, str(error)
            raise
        if not any(values.values()):
            raise NoAnswerError(
                f"{place_of(prometheus.url)}: has no series with namespace={key.namespace} and"
                f" specdecode_deployment={key.name}: configure it to scrape the engines"
                ' (documentation: "Monitor")'
            )
        return values


def _read_token(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        with file.open(encoding="ascii") as stream:
            token = stream.read(_LONGEST_TOKEN).strip()
    except (OSError, ValueError):
        token = ""
    if not token.isprintable() or not token or " " in token:
        raise NoAnswerError(f"{_ASKS_FOR}: {file} contains no token: write it on one line, without spaces")
    return token


def _status(
    source: FiguresSource, values: Mapping[str, Values], over_s: float, why: str | None = None
) -> FiguresStatus:
    told = [
        FigureStatus(name=each.name, value=text)
        for each in FIGURES_WITHOUT_LIMIT
        if (text := _text(values.get(each.name, {})))
    ]
    return FiguresStatus(source=source, message=why, over_seconds=round(over_s), values=told)


def _moved(before: FiguresStatus, now: FiguresStatus) -> bool:
    if (before.source, before.message) != (now.source, now.message):
        return True
    known = {each.name: each.value.split() for each in before.values}
    found = {each.name: each.value.split() for each in now.values}
    return known.keys() != found.keys() or any(_differ(known[name], found[name]) for name in found)


def _differ(before: list[str], now: list[str]) -> bool:
    try:
        pairs = [(float(one), float(other)) for one, other in zip(before, now, strict=True)]
    except ValueError:
        return True
    return not all(math.isclose(one, other, rel_tol=_MOVED) for one, other in pairs)


def _text(values: Values) -> str:
    """Return the value, or the values by position in order; empty without a finite one."""
    ordered = sorted(values.items(), key=lambda each: (len(each[0]), each[0]))
    return " ".join(f"{value:.4g}" for _, value in ordered if math.isfinite(value))[:256]
