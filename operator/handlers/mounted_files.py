"""Reload mounted configuration files, the calibration file and the facts folder, without a restart.

Either may be absent, because the ConfigMaps behind them are optional. An invalid file is logged once, and its last
valid content stays in force.
"""

import asyncio
import hashlib
import json
import logging
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint
from specdecode_operator.deployment.models.facts_files import FactsFileError, facts_in
from specdecode_operator.deployment.models.model_facts import SiteFacts
from specdecode_operator.problems import printable, shown
from specdecode_operator.redaction import clip
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration, CalibrationError, parse_calibration
from specdecode_operator.sizing.catalogue import find_entry

_logger = logging.getLogger(__name__)


class CalibrationFile:
    """Reads a calibration file, which may be absent.

    It is read completely each time: it is small, and the mtime of a mounted ConfigMap does not show changes reliably.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._seen: str | None = None
        """Last content or error, so that each is logged once."""
        self._calibration = UNCALIBRATED

    @property
    def known(self) -> Calibration:
        """Content of the last read."""
        return self._calibration

    def read(self) -> Calibration:
        """Return the content; empty without a file, and the last valid content if the file is invalid."""
        if self._path is None:
            return UNCALIBRATED
        text: str | None = None
        try:
            with suppress(FileNotFoundError):
                text = self._path.read_text(encoding="utf-8")
            if text == self._seen:
                return self._calibration
            self._calibration = UNCALIBRATED if text is None else parse_calibration(text)
        except (OSError, UnicodeDecodeError, CalibrationError) as error:
            seen = text if isinstance(error, CalibrationError) else str(error)
            if seen != self._seen:
                self._seen = seen
                _logger.warning("%s: %s; keeping the previous content", self._path, error)
            return self._calibration
        self._seen = text
        if text is None:
            _logger.info("%s was removed; estimates are no longer corrected", self._path)
        else:
            _logger.info("%s corrects estimates by %d measurements", self._path, len(self._calibration.entries))
        return self._calibration


MOST_FILES: Final = 1_000
MOST_FILE_BYTES: Final = 2**20
"""Maximum size of a ConfigMap."""

MOST_BYTES: Final = 8 * 2**20
"""Maximum total size of the files: eight full ConfigMaps."""

_LONGEST_PROBLEM: Final = 500
_MOST_PROBLEMS: Final = 20
"""Maximum number of problems per log message."""

ReadFacts = Callable[[Path], Mapping[str, Checkpoint]]
"""Returns the facts in one file by model id; raises FactsFileError, or OSError if the file cannot be read."""

_Stamp = tuple[str, int, int, int]
"""Name, inode, mtime in ns and size in bytes of one file, to detect changes."""


@dataclass(frozen=True)
class _File:
    stamp: _Stamp
    facts: Mapping[str, SiteFacts] | None = None  # Last valid facts; None if there were none
    problem: str | None = None
    try_again: bool = False  # Whether the file could not be read, which may be temporary


def read_facts_file(path: Path) -> Mapping[str, Checkpoint]:
    """Return the facts in one file as ``specdecode plan --facts`` does; raise FactsFileError or OSError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FactsFileError(f"{_place(path)}: is not UTF-8 text: write it with specdecode models add") from error
    found = facts_in(text, _place(path), is_json=path.suffix == ".json")
    if not found:
        raise FactsFileError(f"{_place(path)}: holds no facts: write it with specdecode models add")
    return found


_LOOK_REST_S: Final = 1.0
"""Minimum time between reads for reconciles; each takes a switch of threads."""


