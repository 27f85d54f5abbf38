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
"""Name of the manifest during a fetch. It identifies the capture before the first file is complete."""
_SHOWN: Final = 3
_BLOCK_BYTES: Final = 1 << 20
_MOUNT: Final = "/capture"
_POD_LIVES_S: Final = 6 * 3600
"""Lifetime of the pod: long enough for tens of gigabytes. If it cannot be deleted, it stops after this time."""
_READY_DEADLINE_S: Final = 120
_SILENT_S: Final = 120.0
"""Time without data before a fetch fails. Each retry resumes, and an API server restarts within this time."""
_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses between retries without new data. The last one repeats."""
_MANIFEST_BYTES: Final = 16 << 20
_NAMES_BYTES: Final = 1 << 16
_COMPARISON: Final = "comparison.json"
"""Comparison of arms, in the folder above theirs. Manifests do not list it."""
_ALONE: Final = "as-deployed/1"
"""Folder of a capture without arms."""
_ARM: Final = re.compile(PHASE_NAME)
_REPETITION: Final = re.compile(r"[1-9][0-9]?")
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_USER: Final = 65532
"""User of the operator's image, and owner of the files."""


class FetchError(Exception):
    """The files could not be fetched. The message is one line and includes a fix."""


class RemoteFile(NamedTuple):
    """A file on the volume, with the size and checksum of a correct copy."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Location:
    """Claim and folder with the files of a capture."""

    capture: str
    claim: str
    path: str
    image: str  # For the pod that reads the volume
    image_source: str  # Shown to the user, who decides whether to trust the image


def refuse_earlier(out: Path, capture: str, uid: str | None) -> None:
    """Reject a folder with files of another capture before a load is sent. The UID is None before creation."""
    if not _is_folder(out):
        return
    if uid is None and any(out.iterdir()):
        raise FetchError(f"{out}: contains other files: use another folder for capture {capture} (--out)")
    held = _held(out).get("capture_uid")
    if held is not None and held != uid:
        raise _holds_others(out, capture)


def _refuse_others(out: Path, capture: str, manifest: bytes, files: Sequence[RemoteFile]) -> None:
    """Reject a folder with other files, which could be overwritten or mistaken for the capture's."""
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
            f"{out}: contains {shown}{more}, not part of capture {capture}: use another folder, or move these away"
        )


def _is_folder(out: Path) -> bool:
    if out.exists() and not out.is_dir():
        raise FetchError(f"{out}: is not a folder: use another path")
    return out.exists()


def _is_plain(path: Path) -> bool:
    """Return whether a path is a regular file. Writing through a link would change a file elsewhere."""
    return path.is_file() and not path.is_symlink()


def _is_right(path: Path, file: RemoteFile) -> bool:
    if not _is_plain(path) or path.stat().st_size != file.bytes:
        return False
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == file.sha256


def _holds_others(out: Path, capture: str) -> FetchError:
    held = _held(out)
    name = f"{printable(str(held.get('namespace')))}/{printable(str(held['capture']))}" if held.get("capture") else ""
    whose = f"an earlier capture {name}" if name.endswith(f"/{capture}") else f"capture {name}"
    return FetchError(
        f"{out}: contains files of {whose if name else 'something else'}: use another folder for capture {capture},"
        " or move these away"
    )


def _held(out: Path) -> dict[str, Any]:
    """Return the manifest in a folder; empty if none can be read."""
    of_arms = sorted(path for name in (MANIFEST, BEGUN) for path in out.glob(f"*/*/{name}"))
    for path in (out / MANIFEST, out / BEGUN, *of_arms[:1]):
        try:
            found = parse_json(path.read_bytes())
        except (OSError, ValueError):
            continue
        return found if isinstance(found, dict) else {}
    return {}


def find_files(kubectl: Kubectl, name: str, image: str | None) -> Location:
    """Find the files of a capture, even after it was deleted; raise CaptureError if it has none.

    The image comes from the capture's status, because only the operator may write that. An image found by labels cannot
    be trusted with the volume: any user who can create a Deployment can label it like the operator.
    """
    capture = kubectl.find(f"{RESOURCE}/{name}")
    status = (capture or {}).get("status", {})
    if capture is not None and not status.get("path"):
        raise CaptureError(f"capture {name}: {phase_of(capture) or 'Pending'}: no files yet: {message_of(capture)}")
    claim = status.get("claim") or claim_of(kubectl, name)
    if claim is None:
        raise CaptureError(f"capture {name}: no capture or claim found in this namespace: check the name, or set -n")
    found = kubectl.find(f"persistentvolumeclaim/{claim}")
    if found is None:
        raise CaptureError(f"claim {claim}: was deleted, together with the files of capture {name}")
    recorded = status.get("operatorImage")
    path = status.get("path") or f"{found['metadata']['namespace']}/{name}"
    if image is not None:
        return Location(name, claim, path, image, "--image")
    if isinstance(recorded, str) and recorded:
        return Location(name, claim, path, recorded, "status.operatorImage of the capture")
    message = (
        f"--image is missing: capture {name} was deleted or run by an older operator, so its image is unknown; set a"
        " trusted image that contains cat, ls and tail, such as the operator's"
    )
    raise CaptureError(message)


def claim_of(kubectl: Kubectl, name: str) -> str | None:
    """Return the name of the claim that was created for a capture."""
    # Another claim may have the same label, so the name is checked too.
    claim = kubectl.find(f"persistentvolumeclaim/{created_claim(name)}")
    labels = (claim or {}).get("metadata", {}).get("labels") or {}
    return created_claim(name) if labels.get(CAPTURE_LABEL) == name else None


