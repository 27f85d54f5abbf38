"""`specdecode operator` and `specdecode crds`: run the operator, and print the CRDs to install first."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from specdecode_operator.cli.options import (
    AllowHostPathOption,
    AllowPodTemplateOption,
    HiddenName,
    RefuseOption,
    allowed_names,
    allowed_paths,
    ended,
    fail,
)
from specdecode_operator.cli.text_files import DocumentError, place_of, read_text, replaced_whole
from specdecode_operator.enums import LiveTokenIds
from specdecode_operator.problems import printable

if TYPE_CHECKING:
    from specdecode_operator.deployment.attestation.keys import SigningKey
    from specdecode_operator.handlers.leadership import LeaseName


def crds_command(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            HiddenName("--folder"),
            metavar="FOLDER",
            help="Write each CRD to a separate file in this folder instead of printing it.",
        ),
    ] = None,
) -> None:
    """Print the CustomResourceDefinitions as YAML, ready for kubectl apply."""
    # Importing the API models takes a third of a second, and other commands do not need them.
    from specdecode_operator.api.crds import crd_file_name, crd_yaml, crds  # noqa: PLC0415

    if out is None:
        typer.echo("---\n".join(map(crd_yaml, crds())), nl=False)
        return
    if not out.is_dir():
        fail(f"--out: {place_of(str(out))}: is not a folder: create it first, or use another")
    for crd in crds():
        file = out / crd_file_name(crd)
        try:
            with replaced_whole(file) as stream:
                stream.write(crd_yaml(crd))
        except OSError as error:
            fail(f"--out: {place_of(str(file))}: {error.strerror}: use a writable folder")


_LEASE_S: Final = 6
_SHORTEST_LEASE_S: Final = 4
"""The operator renews the Lease six times per duration, and one renewal may take a second under load."""
_LONGEST_LEASE_S: Final = 300

_NAMESPACE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def operator_command(  # noqa: PLR0913  each is an option
    *,
    health_port: Annotated[int, typer.Option(help="Port of /livez and /readyz for probes.")] = 8080,
    metrics_port: Annotated[int, typer.Option(help="Port of /metrics; 0 selects a free port.")] = 8081,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Calibration file. It does not have to exist yet, and is reloaded when it changes."),
    ] = None,
    facts: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder with facts files of models, written by specdecode models add. Added, changed and "
            "removed files are noticed.",
        ),
    ] = None,
    allow_host_path: AllowHostPathOption = None,
    allow_pod_template: AllowPodTemplateOption = None,
    allow_token_ids: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NS=WHAT",
            help="Token ids that live captures may record in a namespace: answers, or answers,prompts. May be "
            "repeated. Defaults to none. A change replaces the engines of that namespace.",
        ),
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Prometheus to query for figures. If not set, the operator reads the engines."
        ),
    ] = None,
    prometheus_token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the bearer token for Prometheus. Read before each query."),
    ] = None,
    webhook_port: Annotated[
        int | None, typer.Option(help="HTTPS port of the admission webhook. If not set, there is no webhook.")
    ] = None,
    webhook_certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder with tls.crt and tls.key of the webhook. Reloaded when they change."
        ),
    ] = None,
    refuse_does_not_fit: RefuseOption = False,
    leader_election: Annotated[
        str | None,
        typer.Option(metavar="LEASE", help="Work only while holding this Lease in the operator's namespace."),
    ] = None,
    lease_duration: Annotated[
        int | None,
        typer.Option(
            metavar="SECONDS",
            help="With --leader-election: duration of the Lease without a renewal,"
            f" {_SHORTEST_LEASE_S} to {_LONGEST_LEASE_S}. Defaults to {_LEASE_S}.",
        ),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            help="Namespace to watch. May be repeated. Defaults to all namespaces, which requires a ClusterRole."
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="With --namespace: nodes to plan for, the output of kubectl get nodes -o yaml."
        ),
    ] = None,
    signing_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="ECDSA P-256 key (cosign.key or PEM) that signs attestations of rollouts."),
    ] = None,
    signing_key_password_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the password of the signing key. If not set, the key has none or an empty one.",
        ),
    ] = None,
    former_key: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Former public key. Attestations that it verifies are signed again with the new key. May be repeated.",
        ),
    ] = None,
    log_reconciles_from: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Log reconciles that take at least this long, and what they waited for; 0 logs all."
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every step.")] = False,
) -> None:
    """Run the operator: in a cluster with its service account, elsewhere with KUBECONFIG."""
    # Importing kopf and the Kubernetes client takes a second, and other commands do not need them.
    from specdecode_operator.cli.input_files import read_nodes  # noqa: PLC0415
    from specdecode_operator.cluster.observed_figures import Prometheus  # noqa: PLC0415
    from specdecode_operator.handlers.main import run_operator  # noqa: PLC0415
    from specdecode_operator.handlers.mounted_files import CalibrationFile, FactsFolder  # noqa: PLC0415
    from specdecode_operator.handlers.settings import Settings, Webhook  # noqa: PLC0415

    namespaces = tuple(dict.fromkeys(namespace or ()))
    for each in namespaces:
        if not _NAMESPACE.fullmatch(each):
            why = "must be the name of one namespace; repeat --namespace for several"
            raise typer.BadParameter(f"{printable(each)}: {why}", param_hint="--namespace")
    is_url = prometheus is None or prometheus.lower().startswith(("http://", "https://"))
    of_cluster = "requires --namespace: without it, the operator watches the nodes itself: omit --nodes"
    both = "must be set together with --webhook-certificate"
    alone = "requires --prometheus"
    lonely_key = "requires --signing-key"
    for option, is_wrong, message in (
        ("--prometheus", not is_url, f"{prometheus}: must start with http:// or https://"),
        ("--prometheus-token-file", prometheus is None and prometheus_token_file is not None, alone),
        ("--webhook-port", (webhook_port is None) != (webhook_certificate is None), both),
        (
            "--refuse-does-not-fit",
            webhook_port is None and refuse_does_not_fit,
            "requires --webhook-port",
        ),
        ("--nodes", nodes is not None and not namespaces, of_cluster),
        ("--signing-key-password-file", signing_key is None and signing_key_password_file is not None, lonely_key),
        ("--former-key", signing_key is None and bool(former_key), lonely_key),
    ):
        if is_wrong:
            raise typer.BadParameter(message, param_hint=option)
    with ended(DocumentError):
        given_nodes = None if nodes is None else read_nodes(nodes)
    settings = Settings(
        calibration=CalibrationFile(calibration),
        facts=FactsFolder(facts),
        host_paths=allowed_paths(allow_host_path),
        pod_template=allowed_names(allow_pod_template),
        token_ids=_allowed_token_ids(allow_token_ids or []),
        prometheus=None if prometheus is None else Prometheus(prometheus, prometheus_token_file),
        webhook=None
        if webhook_port is None or webhook_certificate is None
        else Webhook(webhook_port, webhook_certificate, refuse_does_not_fit),
        lease=_lease(leader_election, lease_duration),
        namespaces=namespaces,
        nodes=given_nodes,
        signing_key=_given_key(signing_key, signing_key_password_file, former_key or []),
        reconciles_told_from_s=log_reconciles_from,
    )
    run_operator(settings, health_port=health_port, metrics_port=metrics_port, verbose=verbose)


def _allowed_token_ids(given: Sequence[str]) -> dict[str, LiveTokenIds]:
    choices, option = [each.value for each in LiveTokenIds if each], "--allow-token-ids"
    allowed: dict[str, LiveTokenIds] = {}
    for each in given:
        namespace, _, what = each.partition("=")
        if not _NAMESPACE.fullmatch(namespace) or what not in choices:
            message = f"must be NS=WHAT, such as team-a=answers; WHAT is {' or '.join(choices)}"
            raise typer.BadParameter(f"{printable(each)}: {message}", param_hint=option)
        if namespace in allowed:
            raise typer.BadParameter(f"{namespace}: is given twice; keep one of them", param_hint=option)
        allowed[namespace] = LiveTokenIds(what)
    return allowed


def _lease(name: str | None, duration_s: int | None) -> "LeaseName | None":
    if name is None:
        if duration_s is not None:
            fix = "requires --leader-election: add --leader-election LEASE, or omit the option"
            raise typer.BadParameter(f"{duration_s}: {fix}", param_hint="--lease-duration")
        return None
    duration_s = _LEASE_S if duration_s is None else duration_s
    if not _SHORTEST_LEASE_S <= duration_s <= _LONGEST_LEASE_S:
        allowed = f"must be {_SHORTEST_LEASE_S} to {_LONGEST_LEASE_S} seconds"
        raise typer.BadParameter(f"{duration_s}: {allowed}", param_hint="--lease-duration")
    from specdecode_operator.handlers.leadership import LeaseName  # noqa: PLC0415
    from specdecode_operator.handlers.settings import own_name  # noqa: PLC0415

    namespace = os.environ.get("POD_NAMESPACE")
    if not namespace or not name:
        fix = "set POD_NAMESPACE, as in the operator's pod" if name else "set the name of a Lease"
        raise typer.BadParameter(f"{name or 'an empty name'}: {fix}", param_hint="--leader-election")
    return LeaseName(namespace, name, own_name(), duration_s)


def _given_key(file: Path | None, password_file: Path | None, former: Sequence[Path]) -> "SigningKey | None":
    if file is None:
        return None
    # Importing cryptography is slow.
    from specdecode_operator.cli.attestation import public_keys  # noqa: PLC0415
    from specdecode_operator.deployment.attestation.keys import KeyFormatError, SigningKey  # noqa: PLC0415

    with ended(DocumentError, at="--signing-key: "):
        # A file written by hand ends with a line break.
        password = None if password_file is None else read_text(str(password_file)).removesuffix("\n").encode()
        pem = read_text(str(file)).encode()
    with ended(KeyFormatError, at=f"--signing-key: {printable(str(file))}: "):
        return SigningKey.read(pem, password, public_keys(former, "--former-key"))
