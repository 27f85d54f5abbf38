"""Calls of the Kubernetes API, as they pass."""

import hashlib
import time
from dataclasses import dataclass, field
from typing import Literal

from aiohttp import web

Moment = Literal["before", "after"]
"""Of a call: before it is passed on to the server, and when the server has done it and nobody knows yet."""

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_READING = ("get", "list", "watch")


@dataclass
class Call:
    """One call, and what became of it."""

    number: int
    method: str
    path: str
    """With its query."""

    verb: str
    """As RBAC has it."""

    resource: str
    """Such as ``deployments.apps`` or ``pods/eviction``; empty for what is no resource, such as ``/version``."""

    namespace: str
    name: str
    digest: str
    """Of what was sent: two that send the same have the same."""

    caller: str
    """How it calls itself: its user agent."""

    at_s: float = field(default_factory=time.monotonic)
    """When it came, on the monotonic clock."""

    faults: str = ""
    """What went wrong on purpose."""

    passed: bool = False
    """Whether it came to the server."""

    status: int = 0
    """Of the answer; 0 where there was none."""

    cut: bool = False
    """Whether the connection was reset, so that the caller got no answer."""

    @property
    def permission(self) -> str:
        """Verb and resource, as ``patch specdecodedeployments.specdecode.io/status``."""
        return f"{self.verb} {self.resource}"

    @property
    def writes(self) -> bool:
        """Whether it may change anything."""
        return self.verb not in _READING and bool(self.resource) and not self.resource.endswith("reviews")

    def __str__(self) -> str:
        where = "/".join(part for part in (self.namespace, self.name) if part)
        words = (str(self.number), self.verb, self.resource, where, str(self.status), "cut" * self.cut, self.faults)
        return " ".join(filter(None, words))


def call_of(number: int, request: web.Request, body: bytes) -> Call:
    """Return a request, taken apart."""
    parts = request.path.strip("/").split("/")
    group, rest = "", parts[2:]
    if parts[0] == "apis":
        group, rest = "".join(parts[1:2]), parts[3:]
    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) > 2 and rest[2] not in {"status", "finalize"}:
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource, *_ = [*rest, "", "", ""]
    resource = ".".join(part for part in (plural, plural and group) if part)
    resource += f"/{subresource}" if subresource else ""
    verb = _VERBS.get(request.method, "get" if name or not plural else "list")
    if request.query.get("watch") in {"true", "1"}:
        verb = "watch"
    if verb == "delete" and not name:
        verb = "deletecollection"
    caller = request.headers.get("User-Agent", "")
    digest = hashlib.sha256(body).hexdigest()[:16] if body else ""
    return Call(number, request.method, request.raw_path, verb, resource, namespace, name, digest, caller)
