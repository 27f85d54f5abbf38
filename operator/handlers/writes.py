"""Writes to the cluster, with the readiness that says why one was refused."""

from collections.abc import Awaitable

from specdecode_operator.cluster.errors import ClusterError, ForbiddenError, InvalidObjectError, RefusedForNowError
from specdecode_operator.deployment.pods.readiness import Readiness, stalled, working
from specdecode_operator.handlers.inventory import BlockedError


async def what_blocks(writing: Awaitable[None], *, hint: str = "", status_is_current: bool) -> Readiness | None:
    """Write to the cluster; return what blocks the object then, or None.

    Parameters
    ----------
    writing
        What is to be done.
    hint
        What helps where the API server refuses an object as it is.
    status_is_current
        Whether the status already speaks of the present spec: then what it says still holds.

    Raises
    ------
    ClusterError
        When the cluster fails and the status need not change: the queue tries again.
    """
    try:
        await writing
    except BlockedError as error:
        return (stalled if error.permanent else working)(error.reason, str(error))
    except ForbiddenError as error:
        return working("Forbidden", str(error))
    except RefusedForNowError as error:
        return working("RefusedForNow", str(error))
    except InvalidObjectError as error:
        return stalled("ChildRefused", f"{error}{hint}")
    except ClusterError as error:
        if status_is_current:
            raise
        return working("ApiServerError", str(error))
    return None
