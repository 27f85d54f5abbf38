"""`specdecode attestation verify` and `attestation-webhook`: check objects and pods against signed attestations."""

import asyncio
import json
import logging
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.cli.input_files import Document, read_all
from specdecode_operator.cli.options import FilesOption, TextOrJson, ended, fail
from specdecode_operator.cli.outputs import Output, print_json
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.cli.text_files import DocumentError, read_text
from specdecode_operator.cluster.resources import CONFIG_MAP
from specdecode_operator.deployment.attestation.attest import ENTRY_SUFFIX, attestation_name
from specdecode_operator.deployment.attestation.keys import KeyFormatError, PublicKey
from specdecode_operator.deployment.attestation.pod_admission import Gate
from specdecode_operator.deployment.attestation.statement import Rollout, UnverifiedError, opened, read_statement
from specdecode_operator.deployment.attestation.verify import CHECKED, Difference, compared
from specdecode_operator.problems import OneLine, printable
from specdecode_operator.untrusted import mapping

KeysOption = Annotated[
    list[Path],
    typer.Option(
        "--key",
        metavar="FILE",
        help="Trusted public key, such as cosign.pub. May be repeated, to rotate keys.",
    ),
]


def public_keys(files: Sequence[Path], option: str = "--key") -> tuple[PublicKey, ...]:
    """Read public keys from files; exit with an error that names the option if a file has no key."""
    keys = []
    for file in files:
        with ended(KeyFormatError, at=f"{option}: {printable(str(file))}: "), ended(DocumentError, at=f"{option}: "):
            keys.append(PublicKey.read(read_text(str(file)).encode()))
    return tuple(keys)


class AttestationOutput(Output):
    """One attestation of a rollout."""

    place: str
    """File and, for a ConfigMap, the entry."""
    problem: str | None
    """Why verification failed; null if it succeeded."""
    rollout: dict[str, Any] | None
    """The signed predicate; null if verification failed."""


class DifferenceOutput(Output):
    """A field that differs from the attestation."""

    field: str
    """Path in the object, or the container."""
    attested: Any
    """Attested value; null if the attestation has none."""
    found: Any
    """Value in the object; null if it has none."""


class ComparedOutput(Output):
    """An object compared with the attestations."""

    kind: str
    name: str
    """Namespace and name."""
    looked_at: str
    """The compared parts of the object."""
    differences: list[DifferenceOutput]
    """Empty if the object matches the attestation."""


class VerifyOutput(Output):
    """Result of `specdecode attestation verify`."""

    verified: bool
    """Whether all signatures are valid and all objects match."""
    attestations: list[AttestationOutput]
    """All attestations in the given file."""
    several_objects: bool
    """Whether they are about several SpecDecodeDeployments. If so, objects are not compared."""
    objects: list[ComparedOutput]
    """Objects of the -f files that the attestations cover."""
    not_looked_at: list[str]
    """Attested kinds that the -f files lack."""


def verify_command(
    attestation: Annotated[
        str,
        typer.Argument(help="ConfigMap NAME-attestation, a DSSE envelope, or a cosign bundle; - for standard input."),
    ],
    *,
    key: KeysOption,
    file: FilesOption = None,
    output: Annotated[TextOrJson, typer.Option("--output", "-o", help="Output format.")] = TextOrJson.TEXT,
) -> None:
    """Verify the attestation of a rollout: its signature and, with -f, objects from the cluster.

    -f takes the output of kubectl get -o yaml for the SpecDecodeDeployment, its
    Deployment or LeaderWorkerSet, and its pods. Each difference from the
    attestation is printed on one line. The command uses no cluster and no network.

    Exits with 0 when everything matches, 1 when a signature or an object does
    not, 2 when a file cannot be used.
    """
    keys = public_keys(key)
    with ended(DocumentError):
        documents = [each for each in read_all(attestation) if isinstance(each, Document)]
        given = [each for name in file or () for each in read_all(name) if isinstance(each, Document)]
    envelopes = [found for each in documents for found in _envelopes(each)]
    if not envelopes:
        fix = "name the ConfigMap NAME-attestation, a DSSE envelope or a bundle"
        fail(f"{printable(attestation)}: contains no attestation: {fix}")
    found, rollouts = _verified(envelopes, keys, given)
    if output is TextOrJson.JSON:
        print_json(found.model_dump(mode="json"))
    else:
        _say(found, rollouts)
    if not found.verified:
        raise typer.Exit(1)


