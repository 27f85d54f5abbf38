"""How many requests the recorders have written so far, for those who watch."""

from contextlib import suppress
from pathlib import Path
from typing import Final

from specdecode_operator.capture.files.segments import segment_paths

_REQUEST: Final = b'{"k":"request",'
"""How the recorder begins the line of a request: the tag is a line's first field."""

_PIECE_BYTES: Final = 2**20


class RecordedRequests:
    """Counts the lines of requests in growing segments; each is read once, however often is asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._count = 0

    def count(self) -> int:
        """Return how many there are; what cannot be read now is counted later."""
        with suppress(OSError):
            for path in segment_paths(self._folder):
                self._read_on(path)
        return self._count

    def _read_on(self, path: Path) -> None:
        """Count what was appended, up to the last line feed: the rest is a line that is not whole yet."""
        with path.open("rb") as stream:
            stream.seek(self._offsets.get(path, 0))
            torn = b""
            while piece := stream.read(_PIECE_BYTES):
                *lines, torn = (torn + piece).split(b"\n")
                self._count += sum(line.startswith(_REQUEST) for line in lines)
                self._offsets[path] = stream.tell() - len(torn)
