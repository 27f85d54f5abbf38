"""Runs the operator until it is told to stop."""

import logging

import kopf

from specdecode_operator.handlers import lifecycle, watch
from specdecode_operator.handlers.state import OperatorState

HANDLERS = (lifecycle, watch)
"""Modules whose import registers the handlers."""

_CHATTY_LOGGERS = ("kopf.objects", "kopf.activities.probe", "aiohttp.access", "httpx")
"""They speak of every watch event and every probe; what changed is logged by the reconciler."""


def run_operator(*, health_port: int, verbose: bool = False) -> None:
    """Serve all namespaces until SIGTERM; /healthz answers on the health port."""
    kopf.configure(verbose=verbose)
    if not verbose:
        for name in _CHATTY_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
    kopf.run(
        clusterwide=True,
        standalone=True,
        # kopf would ask for the name of the process's user, which a container need not have.
        identity="specdecode-operator",  # type: ignore[arg-type]  # its type is private to kopf
        liveness_endpoint=f"http://0.0.0.0:{health_port}/healthz",
        memo=OperatorState(),
    )
