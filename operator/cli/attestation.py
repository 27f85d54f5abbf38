"""`specdecode verify` and `attestation-webhook`: check objects and pods against signed attestations."""

import asyncio
import json
import logging
import signal
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from specdecode_operator.cli.options import FilesOption, TextOrJson, fail
from specdecode_operator.cli.outputs import Output
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.problems import printable

if TYPE_CHECKING:
    from specdecode_operator.api.base import Body
    from specdecode_operator.api.deployment import Key
    from specdecode_operator.attestation.keys import PublicKey
    from specdecode_operator.attestation.pod_admission import Gate
    from specdecode_operator.attestation.statement import Rollout
    from specdecode_operator.cli.input_files import Document
    from specdecode_operator.cluster.client import Cluster


KeysOption = Annotated[
    list[Path],
    typer.Option(
        "--key",
        metavar="FILE",
        help="Public key of who may have signed, such as cosign.pub. May be repeated, while one replaces another.",
    ),
]


def public_keys(files: Sequence[Path], option: str = "--key") -> "tuple[PublicKey, ...]":
    """Return the keys of files that an option names; end with the exit code of invalid input where one holds none."""
    from specdecode_operator.attestation.keys import KeyFormatError, PublicKey  # noqa: PLC0415
    from specdecode_operator.cli.text_files import DocumentError, read_text  # noqa: PLC0415

    keys = []
    for file in files:
        try:
            keys.append(PublicKey.read(read_text(str(file)).encode()))
        except KeyFormatError as error:
            fail(f"{option}: {printable(str(file))}: {error}")
        except DocumentError as error:
            fail(f"{option}: {error}")
    return tuple(keys)


class AttestationOutput(Output):
    """One attestation of a rollout."""

    place: str
    """The file, and the entry in its ConfigMap."""
    problem: str | None
    """Why it does not hold; null where it does."""
    rollout: dict[str, Any] | None
    """The predicate, as it was signed; null where it does not hold."""


class DifferenceOutput(Output):
    """A field that is not as attested."""

    field: str
    """Path in the object, or of which container."""
    attested: Any
    """Null where nothing is."""
    found: Any
    """Null where there is nothing."""


class ComparedOutput(Output):
    """One object that was held against the attestations."""

    kind: str
    name: str
    """With its namespace."""
    looked_at: str
    """What of it is attested and was compared."""
    differences: list[DifferenceOutput]
    """Empty where it is as attested."""


class VerifyOutput(Output):
    """What a third party finds out."""

    verified: bool
    """Whether all of it holds."""
    attestations: list[AttestationOutput]
    """All that the argument names."""
    several_objects: bool
    """Whether they are of several SpecDecodeDeployments: nothing is compared then."""
    objects: list[ComparedOutput]
    """Those of the files that an attestation says something of."""
    not_looked_at: list[str]
    """Kinds that no file has."""


class ExitCode(IntEnum):
    """What the shell gets."""

    VERIFIED = 0
    NOT_VERIFIED = 1
    INVALID = 2


def verify_command(
    attestation: Annotated[
        str,
        typer.Argument(
            help="ConfigMap NAME-attestation, a DSSE envelope, or a bundle of cosign's; - for standard input."
        ),
    ],
    *,
    key: KeysOption,
    file: FilesOption = None,
    output: Annotated[TextOrJson, typer.Option("--output", "-o", help="How to print it.")] = TextOrJson.TEXT,
) -> None:
    """Say whether an attestation of a rollout holds: by its signature alone, and against objects in files.

    With -f, what kubectl get -o yaml says of the SpecDecodeDeployment, its
    Deployment or LeaderWorkerSet and its pods is compared with what was
    signed, each difference a line. No cluster is asked, and no network.

    Exits with 0 when all of it holds, 1 when a signature or an object does not,
    2 when a file cannot be used.
    """
    from specdecode_operator.cli.input_files import Document, read_all  # noqa: PLC0415
    from specdecode_operator.cli.text_files import DocumentError  # noqa: PLC0415

    keys = public_keys(key)
    try:
        documents = [each for each in read_all(attestation) if isinstance(each, Document)]
        given = [each for name in file or () for each in read_all(name)]
        envelopes = [found for each in documents for found in _envelopes(each)]
    except DocumentError as error:
        fail(error)
    if not envelopes:
        fix = "name the ConfigMap NAME-attestation, a DSSE envelope or a bundle"
        fail(f"{printable(attestation)}: holds no attestation: {fix}")
    found = _found(envelopes, keys, [each for each in given if isinstance(each, Document)])
    if output is TextOrJson.JSON:
        from specdecode_operator.cli.outputs import print_json  # noqa: PLC0415

        print_json(found.model_dump(mode="json"))
    else:
        _say(found)
    if not found.verified:
        raise typer.Exit(ExitCode.NOT_VERIFIED)


def _envelopes(document: "Document") -> Iterator[tuple[str, str]]:
    from specdecode_operator.attestation.attest import ENTRY_SUFFIX  # noqa: PLC0415

    body = document.body
    # That of a bundle of sigstore's, as cosign writes it.
    envelope = body.get("dsseEnvelope", body)
    if isinstance(envelope, dict) and "payloadType" in envelope:
        yield document.place, json.dumps(envelope)
    data = body.get("data")
    for name, text in data.items() if isinstance(data, dict) and body.get("kind") == "ConfigMap" else ():
        if str(name).endswith(ENTRY_SUFFIX):
            yield f"{document.place}: {printable(str(name))}", str(text)


