"""Pseudonyms of a live capture: keyed hashes of user-chosen identifiers."""

import re
from hashlib import blake2b

_DIGEST_BYTES = 8
_PERCENT = 100
# As vLLM derives them from X-Request-Id: prompt I of the completion X, and answer N of a request with n > 1.
_PROMPT_OF_COMPLETION = re.compile(r"cmpl-(.+)-\d+", re.DOTALL)
_ANSWER = re.compile(r"\d+_(.+)", re.DOTALL)


class Salt:
    """Key of one live capture, known to its collector."""

    def __init__(self, key: bytes) -> None:
        self.key = key

    def pseudonym(self, identifier: str) -> str:
        """Return 16 hexadecimal characters that stand for an identifier in this capture."""
        return self._digest(identifier, b"id").hex()

    def selects(self, identifier: str, percent: int) -> bool:
        """Return whether an identifier is in a random sample of the given size, the same in every API server."""
        if percent >= _PERCENT:
            return True
        drawn = int.from_bytes(self._digest(identifier, b"sample"), "little")
        return drawn * _PERCENT < percent << 8 * _DIGEST_BYTES

    def _digest(self, identifier: str, purpose: bytes) -> bytes:
        text = identifier.encode("utf-8", "surrogatepass")
        return blake2b(text, digest_size=_DIGEST_BYTES, key=self.key, person=purpose).digest()


def http_request(request_id: str, external_id: str | None) -> str:
    """Return the identifier that all prompts and answers of one HTTP request share."""
    if external_id is None:
        answer = _ANSWER.fullmatch(request_id)
        return answer[1] if answer else request_id
    prompt = _PROMPT_OF_COMPLETION.fullmatch(external_id)
    return prompt[1] if prompt else external_id.removeprefix("chatcmpl-")
