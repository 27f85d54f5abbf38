"""`specdecode verify`: whether an attestation is what its key signed, and objects are what it attests. Offline."""

import json
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdecode_operator.cli.options import FilesOption, fail
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.problems import printable

if TYPE_CHECKING:
    from specdecode_operator.attestation.keys import PublicKey
    from specdecode_operator.attestation.statement import Rollout
    from specdecode_operator.cli.input_files import Document


class ExitCode(IntEnum):
    """What the shell gets."""

    VERIFIED = 0
    NOT_VERIFIED = 1
    INVALID = 2


def verify_command(
    attestation: Annotated[
        str, typer.Argument(help="A DSSE envelope, or the ConfigMap NAME-attestation; - for standard input.")
    ],
    *,
    key: Annotated[Path, typer.Option(metavar="FILE", help="Public key of who signed it, such as cosign.pub.")],
    file: FilesOption = None,
) -> None:
    """Say whether an attestation of a rollout holds: by its signature alone, and against objects in files.

    With -f, what kubectl get -o yaml says of the SpecDecodeDeployment, its
    Deployment or LeaderWorkerSet and its pods is compared with what was
    signed, each difference a line. No cluster is asked, and no network.

    Exits with 0 when all of it holds, 1 when a signature or an object does not,
    2 when a file cannot be used.
    """
    from specdecode_operator.attestation.keys import KeyFormatError, PublicKey  # noqa: PLC0415
    from specdecode_operator.cli.input_files import Document, read_all  # noqa: PLC0415
    from specdecode_operator.cli.text_files import DocumentError, read_text  # noqa: PLC0415

    try:
        public = PublicKey.read(read_text(str(key)).encode())
        documents = [each for each in read_all(attestation) if isinstance(each, Document)]
        given = [each for name in file or () for each in read_all(name)]
        envelopes = [found for each in documents for found in _envelopes(each)]
    except KeyFormatError as error:
        fail(f"--key: {printable(str(key))}: {error}")
    except DocumentError as error:
        fail(error)
    if not envelopes:
        fail(f"{printable(attestation)}: holds no attestation: name a DSSE envelope, or the ConfigMap NAME-attestation")
    rollouts = list(_verified(envelopes, public))
    holds = len(rollouts) == len(envelopes)
    if rollouts:
        holds &= _agree(rollouts, [each for each in given if isinstance(each, Document)])
    if not holds:
        say_line("NOT VERIFIED", err=True)
        raise typer.Exit(ExitCode.NOT_VERIFIED)
    say_line("verified")


def _envelopes(document: "Document") -> Iterator[tuple[str, str]]:
    """Return the envelopes of an object, each with its place."""
    from specdecode_operator.attestation.attest import ENTRY_SUFFIX  # noqa: PLC0415

    body = document.body
    if "payloadType" in body:
        yield document.place, json.dumps(body)
    data = body.get("data")
    for name, text in data.items() if isinstance(data, dict) and body.get("kind") == "ConfigMap" else ():
        if str(name).endswith(ENTRY_SUFFIX):
            yield f"{document.place}: {printable(str(name))}", str(text)


def _verified(envelopes: Sequence[tuple[str, str]], key: "PublicKey") -> "Iterator[Rollout]":
    """Return what those say whose signature holds, and tell of each."""
    from specdecode_operator.attestation.envelope import UnverifiedError, opened  # noqa: PLC0415
    from specdecode_operator.attestation.statement import read_statement  # noqa: PLC0415

    for place, text in envelopes:
        try:
            rollout = read_statement(opened(text, key)).predicate
        except UnverifiedError as error:
            say_line(f"{place}: {error}", err=True)
            continue
        for line in _told(rollout):
            say_line(printable(line))
        yield rollout


def _told(rollout: "Rollout") -> Iterator[str]:
    """Return what an attestation says, for people."""
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


def _agree(rollouts: "Sequence[Rollout]", documents: "Sequence[Document]") -> bool:
    """Say of each object whether it is what was attested; return whether all are."""
    from specdecode_operator.attestation.checks import CHECKED, compared  # noqa: PLC0415

    if len({(each.object.namespace, each.object.name, each.object.uid) for each in rollouts}) > 1:
        say_line("the attestations are of several objects: name those of one", err=True)
        return False
    holds, told = True, [each for each in documents if each.kind in CHECKED]
    for document in told:
        found = compared(rollouts, document.body)
        for difference in found.differences:
            say_line(f"{document.kind} {document.qualified_name}: {difference}", err=True)
            holds = False
        if not found.differences:
            say_line(f"{document.kind} {document.qualified_name} is as attested: {found.looked_at}")
    if missing := [kind for kind in _expected(rollouts[-1]) if kind not in {each.kind for each in told}]:
        say_line(f"not looked at, for no file has it: {', '.join(missing)}")
    return holds


def _expected(rollout: Any) -> list[str]:
    workload = "Deployment" if len(rollout.pods) == 1 else "LeaderWorkerSet"
    return ["SpecDecodeDeployment", workload, "Pod"]
