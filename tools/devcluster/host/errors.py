"""The one error that the development cluster shows to people."""

import sys
from collections.abc import Callable


class ClusterError(Exception):
    """A failure that a person can act on: the text says what failed and what to do."""


def exit_status(work: Callable[[], object]) -> int:
    """Do what a command line says: 0, or 1 after a failure that a person can act on, which is told."""
    try:
        work()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
