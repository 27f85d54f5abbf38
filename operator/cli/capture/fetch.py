"""Brings the files of a capture from its volume to this machine, and checks them."""

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.cli.capture.kubectl import Kubectl, KubectlError
from specdecode_operator.cli.capture.watch import RESOURCE, CaptureError, message_of, phase_of
from specdecode_operator.documents.json_text import parse_json
from specdecode_operator.kube.labels import CAPTURE_LABEL

MANIFEST: Final = "manifest.json"
_PARTIAL_SUFFIX: Final = ".fetching"
_MOUNT: Final = "/capture"
_OPERATOR_SELECTOR: Final = "app.kubernetes.io/name=specdecode-operator"
_POD_LIVES_S: Final = 6 * 3600
"""Long enough for tens of gigabytes; one that was left behind ends by itself."""

_READY_DEADLINE_S: Final = 120
_SILENT_S: Final = 120.0
"""Streams through the API server break, and each try goes on where the last one ended. An API server that restarts, or
another one that takes over, answers again by then."""

_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Between tries that bring nothing; the last one is that of all further tries."""

_BLOCK_BYTES: Final = 1 << 20
_USER: Final = 65532
"""The user of the operator's image, who wrote the files."""


class FetchError(Exception):
    """The files could not be had, in one line that says what to do."""


@dataclass(frozen=True)
class Location:
    """Where the files of a capture lie: the claim of the volume, and the folder on it."""

    capture: str
    claim: str
    path: str
    image: str
    """Image for the pod that reads the volume: the operator's own, which a capture's node has already."""


@dataclass(frozen=True)
class RemoteFile:
    """One file on the volume, and what its copy must be like."""

    name: str
    bytes: int
    sha256: str


def find_files(kubectl: Kubectl, name: str, image: str | None) -> Location:
    """Return where a capture's files lie, also when the capture itself is gone.

    Raises
    ------
    CaptureError
        When it has none.
    """
    capture = kubectl.find(RESOURCE, name)
    status = (capture or {}).get("status", {})
    if capture is not None and not status.get("path"):
        raise CaptureError(f"capture {name}: {phase_of(capture) or 'Pending'}: has no files yet: {message_of(capture)}")
    claim = status.get("claim") or claim_of(kubectl, name)
    if claim is None:
        raise CaptureError(f"capture {name}: neither it nor a claim of it is in this namespace: name another, or -n")
    found = kubectl.find("persistentvolumeclaim", claim)
    if found is None:
        raise CaptureError(f"claim {claim}: is gone, and the files of capture {name} with it")
    path = status.get("path") or f"{found['metadata']['namespace']}/{name}/as-deployed/1"
    return Location(name, claim, path, image or _image(kubectl, status.get("job")))


def claim_of(kubectl: Kubectl, name: str) -> str | None:
    """Return the name of the claim that was made for a capture."""
    claims = kubectl.items("persistentvolumeclaim", f"--selector={CAPTURE_LABEL}={name}")
    return str(claims[0]["metadata"]["name"]) if claims else None


def _image(kubectl: Kubectl, job: str | None) -> str:
    """Return the image of the load generator, which is the operator's own: its node has it already."""
    found = kubectl.find("job", job) if job else None
    pods = (
        [found] if found else kubectl.items("deployments.apps", "--all-namespaces", f"--selector={_OPERATOR_SELECTOR}")
    )
    for pod in pods:
        containers = pod["spec"]["template"]["spec"]["containers"]
        return str(containers[0]["image"])
    raise CaptureError("--image: no operator is seen in this cluster whose image could read the volume: name one")


def fetch(kubectl: Kubectl, location: Location, out: Path, say: Callable[[str], None]) -> list[Path]:
    """Copy the published files into a folder, and return them; what is there already and right is kept.

    Raises
    ------
    FetchError
        When the volume has no published files, or a copy is not what the manifest says.
    KubectlError
        When the cluster refuses something.
    """
    out.mkdir(parents=True, exist_ok=True)
    with _reader(kubectl, location, say) as pod:
        text = _read_manifest(kubectl, pod, location)
        for file in _listed(text, location):
            if _is_right(out / file.name, file):
                say(f"  {file.name}: is here already")
                continue
            _copy(kubectl, pod, location, file, out)
            say(f"  {file.name}: {file.bytes:,} bytes, checksum right")
    # Last, so that a folder with a manifest is whole here too.
    (out / MANIFEST).write_text(text, encoding="utf-8")
    return sorted(path for path in out.iterdir() if path.is_file())


def _listed(manifest: str, location: Location) -> list[RemoteFile]:
    try:
        files = parse_json(manifest)["files"]
        found = [RemoteFile(name, int(each["bytes"]), str(each["sha256"])) for name, each in files.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FetchError(f"{location.path}/{MANIFEST}: is no manifest of a capture ({error!r})") from error
    for file in found:
        # Whoever may write to the volume may not write anywhere on this machine.
        if Path(file.name).name != file.name or file.name == MANIFEST:
            raise FetchError(f"{location.path}/{MANIFEST}: {file.name}: is no name of a file of a capture")
    return found


def _read_manifest(kubectl: Kubectl, pod: str, location: Location) -> str:
    try:
        return kubectl.text("exec", pod, "--", "cat", f"{_MOUNT}/{location.path}/{MANIFEST}")
    except KubectlError as error:
        raise FetchError(
            f"{location.capture}: claim {location.claim} has no {location.path}/{MANIFEST}: nothing was published;"
            f" files of a run that failed or was cancelled are beside it, in {location.path}.part-…"
        ) from error


def _copy(kubectl: Kubectl, pod: str, location: Location, file: RemoteFile, out: Path) -> None:
    """Copy one file, from where an earlier fetch ended."""
    partial = out / f"{file.name}{_PARTIAL_SUFFIX}"
    partial.touch()
    source = f"{_MOUNT}/{location.path}/{file.name}"
    have, heard_at, in_vain = partial.stat().st_size, time.monotonic(), 0
    while have < file.bytes:
        with partial.open("ab") as sink:
            stream = kubectl.stream("exec", pod, "--", "tail", "-c", f"+{have + 1}", source, output=sink)
            words = stream.communicate()[1].decode(errors="replace").strip()
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
    partial.replace(out / file.name)


def _is_right(path: Path, file: RemoteFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.bytes:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while block := content.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest() == file.sha256


@contextlib.contextmanager
def _reader(kubectl: Kubectl, location: Location, say: Callable[[str], None]) -> Iterator[str]:
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
            say(f"  pod {name} is left (kubectl delete pod {name}), it ends by itself in {hours} hours: {error}")


def _why(kubectl: Kubectl, pod: str) -> str:
    """Why a pod does not start, in the cluster's words."""
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
