"""Copy a capture's files from its volume to a local folder; resume, and verify checksums."""

import contextlib
import hashlib
import io
import json
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from specdecode_operator.api.base import PHASE_NAME, Body
from specdecode_operator.capture.observation import created_claim
from specdecode_operator.cli.capture.watch import RESOURCE, CaptureError, message_of, phase_of
from specdecode_operator.cli.kubectl import Kubectl, KubectlError, one_line
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.cluster.resources import CAPTURE_LABEL
from specdecode_operator.problems import printable
from specdecode_operator.untrusted import parse_json

MANIFEST: Final = "manifest.json"
PARTIAL_SUFFIX: Final = ".fetching"
BEGUN: Final = f"{MANIFEST}{PARTIAL_SUFFIX}"
"""The manifest of files that are on their way: whose they are is known before the first of them comes."""

_SHOWN: Final = 3
_BLOCK_BYTES: Final = 1 << 20


class FetchError(Exception):
    """The files could not be had, in one line that says what to do."""


@dataclass(frozen=True)
class RemoteFile:
    """One file on the volume, and what its copy must be like."""

    name: str
    bytes: int
    sha256: str


def refuse_others(out: Path, capture: str, manifest: bytes, files: Sequence[RemoteFile]) -> None:
    """Make sure that a folder holds nothing but files of the capture with this manifest."""
    if not _is_folder(out):
        return
    begun = [path for name in (MANIFEST, BEGUN) if (path := out / name).is_file()]
    if any(path.read_bytes() != manifest for path in begun):
        raise _holds_others(out, capture)
    known = {MANIFEST, BEGUN} if begun else set()
    for file in files:
        if begun:
            known |= {file.name, f"{file.name}{PARTIAL_SUFFIX}"}
        elif is_right(out / file.name, file):
            known.add(file.name)
    _refuse(out, capture, [path.name for path in _entries(out) if path.name not in known or not _is_plain(path)])


def refuse_strangers(out: Path, capture: str, known: Collection[str]) -> None:
    """Make sure that the folder of several arms holds nothing but theirs, by their names."""
    if _is_folder(out):
        _refuse(out, capture, [path.name for path in _entries(out) if path.name not in known or path.is_symlink()])


def _refuse(out: Path, capture: str, strangers: Sequence[str]) -> None:
    if strangers:
        shown = ", ".join(printable(name) for name in strangers[:_SHOWN])
        more = f" and {len(strangers) - _SHOWN} more" if len(strangers) > _SHOWN else ""
        raise FetchError(
            f"{out}: holds {shown}{more}, which capture {capture} has not: name another folder, or move it away"
        )


def refuse_earlier(out: Path, capture: str, uid: str | None) -> None:
    """Make sure, before a load is sent, that a folder can take the files of a capture; its UID is None before it is."""
    if not _is_folder(out):
        return
    if uid is None and _entries(out):
        raise FetchError(f"{out}: holds files already: name another folder for those of capture {capture} (--out)")
    held = _held(out).get("capture_uid")
    if held is not None and held != uid:
        raise _holds_others(out, capture)


def is_right(path: Path, file: RemoteFile) -> bool:
    """Whether a file is here as the manifest says."""
    if not _is_plain(path) or path.stat().st_size != file.bytes:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while block := content.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest() == file.sha256


def _is_folder(out: Path) -> bool:
    if not out.exists():
        return False
    if not out.is_dir():
        raise FetchError(f"{out}: is no folder: name another")
    return True


def _is_plain(path: Path) -> bool:
    """Whether a path is a file itself: what is written through a link lands somewhere else."""
    return path.is_file() and not path.is_symlink()


def _entries(out: Path) -> list[Path]:
    return sorted(out.iterdir())


def _holds_others(out: Path, capture: str) -> FetchError:
    held = _held(out)
    name = f"{printable(str(held.get('namespace')))}/{printable(str(held['capture']))}" if held.get("capture") else ""
    whose = f"capture {name}, recorded at another time," if name.endswith(f"/{capture}") else f"capture {name}"
    return FetchError(
        f"{out}: holds files of {whose if name else 'something else'}: name another folder for those of capture"
        f" {capture}, or move these away"
    )


def _held(out: Path) -> dict[str, Any]:
    of_arms = sorted(path for name in (MANIFEST, BEGUN) for path in out.glob(f"*/*/{name}"))
    for path in (out / MANIFEST, out / BEGUN, *of_arms[:1]):
        try:
            found = parse_json(path.read_bytes())
        except (OSError, ValueError):
            continue
        return found if isinstance(found, dict) else {}
    return {}


_MOUNT: Final = "/capture"
_POD_LIVES_S: Final = 6 * 3600
"""Long enough for tens of gigabytes; one that was left behind ends by itself."""

