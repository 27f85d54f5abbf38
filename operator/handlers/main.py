"""Runs the operator until it is told to stop."""

import gc
import logging
from dataclasses import replace

import kopf
from prometheus_client.registry import Collector

from specdecode_operator.admission.certificate import CertificateFolder
from specdecode_operator.admission.judgement import Terms
from specdecode_operator.admission.metrics import AdmissionCollector
from specdecode_operator.admission.review import answer
from specdecode_operator.admission.server import VALIDATE, serve_admission
from specdecode_operator.api.base import Body
from specdecode_operator.handlers import lifecycle, watch
from specdecode_operator.handlers.leadership.leadership import LeaderCollector, Leadership, end_at_once, holding
from specdecode_operator.handlers.logs import OneLine
from specdecode_operator.handlers.metrics import serve_metrics
from specdecode_operator.handlers.settings import Settings
from specdecode_operator.handlers.state import OperatorState

_CHATTY_LOGGERS = ("kopf.objects", "aiohttp.access", "httpx")
"""They speak of every watch event and every request; what changed is logged by the reconciler."""

_GARBAGE_THRESHOLDS = (700, 10, 100)
"""As `gc.set_threshold` takes them. The last is 10 by itself: so many collections of what is young are followed by one
that looks through all that is kept. With 1,000 deployments that took a quarter of a second, in which nothing else is
done, and a fifth of the CPU time of an idle operator (Python 3.11)."""


def run_operator(settings: Settings, *, health_port: int, metrics_port: int, verbose: bool = False) -> None:
    """Serve what the settings name until SIGTERM; /livez, /readyz and /metrics answer on their ports."""
    kopf.configure(verbose=verbose)
    for handler in logging.getLogger().handlers:
        handler.addFilter(OneLine())
    if not verbose:
        for name in _CHATTY_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
    gc.set_threshold(*_GARBAGE_THRESHOLDS)
    leadership = Leadership(settings.lease, end_at_once) if settings.lease else None
    state = OperatorState(settings, leadership)
    registry = kopf.OperatorRegistry()
    lifecycle.register(registry)
    watch.register(registry, nodes=not settings.namespaces)
    leader = LeaderCollector(leadership, "Namespaced" if settings.namespaces else "Cluster")
    lifecycle.serve_health(health_port, state, leadership)
    port = serve_metrics(metrics_port, leader, *state.collectors(), *_serve_webhook(settings, state))
    logging.getLogger(__name__).info("/metrics is served on port %d", port)
    with holding(leadership):
        kopf.run(
            registry=registry,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            standalone=True,
            # kopf would ask for the name of the process's user, which a container need not have.
            identity="specdecode-operator",  # type: ignore[arg-type]  # its type is private to kopf
            memo=state,
            stop_flag=state.ended,
        )


def _serve_webhook(settings: Settings, state: OperatorState) -> tuple[Collector, ...]:
    """Answer the API server's reviews, if asked to, with the terms of the reconcile; return what is said of them."""
    webhook = settings.webhook
    if webhook is None:
        return ()
    terms = Terms(
        settings.host_paths,
        settings.pod_template,
        nodes=settings.nodes or None,
        does_not_fit=not webhook.refuses_what_does_not_fit,
    )
    certificate = CertificateFolder(webhook.certificate)
    collector = AdmissionCollector(lambda: certificate.expires)

    def validate(review: object) -> Body:
        now = replace(
            terms,
            calibration=state.calibration.read(),
            site_facts=state.facts.read(),
            storage_classes=state.relist.storage_classes,
        )
        return answer(review, now)

    port = serve_admission(webhook.port, certificate, {VALIDATE: validate}, collector)
    logging.getLogger(__name__).info("%s is served on port %d", VALIDATE, port)
    return (collector,)
