"""What engines said at several moments, kept as long as a figure looks back."""

from array import array
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Final
from weakref import WeakValueDictionary

from specdecode_operator.engine.exposition import Exposition
from specdecode_operator.monitoring.figures import FIGURES, Figure
from specdecode_operator.monitoring.growth import (
    Growth,
    Page,
    Said,
    Series,
    UnreadablePageError,
    growth_between,
    page_of,
)
from specdecode_operator.monitoring.measures import Values, Within

WINDOW_S: Final = 300
EVERY_S: Final = 60
"""Pages that lie closer than this tell no more."""

SHOWN: Final[tuple[Figure, ...]] = tuple(figure for figure in FIGURES if not isinstance(figure.measure, Within))
"""What needs no limit of an owner's."""

_MOST_SERIES_SETS: Final = 2
"""On the pages of an engine: it has some series more once it works, and a hostile one other series on each page."""

_NAMES: Final = frozenset().union(*(figure.measure.series() for figure in SHOWN))


class _Series:
    """The names and labels of a page: most of its memory, and the same on every page of engines of one model."""

    _known: ClassVar[WeakValueDictionary[tuple[tuple[Series, ...], tuple[str, ...]], "_Series"]] = WeakValueDictionary()

    def __init__(self, counters: tuple[Series, ...], gauges: tuple[str, ...]) -> None:
        self.counters, self.gauges = counters, gauges

    @classmethod
    def of(cls, page: Page) -> "_Series":
        """Return those of a page, shared with all pages that have the same."""
        names = tuple(page.counters), tuple(page.gauges)
        return cls._known.setdefault(names, cls(*names))


@dataclass(frozen=True)
class _Kept:
    """A page as it is kept."""

    at_s: float
    series: _Series
    values: "array[float]"

    @classmethod
    def of(cls, page: Page) -> "_Kept":
        """Return a page so that it takes little memory."""
        gauges = (number for said in page.gauges.values() for number in (said.total, said.largest))
        return cls(page.at_s, _Series.of(page), array("d", [*page.counters.values(), *gauges]))

    def page(self) -> Page:
        """Return it as it was."""
        counters, values = self.series.counters, self.values
        said = map(Said, values[len(counters) :: 2], values[len(counters) + 1 :: 2])
        return Page(
            self.at_s,
            dict(zip(counters, values[: len(counters)], strict=True)),
            dict(zip(self.series.gauges, said, strict=True)),
        )


class Looks:
    """The pages of one object's engines."""

    def __init__(self) -> None:
        self._pages: dict[str, list[_Kept]] = {}

    def names_due(self, engine: str, at_s: float) -> frozenset[str]:
        """Return the names for which a page of this moment is to be read; none where it would tell no more."""
        pages = self._pages.get(engine)
        return frozenset() if pages and at_s - pages[-1].at_s < EVERY_S else _NAMES

    def hear(self, engine: str, page: Exposition, at_s: float) -> None:
        """Keep a page that was read for the names that were due; what cannot be says nothing."""
        pages = self._pages.setdefault(engine, [])
        try:
            pages.append(_Kept.of(page_of(page, _NAMES, at_s)))
        except UnreadablePageError:
            return
        while len(pages) > 1 and at_s - pages[1].at_s >= WINDOW_S:
            del pages[0]
        while len({id(page.series) for page in pages}) > _MOST_SERIES_SETS:
            del pages[0]

    def retain(self, engines: Collection[str]) -> None:
        """Forget the others."""
        self._pages = {name: pages for name, pages in self._pages.items() if name in engines}

    def figures(self, now_s: float) -> tuple[dict[str, Values], float] | None:
        """Return the figures and the seconds that they are of; None before an engine was looked at twice."""
        looks = [
            (pages[0].page(), pages[-1].page())
            for pages in self._pages.values()
            if len(pages) > 1 and now_s - pages[-1].at_s < WINDOW_S
        ]
        if not looks:
            return None
        growth: Growth = growth_between(looks)
        values = {figure.name: figure.measure.values(growth) for figure in SHOWN}
        return values, max(after.at_s - before.at_s for before, after in looks)
