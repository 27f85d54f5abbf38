"""Whether the API server, the CRD and the operator are what this command line goes with."""

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Final

from specdecode_operator.api.base import GROUP, VERSION, Body
from specdecode_operator.api.crd.skew import INSTALL_CRD, crd_skew
from specdecode_operator.doctor.findings import Finding, Grade, Reading, Unreadable, fail, listed, ok, unknown, warn
from specdecode_operator.kube.untyped import mapping, objects, texts
from specdecode_operator.version import __version__

OLDEST_MINOR: Final = 30
"""preStop sleep and ValidatingAdmissionPolicy are there without a switch from 1.30."""

NEWEST_MINOR: Final = 37
"""The newest that our tests run on (docs/reference/supported.md)."""

_CRD: Final = "crd"
_ADD_ONS: Final = (
    (
        "leaderworkerset",
        "leaderworkerset.x-k8s.io",
        "for replicas over several nodes",
        "is not installed: needed only for replicas over several nodes",
    ),
    (
        "kueue",
        "kueue.x-k8s.io",
        "for captures and engines in queues",
        "is not installed: needed only for captures and schedules that name a queue",
    ),
    (
        "prometheus",
        "monitoring.coreos.com",
        "metrics.podMonitor.enabled of the chart works",
        "no Prometheus operator: leave metrics.podMonitor.enabled of the chart off",
    ),
)
"""What only some need: subject, API group, what it is for, and what its absence means."""


def version_finding(seen: Reading[str]) -> Finding:
    """Judge the version of the API server."""
    if isinstance(seen, Unreadable):
        return unknown("kubernetes", seen)
    oldest, newest = (f"1.{minor}" for minor in (OLDEST_MINOR, NEWEST_MINOR))
    match = re.match(r"v?1\.(\d+)", seen)
    if match is None:
        return warn("kubernetes", f"{seen}, which is no version that is known", f"use {oldest} to {newest}")
    if int(match[1]) < OLDEST_MINOR:
        fix = f"upgrade: engines drain with preStop sleep, on from {oldest}"
        return fail("kubernetes", f"{seen} is older than {oldest}", fix)
    if int(match[1]) > NEWEST_MINOR:
        what = f"{seen} is newer than {newest}, the newest that this release is tested on"
        return warn("kubernetes", what, "see whether a newer release names it, or try an object of no importance")
    return ok("kubernetes", seen)


def crd_finding(expected: Body, body: Reading[Body | None], groups: Reading[Mapping[str, Sequence[str]]]) -> Finding:
    """Judge one CRD: ``expected`` is that of this command line, ``body`` the installed one.

    Where that may not be read, ``groups``, the versions that are served by
    group, say less.
    """
    name = expected["metadata"]["name"]
    if body is None:
        return fail(_CRD, f"{name} is not installed", INSTALL_CRD)
    if not isinstance(body, Unreadable):
        return _installed_crd_finding(expected, body)
    if isinstance(groups, Unreadable):
        return unknown(_CRD, body)
    if VERSION in groups.get(GROUP, ()):
        what = f"{GROUP}/{VERSION} is served; whether {name} is, and its schema, cannot be told: {body.why}"
        return warn(_CRD, what, INSTALL_CRD)
    return fail(_CRD, f"{GROUP}/{VERSION} is not served, nor {name}", INSTALL_CRD)


def _installed_crd_finding(expected: Body, body: Body) -> Finding:
    name = expected["metadata"]["name"]
    served = [each for each in objects(mapping(body, "spec"), "versions") if each.get("served")]
    names = ", ".join(str(each.get("name")) for each in served) or "nothing"
    installed = next((each for each in served if each.get("name") == VERSION), None)
    if installed is None:
        return fail(_CRD, f"{name} serves {names}, not {VERSION}", INSTALL_CRD)
    conditions = {each.get("type"): each.get("status") for each in objects(mapping(body, "status"), "conditions")}
    if conditions.get("Established") != "True":
        return fail(_CRD, f"{name} is not established", f"see kubectl describe crd {name}")
    if installed.get("schema") != expected["spec"]["versions"][0]["schema"]:
        fix = f"install CRDs and operator of {__version__} ({INSTALL_CRD}), or use the command line of the operator"
        other = f"{name} serves {VERSION} with another schema than that of this command line"
        return warn(_CRD, crd_skew(body) or other, fix)
    return ok(_CRD, f"{name} serves {names}, as this command line has it")


