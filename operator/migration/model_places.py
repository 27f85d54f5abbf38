"""Finds where the models of a Deployment lie: on the hub, on a claim, or where the operator cannot take them from."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from specdecode_operator.kube.untyped import mapping, name_of, objects
from specdecode_operator.migration.server_command import container_commands
from specdecode_operator.migration.shell import ScriptError

_DOWNLOADERS: Final = (("hf", "download"), ("huggingface-cli", "download"))
_SWITCHES: Final = frozenset({"--quiet", "--force-download", "--resume-download", "--dry-run"})
"""Their options without a value; the repository may stand behind them."""

_TOKENS: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


@dataclass(frozen=True)
class Place:
    """Where a model lies.

    Attributes
    ----------
    model
        What the object names: a hub id, or a path inside the claim.
    claim
        PersistentVolumeClaim; None for the hub and for nodes.
    host_path
        Directory of the nodes.
    revision
        Revision of the hub repository, where a download names it.
    volume
        Volume of the pod that held it; None for the hub itself.
    download
        Container that fetched it.
    token
        Key of the Secret that the download used.
    problem
        Why the operator cannot take it from there.
    """

    model: str
    claim: str | None = None
    host_path: str | None = None
    revision: str | None = None
    volume: str | None = None
    download: str | None = None
    token: dict[str, str] | None = None
    problem: str | None = None

    @property
    def source(self) -> dict[str, Any] | None:
        """What models.volume says of it; None for the hub."""
        if self.claim is not None:
            return {"persistentVolumeClaim": {"claimName": self.claim}}
        return None if self.host_path is None else {"hostPath": {"path": self.host_path}}


def find_place(model: str, pod: Mapping[str, Any], container: Mapping[str, Any]) -> Place:
    """Return where a model lies that the server is given by this name."""
    if not model.startswith(("/", "./", "~")):
        return Place(model)
    path = model.rstrip("/")
    mount = _mount(path, container)
    name = None if mount is None else name_of(mount)
    if fetched := _download(path, [*objects(pod, "initContainers"), container]):
        return replace(fetched, volume=name)
    if mount is None:
        problem = "lies in the image: put it on a PersistentVolumeClaim and name that in spec.models, or use its hub id"
        return Place(model, problem=problem)
    volume = next((each for each in objects(pod, "volumes") if name_of(each) == name), {})
    claim, host = mapping(volume, "persistentVolumeClaim").get("claimName"), mapping(volume, "hostPath").get("path")
    claim, host = (each if isinstance(each, str) else None for each in (claim, host))
    if claim is None and host is None:
        kind = next((key for key in volume if key != "name"), "a volume that the pod does not have")
        problem = f"lies on {kind}: copy it to a PersistentVolumeClaim and name that in spec.models, or use its hub id"
        return Place(model, volume=name, problem=problem)
    parts = (str(mount.get("subPath") or "").strip("/"), path[len(str(mount["mountPath"]).rstrip("/")) :].strip("/"))
    inside = "/".join(part for part in parts if part)
    if host is not None and not inside:
        host, _, inside = host.rstrip("/").rpartition("/")
    at_root = None if inside else "is the claim's root: put the model into a folder of the claim, and name the folder"
    return Place(inside or model, claim=claim, host_path=host, volume=name, problem=at_root)


def token_of(container: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the key of the Secret that a container takes its hub token from."""
    for each in objects(container, "env"):
        reference = mapping(mapping(each, "valueFrom"), "secretKeyRef")
        if name_of(each) in _TOKENS and reference:
            return {"name": name_of(reference), "key": str(reference.get("key"))}
    return None


def _mount(path: str, container: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The mount that a path lies under, the deepest first."""
    mounts = [each for each in objects(container, "volumeMounts") if each.get("mountPath")]
    above = [each for each in mounts if f"{path}/".startswith(f"{str(each['mountPath']).rstrip('/')}/")]
    return max(above, key=lambda each: len(str(each["mountPath"])), default=None)


def _download(path: str, containers: Iterable[Mapping[str, Any]]) -> Place | None:
    """The hub repository that an init container, or the server's own script, fetches to a path."""
    for container in containers:
        try:
            commands = container_commands(container, "container")
        except ScriptError:
            continue
        for command in commands:
            found = _downloaded(command.words)
            if found is None or found[1].rstrip("/") != path:
                continue
            model, _, revision = found
            name = name_of(container)
            if model in command.unknown or revision in command.unknown:
                problem = f"is {model} of the hub, but {name} learns that only when it runs: write the hub id out"
                return Place(path, download=name, problem=problem)
            return Place(model, revision=revision, download=name, token=token_of(container))
    return None


def _downloaded(words: Sequence[str]) -> tuple[str, str, str | None] | None:
    """Repository, folder and revision of ``hf download``."""
    for index in range(len(words) - 1):
        if (words[index].rpartition("/")[2], words[index + 1]) not in _DOWNLOADERS:
            continue
        options: dict[str, str] = {}
        positional: list[str] = []
        rest = [part for word in words[index + 2 :] for part in _halves(word)]
        while rest:
            word = rest.pop(0)
            if word.startswith("--"):
                has_value = word not in _SWITCHES and rest and not rest[0].startswith("--")
                options[word] = rest.pop(0) if has_value else ""
            else:
                positional.append(word)
        if positional and "--local-dir" in options:
            return positional[0], options["--local-dir"], options.get("--revision")
    return None


def _halves(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith("--") else [word]
