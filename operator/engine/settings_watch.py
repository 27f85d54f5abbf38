"""Says at /metrics which settings vLLM changed by itself: it tells of that in a line of its log, and serves on.

vLLM's logging configuration runs this file (runpy.run_path) in each process of an engine, and makes its handler. So it
is one file for Python 3.10 and newer, and needs the standard library and vLLM's own prometheus_client. Nothing in it
may fail: an engine would not start for it. A process writes the names of what it saw into a file, and the one that
answers /metrics reads it. Of the engine's words only these names leave the pod.
"""

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "specdecode_settings_watch"
METRIC = "specdecode:engine_changed_setting"
LABEL = "change"
_MOST_BYTES = 4096
_LOOKED_AT = 512
"""Characters of a template: all that tells them apart is at the beginning."""


class Watch(logging.Handler):
    """Notes which of the known templates a record was made of; a request's own words are arguments and not looked at.

    ``changes`` is a regular expression by name, ``path`` the file that the engine's processes share.
    """

    def __init__(self, changes: Mapping[str, str], path: str) -> None:
        super().__init__()
        self._changes = {name: re.compile(pattern) for name, pattern in changes.items()}
        self._path = Path(path)
        self._noted: set[str] = set()
        # Without it, or where vLLM configures its logging again.
        with suppress(Exception):
            self._publish()

    def emit(self, record: logging.LogRecord) -> None:
        """Note a change at its first record."""
        with suppress(Exception):
            template = str(record.msg)[:_LOOKED_AT]
            for name, pattern in self._changes.items():
                if name not in self._noted and pattern.search(template):
                    self._noted.add(name)
                    with self._path.open("a", encoding="ascii") as noted:
                        noted.write(f"{name}\n")

    def _publish(self) -> None:
        from prometheus_client import REGISTRY  # noqa: PLC0415  only an engine has it, and most processes never answer

        REGISTRY.register(_Changed(tuple(self._changes), self._path))


class _Changed:
    """Collects 1 for what was changed, and 0 for the rest: that all is as it was asked for is an answer, too."""

    def __init__(self, names: tuple[str, ...], path: Path) -> None:
        self._names, self._path = names, path

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

        family = GaugeMetricFamily(METRIC, "Settings that vLLM changed by itself when it started.", labels=[LABEL])
        try:
            # Made here, if it is not there: where nobody can write, nothing is known.
            with self._path.open("a+", encoding="ascii", errors="replace") as noted:
                noted.seek(0)
                seen = set(noted.read(_MOST_BYTES).split())
        except OSError:
            return
        for name in self._names:
            family.add_metric([name], name in seen)
        yield family


def _as_module() -> None:
    """Let the logging configuration find the handler: it names classes by their modules."""
    module = ModuleType(MODULE)
    module.__dict__["Watch"] = Watch
    sys.modules[MODULE] = module


if __name__ == "<run_path>":
    _as_module()