def _found(
    envelopes: Sequence[tuple[str, str]], keys: "Sequence[PublicKey]", documents: "Sequence[Document]"
) -> "VerifyOutput":
    attestations, rollouts = [], []
    for place, text in envelopes:
        attestation, rollout = _opened(place, text, keys)
        attestations.append(attestation)
        rollouts += [] if rollout is None else [rollout]
    several = len({(each.object.namespace, each.object.name, each.object.uid) for each in rollouts}) > 1
    compared = [] if several or not rollouts else _compared(rollouts, documents)
    seen = {each.kind for each in compared}
    return VerifyOutput(
        verified=len(rollouts) == len(envelopes) and not several and not any(each.differences for each in compared),
        attestations=attestations,
        several_objects=several,
        objects=compared,
        not_looked_at=[kind for kind in _expected(rollouts) if kind not in seen],
    )


def _opened(place: str, text: str, keys: "Sequence[PublicKey]") -> "tuple[AttestationOutput, Rollout | None]":
    import msgspec  # noqa: PLC0415

    from specdecode_operator.attestation.statement import (  # noqa: PLC0415
        UnverifiedError,
        opened,
        read_statement,
    )

    try:
        rollout = read_statement(opened(text, *keys)).predicate
    except UnverifiedError as error:
        return AttestationOutput(place=place, problem=str(error), rollout=None), None
    return AttestationOutput(place=place, problem=None, rollout=msgspec.to_builtins(rollout)), rollout


def _compared(rollouts: "Sequence[Rollout]", documents: "Sequence[Document]") -> "list[ComparedOutput]":
    from specdecode_operator.attestation.verify import CHECKED, compared  # noqa: PLC0415

    told = []
    for document in documents:
        if document.kind in CHECKED:
            found = compared(rollouts, document.body)
            differences = [DifferenceOutput(**each._asdict()) for each in found.differences]
            named = {"kind": document.kind, "name": document.qualified_name}
            told.append(ComparedOutput(**named, looked_at=found.looked_at, differences=differences))
    return told


def _expected(rollouts: "Sequence[Rollout]") -> list[str]:
    if not rollouts:
        return []
    workload = "Deployment" if len(rollouts[-1].pods) == 1 else "LeaderWorkerSet"
    return ["SpecDecodeDeployment", workload, "Pod"]


def _say(found: "VerifyOutput") -> None:
    import msgspec  # noqa: PLC0415

    from specdecode_operator.attestation.statement import Rollout  # noqa: PLC0415
    from specdecode_operator.attestation.verify import Difference  # noqa: PLC0415

    for attestation in found.attestations:
        if attestation.rollout is None:
            say_line(f"{attestation.place}: {attestation.problem}", err=True)
        else:
            for line in _told(msgspec.convert(attestation.rollout, Rollout)):
                say_line(printable(line))
    if found.several_objects:
        say_line("the attestations are of several objects: name those of one", err=True)
    for each in found.objects:
        for difference in each.differences:
            told = Difference(difference.field, difference.attested, difference.found)
            say_line(f"{each.kind} {each.name}: {printable(str(told))}", err=True)
        if not each.differences:
            say_line(f"{each.kind} {each.name} is as attested: {each.looked_at}")
    if found.not_looked_at:
        say_line(f"not looked at, for no file has it: {', '.join(found.not_looked_at)}")
    say_line("verified" if found.verified else "NOT VERIFIED", err=not found.verified)


def _told(rollout: "Rollout") -> Iterator[str]:
    its, plan = rollout.object, rollout.plan
    yield f"{its.namespace}/{its.name}, generation {its.generation}: signed at {rollout.made_at}"
    yield f"  plan: {plan.get('verdict')}: {plan.get('explanation')}"
    served = rollout.served
    if served is None:
        yield "  not attested: that engines served by it"
        return
    memory = served.kv_cache
    yield (
        f"  KV cache: {_tokens(memory.predicted_tokens)} predicted, {_tokens(memory.reported_tokens)} reported"
        f" by {served.engines} engines of vLLM {served.engine_version or 'of an unknown version'}"
    )
    for image in served.images:
        yield f"  image of container {image.container}: {image.digest}"
    verdict = served.verdict
    yield (
        f"  comparison {verdict.capture}: Pays={verdict.status}: {verdict.message}" if verdict else "  comparison: none"
    )


def _tokens(count: int | None) -> str:
    return "nothing" if count is None else f"{count:,} tokens"


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
    from specdecode_operator.attestation.pod_admission import Gate  # noqa: PLC0415
    from specdecode_operator.problems import OneLine  # noqa: PLC0415

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
    from specdecode_operator.cluster.client import Cluster  # noqa: PLC0415
    from specdecode_operator.handlers.metrics import AdmissionCollector, serve_metrics  # noqa: PLC0415
    from specdecode_operator.handlers.webhook import answer_pod, serve_admission  # noqa: PLC0415
    from specdecode_operator.handlers.webhook_certificate import CertificateFolder  # noqa: PLC0415

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
    from specdecode_operator.cluster.client import ClusterError  # noqa: PLC0415
    from specdecode_operator.cluster.resources import CONFIG_MAP  # noqa: PLC0415

    try:
        async with asyncio.timeout(_READ_WITHIN_S):
            return await cluster.get(CONFIG_MAP, key.namespace, attestation_name(key))
    except TimeoutError as error:
        raise ClusterError(f"the API server does not answer within {_READ_WITHIN_S:.0f} s") from error
