"""Lines of the log: each is one, whoever wrote what stands in it."""

import logging
import traceback

from specdecode_operator.problems import printable


class OneLine(logging.Filter):
    """Shows what others wrote, and does not do it: no value ends a line of the log and begins one of its own."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, as it may be written."""
        try:
            record.msg, record.args = printable(record.getMessage()), None
        except Exception:  # noqa: BLE001  a library's slip: the handler tells of it, and whoever logged goes on
            return True
        if record.exc_info and not record.exc_text:
            lines = "".join(traceback.format_exception(*record.exc_info)).splitlines()
            record.exc_text = "\n".join(f"  {printable(line)}" for line in lines)
        return True
