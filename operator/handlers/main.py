"""Runs the operator until it is told to stop."""

import logging
import os
import socket
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import kopf

from specdecode_operator.admission.certificate import CertificateFolder
from specdecode_operator.admission.judgement import Terms
from specdecode_operator.admission.metrics import AdmissionCollector
from specdecode_operator.admission.review import answer
from specdecode_operator.admission.server import VALIDATE, serve_admission
from specdecode_operator.api.base import Body
from specdecode_operator.attestation.keys import SigningKey
from specdecode_operator.cluster.figures_source import Prometheus
from specdecode_operator.handlers import lifecycle, watch
from specdecode_operator.handlers.leadership import Leadership, LeaseName, end_at_once, leader_gauge, working
from specdecode_operator.handlers.metrics import serve_metrics
from specdecode_operator.handlers.state import OperatorState
from specdecode_operator.kube.nodes import NodeFacts
from specdecode_operator.kube.pod_policy import NONE_ALLOWED
from specdecode_operator.problems import printable

_CHATTY_LOGGERS = ("kopf.objects", "aiohttp.access", "httpx")
"""They speak of every watch event and every request; what changed is logged by the reconciler."""


class OneLine(logging.Filter):
    """Shows what others wrote, and does not do it: no value ends a line of the log and begins one of its own."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, as it may be written."""
        try:
            record.msg, record.args = printable(record.getMessage()), None
        except Exception:  # noqa: BLE001  a library's slip: the handler tells of it, and whoever logged goes on
            return True
        if record.exc_info and not record.exc_text:
            lines = "".join(traceback.format_exception(*record.exc_info)).splitlines()
            record.exc_text = "\n".join(f"  {printable(line)}" for line in lines)
        return True


@dataclass(frozen=True)
class Webhook:
    """How admission reviews are answered."""

    port: int
    certificate: Path
    """Folder with tls.crt and tls.key, which may come later and change."""

    refuses_what_does_not_fit: bool = False


def run_operator(  # noqa: PLR0913  what the command line says
    *,
    health_port: int,
    metrics_port: int,
    calibration: Path | None = None,
    host_paths: tuple[str, ...] = (),
    pod_template: frozenset[str] = NONE_ALLOWED,
    prometheus: Prometheus | None = None,
    webhook: Webhook | None = None,
    lease: LeaseName | None = None,
    namespaces: tuple[str, ...] = (),
    nodes: tuple[NodeFacts, ...] | None = None,
    signing_key: SigningKey | None = None,
    verbose: bool = False,
) -> None:
    """Serve these namespaces, or all, until SIGTERM; /livez, /readyz and /metrics answer on their ports.

    ``calibration`` is the file that corrects estimates; it may come, change and go at any time. ``host_paths`` are the
    directories of nodes that objects may have their models in, ``pod_template`` is what their podTemplate may ask for
    beyond the policy. ``prometheus`` is asked for figures, in place of engines. ``webhook`` judges objects before they
    are stored, also while another replica leads. With ``lease`` it works while it holds that Lease. ``nodes`` are those
    to plan for where namespaces are named: then nothing is asked of the cluster as a whole. ``signing_key`` signs what
    is attested of each rollout.
    """
    kopf.configure(verbose=verbose)
    for handler in logging.getLogger().handlers:
        handler.addFilter(OneLine())
    if not verbose:
        for name in _CHATTY_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
    state = OperatorState(
        calibration,
        host_paths,
        pod_template,
        prometheus,
        namespaces=namespaces,
        nodes=nodes,
        identity=_identity(lease),
        signing_key=signing_key,
    )
    registry = kopf.OperatorRegistry()
    lifecycle.register(registry)
    watch.register(registry, nodes=not namespaces)
    leads = leader_gauge()
    leads.set(lease is None)
    leadership = Leadership(lease, leads, end_at_once) if lease else None
    lifecycle.serve_health(health_port, state, leadership)
    collectors = (leads, *state.collectors())
    if webhook is not None:
        collectors = (*collectors, _serve_webhook(webhook, state, Terms(host_paths, pod_template, nodes=nodes or None)))
    port = serve_metrics(metrics_port, *collectors)
    logging.getLogger(__name__).info("/metrics is served on port %d", port)
    with working(leadership):
        kopf.run(
            registry=registry,
            clusterwide=not namespaces,
            namespaces=namespaces,
            standalone=True,
            # kopf would ask for the name of the process's user, which a container need not have.
            identity="specdecode-operator",  # type: ignore[arg-type]  # its type is private to kopf
            memo=state,
        )


def _identity(lease: LeaseName | None) -> str:
    """Return by what operators know each other: the replicas of one installation are one."""
    if lease is not None:
        return f"{lease.namespace}/{lease.name}"
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"


def _serve_webhook(webhook: Webhook, state: OperatorState, terms: Terms) -> AdmissionCollector:
    """Answer the API server's reviews, with the terms that the reconcile has; return what is said of them."""
    terms = replace(terms, does_not_fit=not webhook.refuses_what_does_not_fit)
    certificate = CertificateFolder(webhook.certificate)
    collector = AdmissionCollector(lambda: certificate.expires)

    def validate(review: object) -> Body:
        return answer(review, replace(terms, calibration=state.calibration.read()))

    port = serve_admission(webhook.port, certificate, {VALIDATE: validate}, collector)
    logging.getLogger(__name__).info("%s is served on port %d", VALIDATE, port)
    return collector
