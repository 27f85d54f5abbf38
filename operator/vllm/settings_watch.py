"""Reports settings that vLLM changed, its speculative configuration, and times of its start at /metrics.

vLLM only logs them.

vLLM's logging configuration runs this file with runpy.run_path in each process of an engine, and creates its handler.
So it is one file for Python 3.10 and newer, and needs only the standard library and vLLM's own prometheus_client. It
must not raise: the engine would not start. Each process writes the names of changed settings into a file, and the
process that serves /metrics reads it. Only these names leave the pod, settings of the speculative configuration that
are numbers or single words, and times.
"""

import logging
import os
import re
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
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
"""Values shown for a setting that is neither a number nor a word, and for a setting that is not set."""
_SPECULATION_HELP = "How vLLM speculates, as it says when it starts."
TIMES = "specdecode:engine_startup_seconds"
PHASE = "phase"
_TIMES_HELP = "Time of each phase of the start, as vLLM logs it."
_LONGEST_S = 10**6
_TIME_OF = "startup_"
_TIME = re.compile(rf"{_TIME_OF}(\w+)=(\d{{1,7}}\.\d)", re.ASCII)
CORE_STARTS = re.compile(r"^Initializing a V1 LLM engine")
"""Matches the record whose last argument is the configuration, after all changes (v1/engine/core.py)."""
_WORD = re.compile(r"[\w.+-]{1,64}", re.ASCII)

_SHARED = "PROMETHEUS_MULTIPROC_DIR"
"""Set if several processes serve /metrics: their metrics are in files of prometheus_client."""

_NOTES = re.compile(r"(\w+(=[\w.+-]+)?\n)*", re.ASCII)
_MOST_BYTES = 4096
_LOOKED_AT = 512
"""Most characters of a template to match: templates differ at the beginning."""


class Watch(logging.Handler):
    """Notes which known templates were logged. It never matches the arguments of a record, which contain request text.

    ``changes`` has a regular expression by name, ``keys`` the settings of the speculative configuration to report, and
    ``path`` is the file that the engine's processes share. ``times`` has, by phase, a regular expression and which
    argument of the record is the time in seconds; None if it is the time since the engine began.
    """

    def __init__(
        self,
        changes: Mapping[str, str],
        path: str,
        keys: Sequence[str] = (),
        times: Mapping[str, tuple[str, int | None]] = {},
    ) -> None:
        super().__init__()
        self._changes = {name: re.compile(pattern) for name, pattern in changes.items()}
        self._keys = tuple(keys)
        self._times = {phase: (re.compile(pattern), argument) for phase, (pattern, argument) in times.items()}
        self._path = Path(path)
        self._noted: set[str] = set()
        self._page: _Page | None = None
        # Without the library, or when vLLM configures its logging again.
        with suppress(Exception):
            self._page = _publish(tuple(changes), self._path)

    def emit(self, record: logging.LogRecord) -> None:
        """Note a change, and the configuration, at its first record."""
        with suppress(Exception):
            template = str(record.msg)[:_LOOKED_AT]
            for name, pattern in self._changes.items():
                if pattern.search(template):
                    self._note(name)
            if self._keys and CORE_STARTS.search(template):
                for said in _spoken(record.args, self._keys):
                    self._note(said)
            for phase, (pattern, argument) in self._times.items():
                if pattern.search(template):
                    arguments: Any = record.args
                    self._note_time(phase, _age_s() if argument is None else arguments[argument])

    def _note_time(self, phase: str, seconds: Any) -> None:
        """Note a time unless another rank has noted a longer one, so that the file stays small."""
        is_time = isinstance(seconds, (int, float)) and 0 <= seconds <= _LONGEST_S
        if is_time and seconds > _longest(_seen(self._path)).get(phase, -1):
            self._note(f"{_TIME_OF}{phase}={seconds:.1f}")

    def _note(self, word: str) -> None:
        if word in self._noted:
            return
        self._noted.add(word)
        if self._page is not None:
            self._page.show(word)
        # Another rank may have noted it.
        if word in _seen(self._path):
            return
        try:
            with open(self._path, "a", encoding="ascii", opener=_opened) as noted:
                noted.write(f"{word}\n")
        except OSError:
            _give_up(self._path)


