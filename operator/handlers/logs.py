"""Log records as single lines without secrets."""

import logging
import traceback

from specdecode_operator.problems import printable
from specdecode_operator.redaction import redact


class OneLine(logging.Filter):
    """Escapes control characters and masks secrets, so that no value ends a line of the log and begins another."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite the record in place, and let every record pass."""
        try:
            record.msg, record.args = printable(record.getMessage()), None
        except Exception:  # noqa: BLE001  a library's slip: the handler tells of it, and whoever logged goes on
            return True
        if record.exc_info and not record.exc_text:
            # A private key has several lines: it is masked before the lines are taken apart.
            lines = redact("".join(traceback.format_exception(*record.exc_info))).splitlines()
            record.exc_text = "\n".join(f"  {printable(line)}" for line in lines)
        return True