_READY_DEADLINE_S: Final = 120
_SILENT_S: Final = 120.0
"""Streams through the API server break, and each try goes on where the last one ended. An API server that restarts, or
another one that takes over, answers again by then."""

_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Between tries that bring nothing; the last one is that of all further tries."""

_MANIFEST_BYTES: Final = 16 << 20
_NAMES_BYTES: Final = 1 << 16
_COMPARISON: Final = "comparison.json"
"""What arms come to: beside their folders, and in no manifest."""

_ALONE: Final = "as-deployed/1"
"""Folder of a capture without arms."""

_ARM: Final = re.compile(PHASE_NAME)
_REPETITION: Final = re.compile(r"[1-9][0-9]?")
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_USER: Final = 65532
"""The user of the operator's image, who wrote the files."""


@dataclass(frozen=True)
class Location:
    """Where the files of a capture lie: the claim of the volume, and the folder on it."""

    capture: str
    claim: str
    path: str
    image: str
    """Image for the pod that reads the volume."""
    image_source: str
    """Where the image was taken from, for the user who decides whether to trust it."""


def find_files(kubectl: Kubectl, name: str, image: str | None) -> Location:
    """Return where a capture's files lie, also when the capture itself is gone."""
    capture = kubectl.find(f"{RESOURCE}/{name}")
    status = (capture or {}).get("status", {})
    if capture is not None and not status.get("path"):
        raise CaptureError(f"capture {name}: {phase_of(capture) or 'Pending'}: has no files yet: {message_of(capture)}")
    claim = status.get("claim") or claim_of(kubectl, name)
    if claim is None:
        raise CaptureError(f"capture {name}: neither it nor a claim of it is in this namespace: name another, or -n")
    found = kubectl.find(f"persistentvolumeclaim/{claim}")
    if found is None:
        raise CaptureError(f"claim {claim}: is gone, and the files of capture {name} with it")
    path = status.get("path") or f"{found['metadata']['namespace']}/{name}"
    return Location(name, claim, path, *_image(name, status, image))


def claim_of(kubectl: Kubectl, name: str) -> str | None:
    """Return the name of the claim that was made for a capture."""
    # Another claim may have the label, too: the name tells them apart.
    claim = kubectl.find(f"persistentvolumeclaim/{created_claim(name)}")
    labels = (claim or {}).get("metadata", {}).get("labels") or {}
    return created_claim(name) if labels.get(CAPTURE_LABEL) == name else None


def _image(name: str, status: Body, given: str | None) -> tuple[str, str]:
    """Return the image for the pod that reads the volume, and where it was taken from.

    Only the operator may write a capture's status. Labels are no proof: anyone who may create a Deployment in any
    namespace can label it like the operator, and the volume must not be mounted into their image.
    """
    if given is not None:
        return given, "--image"
    recorded = status.get("operatorImage")
    if isinstance(recorded, str) and recorded:
        return recorded, "status.operatorImage of the capture"
    message = (
        f"--image: is missing: no status of capture {name} names the image that ran it, because the capture is gone or"
        " was run by an older operator; name an image that you trust and that has cat, ls and tail, such as the"
        " operator's own"
    )
    raise CaptureError(message)


@dataclass(frozen=True)
class _Folder:
    """One folder of published files, and the one that it goes to."""

    location: Location
    out: Path
    manifest: bytes
    files: Sequence[RemoteFile]


def fetch(kubectl: Kubectl, location: Location, out: Path) -> list[Path]:
    """Copy the published files into a folder, and return them; what is there already and right is kept.

    Those of several arms or repetitions lie in a folder each, with the comparison beside.
    """
    with _reader(kubectl, location) as pod:
        parts = _parts(kubectl, pod, location)
        folders = [_folder(kubectl, pod, replace(location, path=path), out / part) for part, path in parts.items()]
        for folder in folders:
            refuse_others(folder.out, location.capture, folder.manifest, folder.files)
        if [*parts] != [""]:
            refuse_strangers(out, location.capture, {_COMPARISON, *(part.partition("/")[0] for part in parts)})
        out.mkdir(parents=True, exist_ok=True)
        _check_room(out, folders)
        found = [path for folder in folders for path in _copy_folder(kubectl, pod, folder)]
        return [*found, *([] if [*parts] == [""] else _copy_comparison(kubectl, pod, location, out))]


