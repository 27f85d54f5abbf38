"""`specdecode doctor`: check whether a cluster is ready, with the caller's own rights."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Final, TypeVar

import typer

from specdecode_operator.api.base import Body
from specdecode_operator.api.crds import crds
from specdecode_operator.cli.doctor.findings import (
    Finding,
    Grade,
    Reading,
    Unreadable,
    claim_finding,
    crd_finding,
    gpu_findings,
    limit_findings,
    operator_finding,
    optional_findings,
    quota_findings,
    rights_finding,
    security_finding,
    served_namespaces,
    shared_memory_finding,
    storage_findings,
    version_finding,
    webhook_findings,
)
from specdecode_operator.cli.options import Context, ExitCode, TextOrJson, fail
from specdecode_operator.cli.outputs import print_json
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.cluster.client import ClusterError, ForbiddenError
from specdecode_operator.cluster.kubeconfig import ClusterView, open_cluster
from specdecode_operator.cluster.resources import DEPLOYMENT, NODE, POD, Resource
from specdecode_operator.cluster.rights import RELEASE, Right, Scope, rights_in
from specdecode_operator.untrusted import mapping

_CRD: Final = Resource("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions")
_NAMESPACE: Final = Resource("v1", "Namespace", "namespaces")
_QUOTA: Final = Resource("v1", "ResourceQuota", "resourcequotas")
_LIMITS: Final = Resource("v1", "LimitRange", "limitranges")
_CLAIM: Final = Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
_CLASS: Final = Resource("storage.k8s.io/v1", "StorageClass", "storageclasses")
_WEBHOOK: Final = Resource(
    "admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations"
)
_REVIEW: Final = Resource("authorization.k8s.io/v1", "SubjectAccessReview", "subjectaccessreviews")
_OPERATOR_LABEL: Final = "app.kubernetes.io/name=specdecode-operator"
_CHART_LABEL: Final = "app.kubernetes.io/part-of=specdecode"
_USUAL_NAMESPACE: Final = "specdecode-system"

_T = TypeVar("_T")


async def examine(cluster: ClusterView, namespace: str) -> list[Finding]:
    """Return all findings on a cluster, and on engines in one of its namespaces."""
    # Whoever may not even ask for the version has no cluster, or no login.
    version = await cluster.version()
    expected = crds()
    groups, deployments, webhooks, nodes, pods, classes = await asyncio.gather(
        _read(cluster.groups()),
        _operators(cluster),
        _read(cluster.list(_WEBHOOK, selector=_CHART_LABEL)),
        _read(cluster.list(NODE)),
        _read(cluster.list(POD)),
        _read(cluster.list(_CLASS)),
    )
    installed = await asyncio.gather(*(_read(cluster.get(_CRD, None, each["metadata"]["name"])) for each in expected))
    space, quotas, limits, claims = await asyncio.gather(
        _read(cluster.get(_NAMESPACE, None, namespace)),
        _read(cluster.list(_QUOTA, namespace)),
        _read(cluster.list(_LIMITS, namespace)),
        _read(cluster.list(_CLAIM, namespace)),
    )
    limited = limit_findings(limits)
    return [
        version_finding(version),
        *(crd_finding(each, body, groups) for each, body in zip(expected, installed, strict=True)),
        operator_finding(deployments),
        *await _rights(cluster, deployments),
        *webhook_findings(webhooks, datetime.now(UTC)),
        *gpu_findings(nodes, pods),
        shared_memory_finding(limited),
        *limited,
        *storage_findings(classes),
        claim_finding(claims),
        security_finding(namespace, space),
        *quota_findings(quotas, limits),
        *optional_findings(groups),
    ]


async def _read(question: Awaitable[_T]) -> Reading[_T]:
    try:
        return await question
    except ForbiddenError as error:
        return Unreadable(str(error).partition(":")[0])
    except ClusterError as error:
        return Unreadable(str(error))


async def _operators(cluster: ClusterView) -> Reading[list[Body]]:
    everywhere = await _read(cluster.list(DEPLOYMENT, selector=_OPERATOR_LABEL))
    if not isinstance(everywhere, Unreadable):
        return everywhere
    usual = await _read(cluster.list(DEPLOYMENT, _USUAL_NAMESPACE, _OPERATOR_LABEL))
    # None there says nothing of the other namespaces.
    return usual if not isinstance(usual, Unreadable) and usual else everywhere


async def _rights(cluster: ClusterView, deployments: Reading[Sequence[Body]]) -> list[Finding]:
    if isinstance(deployments, Unreadable):
        return []
    findings = []
    for body in deployments:
        space = str(mapping(body, "metadata").get("namespace"))
        pod = mapping(mapping(mapping(body, "spec"), "template"), "spec")
        account = f"{space}/{pod.get('serviceAccountName', 'default')}"
        name = str(mapping(body, "metadata").get("name"))
        missing = await _missing(cluster, account, name, served_namespaces(body))
        findings.append(rights_finding(f"service account {account}", missing))
    return findings


async def _missing(cluster: ClusterView, account: str, name: str, served: frozenset[str]) -> Reading[list[str]]:
    own = account.partition("/")[0]
    places = [(scope, each) for each in sorted(served) for scope in (Scope.SERVED, Scope.NAMED)]
    places = places or [(Scope.SERVED, ""), (Scope.CLUSTER, "")]
    rights = [(right, space) for scope, space in [*places, (Scope.OWN, own)] for right in rights_in(scope)]
    asked = [(right, verb, space) for right, space in rights for verb in right.verbs]
    user = f"system:serviceaccount:{account.replace('/', ':')}"
    answers = await _read(asyncio.gather(*(cluster.review(_REVIEW, _review(user, name, *each)) for each in asked)))
    if isinstance(answers, Unreadable):
        return answers
    return [
        f"{verb} {right.resource}" + (f" in namespace {space}" if space else "")
        for (right, verb, space), answer in zip(asked, answers, strict=True)
        if not mapping(answer, "status").get("allowed")
    ]


def _review(user: str, operator: str, right: Right, verb: str, namespace: str) -> Body:
    own = user.split(":")[2]
    qualified, _, subresource = right.resource.partition("/")
    plural, _, group = qualified.partition(".")
    attributes = {"verb": verb, "group": group, "resource": plural, "subresource": subresource, "namespace": namespace}
    if right.names:
        attributes["name"] = operator if right.names == (RELEASE,) else right.names[0]
    return {
        "apiVersion": _REVIEW.api_version,
        "kind": _REVIEW.kind,
        "spec": {
            "user": user,
            "groups": ["system:serviceaccounts", f"system:serviceaccounts:{own}", "system:authenticated"],
            "resourceAttributes": attributes,
        },
    }


_NAMESPACE_HELP: Final = "Namespace that engines will run in; that of the kubeconfig's context."


def doctor_command(
    *,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help=_NAMESPACE_HELP)] = None,
    context: Context = None,
    output: Annotated[TextOrJson, typer.Option("--output", "-o", help="text or json.")] = TextOrJson.TEXT,
) -> None:
    """Say whether a cluster is ready: one line a finding, OK, WARN or FAIL, with the fix.

    It only reads, with your own rights; what you may not read is a WARN that
    says so.

    For example: specdecode doctor -n models

    Exits with 0 when nothing FAILs, 4 when something does, 2 when the cluster
    cannot be asked.
    """
    try:
        findings = asyncio.run(_findings(namespace, context))
    except ClusterError as error:
        fail(error)
    if output is TextOrJson.JSON:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        _say(findings)
    failed = any(finding.grade is Grade.FAIL for finding in findings)
    raise typer.Exit(ExitCode.DOES_NOT_FIT if failed else ExitCode.OK)


async def _findings(namespace: str | None, context: str | None) -> "list[Finding]":
    async with open_cluster(context) as cluster:
        return await examine(cluster, namespace or cluster.namespace)


def _say(findings: "list[Finding]") -> None:
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        fix = f" -> {finding.fix}" if finding.fix else ""
        say_line(f"{finding.grade:<4}  {finding.subject:<{width}}  {finding.what}{fix}")
