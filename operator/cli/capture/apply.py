"""Applies captures from files: all of them or none, and nothing else that stands there."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from specdecode_operator.api import base
from specdecode_operator.api import capture as api
from specdecode_operator.api.base import Body
from specdecode_operator.cli.capture.kubectl import Kubectl
from specdecode_operator.cli.capture.watch import CaptureError
from specdecode_operator.cli.input_files import Document, Other, read_all
from specdecode_operator.problems import printable, shown, shown_or_missing

_SUFFIXES: Final = (".json", ".yaml", ".yml")
_SHOWN: Final = 3


@dataclass(frozen=True)
class Applied:
    """A capture that was applied."""

    name: str
    kubectl: Kubectl
    """kubectl in its namespace, which the file may name."""

    suspended: bool
    """Whether it was applied as one that shall not start."""


def read_captures(source: str) -> list[Body]:
    """Return the captures of a file, of ``-``, or of a folder's files, as ``kubectl apply`` takes them.

    Raises
    ------
    CaptureError
        When anything else is among them, or the same capture twice.
    DocumentError
        When a file cannot be read.
    """
    files = _files(source)
    found = [(file, each) for file in files for each in read_all(file)]
    wrong = [f"{printable(file)}: holds {each.name}" for file, each in found if isinstance(each, Other)]
    documents = [each for _, each in found if isinstance(each, Document)]
    wrong += filter(None, map(_wrong, documents))
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CaptureError(f"nothing was applied: {'; '.join(wrong[:_SHOWN])}{more}")
    if not documents:
        raise CaptureError(f"{source}: holds no {api.KIND}: name another file or folder")
    names: set[str] = set()
    for document in documents:
        if document.qualified_name in names:
            twice = f"{document.place}: metadata.name: {shown(document.name)}: is there twice"
            raise CaptureError(f"nothing was applied: {twice}: rename one")
        names.add(document.qualified_name)
    return [document.body for document in documents]


def apply(kubectl: Kubectl, captures: Sequence[Body]) -> list[Applied]:
    """Apply captures, after the API server has said that it takes every one of them.

    What is sent is what was read, not the file's text: another parser might find other objects in it.

    Raises
    ------
    KubectlError
        When the API server refuses one of them; then none was applied.
    """
    listed: Body = {"apiVersion": "v1", "kind": "List", "items": [*captures]}
    if len(captures) > 1:
        kubectl.apply(listed, "--dry-run=server")
    answer = kubectl.apply(listed if len(captures) > 1 else captures[0])
    return [
        Applied(
            name=str(each["metadata"]["name"]),
            kubectl=replace(kubectl, namespace=str(each["metadata"]["namespace"])),
            suspended=bool((sent.get("spec") or {}).get("suspend")),
        )
        for each, sent in zip(answer.get("items", [answer]), captures, strict=True)
    ]


def _files(source: str) -> Iterable[str]:
    folder = Path(source)
    if not source or not folder.is_dir():
        return [source]
    found = [str(file) for file in sorted(folder.iterdir()) if file.suffix in _SUFFIXES and file.is_file()]
    if not found:
        raise CaptureError(f"{source}: no {', '.join(_SUFFIXES)} file is in this folder: name another")
    return found


def _wrong(document: Document) -> str | None:
    """Return why a document is no capture that could be applied."""
    body = document.body
    kind, version, metadata = body.get("kind"), body.get("apiVersion"), body.get("metadata")
    if kind != api.KIND:
        return f"{document.place}: kind: {shown_or_missing(kind or None)}: is no {api.KIND}: apply it with kubectl"
    if version != base.API_VERSION:
        return f"{document.place}: apiVersion: {shown_or_missing(version or None)}: use {base.API_VERSION}"
    # The rules of the CRDs take longer to load than the rest of the command line.
    from specdecode_operator.api.crd.admission import metadata_problems  # noqa: PLC0415

    if problems := metadata_problems(metadata):
        return f"{document.place}: {problems[0]}"
    if not isinstance(body.get("spec", {}), dict):
        return f"{document.place}: spec: must be an object"
    return None
