"""Runs the operator until it is told to stop."""

import logging

import kopf

from specdecode_operator.handlers import lifecycle, watch
from specdecode_operator.handlers.state import OperatorState

HANDLERS = (lifecycle, watch)
"""Modules whose import registers the handlers."""

_CHATTY_LOGGERS = ("kopf.objects", "aiohttp.access")
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
        liveness_endpoint=f"http://0.0.0.0:{health_port}/healthz",
        memo=OperatorState(),
    )