def _envelopes(document: Document) -> Iterator[tuple[str, str]]:
    """Yield the envelopes of an object, each with its place."""
    body = document.body
    # cosign writes a sigstore bundle, with the envelope in this field.
    envelope = body.get("dsseEnvelope", body)
    if isinstance(envelope, dict) and "payloadType" in envelope:
        yield document.place, json.dumps(envelope)
    for name, text in mapping(body, "data").items() if document.kind == "ConfigMap" else ():
        if str(name).endswith(ENTRY_SUFFIX):
            yield f"{document.place}: {printable(str(name))}", str(text)


def _verified(
    envelopes: Sequence[tuple[str, str]], keys: Sequence[PublicKey], documents: Sequence[Document]
) -> tuple[VerifyOutput, list[Rollout]]:
    attestations, rollouts = [], []
    for place, text in envelopes:
        try:
            rollout = read_statement(opened(text, *keys)).predicate
        except UnverifiedError as error:
            attestations.append(AttestationOutput(place=place, problem=str(error), rollout=None))
        else:
            rollouts.append(rollout)
            attestations.append(AttestationOutput(place=place, problem=None, rollout=msgspec.to_builtins(rollout)))
    several = len({(each.object.namespace, each.object.name, each.object.uid) for each in rollouts}) > 1
    objects = []
    for document in documents if rollouts and not several else ():
        if document.kind in CHECKED:
            found = compared(rollouts, document.body)
            row = ComparedOutput(
                kind=document.kind,
                name=document.qualified_name,
                looked_at=found.looked_at,
                differences=[DifferenceOutput(**each._asdict()) for each in found.differences],
            )
            objects.append(row)
    expected = []
    if rollouts:
        expected = ["SpecDecodeDeployment", "Deployment" if len(rollouts[-1].pods) == 1 else "LeaderWorkerSet", "Pod"]
    seen = {each.kind for each in objects}
    verified = len(rollouts) == len(envelopes) and not several and not any(each.differences for each in objects)
    answer = VerifyOutput(
        verified=verified,
        attestations=attestations,
        several_objects=several,
        objects=objects,
        not_looked_at=[kind for kind in expected if kind not in seen],
    )
    return answer, rollouts


def _say(found: VerifyOutput, rollouts: Sequence[Rollout]) -> None:
    valid = iter(rollouts)
    for attestation in found.attestations:
        if attestation.problem is not None:
            say_line(f"{attestation.place}: {attestation.problem}", err=True)
        else:
            for line in _told(next(valid)):
                say_line(printable(line))
    if found.several_objects:
        say_line("the attestations are about several objects: pass the attestations of one object", err=True)
    for each in found.objects:
        for difference in each.differences:
            told = Difference(difference.field, difference.attested, difference.found)
            say_line(f"{each.kind} {each.name}: {printable(str(told))}", err=True)
        if not each.differences:
            say_line(f"{each.kind} {each.name} matches the attestation: {each.looked_at}")
    if found.not_looked_at:
        say_line(f"not checked, because no file contains it: {', '.join(found.not_looked_at)}")
    say_line("verified" if found.verified else "NOT VERIFIED", err=not found.verified)


