"""How long the parts of a capture may take."""

from typing import Final

MOST_WAITING_S: Final = 1800
"""How long a capture that has taken a deployment's GPUs may wait for its pods to run on them."""

_SHORTEST_WRAP_UP_S: Final = 900
_LOAD_FOR_WRAP_UP: Final = 10


def wrap_up_s(deadline_seconds: int) -> int:
    """Return how long all may take but the start of the engine and the load: files are merged, checked and published.

    What there is to merge grows with the load: 6 to 20 MB of segments a second were merged and checked on a shared
    machine with 2 cores.
    """
    return _SHORTEST_WRAP_UP_S + deadline_seconds // _LOAD_FOR_WRAP_UP
