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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

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
"""The manifest while its files are on their way, so that their owner is known before the first of them comes."""
_SHOWN: Final = 3
_BLOCK_BYTES: Final = 1 << 20
_MOUNT: Final = "/capture"
_POD_LIVES_S: Final = 6 * 3600
"""Long enough for tens of gigabytes; a pod that was left behind ends by itself."""
_READY_DEADLINE_S: Final = 120
_SILENT_S: Final = 120.0
"""Streams through the API server break, and each try resumes. An API server that restarts answers again by then."""
_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Between tries that bring nothing; the last one is that of all further tries."""
_MANIFEST_BYTES: Final = 16 << 20
_NAMES_BYTES: Final = 1 << 16
_COMPARISON: Final = "comparison.json"
"""The comparison of arms: beside their folders, and in no manifest."""
_ALONE: Final = "as-deployed/1"
"""Folder of a capture without arms."""
_ARM: Final = re.compile(PHASE_NAME)
_REPETITION: Final = re.compile(r"[1-9][0-9]?")
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_USER: Final = 65532
"""The user of the operator's image, who wrote the files."""


class FetchError(Exception):
    """The files could not be had, in one line that says what to do."""


class RemoteFile(NamedTuple):
    """One file on the volume, and what its copy must be like."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Location:
    """Where the files of a capture lie: the claim of the volume, and the folder on it."""

    capture: str
    claim: str
    path: str
    image: str  # For the pod that reads the volume
    image_source: str  # Shown to the user, who decides whether to trust the image


def refuse_earlier(out: Path, capture: str, uid: str | None) -> None:
    """Reject, before a load is sent, a folder with files of another capture; the UID is None before creation."""
    if not _is_folder(out):
        return
    if uid is None and any(out.iterdir()):
        raise FetchError(f"{out}: holds files already: name another folder for those of capture {capture} (--out)")
    held = _held(out).get("capture_uid")
    if held is not None and held != uid:
        raise _holds_others(out, capture)


def _refuse_others(out: Path, capture: str, manifest: bytes, files: Sequence[RemoteFile]) -> None:
    """Reject a folder with other files: they would be lost, or pass for the capture's."""
    if not _is_folder(out):
        return
    begun = [path for name in (MANIFEST, BEGUN) if (path := out / name).is_file()]
    if any(path.read_bytes() != manifest for path in begun):
        raise _holds_others(out, capture)
    known = {MANIFEST, BEGUN} if begun else set()
    for file in files:
        if begun:
            known |= {file.name, f"{file.name}{PARTIAL_SUFFIX}"}
        elif _is_right(out / file.name, file):
            known.add(file.name)
    _refuse(out, capture, [path.name for path in out.iterdir() if path.name not in known or not _is_plain(path)])


def _refuse(out: Path, capture: str, strangers: Sequence[str]) -> None:
    if strangers:
        shown = ", ".join(printable(name) for name in sorted(strangers)[:_SHOWN])
        more = f" and {len(strangers) - _SHOWN} more" if len(strangers) > _SHOWN else ""
        raise FetchError(
            f"{out}: holds {shown}{more}, which capture {capture} has not: name another folder, or move it away"
        )


def _is_folder(out: Path) -> bool:
    if out.exists() and not out.is_dir():
        raise FetchError(f"{out}: is no folder: name another")
    return out.exists()


def _is_plain(path: Path) -> bool:
    """Return whether a path is a file itself: what is written through a link lands somewhere else."""
    return path.is_file() and not path.is_symlink()


def _is_right(path: Path, file: RemoteFile) -> bool:
    if not _is_plain(path) or path.stat().st_size != file.bytes:
        return False
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == file.sha256


def _holds_others(out: Path, capture: str) -> FetchError:
    held = _held(out)
    name = f"{printable(str(held.get('namespace')))}/{printable(str(held['capture']))}" if held.get("capture") else ""
    whose = f"capture {name}, recorded at another time," if name.endswith(f"/{capture}") else f"capture {name}"
    return FetchError(
        f"{out}: holds files of {whose if name else 'something else'}: name another folder for those of capture"
        f" {capture}, or move these away"
    )


def _held(out: Path) -> dict[str, Any]:
    """Return the manifest in a folder; empty if it has none that can be read."""
    of_arms = sorted(path for name in (MANIFEST, BEGUN) for path in out.glob(f"*/*/{name}"))
    for path in (out / MANIFEST, out / BEGUN, *of_arms[:1]):
        try:
            found = parse_json(path.read_bytes())
        except (OSError, ValueError):
            continue
        return found if isinstance(found, dict) else {}
    return {}


