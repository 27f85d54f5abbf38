"""Says at /metrics which settings vLLM changed by itself: it tells of that in a line of its log, and serves on.

vLLM's logging configuration runs this file (runpy.run_path) in each process of an engine, and makes its handler. So it
is one file for Python 3.10 and newer, and needs the standard library and vLLM's own prometheus_client. Nothing in it
may fail: an engine would not start for it. A process writes the names of what it saw into a file, and the one that
answers /metrics reads it. Of the engine's words only these names leave the pod.
"""

import logging
import os
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
_HELP = "Settings that vLLM changed by itself when it started."
_SHARED = "PROMETHEUS_MULTIPROC_DIR"
"""Set where several processes answer /metrics: what they publish then lies in files of prometheus_client's own."""

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
        self._gauge: Any = None
        # Without the library, or where vLLM configures its logging again.
        with suppress(Exception):
            self._gauge = _publish(tuple(changes), self._path)

    def emit(self, record: logging.LogRecord) -> None:
        """Note a change at its first record."""
        with suppress(Exception):
            template = str(record.msg)[:_LOOKED_AT]
            for name, pattern in self._changes.items():
                if name not in self._noted and pattern.search(template):
                    self._noted.add(name)
                    with open(self._path, "a", encoding="ascii", opener=_opened) as noted:
                        noted.write(f"{name}\n")
                    if self._gauge is not None:
                        self._gauge.labels(name).set(1)


def _publish(names: tuple[str, ...], path: Path) -> Any:
    """Publish what is noted; return the metric that is to be set, where it is not read from the file."""
    # Only an engine has it.
    from prometheus_client import REGISTRY, Gauge  # noqa: PLC0415

    if not os.environ.get(_SHARED):
        REGISTRY.register(_Changed(names, path))
        return None
    gauge = Gauge(METRIC, _HELP, [LABEL], multiprocess_mode="max")
    seen = _seen(path)
    for name in names:
        gauge.labels(name).set(name in seen)
    return gauge


def _opened(path: str, flags: int) -> int:
    """Open without waiting, as for a pipe's other end, and nothing that a link means: who else writes there may try."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o600)


def _seen(path: Path) -> set[str]:
    # Made here, if it is not there: where nobody can write, nothing is known.
    with open(path, "a+", encoding="ascii", errors="replace", opener=_opened) as noted:
        noted.seek(0)
        return set(noted.read(_MOST_BYTES).split())


class _Changed:
    """Collects 1 for what was changed, and 0 for the rest: that all is as it was asked for is an answer, too."""

    def __init__(self, names: tuple[str, ...], path: Path) -> None:
        self._names, self._path = names, path

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

        family = GaugeMetricFamily(METRIC, _HELP, labels=[LABEL])
        try:
            seen = _seen(self._path)
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
