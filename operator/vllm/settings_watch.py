"""Says at /metrics which settings vLLM changed by itself, and how it speculates: it tells of that in its log alone.

vLLM's logging configuration runs this file (runpy.run_path) in each process of an engine, and makes its handler. So it
is one file for Python 3.10 and newer, and needs the standard library and vLLM's own prometheus_client. Nothing in it
may fail: an engine would not start for it. A process writes the names of what it saw into a file, and the one that
answers /metrics reads it. Of the engine's words only these names leave the pod, and settings of its speculative
configuration that are numbers or single words.
"""

import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "specdecode_settings_watch"
METRIC = "specdecode:engine_changed_setting"
LABEL = "change"
_HELP = "Settings that vLLM changed by itself when it started."

SPECULATION = "specdecode:engine_speculation"
KEY, VALUE = "key", "value"
SET, UNSET = "set", "None"
"""Values of what is no number or word, and of what has none."""
_SPECULATION_HELP = "How vLLM speculates, as it says when it starts."
CORE_STARTS = re.compile(r"^Initializing a V1 LLM engine")
"""Begins the record whose last argument is the configuration, with all that vLLM changed in it (v1/engine/core.py)."""
_WORD = re.compile(r"[\w.+-]{1,64}", re.ASCII)

_SHARED = "PROMETHEUS_MULTIPROC_DIR"
"""Set where several processes answer /metrics: what they publish then lies in files of prometheus_client's own."""

_NOTES = re.compile(r"(\w+(=[\w.+-]+)?\n)*", re.ASCII)
_MOST_BYTES = 4096
_LOOKED_AT = 512
"""Characters of a template: all that tells them apart is at the beginning."""


class Watch(logging.Handler):
    """Notes which of the known templates a record was made of; a request's own words are arguments and not looked at.

    ``changes`` is a regular expression by name, ``keys`` what is told of the speculative configuration, ``path`` the
    file that the engine's processes share.
    """

    def __init__(self, changes: Mapping[str, str], path: str, keys: Sequence[str] = ()) -> None:
        super().__init__()
        self._changes = {name: re.compile(pattern) for name, pattern in changes.items()}
        self._keys = tuple(keys)
        self._path = Path(path)
        self._noted: set[str] = set()
        self._page: _Page | None = None
        # Without the library, or where vLLM configures its logging again.
        with suppress(Exception):
            self._page = _publish(tuple(changes), self._path)

    def emit(self, record: logging.LogRecord) -> None:
        """Note a change, and the configuration, at the first record of it."""
        with suppress(Exception):
            template = str(record.msg)[:_LOOKED_AT]
            for name, pattern in self._changes.items():
                if pattern.search(template):
                    self._note(name)
            if self._keys and CORE_STARTS.search(template):
                for said in _spoken(record.args, self._keys):
                    self._note(said)

    def _note(self, word: str) -> None:
        if word in self._noted:
            return
        self._noted.add(word)
        if self._page is not None:
            self._page.show(word)
        # Another rank may have said so.
        if word in _seen(self._path):
            return
        try:
            with open(self._path, "a", encoding="ascii", opener=_opened) as noted:
                noted.write(f"{word}\n")
        except OSError:
            _give_up(self._path)


def _spoken(arguments: Any, keys: Sequence[str]) -> list[str]:
    """Return ``key=value`` of the speculative configuration among the arguments of a record."""
    for argument in arguments:
        if hasattr(argument, "speculative_config"):
            config = argument.speculative_config
            return [f"{key}={word(getattr(config, key))}" for key in keys if hasattr(config, key)]
    return []


def word(value: object) -> str:
    """Return a value that may leave the pod: no path, no text that somebody wrote."""
    value = getattr(value, "value", value)
    if value is None:
        return UNSET
    return str(value) if isinstance(value, (str, int, float)) and _WORD.fullmatch(str(value)) else SET


class _Page:
    """The two metrics where each process publishes what it sees itself, in files of prometheus_client's own."""

    def __init__(self, gauge: Any) -> None:
        self._changed = gauge(METRIC, _HELP, [LABEL], multiprocess_mode="max")
        self._spoken = gauge(SPECULATION, _SPECULATION_HELP, [KEY, VALUE], multiprocess_mode="max")

    def show(self, word: str, holds: bool = True) -> None:
        key, spoken, value = word.partition("=")
        (self._spoken.labels(key, value) if spoken else self._changed.labels(word)).set(holds)


def _publish(names: tuple[str, ...], path: Path) -> _Page | None:
    """Publish what is noted; return the metrics that are to be set, where they are not read from the file."""
    # Only an engine has it.
    from prometheus_client import REGISTRY, Gauge  # noqa: PLC0415

    if not os.environ.get(_SHARED):
        REGISTRY.register(_Noted(names, path))
        return None
    page = _Page(Gauge)
    seen = _seen(path)
    for word in {*names, *seen}:
        page.show(word, word in seen)
    return page


def _opened(path: str, flags: int) -> int:
    """Open without waiting, as for a pipe's other end, and nothing that a link means: who else writes there may try."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o600)


def _seen(path: Path) -> set[str]:
    """Return what was noted; raise OSError or ValueError where something noted may be lost."""
    # Made here, if it is not there: where nobody can write, nothing is known.
    with open(path, "a+", encoding="ascii", errors="replace", opener=_opened) as noted:
        noted.seek(0)
        text = noted.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES or not _NOTES.fullmatch(text):
        raise ValueError("holds what is no note, in whose place one may have been")
    return set(text.split())


def _give_up(path: Path) -> None:
    """Let nobody read the file for all that was seen, as on a full disk: a link takes no space, and is not followed."""
    link = path.with_name(f"{path.name}.{os.getpid()}")
    link.symlink_to("incomplete")
    link.replace(path)


class _Noted:
    """Collects 1 for what was changed, and 0 for the rest: that all is as it was asked for is an answer, too."""

    def __init__(self, names: tuple[str, ...], path: Path) -> None:
        self._names, self._path = names, path

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

        changed = GaugeMetricFamily(METRIC, _HELP, labels=[LABEL])
        speculation = GaugeMetricFamily(SPECULATION, _SPECULATION_HELP, labels=[KEY, VALUE])
        try:
            seen = _seen(self._path)
        except (OSError, ValueError):
            return
        for name in self._names:
            changed.add_metric([name], name in seen)
        for word in sorted(seen):
            key, spoken, value = word.partition("=")
            if spoken:
                speculation.add_metric([key, value], 1)
        yield from (changed, speculation)


def _as_module() -> None:
    """Let the logging configuration find the handler: it names classes by their modules."""
    module = ModuleType(MODULE)
    module.__dict__["Watch"] = Watch
    sys.modules[MODULE] = module


if __name__ == "<run_path>":
    _as_module()
