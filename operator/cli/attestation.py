"""`specdecode verify`: whether an attestation is what its key signed, and objects are what it attests. Offline."""

import json
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated

import typer

from specdecode_operator.cli.options import FilesOption, TextOrJson, fail
from specdecode_operator.cli.public_keys import KeysOption, public_keys
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.problems import printable

if TYPE_CHECKING:
    from specdecode_operator.attestation.keys import PublicKey
    from specdecode_operator.attestation.statement import Rollout
    from specdecode_operator.cli.input_files import Document
    from specdecode_operator.cli.outputs.verify import AttestationOutput, ComparedOutput, VerifyOutput


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
        from specdecode_operator.cli.outputs.printing import print_json  # noqa: PLC0415

        print_json(found.model_dump(mode="json"))
    else:
        _say(found)
    if not found.verified:
        raise typer.Exit(ExitCode.NOT_VERIFIED)


def _envelopes(document: "Document") -> Iterator[tuple[str, str]]:
    """Return the envelopes of an object, each with its place."""
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
    """Return what there is to say of attestations and objects."""
    from specdecode_operator.cli.outputs.verify import VerifyOutput  # noqa: PLC0415

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

    from specdecode_operator.attestation.envelope import UnverifiedError, opened  # noqa: PLC0415
    from specdecode_operator.attestation.statement import read_statement  # noqa: PLC0415
    from specdecode_operator.cli.outputs.verify import AttestationOutput  # noqa: PLC0415

    try:
        rollout = read_statement(opened(text, *keys)).predicate
    except UnverifiedError as error:
        return AttestationOutput(place=place, problem=str(error), rollout=None), None
    return AttestationOutput(place=place, problem=None, rollout=msgspec.to_builtins(rollout)), rollout


def _compared(rollouts: "Sequence[Rollout]", documents: "Sequence[Document]") -> "list[ComparedOutput]":
    from specdecode_operator.attestation.checks import CHECKED, compared  # noqa: PLC0415
    from specdecode_operator.cli.outputs.verify import ComparedOutput, DifferenceOutput  # noqa: PLC0415

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
    """Say it to people."""
    import msgspec  # noqa: PLC0415

    from specdecode_operator.attestation.checks import Difference  # noqa: PLC0415
    from specdecode_operator.attestation.statement import Rollout  # noqa: PLC0415

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
