"""`specdecode webhook-certificate`: what the chart's Job runs, so that the API server trusts the webhook."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from specdecode_operator.cli.options import fail
from specdecode_operator.cli.terminal import say_line

if TYPE_CHECKING:
    from specdecode_operator.admission.self_signed import ServerCertificate

_WEBHOOK: Final = "validate.specdecode.io"
"""In the configuration that the chart makes."""


def webhook_certificate_command(
    *,
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the Secret and of the Service.")],
    secret: Annotated[str, typer.Option(metavar="NAME", help="Secret that the certificate is written to.")],
    service: Annotated[str, typer.Option(metavar="NAME", help="Service by which the API server calls the webhook.")],
    configuration: Annotated[
        str, typer.Option(metavar="NAME", help="ValidatingWebhookConfiguration that shall trust it.")
    ],
    current: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The Secret as it is now, mounted; it may be absent.")
    ] = None,
) -> None:
    """Keep the admission webhook's certificate while it is good, else make another one, and have it trusted.

    It signs for itself and lasts 90 days; run it again each week. The one before
    it stays trusted until it ends, for pods get the new one a minute later.
    """
    import asyncio  # noqa: PLC0415

    from specdecode_operator.admission.self_signed import kept_or_renewed  # noqa: PLC0415
    from specdecode_operator.cluster.errors import ClusterError  # noqa: PLC0415

    files = {} if current is None else _read(current)
    made = kept_or_renewed(files, [f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local"])
    try:
        asyncio.run(_write(made, namespace, secret, configuration))
    except ClusterError as error:
        fail(error)
    word = "kept" if made.certificate == files.get("tls.crt") else "written"
    say_line(f"certificate {word} in Secret {namespace}/{secret}; {configuration} trusts it")


def _read(folder: Path) -> dict[str, bytes]:
    """Return the files of a mounted Secret, which are links; none where it is not there yet."""
    try:
        return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    except OSError:
        return {}


async def _write(made: "ServerCertificate", namespace: str, secret: str, configuration: str) -> None:
    """First have it trusted, then show it."""
    from specdecode_operator.cluster.client import Cluster  # noqa: PLC0415
    from specdecode_operator.cluster.webhook_certificate import write_certificate  # noqa: PLC0415

    cluster = await Cluster.connect()
    try:
        await write_certificate(cluster, made.files, made.trust, (namespace, secret), (configuration, _WEBHOOK))
    finally:
        await cluster.close()