def fetch(kubectl: Kubectl, location: Location, out: Path) -> list[Path]:
    """Copy the published files to a folder, and return their paths. Files that are already correct are kept.

    Several arms or repetitions have one folder each, next to the comparison. Raises FetchError if the volume has no
    published files, a copy does not match the manifest, or the folder contains other files.
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
            raise FetchError(f"{out}: needs {wanted:,} bytes, but only {free:,} are free: use a folder with more space")
        found = [path for folder in folders for path in folder.copy()]
        if several:
            content, _ = _read(kubectl, pod, ("cat", f"{_MOUNT}/{location.path}/{_COMPARISON}"), _MANIFEST_BYTES)
            if content:
                (out / _COMPARISON).unlink(missing_ok=True)  # it may be a link
                (out / _COMPARISON).write_bytes(content)
                found.append(out / _COMPARISON)
        return found


def _parts(kubectl: Kubectl, pod: str, location: Location) -> list[tuple[str, str]]:
    """Return the folders with published files: path below the output folder, and path on the volume.

    Names are checked, because files on the volume must not cause writes elsewhere on this machine.
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
    """A folder of published files, and its local destination."""

    def __init__(self, kubectl: Kubectl, pod: str, location: Location, path: str, out: Path) -> None:
        self._kubectl, self._pod, self._path, self.out = kubectl, pod, path, out
        where = f"{path}/{MANIFEST}"
        self.manifest, words = _read(kubectl, pod, ("cat", f"{_MOUNT}/{where}"), _MANIFEST_BYTES + 1)
        if len(self.manifest) > _MANIFEST_BYTES:
            raise FetchError(f"{where}: is not a manifest: larger than {_MANIFEST_BYTES:,} bytes")
        if not self.manifest:
            raise FetchError(
                f"{location.capture}: claim {location.claim} has no {where}, so no files were published;"
                f" files of a failed or cancelled run are in {path}.part-…"
                f"{f' ({words})' if words else ''}"
            )
        try:
            listed = parse_json(self.manifest)["files"].items()
            found = [(str(name), each["bytes"], each["sha256"]) for name, each in listed]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FetchError(f"{where}: is not the manifest of a capture: use another capture") from error
        for name, size, sha256 in found:
            # Files on the volume must not cause writes elsewhere on this machine.
            if not _FILE_NAME.fullmatch(name) or name == MANIFEST or name.endswith(PARTIAL_SUFFIX):
                raise FetchError(f"{where}: {printable(name)}: is not a valid file name")
            if type(size) is not int or size < 0 or not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
                raise FetchError(f"{where}: {name}: bytes or sha256 is missing or invalid: the manifest is damaged")
        self.files = [RemoteFile(*each) for each in found]

    def missing_bytes(self) -> int:
        """Return the number of bytes still to fetch."""
        paths = (self.out / f"{file.name}{suffix}" for file in self.files for suffix in ("", PARTIAL_SUFFIX))
        return sum(file.bytes for file in self.files) - sum(path.stat().st_size for path in paths if path.exists())

    def copy(self) -> list[Path]:
        """Fetch missing files; return the paths of all files."""
        manifest, begun = self.out / MANIFEST, self.out / BEGUN
        self.out.mkdir(parents=True, exist_ok=True)
        if not manifest.exists():
            begun.write_bytes(self.manifest)
        try:
            for file in self.files:
                if _is_right(self.out / file.name, file):
                    say_line(f"  {file.name}: already complete")
                else:
                    self._copy(file)
                    say_line(f"  {file.name}: {file.bytes:,} bytes, checksum verified")
        finally:
            if [*self.out.iterdir()] == [begun]:
                begun.unlink()  # no file was fetched
        if begun.exists():
            begun.replace(manifest)  # last, so that a folder with a manifest is complete
        return sorted(self.out / name for name in (MANIFEST, *(file.name for file in self.files)))

    def _copy(self, file: RemoteFile) -> None:
        """Fetch one file; resume an earlier fetch."""
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
                    f"{file.name}: no data for {_SILENT_S:.0f} s, {have:,} of {file.bytes:,} bytes fetched: fetch again"
                    f" to resume{f'; {words}' if words else ''}"
                )
            time.sleep(_PAUSES_S[min(in_vain, len(_PAUSES_S) - 1)])
            in_vain += 1
        if not _is_right(partial, file):
            partial.unlink()
            raise FetchError(
                f"{file.name}: {have:,} bytes fetched, which do not match the manifest ({file.bytes:,} bytes, sha256"
                f" {file.sha256[:12]}…): fetch again"
            )
        partial.replace(self.out / file.name)


def _read(kubectl: Kubectl, pod: str, command: Sequence[str], most_bytes: int) -> tuple[bytes, str]:
    content = io.BytesIO()
    words = _stream(kubectl, pod, command, content, most_bytes)
    return content.getvalue(), words


def _stream(kubectl: Kubectl, pod: str, command: Sequence[str], sink: BinaryIO, most_bytes: int) -> str:
    """Write a command's output in the pod to ``sink``, and return its error output.

    The size is limited, because a file may be a link to an endless device.
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
    """Run a pod that mounts the volume, and delete it at the end."""
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
            fix = f"run kubectl delete pod {name}, or wait {hours} hours until it ends"
            say_line(f"  pod {name} was not deleted: {error}: {fix}")


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
