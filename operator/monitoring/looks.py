"""What engines said at several moments, kept as long as a figure looks back."""

from collections.abc import Collection, Mapping
from typing import Final

from specdecode_operator.monitoring.figures import FIGURES, Figure
from specdecode_operator.monitoring.growth import Growth, Page, Series, UnreadablePageError, growth_between, read_page
from specdecode_operator.monitoring.measures import Values, Within

WINDOW_S: Final = 300
EVERY_S: Final = 60
"""Pages that lie closer than this tell no more."""

SHOWN: Final[tuple[Figure, ...]] = tuple(figure for figure in FIGURES if not isinstance(figure.measure, Within))
"""What needs no limit of an owner's."""

_NAMES: Final = frozenset().union(*(figure.measure.series() for figure in SHOWN))


class Looks:
    """The pages of one object's engines."""

    def __init__(self) -> None:
        self._pages: dict[str, list[Page]] = {}

    def hear(self, engine: str, text: str, at_s: float) -> None:
        """Keep a page where it is time for one; what cannot be read says nothing."""
        pages = self._pages.setdefault(engine, [])
        if pages and at_s - pages[-1].at_s < EVERY_S:
            return
        try:
            page = read_page(text, _NAMES, at_s)
        except UnreadablePageError:
            return
        pages.append(_sharing(page, pages[-1]) if pages else page)
        while len(pages) > 1 and at_s - pages[1].at_s >= WINDOW_S:
            del pages[0]

    def retain(self, engines: Collection[str]) -> None:
        """Forget the others."""
        self._pages = {name: pages for name, pages in self._pages.items() if name in engines}

    def figures(self, now_s: float) -> tuple[dict[str, Values], float] | None:
        """Return the figures and the seconds that they are of; None before an engine was looked at twice."""
        looks = [
            (pages[0], pages[-1])
            for pages in self._pages.values()
            if len(pages) > 1 and now_s - pages[-1].at_s < WINDOW_S
        ]
        if not looks:
            return None
        growth: Growth = growth_between(looks)
        values = {figure.name: figure.measure.values(growth) for figure in SHOWN}
        return values, max(after.at_s - before.at_s for before, after in looks)


def _sharing(page: Page, before: Page) -> Page:
    """Return a page with the names and labels of the one before, which take most of the memory."""
    return Page(page.at_s, _with_keys_of(page.counters, before.counters), _with_keys_of(page.gauges, before.gauges))


def _with_keys_of(series: Mapping[Series, float], before: Mapping[Series, float]) -> Mapping[Series, float]:
    known = {key: key for key in before}
    return {known.get(key, key): value for key, value in series.items()}