def _parts(kubectl: Kubectl, pod: str, location: Location) -> dict[str, str]:
    """Return the folders with published files, by where they go below that of the whole; in the order of their names.

    Whoever may write to the volume may not write anywhere else on this machine.
    """
    if location.path.endswith(f"/{_ALONE}"):
        return {"": location.path}
    arms = [name for name in _names(kubectl, pod, location.path) if _ARM.fullmatch(name)]
    found = [
        f"{arm}/{name}"
        for arm in arms
        for name in _names(kubectl, pod, f"{location.path}/{arm}")
        if _REPETITION.fullmatch(name)
    ]
    if found in ([], [_ALONE]):
        return {"": f"{location.path}/{_ALONE}"}
    return {part: f"{location.path}/{part}" for part in found}


def _names(kubectl: Kubectl, pod: str, path: str) -> list[str]:
    listed = io.BytesIO()
    _stream(kubectl, pod, ("ls", "-1", f"{_MOUNT}/{path}"), listed, _NAMES_BYTES)
    return sorted(listed.getvalue().decode(errors="replace").splitlines())


def _folder(kubectl: Kubectl, pod: str, location: Location, out: Path) -> _Folder:
    manifest = _read_manifest(kubectl, pod, location)
    return _Folder(location, out, manifest, _listed(manifest, location))


def _copy_folder(kubectl: Kubectl, pod: str, folder: _Folder) -> list[Path]:
    out, files = folder.out, folder.files
    out.mkdir(parents=True, exist_ok=True)
    if not (out / MANIFEST).exists():
        (out / BEGUN).write_bytes(folder.manifest)
    try:
        _copy_all(kubectl, pod, folder.location, files, out)
    finally:
        if [*out.iterdir()] == [out / BEGUN]:
            (out / BEGUN).unlink()  # nothing has come that it could speak of
    if (out / BEGUN).exists():
        (out / BEGUN).replace(out / MANIFEST)  # last, so that a folder with a manifest is whole here too
    return sorted(out / name for name in (MANIFEST, *(file.name for file in files)))


def _copy_comparison(kubectl: Kubectl, pod: str, location: Location, out: Path) -> list[Path]:
    content = io.BytesIO()
    _stream(kubectl, pod, ("cat", f"{_MOUNT}/{location.path}/{_COMPARISON}"), content, _MANIFEST_BYTES)
    if not content.getvalue():
        return []
    (out / _COMPARISON).unlink(missing_ok=True)  # what is written through a link lands somewhere else
    (out / _COMPARISON).write_bytes(content.getvalue())
    return [out / _COMPARISON]


def _copy_all(kubectl: Kubectl, pod: str, location: Location, files: Sequence[RemoteFile], out: Path) -> None:
    for file in files:
        if is_right(out / file.name, file):
            say_line(f"  {file.name}: is here already")
            continue
        _copy(kubectl, pod, location, file, out)
        say_line(f"  {file.name}: {file.bytes:,} bytes, checksum right")


