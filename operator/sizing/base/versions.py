"""vLLM's versions, as the rules of sizing depend on them."""

from specdecode_operator.sizing.base.errors import SizingError


def release(version: str) -> tuple[int, int]:
    """Return major and minor of a version such as ``0.32.0``.

    Raises
    ------
    SizingError
        When it is no version.
    """
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdecimal() and minor.isdecimal()):
        raise SizingError("vllm_version", version, "write it as 0.32.0")
    return int(major), int(minor)
