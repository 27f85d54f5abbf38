"""Work at the same time."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed


def together(*works: Callable[[], object]) -> None:
    """Run the works in threads, and return when all have ended; raise the first error when it occurs."""
    pool = ThreadPoolExecutor(len(works))
    running = [pool.submit(work) for work in works]
    pool.shutdown(wait=False)
    for ended in as_completed(running):
        ended.result()
