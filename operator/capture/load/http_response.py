"""Takes an HTTP/1.1 response apart as its bytes arrive."""

from collections.abc import Callable

_LONGEST_HEAD_BYTES = 64 * 1024
_LONGEST_LINE_BYTES = 1024


class MalformedResponseError(ValueError):
    """What arrived is no HTTP/1.1 response."""


class HttpResponse:
    """One response: fed with bytes as they come, it hands out its status and the bytes of its body.

    Framing is that of RFC 9112: chunked, by Content-Length, or up to the
    connection's end.

    Attributes
    ----------
    status
        None until the head is complete.
    complete
        The body's end was seen.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.complete = False
        self._buffer = bytearray()
        self._left: int | None = None
        self._read: Callable[[], bytes | None] = self._read_head

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the body in what arrived.

        Raises
        ------
        MalformedResponseError
            It is not HTTP.
        """
        self._buffer += data
        body = []
        # A reader returns None when it needs more bytes than there are.
        while not self.complete and (part := self._read()) is not None:
            body.append(part)
        return body[0] if len(body) == 1 else b"".join(body)

    def end_of_connection(self) -> None:
        """Note that nothing more comes: the end of a body without a length."""
        if self._read == self._read_to_end:
            self.complete = True

    def _read_head(self) -> bytes | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            self._limit(_LONGEST_HEAD_BYTES, "the head of the response")
            return None
        lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        status = _status(lines[0])
        if status < 200:  # noqa: PLR2004 - an informational answer: the real one follows
            return b""
        self.status = status
        self._choose_framing(dict(_header(line) for line in lines[1:]))
        return b""

    def _choose_framing(self, headers: dict[bytes, bytes]) -> None:
        if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            self._read = self._read_chunk_size
        elif b"content-length" in headers:
            self._left = _number(headers[b"content-length"], 10)
            self._read = self._read_length
        elif self.status in (204, 304):
            self.complete = True
        else:
            self._read = self._read_to_end

    def _read_chunk_size(self) -> bytes | None:
        line = self._line()
        if line is None:
            return None
        self._left = _number(line.partition(b";")[0].strip(), 16)
        self._read = self._read_chunk if self._left else self._read_trailer
        return b""

    def _read_chunk(self) -> bytes | None:
        assert self._left is not None  # noqa: S101 - a size was read
        if len(self._buffer) < self._left + 2:
            return None
        if self._buffer[self._left : self._left + 2] != b"\r\n":
            raise MalformedResponseError("a chunk does not end where its size says")
        return self._taken(self._left, skipped=2, then=self._read_chunk_size)

    def _read_trailer(self) -> bytes | None:
        line = self._line()
        if line is None:
            return None
        self.complete = not line
        return b""

    def _read_length(self) -> bytes | None:
        assert self._left is not None  # noqa: S101 - a length was read
        if not self._buffer and self._left:
            return None
        count = min(self._left, len(self._buffer))
        self._left -= count
        self.complete = self._left == 0
        return self._taken(count, skipped=0, then=self._read_length)

    def _read_to_end(self) -> bytes | None:
        return self._taken(len(self._buffer), skipped=0, then=self._read_to_end) if self._buffer else None

    def _taken(self, count: int, *, skipped: int, then: Callable[[], bytes | None]) -> bytes:
        part = bytes(self._buffer[:count])
        del self._buffer[: count + skipped]
        self._read = then
        return part

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            self._limit(_LONGEST_LINE_BYTES, "a line")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _limit(self, most_bytes: int, what: str) -> None:
        if len(self._buffer) > most_bytes:
            raise MalformedResponseError(f"{what} is longer than {most_bytes} bytes")


def _status(line: bytes) -> int:
    protocol, _, rest = line.partition(b" ")
    if not protocol.startswith(b"HTTP/1."):
        raise MalformedResponseError(f"the answer begins with {line[:40]!r}, which is not HTTP")
    return _number(rest[:3], 10)


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.strip().lower(), value.strip()


def _number(text: bytes, base: int) -> int:
    try:
        number = int(text, base)
    except ValueError as error:
        raise MalformedResponseError(f"{text[:40]!r} is not a number") from error
    if number < 0:
        raise MalformedResponseError(f"{number} is not a length")
    return number
