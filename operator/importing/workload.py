"""A vLLM server as its source describes it: the common form of every source."""

import shlex
from dataclasses import dataclass, field
from typing import Any

from specdecode_operator.importing.spec_builder import Object, Remarks
from specdecode_operator.untrusted import mapping


@dataclass(frozen=True)
class Workload:
    """A server: its containers, volumes and resources as a pod has them, its replicas, and how to end it."""

    kind: str
    name: str
    pod: Object
    where: str
    metadata: Object = field(default_factory=dict)
    namespace: str | None = None
    match_labels: Object = field(default_factory=dict)
    spec: Object = field(default_factory=dict)
    """Replicas and rollout, by the names of a Deployment."""
    nodes: int = 1
    says_gpus: bool = True
    """Whether the source says how many GPUs there are; if not, the parallelism of the server does."""
    outside: bool = False
    """Whether it runs outside Kubernetes, so that folders of its machine are on no node."""
    end: str = ""
    remove: str = ""
    """Command that removes what ``end`` leaves as a way back; empty if it leaves nothing."""
    remarks: Remarks = field(default_factory=Remarks)


def name_in(body: Object) -> str:
    """Return an object's name."""
    return str(mapping(body, "metadata").get("name") or "vllm")


def namespace_of(body: Object) -> str | None:
    """Return an object's namespace."""
    found = mapping(body, "metadata").get("namespace")
    return str(found) if found else None


def within(body: Object) -> str:
    """Return the option of kubectl that names an object's namespace."""
    return in_namespace(namespace_of(body))


def in_namespace(namespace: str | None) -> str:
    """Return the option of kubectl that names a namespace."""
    return f" -n {shlex.quote(namespace)}" if namespace else ""


def kubectl(verb: str, body: Object, options: str = "") -> str:
    """Return a kubectl command for an object, with its name quoted: the command is copied into a shell."""
    kind = str(body.get("kind")).lower()
    return f"kubectl {verb} {kind}/{shlex.quote(name_in(body))}{options}{within(body)}"


def operand(name: str) -> str:
    """Return a name as the last words of a docker command: a leading dash does not make it an option."""
    return f"-- {shlex.quote(name)}" if name.startswith("-") else shlex.quote(name)


def plain_text(value: Any) -> str:
    """Return a YAML value as a command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
