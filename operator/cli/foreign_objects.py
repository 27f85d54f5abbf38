"""Replace objects of other projects that run vLLM with our own, in memory, so that `plan` and `lint` can size them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from specdecode_operator.api.base import API_VERSION, Body
from specdecode_operator.api.deployment import KIND
from specdecode_operator.cli.input_files import Document, Found, Other, may_run_vllm
from specdecode_operator.cluster.resources import MANAGED_BY_LABEL, MANAGER
from specdecode_operator.importing.convert import runs_server
from specdecode_operator.importing.foreign import other_objects, read_server
from specdecode_operator.importing.prefill_decode import split_problems
from specdecode_operator.importing.sources import import_instead, read_workloads
from specdecode_operator.importing.spec_builder import MigrationError, Workload, broken, name_in, namespace_of
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip
from specdecode_operator.untrusted import mapping, objects
from specdecode_operator.vllm.kv_transfer import ServingRole

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_MOST_SHOWN: Final = 400


def assumption_notes(documents: Sequence[Document], *, gpu: bool) -> Iterator[str]:
    """Yield the assumptions of the plan: the version of vLLM and, with ``gpu``, the GPU."""
    servers = [each.foreign for each in documents if each.foreign is not None]
    unnamed = [each.name for each in servers if not each.names_gpu]
    if gpu and unnamed:
        yield (
            f"{_who(unnamed)}: no node label names the GPU, so the plan assumes H100 and H200; name the GPU with --gpu"
            " or --nodes"
        )
    assumed = {each.name: each.assumed_version for each in servers if each.assumed_version is not None}
    if assumed:
        version = next(iter(assumed.values()))
        yield (
            f"{_who([*assumed])}: no image tag contains a supported version of vLLM, so the plan assumes {version}; set"
            " it with --engine-version"
        )


def _who(names: Sequence[str]) -> str:
    return printable(names[0]) if len(names) == 1 else f"{len(names)} servers"


def with_servers(found: Sequence[Found], engine_version: str | None) -> tuple[list[Found], tuple[str, ...]]:
    """Replace servers of other projects with our objects; return all objects, and notes on those not planned.

    ``engine_version`` is the version of vLLM of servers whose image tag does not contain it.
    """
    others = [each.document for each in found if isinstance(each, Other) and each.document is not None]
    bodies = [each.body for each in others]
    present = {(str(each.get("kind")), name_in(each)) for each in bodies}
    converted, left, advice = list[Found](), list[str](), list[str]()
    for each in found:
        document = each.document if isinstance(each, Other) else None
        if document is None or _is_created(document.body, present):
            converted.append(each)
            continue
        servers, rest = _servers(document, bodies, engine_version)
        converted += servers or [each]
        left += rest
        if not servers and (instead := import_instead(document.body)):
            advice.append(f"{document.place}: {clip(printable(instead), _MOST_SHOWN)}")
    converted = [*_with_split_warnings(converted)]
    if not any(isinstance(each, Document) and each.foreign for each in converted):
        return converted, tuple(advice)
    rest = [f"not planned, because they do not run vLLM: {printable(other_objects(left))}"] if left else []
    return converted, (*advice, *rest)


def _is_created(body: Body, present: set[tuple[str, str]]) -> bool:
    """Return whether the operator or an object of the same input creates an object."""
    metadata = mapping(body, "metadata")
    owners = {(str(each.get("kind")), str(each.get("name"))) for each in objects(metadata, "ownerReferences")}
    managed_by = mapping(metadata, "labels").get(MANAGED_BY_LABEL)
    return managed_by == MANAGER or bool(owners & present) or any(kind == KIND for kind, _ in owners)


def _servers(document: Document, bodies: Sequence[Body], version: str | None) -> tuple[list[Document], list[str]]:
    """Return the servers of an object, and names of its parts that do not run vLLM, or of the whole object."""
    body, kind = document.body, str(document.body.get("kind") or "a file without kind")
    servers, left = list[Document](), list[str]()
    if not may_run_vllm(body):
        return [], [clip(printable(kind), 64)]
    try:
        workloads = read_workloads(body, bodies)
    except MigrationError as error:
        workloads = [broken(kind, name_in(body), "", error, namespace_of(body))]
    for workload in workloads:
        if runs_server(workload):
            servers.append(_document(document, workload, kind, version))
        else:
            left.append(f"{workload.name} of {kind}" if len(workloads) > 1 else kind)
    return servers, [clip(printable(each), 96) for each in left or ([] if servers else [kind])]


def _document(document: Document, workload: Workload, kind: str, version: str | None) -> Document:
    server = read_server(workload, clip(printable(kind), 64), version)
    metadata = {"name": "server"}
    if workload.namespace is not None and _NAME.fullmatch(workload.namespace):
        metadata["namespace"] = workload.namespace
    made = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": server.spec}
    return replace(document, body=made, foreign=replace(server, name=clip(server.name, 128)))


def _with_split_warnings(found: Sequence[Found]) -> Iterator[Found]:
    """Yield the objects, with warnings on decode sides that differ from the prefill side of their split."""
    prefill: dict[tuple[object, ...], Document] = {}
    for document in (each for each in found if isinstance(each, Document)):
        for key in _split_keys(document, ServingRole.PREFILL):
            prefill.setdefault(key, document)
    for each in found:
        other = next((prefill[key] for key in _split_keys(each, ServingRole.DECODE) if key in prefill), None)
        if other is None or other.foreign is None or not isinstance(each, Document) or each.foreign is None:
            yield each
            continue
        server = each.foreign
        problems = map(server.in_its_fields, split_problems(other.foreign.spec, server.spec, other.name))
        yield replace(each, foreign=replace(server, warnings=(*server.warnings, *problems)))


def _split_keys(found: Found, role: ServingRole) -> list[tuple[object, ...]]:
    """Return what both sides of a split share: the object, or the file, the namespace and the model."""
    server = found.foreign if isinstance(found, Document) else None
    if not isinstance(found, Document) or server is None or server.side is None or server.side.role is not role:
        return []
    model = mapping(server.spec, "target").get("model")
    return [(found.file, found.number, found.item), (found.file, found.namespace, "model", str(model))]
