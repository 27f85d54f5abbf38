"""A vLLM server as its source describes it: the common form of every source."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from specdecode_operator.importing.spec_builder import Outcome, Setting
from specdecode_operator.problems import Problem
from specdecode_operator.untrusted import mapping

_WRITERS: Final = ("deployment.kubernetes.io/", "kubectl.kubernetes.io/", "field.cattle.io/")
_OF_SYSTEM: Final = "Kubernetes wrote it for the old object"
_OF_OBJECT: Final = "is the old object's own: add it to metadata of the new one if a tool or a policy reads it"


@dataclass
class Remarks:
    """What a source says of settings that no pod has."""

    settings: list[Setting] = field(default_factory=list)
    decisions: list[Problem] = field(default_factory=list)

    def own(self, name: str, why: str) -> None:
        """Say that a setting is the operator's own business."""
        self.settings.append(Setting(Outcome.OPERATOR, name, why))

    def drop(self, name: str, why: str) -> None:
        """Say that a setting is not kept, and why the server is the same without it."""
        self.settings.append(Setting(Outcome.DROPPED, name, why))

    def decide(self, path: str, value: str, message: str) -> None:
        """Say what a person must decide."""
        self.decisions.append(Problem(path, value, message))

    def drop_metadata(self, body: Mapping[str, Any], read: Sequence[str] = ()) -> None:
        """Say of the labels and annotations of the source itself, which no pod has, that they stay with it."""
        for kind in ("labels", "annotations"):
            for key in mapping(mapping(body, "metadata"), kind):
                if key not in read:
                    self.drop(f"metadata.{kind} {key}", _OF_SYSTEM if key.startswith(_WRITERS) else _OF_OBJECT)

    def ask_for_rest(self, body: Mapping[str, Any], known: Sequence[str], where: str) -> None:
        """Ask for every key that says something and that nothing here reads; its value may be a secret."""
        message = "is not read here: say what means the same in podTemplate or extraArgs, or remove it"
        for key, value in body.items():
            if key not in known and value not in (None, "", {}, [], False):
                self.decide(f"{where}.{key}", "is set", message)


@dataclass(frozen=True)
class Workload:
    """A server: its containers, volumes and resources as a pod has them, how many there are, and how to end it."""

    kind: str
    """What people call the source, such as StatefulSet or docker run."""

    name: str
    pod: Mapping[str, Any]
    """The pod's spec; of a source outside Kubernetes, what means the same."""

    where: str
    """Path of the containers in the source, for messages."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Labels and annotations of the pods."""

    namespace: str | None = None
    match_labels: Mapping[str, Any] = field(default_factory=dict)
    """What the source itself finds its pods by."""

    spec: Mapping[str, Any] = field(default_factory=dict)
    """Replicas and rollout, by the names of a Deployment."""

    nodes: int = 1
    """Pods that one server runs in."""

    says_gpus: bool = True
    """Whether the source says how many GPUs there are; if not, they are as many as the server spreads over."""

    outside: bool = False
    """Whether it runs outside Kubernetes: a folder of its machine is none of a node's."""

    end: str = ""
    """Command that ends the old server."""

    remove: str = ""
    """Command that removes what the first one leaves as a way back; empty where it leaves none."""

    remarks: Remarks = field(default_factory=Remarks)


def name_in(body: Mapping[str, Any]) -> str:
    """Return an object's name."""
    return str(mapping(body, "metadata").get("name") or "vllm")


def namespace_of(body: Mapping[str, Any]) -> str | None:
    """Return an object's namespace."""
    found = mapping(body, "metadata").get("namespace")
    return str(found) if found else None


def within(body: Mapping[str, Any]) -> str:
    """Return the option of kubectl that names an object's namespace."""
    return in_namespace(namespace_of(body))


def in_namespace(namespace: str | None) -> str:
    """Return the option of kubectl that names a namespace."""
    return f" -n {shlex.quote(namespace)}" if namespace else ""


def quoted_name(body: Mapping[str, Any]) -> str:
    """Return an object's name as one word of a shell: commands with names of files that others wrote are copied."""
    return shlex.quote(name_in(body))


def operand(name: str) -> str:
    """Return a name as the last words of docker's command: one that begins with a dash is no option."""
    return f"-- {shlex.quote(name)}" if name.startswith("-") else shlex.quote(name)


def plain_text(value: Any) -> str:
    """Return a value of YAML as text, as a command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
