"""The calibration file that the operator was given, as it is now."""

import logging
from pathlib import Path

from specdecode_operator.sizing.pair.calibration import UNCALIBRATED, Calibration, CalibrationError, parse_calibration

_logger = logging.getLogger(__name__)


class CalibrationFile:
    """Follows a calibration file: what changes in it counts without a restart.

    The file may be absent, for the ConfigMap that holds it is optional. It is
    read whole each time: it is small, and a mounted ConfigMap changes by links
    whose times say little.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: str | None = None
        """What was last read or went wrong: each is told once."""
        self._calibration = UNCALIBRATED

    def read(self) -> Calibration:
        """Return what the file holds; empty where there is none, and the last good one where it is broken."""
        if self._path is None:
            return UNCALIBRATED
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            self._take(self._path, None)
        except (OSError, UnicodeDecodeError) as error:
            self._refuse(self._path, str(error))
        else:
            self._take(self._path, text)
        return self._calibration

    def _take(self, path: Path, text: str | None) -> None:
        if text == self._seen:
            return
        try:
            self._calibration = UNCALIBRATED if text is None else parse_calibration(text)
        except CalibrationError as error:
            self._refuse(path, str(error), seen=text)
            return
        self._seen = text
        if text is None:
            _logger.info("%s is gone: estimates are no longer corrected", path)
        else:
            _logger.info("%s corrects estimates by %d measurements", path, len(self._calibration.entries))

    def _refuse(self, path: Path, why: str, seen: str | None = None) -> None:
        """Say once why the file as it is now is not used."""
        seen = seen or why
        if seen != self._seen:
            self._seen = seen
            _logger.warning("%s: %s; what it held before stays in force", path, why)