def _spoken(arguments: Any, keys: Sequence[str]) -> list[str]:
    """Return ``key=value`` for each of these settings of the speculative configuration in the arguments of a record."""
    for argument in arguments:
        if hasattr(argument, "speculative_config"):
            config = argument.speculative_config
            return [f"{key}={word(getattr(config, key))}" for key in keys if hasattr(config, key)]
    return []


def word(value: object) -> str:
    """Return a value that may leave the pod: no path, no free text."""
    value = getattr(value, "value", value)
    if value is None:
        return UNSET
    return str(value) if isinstance(value, (str, int, float)) and _WORD.fullmatch(str(value)) else SET


def _age_s() -> float:
    """Return the time since the engine began: since its first process started, which leads the process group."""
    began_ticks = int(Path(f"/proc/{os.getpgid(0)}/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_ticks / os.sysconf("SC_CLK_TCK")


def _longest(notes: Collection[str]) -> dict[str, float]:
    """Return the longest time of each phase: ranks take different times."""
    times: dict[str, float] = {}
    for found in filter(None, map(_TIME.fullmatch, notes)):
        times[found[1]] = max(times.get(found[1], 0), float(found[2]))
    return times


class _Page:
    """The metrics as each process publishes its own observations in prometheus_client's files."""

    def __init__(self, gauge: Any) -> None:
        self._changed = gauge(METRIC, _HELP, [LABEL], multiprocess_mode="max")
        self._spoken = gauge(SPECULATION, _SPECULATION_HELP, [KEY, VALUE], multiprocess_mode="max")
        self._times = gauge(TIMES, _TIMES_HELP, [PHASE], multiprocess_mode="max")

    def show(self, word: str, holds: bool = True) -> None:
        if times := _longest([word]):
            for phase, seconds in times.items():
                self._times.labels(phase).set(seconds)
            return
        key, spoken, value = word.partition("=")
        (self._spoken.labels(key, value) if spoken else self._changed.labels(word)).set(holds)


def _publish(names: tuple[str, ...], path: Path) -> _Page | None:
    """Publish the notes; return the metrics to set, or None if they are read from the file."""
    # Only an engine has the library.
    from prometheus_client import REGISTRY, Gauge  # noqa: PLC0415

    if not os.environ.get(_SHARED):
        REGISTRY.register(_Noted(names, path))
        return None
    page = _Page(Gauge)
    seen = _seen(path)
    longest = {f"{_TIME_OF}{phase}={seconds:.1f}" for phase, seconds in _longest(seen).items()}
    for word in {*names, *longest, *(each for each in seen if not _TIME.fullmatch(each))}:
        page.show(word, word in seen)
    return page


def _opened(path: str, flags: int) -> int:
    """Open with O_NONBLOCK and O_NOFOLLOW: other processes may write to this directory."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o600)


def _seen(path: Path) -> set[str]:
    """Return the notes; raise OSError or ValueError if a note may be lost."""
    # The file is created here if absent: a path that cannot be written proves no absence of changes.
    with open(path, "a+", encoding="ascii", errors="replace", opener=_opened) as noted:
        noted.seek(0)
        text = noted.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES or not _NOTES.fullmatch(text):
        raise ValueError("contains text that is not a note; notes may be lost")
    return set(text.split())


def _give_up(path: Path) -> None:
    """Mark the file incomplete by replacing it with a symlink, which works on a full disk and is not followed."""
    link = path.with_name(f"{path.name}.{os.getpid()}")
    link.symlink_to("incomplete")
    link.replace(path)


class _Noted:
    """Collects 1 for each changed setting and 0 for the others, because an unchanged setting is also a result."""

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
        times = GaugeMetricFamily(TIMES, _TIMES_HELP, labels=[PHASE])
        for phase, seconds in sorted(_longest(seen).items()):
            times.add_metric([phase], seconds)
        for word in sorted(seen):
            key, spoken, value = word.partition("=")
            if spoken and not _TIME.fullmatch(word):
                speculation.add_metric([key, value], 1)
        yield from (changed, speculation, times)


def _as_module() -> None:
    """Register this file as a module, because the logging configuration refers to classes by module."""
    module = ModuleType(MODULE)
    module.__dict__["Watch"] = Watch
    sys.modules[MODULE] = module


if __name__ == "<run_path>":
    _as_module()