def _told(rollout: Rollout) -> Iterator[str]:
    its, plan, served = rollout.object, rollout.plan, rollout.served
    yield f"{its.namespace}/{its.name}, generation {its.generation}: signed at {rollout.made_at}"
    yield f"  plan: {plan.get('verdict')}: {plan.get('explanation')}"
    if served is None:
        yield "  not attested: engines that served with this plan"
        return
    counts = (served.kv_cache.predicted_tokens, served.kv_cache.reported_tokens)
    predicted, reported = ("nothing" if count is None else f"{count:,} tokens" for count in counts)
    version = served.engine_version or "of an unknown version"
    yield f"  KV cache: {predicted} predicted, {reported} reported by {served.engines} engines of vLLM {version}"
    for image in served.images:
        yield f"  image of container {image.container}: {image.digest}"
    verdict = served.verdict
    yield (
        f"  comparison {verdict.capture}: Pays={verdict.status}: {verdict.message}" if verdict else "  comparison: none"
    )


_logger = logging.getLogger(__name__)


def attestation_webhook_command(
    *,
    key: KeysOption,
    certificate: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Folder with tls.crt and tls.key of the webhook. Reloaded when they change."
        ),
    ],
    port: Annotated[int, typer.Option(help="HTTPS port of the webhook; 0 selects a free port.")] = 9443,
    metrics_port: Annotated[int, typer.Option(help="Port of /metrics; 0 selects a free port.")] = 8081,
    allow_container: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=IMAGE",
            help="Name and exact image of a container that is injected into pods, such as a service mesh "
            "sidecar. May be repeated.",
        ),
    ] = None,
) -> None:
    """Run a validating webhook that rejects engine pods without a matching attestation.

    In the cluster, it reads only ConfigMap NAME-attestation in the namespace of
    the pod. It cannot sign. The manifests are in examples/attestation.
    """
    allowed = set()
    for text in allow_container or ():
        name, _, image = text.partition("=")
        if not name or not image:
            message = f"{printable(text)}: write NAME=IMAGE, such as istio-proxy=docker.io/istio/proxyv2@sha256:…"
            raise typer.BadParameter(message, param_hint="--allow-container")
        allowed.add((name, image))
    gate = Gate(public_keys(key), frozenset(allowed))
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(name)s [%(levelname)s] %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(OneLine())
    asyncio.run(_serve(gate, certificate, port, metrics_port))


async def _serve(gate: Gate, certificate_folder: Path, port: int, metrics_port: int) -> None:
    """Serve until SIGTERM. Each review has a thread; requests to the API server run in this event loop."""
    # Importing kopf and the Kubernetes client takes a second.
    from specdecode_operator.cluster.client import Cluster, ClusterError  # noqa: PLC0415
    from specdecode_operator.handlers.metrics import AdmissionCollector, serve_metrics  # noqa: PLC0415
    from specdecode_operator.handlers.webhook import answer_pod, serve_admission  # noqa: PLC0415
    from specdecode_operator.handlers.webhook_certificate import CertificateFolder  # noqa: PLC0415

    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, stopped.set)
    cluster = await Cluster.connect()

    async def attestations(key: Key) -> Body | None:
        # By default, the API server times out a review after 10 seconds.
        within_s = 5
        try:
            async with asyncio.timeout(within_s):
                return await cluster.get(CONFIG_MAP, key.namespace, attestation_name(key))
        except TimeoutError as error:
            raise ClusterError(f"the API server does not answer within {within_s} s") from error

    def validate(review: Any) -> Body:
        read = lambda key: asyncio.run_coroutine_threadsafe(attestations(key), loop).result()  # noqa: E731
        answer = answer_pod(review, gate, read)
        if refusal := answer["response"].get("status"):
            _logger.info("refused: %s", refusal["message"])
        return answer

    certificate, path = CertificateFolder(certificate_folder), "/validate-pods"
    collector = AdmissionCollector(lambda: certificate.expires)
    served = serve_admission(port, certificate, {path: validate}, collector)
    _logger.info("%s is served on port %d, /metrics on port %d", path, served, serve_metrics(metrics_port, collector))
    await stopped.wait()
    await cluster.close()
