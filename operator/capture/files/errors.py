"""What stops a capture, in words for the person who reads its status."""


class CaptureError(Exception):
    """A capture cannot go on.

    Attributes
    ----------
    reason
        One word in CamelCase, for conditions and scripts.
    message
        What happened, where, and what to do.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
