"""What stops a capture, in words for the person who reads its status."""


class CaptureError(Exception):
    """A capture cannot go on."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason  # one word in CamelCase, for conditions and scripts
        self.message = message  # what happened, where, and what to do