class FactsFolder:
    """Reads a folder of facts files, which may be absent; thread-safe.

    The event loop reads it in a thread, because parsing 8 MiB may take seconds. An invalid file does not affect the
    other files.
    """

    def __init__(self, folder: Path | None = None, read_file: ReadFacts = read_facts_file) -> None:
        self._folder = folder
        self._read_file = read_file
        self._files: dict[str, _File] = {}
        self._stamps: tuple[_Stamp, ...] = ()
        self._facts: Mapping[str, SiteFacts] = {}
        self._told: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._looked_s = -_LOOK_REST_S
        self._reading: asyncio.Task[Mapping[str, SiteFacts]] | None = None
        """Latest read that `look` began."""

    @property
    def known(self) -> Mapping[str, SiteFacts]:
        """Facts of the last read, by model id without outer slashes."""
        return self._facts

    async def look(self) -> None:
        """Read the folder in a thread, at most once per second. If a read is in progress, wait for it."""
        now_s = time.monotonic()
        if self._folder is not None and now_s - self._looked_s >= _LOOK_REST_S:
            self._looked_s = now_s
            self._reading = asyncio.create_task(asyncio.to_thread(self.read))
        if self._reading is not None:
            await asyncio.shield(self._reading)  # Cancelling one caller must not cancel the shared read.

    def read(self) -> Mapping[str, SiteFacts]:
        """Read the folder; return its facts by model id without outer slashes."""
        if self._folder is None:
            return self._facts
        with self._lock:
            self._follow(self._folder)
            return self._facts

    def _follow(self, folder: Path) -> None:
        try:
            stamps = _stamps(folder)
        except OSError as error:
            self._tell([f"{folder}: {error.strerror}; the last facts that were read stay in force"])
            return
        if stamps == self._stamps and not any(each.try_again for each in self._files.values()):
            return
        problems = list(self._take(folder, stamps))
        if stamps != self._stamps:
            _logger.info("%s: number of models with facts: %d", folder, len(self._facts))
        self._stamps = stamps
        self._tell(problems)

    def _take(self, folder: Path, stamps: tuple[_Stamp, ...]) -> Iterator[str]:
        """Read the files that have changed; yield a problem for each file that is not used."""
        files: dict[str, _File] = {}
        facts: dict[str, SiteFacts] = {}
        left_bytes = MOST_BYTES
        for number, stamp in enumerate(stamps):
            name, _, _, size_bytes = stamp
            place = _place(folder / name)
            if number >= MOST_FILES:
                yield f"{folder}: {len(stamps):,} files; only the first {MOST_FILES:,} are read; remove some"
                break
            file = self._read(folder / name, stamp, left_bytes)
            if size_bytes <= min(MOST_FILE_BYTES, left_bytes):
                left_bytes -= size_bytes
            files[name] = file
            if file.problem is not None:
                yield file.problem if file.facts is None else f"{file.problem}; its last valid facts stay in force"
            for model, given in (file.facts or {}).items():
                if problem := _not_used(model, facts):
                    yield f"{place}: model: {shown(model)}: {problem}"
                else:
                    facts[model.strip("/")] = given
        self._files, self._facts = files, facts

    def _read(self, path: Path, stamp: _Stamp, left_bytes: int) -> _File:
        before = self._files.get(path.name)
        last = None if before is None else before.facts
        if stamp[-1] > min(MOST_FILE_BYTES, left_bytes):
            problem = (
                f"{_place(path)}: {stamp[-1]:,} bytes exceed the limit of {MOST_FILE_BYTES:,} per file or"
                f" {MOST_BYTES:,} in total; create the file again with specdecode models add, or remove other files"
            )
            return _File(("", 0, 0, 0), last, problem)  # Not a real stamp: it may fit later.
        if before is not None and before.stamp == stamp and not before.try_again:
            return before
        try:
            found = self._read_file(path)
            return _File(stamp, {model: _site_facts(path.name, each) for model, each in found.items()})
        except FactsFileError as error:
            return _File(stamp, last, str(error))
        except OSError as error:
            return _File(stamp, last, f"{_place(path)}: {error.strerror}", try_again=True)
        except Exception as error:  # noqa: BLE001  one file must not stop the operator
            return _File(
                stamp,
                last,
                f"{_place(path)}: internal error ({type(error).__name__}) while reading it; please report it",
            )

    def _tell(self, problems: list[str]) -> None:
        """Log new problems."""
        new = [each for each in problems if each not in self._told]
        self._told = frozenset(problems)
        for each in new[:_MOST_PROBLEMS]:
            _logger.warning("facts file not used: %s", clip(printable(each), _LONGEST_PROBLEM))
        if len(new) > _MOST_PROBLEMS:
            more = len(new) - _MOST_PROBLEMS
            _logger.warning("facts files not used: %d more problems are not shown; fix these first", more)


def _place(path: Path) -> str:
    """Return how the log names a file.

    The folder comes last: if a file is called ``password``, text after its name and a colon is masked as a secret.
    """
    return f"{path.name} in {path.parent}"


def _stamps(folder: Path) -> tuple[_Stamp, ...]:
    found = []
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return ()
    for name in names:
        if name.startswith("."):  # Links and folders of the kubelet
            continue
        try:
            known = (folder / name).stat()
        except FileNotFoundError:  # Removed meanwhile
            continue
        except OSError:
            found.append((name, 0, 0, 0))  # Reading it reports the error.
            continue
        if stat.S_ISREG(known.st_mode):
            found.append((name, known.st_ino, known.st_mtime_ns, known.st_size))
    return tuple(found)


def _not_used(model: str, facts: Mapping[str, SiteFacts]) -> str | None:
    if find_entry(model) is not None:
        return "the catalogue takes precedence for this model; remove the file"
    if (other := facts.get(model.strip("/"))) is not None:
        return f"{printable(other.file)} has facts about this model too; remove one of the files"
    return None


def _site_facts(file: str, checkpoint: Checkpoint) -> SiteFacts:
    digest = hashlib.sha256(json.dumps(asdict(checkpoint), sort_keys=True).encode()).hexdigest()
    return SiteFacts(file, digest, checkpoint)
