"""`specdecode attestation-webhook`: lets those pods start that an attestation speaks of, with a public key alone."""

import asyncio
import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from specdecode_operator.cli.public_keys import KeysOption, public_keys
from specdecode_operator.problems import printable

if TYPE_CHECKING:
    from specdecode_operator.api.base import Body
    from specdecode_operator.api.key import Key
    from specdecode_operator.attestation.gate import Gate
    from specdecode_operator.cluster.client import Cluster

_PATH: Final = "/validate-pods"
_READ_WITHIN_S: Final = 5.0
"""Of one ConfigMap: the API server waits ten seconds for the answer unless told otherwise."""

_logger = logging.getLogger(__name__)


def attestation_webhook_command(
    *,
    key: KeysOption,
    certificate: Annotated[
        Path, typer.Option(metavar="FOLDER", help="tls.crt and tls.key of the webhook; read again on a change.")
    ],
    port: Annotated[int, typer.Option(help="Port of the webhook, in HTTPS; 0 takes a free one.")] = 9443,
    metrics_port: Annotated[int, typer.Option(help="Port of /metrics; 0 takes a free one.")] = 8081,
    allow_container: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=IMAGE",
            help="A container that others add to pods, such as a mesh's, by its exact image. May be repeated.",
        ),
    ] = None,
) -> None:
    """Answer the API server's question whether a pod may start: an attestation must speak of it.

    Of the cluster it reads ConfigMap NAME-attestation, in the namespace of the
    pod, and nothing else. It can sign nothing. examples/attestation has it
    with all that it needs.
    """
    from specdecode_operator.attestation.gate import Gate  # noqa: PLC0415
    from specdecode_operator.handlers.logs import OneLine  # noqa: PLC0415

    gate = Gate(public_keys(key), frozenset(map(_container, allow_container or ())))
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(name)s [%(levelname)s] %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(OneLine())
    asyncio.run(_serve(gate, certificate, port, metrics_port))


def _container(text: str) -> tuple[str, str]:
    name, _, image = text.partition("=")
    if not name or not image:
        message = f"{printable(text)}: write NAME=IMAGE, such as istio-proxy=docker.io/istio/proxyv2@sha256:…"
        raise typer.BadParameter(message, param_hint="--allow-container")
    return name, image


async def _serve(gate: "Gate", certificate_folder: Path, port: int, metrics_port: int) -> None:
    """Answer until SIGTERM: reviews in threads of their own, questions to the API server in this loop."""
    from specdecode_operator.admission.attested_pods import answer_pod  # noqa: PLC0415
    from specdecode_operator.admission.certificate import CertificateFolder  # noqa: PLC0415
    from specdecode_operator.admission.metrics import AdmissionCollector  # noqa: PLC0415
    from specdecode_operator.admission.server import serve_admission  # noqa: PLC0415
    from specdecode_operator.cluster.client import Cluster  # noqa: PLC0415
    from specdecode_operator.handlers.metrics import serve_metrics  # noqa: PLC0415

    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, stopped.set)
    cluster = await Cluster.connect()

    def read(key: "Key") -> "Body | None":
        return asyncio.run_coroutine_threadsafe(_attestations(cluster, key), loop).result()

    def validate(review: Any) -> "Body":
        answer = answer_pod(review, gate, read)
        if refusal := answer["response"].get("status"):
            _logger.info("refused: %s", refusal["message"])
        return answer

    certificate = CertificateFolder(certificate_folder)
    collector = AdmissionCollector(lambda: certificate.expires)
    served = serve_admission(port, certificate, {_PATH: validate}, collector)
    _logger.info("%s is served on port %d, /metrics on port %d", _PATH, served, serve_metrics(metrics_port, collector))
    await stopped.wait()
    await cluster.close()


async def _attestations(cluster: "Cluster", key: "Key") -> "Body | None":
    from specdecode_operator.attestation.attest import attestation_name  # noqa: PLC0415
    from specdecode_operator.cluster.errors import ClusterError  # noqa: PLC0415
    from specdecode_operator.kube.resources import CONFIG_MAP  # noqa: PLC0415

    try:
        async with asyncio.timeout(_READ_WITHIN_S):
            return await cluster.get(CONFIG_MAP, key.namespace, attestation_name(key))
    except TimeoutError as error:
        raise ClusterError(f"the API server does not answer within {_READ_WITHIN_S:.0f} s") from error
