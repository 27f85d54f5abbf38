"""Start, stop and health of the operator process."""

import dataclasses
import os
from typing import Any

import kopf

from specdecode_operator.cluster.errors import ClusterError
from specdecode_operator.handlers.state import OperatorState
from specdecode_operator.kube.labels import OWNED_SELECTOR
from specdecode_operator.kube.resources import WATCHED

_RETRY_S = 5


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, memo: OperatorState, **_: Any) -> None:
    """Set up kopf, connect and begin to work."""
    configure(settings)
    try:
        await memo.start()
    except ClusterError as error:
        raise kopf.TemporaryError(str(error), delay=_RETRY_S) from error


@kopf.on.cleanup()
async def stop(memo: OperatorState, **_: Any) -> None:
    """End the work."""
    await memo.stop()


@kopf.on.probe(id="working")
def probe(memo: OperatorState, **_: Any) -> bool:
    """Fail the liveness probe when nothing works any more."""
    memo.check()
    return True


@kopf.on.login()
def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    """Log in as the pod's service account, or as KUBECONFIG says outside a cluster."""
    account = kopf.login_with_service_account(**kwargs)
    if account is None:
        return kopf.login_with_kubeconfig(**kwargs)
    # By address, as every client library does: kopf's name for it needs a cluster DNS.
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return dataclasses.replace(account, server=server)


def configure(settings: kopf.OperatorSettings) -> None:
    """Set what the handlers rely on."""
    # Should a handler ever keep state, it lies in the status: metadata stays as Git has it.
    settings.persistence.finalizer = "specdecode.io/kopf"
    settings.persistence.progress_storage = kopf.StatusProgressStorage(field="status.kopf.progress")
    settings.persistence.diffbase_storage = kopf.StatusDiffBaseStorage(field="status.kopf.last")
    settings.posting.enabled = False  # our own Events speak of conditions
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 30
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = 30
    # Only what carries our label is watched: clusters have many other pods.
    for resource in WATCHED:
        settings.watching.label_selectors[resource.group, resource.plural] = OWNED_SELECTOR