def find_files(kubectl: Kubectl, name: str, image: str | None) -> Location:
    """Return where a capture's files lie, also when the capture itself is gone; raise CaptureError if it has none.

    Only the operator may write a capture's status. Labels are no proof of the image: anyone who may create a Deployment
    in any namespace can label it like the operator, and the volume must not be mounted into their image.
    """
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
    recorded = status.get("operatorImage")
    path = status.get("path") or f"{found['metadata']['namespace']}/{name}"
    if image is not None:
        return Location(name, claim, path, image, "--image")
    if isinstance(recorded, str) and recorded:
        return Location(name, claim, path, recorded, "status.operatorImage of the capture")
    message = (
        f"--image: is missing: no status of capture {name} names the image that ran it, because the capture is gone or"
        " was run by an older operator; name an image that you trust and that has cat, ls and tail, such as the"
        " operator's own"
    )
    raise CaptureError(message)


def claim_of(kubectl: Kubectl, name: str) -> str | None:
    """Return the name of the claim that was made for a capture."""
    # Another claim may have the label, too: the name tells them apart.
    claim = kubectl.find(f"persistentvolumeclaim/{created_claim(name)}")
    labels = (claim or {}).get("metadata", {}).get("labels") or {}
    return created_claim(name) if labels.get(CAPTURE_LABEL) == name else None


def fetch(kubectl: Kubectl, location: Location, out: Path) -> list[Path]:
    """Copy the published files into a folder, and return them; correct copies are kept.

    Files of several arms or repetitions lie in a folder each, with the comparison beside them. FetchError is raised if
    the volume has no published files, a copy is not as in the manifest, or the folder holds anything else.
    """
    with _reader(kubectl, location) as pod:
        folders = [_Folder(kubectl, pod, location, path, out / part) for part, path in _parts(kubectl, pod, location)]
        several = [each.out for each in folders] != [out]
        for folder in folders:
            _refuse_others(folder.out, location.capture, folder.manifest, folder.files)
        if several and _is_folder(out):
            known = {_COMPARISON, *(each.out.relative_to(out).parts[0] for each in folders)}
            strangers = [path.name for path in out.iterdir() if path.name not in known or path.is_symlink()]
            _refuse(out, location.capture, strangers)
        out.mkdir(parents=True, exist_ok=True)
        wanted, free = sum(folder.missing_bytes() for folder in folders), shutil.disk_usage(out).free
        if wanted > free:
            raise FetchError(
                f"{out}: {wanted:,} bytes are to come, and {free:,} are free: name a folder with more room"
            )
        found = [path for folder in folders for path in folder.copy()]
        if several:
            content, _ = _read(kubectl, pod, ("cat", f"{_MOUNT}/{location.path}/{_COMPARISON}"), _MANIFEST_BYTES)
            if content:
                (out / _COMPARISON).unlink(missing_ok=True)  # what is written through a link lands somewhere else
                (out / _COMPARISON).write_bytes(content)
                found.append(out / _COMPARISON)
        return found


def _parts(kubectl: Kubectl, pod: str, location: Location) -> list[tuple[str, str]]:
    """Return the folders with published files: where they go below the output folder, and their path on the volume.

    Whoever may write to the volume may not write anywhere else on this machine: names are checked.
    """

    def names(path: str, allowed: re.Pattern[str]) -> list[str]:
        listed, _ = _read(kubectl, pod, ("ls", "-1", f"{_MOUNT}/{path}"), _NAMES_BYTES)
        return [name for name in sorted(listed.decode(errors="replace").splitlines()) if allowed.fullmatch(name)]

    if location.path.endswith(f"/{_ALONE}"):
        return [("", location.path)]
    arms = names(location.path, _ARM)
    found = [f"{arm}/{name}" for arm in arms for name in names(f"{location.path}/{arm}", _REPETITION)]
    if found in ([], [_ALONE]):
        return [("", f"{location.path}/{_ALONE}")]
    return [(part, f"{location.path}/{part}") for part in found]