def _listed(manifest: bytes, location: Location) -> list[RemoteFile]:
    """Return the files of a manifest: whoever may write to the volume may not write anywhere else on this machine."""
    where = f"{location.path}/{MANIFEST}"
    try:
        found = [(str(name), each["bytes"], each["sha256"]) for name, each in parse_json(manifest)["files"].items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FetchError(f"{where}: is no manifest of a capture: name another capture") from error
    for name, size, sha256 in found:
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST or name.endswith(PARTIAL_SUFFIX):
            raise FetchError(f"{where}: {printable(name)}: is no name of a file of a capture")
        if type(size) is not int or size < 0 or not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
            raise FetchError(f"{where}: {name}: has no number of bytes and no sha256: the manifest is broken")
    return [RemoteFile(*each) for each in found]


def _read_manifest(kubectl: Kubectl, pod: str, location: Location) -> bytes:
    content = io.BytesIO()
    words = _stream(kubectl, pod, ("cat", f"{_MOUNT}/{location.path}/{MANIFEST}"), content, _MANIFEST_BYTES + 1)
    if len(content.getvalue()) > _MANIFEST_BYTES:
        raise FetchError(f"{location.path}/{MANIFEST}: is larger than {_MANIFEST_BYTES:,} bytes: is no manifest")
    if not content.getvalue():
        raise FetchError(
            f"{location.capture}: claim {location.claim} has no {location.path}/{MANIFEST}: nothing was published;"
            f" files of a run that failed or was cancelled are beside it, in {location.path}.part-…"
            f"{f' ({words})' if words else ''}"
        )
    return content.getvalue()


def _check_room(out: Path, folders: Sequence[_Folder]) -> None:
    have = sum(
        (folder.out / f"{file.name}{suffix}").stat().st_size
        for folder in folders
        for file in folder.files
        for suffix in ("", PARTIAL_SUFFIX)
        if (folder.out / f"{file.name}{suffix}").exists()
    )
    wanted = sum(file.bytes for folder in folders for file in folder.files) - have
    free = shutil.disk_usage(out).free
    if wanted > free:
        raise FetchError(f"{out}: {wanted:,} bytes are to come, and {free:,} are free: name a folder with more room")


def _copy(kubectl: Kubectl, pod: str, location: Location, file: RemoteFile, out: Path) -> None:
    partial = out / f"{file.name}{PARTIAL_SUFFIX}"
    partial.touch()
    source = f"{_MOUNT}/{location.path}/{file.name}"
    have, heard_at, in_vain = partial.stat().st_size, time.monotonic(), 0
    while have < file.bytes:
        with partial.open("ab") as sink:
            words = _stream(kubectl, pod, ("tail", "-c", f"+{have + 1}", source), sink, file.bytes - have)
        had, have = have, partial.stat().st_size
        if have > had:
            heard_at, in_vain = time.monotonic(), 0
            continue
        if time.monotonic() - heard_at >= _SILENT_S:
            raise FetchError(
                f"{file.name}: nothing came for {_SILENT_S:.0f} s, {have:,} of {file.bytes:,} bytes are here: fetch"
                f" again, it goes on from there{f'; {words}' if words else ''}"
            )
        time.sleep(_PAUSES_S[min(in_vain, len(_PAUSES_S) - 1)])
        in_vain += 1
    if not is_right(partial, file):
        partial.unlink()
        raise FetchError(
            f"{file.name}: {have:,} bytes came that are not what the manifest says ({file.bytes:,} bytes, sha256"
            f" {file.sha256[:12]}…): fetch again"
        )
    partial.replace(out / file.name)


def _stream(kubectl: Kubectl, pod: str, command: Sequence[str], sink: BinaryIO, most_bytes: int) -> str:
    """Write what a command in the pod prints, but no more than that: a file may be a link to something endless.

    Returns what it complained of.
    """
    with tempfile.TemporaryFile() as complaints:
        process = kubectl.stream("exec", pod, "--", *command, errors=complaints)
        assert process.stdout is not None  # noqa: S101  it is a pipe
        try:
            while most_bytes and (block := process.stdout.read1(min(most_bytes, _BLOCK_BYTES))):  # type: ignore[attr-defined]
                sink.write(block)
                most_bytes -= len(block)
        finally:
            if not most_bytes:
                process.terminate()
            process.stdout.close()
            process.wait()
        complaints.seek(0)
        return one_line(complaints.read(_BLOCK_BYTES).decode(errors="replace"))


@contextlib.contextmanager
def _reader(kubectl: Kubectl, location: Location) -> Iterator[str]:
    """Start a pod that sees the volume, and remove it in the end; that it cannot be removed undoes nothing."""
    name = f"{location.capture[:40]}-fetch-{secrets.token_hex(3)}"
    kubectl.text("create", "--filename=-", stdin=json.dumps(_pod(name, location)))
    try:
        try:
            kubectl.text("wait", f"pod/{name}", "--for=condition=Ready", f"--timeout={_READY_DEADLINE_S}s")
        except KubectlError as error:
            raise FetchError(
                f"pod {name}, which reads claim {location.claim}, does not start: {_why(kubectl, name)}"
            ) from (error)
        yield name
    finally:
        try:
            kubectl.text("delete", f"pod/{name}", "--wait=false", "--ignore-not-found")
        except KubectlError as error:
            hours = _POD_LIVES_S // 3600
            say_line(f"  pod {name} is left (kubectl delete pod {name}), it ends by itself in {hours} hours: {error}")


def _why(kubectl: Kubectl, pod: str) -> str:
    status = (kubectl.find(f"pod/{pod}") or {}).get("status", {})
    waiting = [each.get("state", {}).get("waiting") for each in status.get("containerStatuses") or []]
    words = [each.get("message") or each.get("reason") for each in waiting if each]
    words += [each["message"] for each in status.get("conditions") or [] if each.get("message")]
    return "; ".join(filter(None, words)) or f"phase {status.get('phase', 'unknown')}"


def _pod(name: str, location: Location) -> Body:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {"app.kubernetes.io/part-of": "specdecode", "app.kubernetes.io/component": "capture-fetch"},
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _POD_LIVES_S,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            # The volume may be on a GPU node.
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "containers": [
                {
                    "name": "fetch",
                    "image": location.image,
                    "command": ["sleep", str(_POD_LIVES_S)],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "resources": {"requests": {"cpu": "50m", "memory": "32Mi"}, "limits": {"memory": "256Mi"}},
                    "volumeMounts": [{"name": "capture", "mountPath": _MOUNT, "readOnly": True}],
                }
            ],
            "volumes": [{"name": "capture", "persistentVolumeClaim": {"claimName": location.claim}}],
        },
    }