def operator_finding(deployments: Reading[Sequence[Body]]) -> Finding:
    """Judge whether an operator runs, and its version; of several the first with which something is wrong."""
    subject = "operator"
    if isinstance(deployments, Unreadable):
        return unknown(subject, deployments)
    if not deployments:
        fix = "install it: kubectl apply --server-side -k manifests, or the chart specdecode-operator"
        return fail(subject, "is not installed", fix)
    if both := _meeting(deployments):
        where = f"runs more than once: {_place(both[0])} and {_place(both[1])} serve the same namespaces"
        return fail(subject, where, "remove one, or have each serve namespaces of its own (watchNamespaces)")
    findings = [_one_operator_finding(each) for each in deployments]
    return next((each for each in findings if each.grade is not Grade.OK), findings[0])


def served_namespaces(body: Body) -> frozenset[str]:
    """Return the namespaces that an operator's Deployment names; none where it serves the whole cluster."""
    prefix = "--namespace="
    return frozenset(argument.removeprefix(prefix) for argument in _arguments(body) if argument.startswith(prefix))


def _arguments(body: Body) -> Sequence[str]:
    containers = objects(mapping(mapping(mapping(body, "spec"), "template"), "spec"), "containers")
    return texts(containers[0], "args") if containers else ()


def _meeting(deployments: Sequence[Body]) -> tuple[Body, Body] | None:
    """Return two operators that would undo each other's work."""
    for first, second in combinations(deployments, 2):
        served, also = served_namespaces(first), served_namespaces(second)
        if served & also or not (served or also):
            return first, second
    return None


def _one_operator_finding(body: Body) -> Finding:
    subject = "operator"
    containers = objects(mapping(mapping(mapping(body, "spec"), "template"), "spec"), "containers")
    image = str(containers[0].get("image")) if containers else "unknown"
    if not mapping(body, "status").get("availableReplicas"):
        namespace, _, name = _place(body).partition("/")
        fix = f"see kubectl describe deployment {name} -n {namespace}, and its pods' logs"
        return fail(subject, f"{_place(body)} is installed but not available", fix)
    version = _version(body, image)
    if version not in {None, __version__}:
        fix = "use the same version of both: the other one's rules and sizes may differ"
        return warn(subject, f"{_place(body)} runs {version}, this command line is {__version__}", fix)
    return ok(subject, f"{_place(body)} is available (image {image})")


def _version(body: Body, image: str) -> str | None:
    """Return an operator's version: by the tag of its image, else, as where a digest names it, by the label."""
    tag = image.rpartition(":")[2].removeprefix("v")
    label = mapping(mapping(body, "metadata"), "labels").get("app.kubernetes.io/version")
    told = (each for each in (tag, label) if isinstance(each, str))
    return next((each for each in told if re.fullmatch(r"\d+\.\d+\.\d+.*", each)), None)


def rights_finding(account: str, missing: Reading[Sequence[str]]) -> Finding:
    """Judge the rights of the operator's service account."""
    if isinstance(missing, Unreadable):
        return unknown("permissions", missing)
    if missing:
        fix = "grant it: manifests/operator-role.yaml has the whole list"
        return fail("permissions", f"{account} may not {listed(missing, 4)}", fix)
    return ok("permissions", f"{account} may do all that it needs")


def optional_findings(groups: Reading[Mapping[str, Sequence[str]]]) -> list[Finding]:
    """Say what is there that only some need."""
    if isinstance(groups, Unreadable):
        return [unknown("add-ons", groups)]
    return [
        ok(subject, f"{group} {', '.join(groups[group])}: {use}" if groups.get(group) else absent)
        for subject, group, use, absent in _ADD_ONS
    ]


def _place(body: Body) -> str:
    metadata = mapping(body, "metadata")
    return f"{metadata.get('namespace')}/{metadata.get('name')}"