class _Folder:
    """One folder of published files, and the one that it goes to."""

    def __init__(self, kubectl: Kubectl, pod: str, location: Location, path: str, out: Path) -> None:
        self._kubectl, self._pod, self._path, self.out = kubectl, pod, path, out
        where = f"{path}/{MANIFEST}"
        self.manifest, words = _read(kubectl, pod, ("cat", f"{_MOUNT}/{where}"), _MANIFEST_BYTES + 1)
        if len(self.manifest) > _MANIFEST_BYTES:
            raise FetchError(f"{where}: is larger than {_MANIFEST_BYTES:,} bytes: is no manifest")
        if not self.manifest:
            raise FetchError(
                f"{location.capture}: claim {location.claim} has no {where}: nothing was published;"
                f" files of a run that failed or was cancelled are beside it, in {path}.part-…"
                f"{f' ({words})' if words else ''}"
            )
        try:
            listed = parse_json(self.manifest)["files"].items()
            found = [(str(name), each["bytes"], each["sha256"]) for name, each in listed]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FetchError(f"{where}: is no manifest of a capture: name another capture") from error
        for name, size, sha256 in found:
            # Whoever may write to the volume may not write anywhere else on this machine.
            if not _FILE_NAME.fullmatch(name) or name == MANIFEST or name.endswith(PARTIAL_SUFFIX):
                raise FetchError(f"{where}: {printable(name)}: is no name of a file of a capture")
            if type(size) is not int or size < 0 or not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
                raise FetchError(f"{where}: {name}: has no number of bytes and no sha256: the manifest is broken")
        self.files = [RemoteFile(*each) for each in found]

    def missing_bytes(self) -> int:
        """Return how many bytes are to come."""
        paths = (self.out / f"{file.name}{suffix}" for file in self.files for suffix in ("", PARTIAL_SUFFIX))
        return sum(file.bytes for file in self.files) - sum(path.stat().st_size for path in paths if path.exists())

    def copy(self) -> list[Path]:
        """Copy what is missing; return all files."""
        manifest, begun = self.out / MANIFEST, self.out / BEGUN
        self.out.mkdir(parents=True, exist_ok=True)
        if not manifest.exists():
            begun.write_bytes(self.manifest)
        try:
            for file in self.files:
                if _is_right(self.out / file.name, file):
                    say_line(f"  {file.name}: is here already")
                else:
                    self._copy(file)
                    say_line(f"  {file.name}: {file.bytes:,} bytes, checksum right")
        finally:
            if [*self.out.iterdir()] == [begun]:
                begun.unlink()  # no file has come
        if begun.exists():
            begun.replace(manifest)  # last, so that a folder with a manifest is whole here too
        return sorted(self.out / name for name in (MANIFEST, *(file.name for file in self.files)))

    def _copy(self, file: RemoteFile) -> None:
        """Copy one file, from where an earlier fetch ended."""
        partial = self.out / f"{file.name}{PARTIAL_SUFFIX}"
        partial.touch()
        source = f"{_MOUNT}/{self._path}/{file.name}"
        have, heard_at, in_vain = partial.stat().st_size, time.monotonic(), 0
        while have < file.bytes:
            with partial.open("ab") as sink:
                command = ("tail", "-c", f"+{have + 1}", source)
                words = _stream(self._kubectl, self._pod, command, sink, file.bytes - have)
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
        if not _is_right(partial, file):
            partial.unlink()
            raise FetchError(
                f"{file.name}: {have:,} bytes came that are not what the manifest says ({file.bytes:,} bytes, sha256"
                f" {file.sha256[:12]}…): fetch again"
            )
        partial.replace(self.out / file.name)


def _read(kubectl: Kubectl, pod: str, command: Sequence[str], most_bytes: int) -> tuple[bytes, str]:
    content = io.BytesIO()
    words = _stream(kubectl, pod, command, content, most_bytes)
    return content.getvalue(), words


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
    """Start a pod that sees the volume, and remove it in the end."""
    name = f"{location.capture[:40]}-fetch-{secrets.token_hex(3)}"
    kubectl.text("create", "--filename=-", stdin=json.dumps(_pod(name, location)))
    try:
        try:
            kubectl.text("wait", f"pod/{name}", "--for=condition=Ready", f"--timeout={_READY_DEADLINE_S}s")
        except KubectlError as error:
            status = (kubectl.find(f"pod/{name}") or {}).get("status", {})
            waiting = [each.get("state", {}).get("waiting") for each in status.get("containerStatuses") or []]
            words = [each.get("message") or each.get("reason") for each in waiting if each]
            words += [each["message"] for each in status.get("conditions") or [] if each.get("message")]
            why = "; ".join(filter(None, words)) or f"phase {status.get('phase', 'unknown')}"
            raise FetchError(f"pod {name}, which reads claim {location.claim}, does not start: {why}") from error
        yield name
    finally:
        try:
            kubectl.text("delete", f"pod/{name}", "--wait=false", "--ignore-not-found")
        except KubectlError as error:
            hours = _POD_LIVES_S // 3600
            say_line(f"  pod {name} is left (kubectl delete pod {name}), it ends by itself in {hours} hours: {error}")


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
