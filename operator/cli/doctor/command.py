"""`specdecode doctor`: check whether a cluster is ready, with the caller's own rights."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Final, TypeVar

import typer

from specdecode_operator.api.base import Body
from specdecode_operator.api.crds import crds
from specdecode_operator.cli.doctor import findings as judge
from specdecode_operator.cli.options import Context, ExitCode, TextOrJson, ended
from specdecode_operator.cli.outputs import print_json
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.cluster.client import ClusterError, ForbiddenError
from specdecode_operator.cluster.kubeconfig import ClusterView, open_cluster
from specdecode_operator.cluster.resources import DEPLOYMENT, NODE, POD, Resource
from specdecode_operator.cluster.rights import RELEASE, Scope, rights_in
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


async def examine(cluster: ClusterView, namespace: str) -> list[judge.Finding]:
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
    limited = judge.limit_findings(limits)
    return [
        judge.version_finding(version),
        *(judge.crd_finding(each, body, groups) for each, body in zip(expected, installed, strict=True)),
        judge.operator_finding(deployments),
        *await _rights(cluster, deployments),
        *judge.webhook_findings(webhooks, datetime.now(UTC)),
        *judge.gpu_findings(nodes, pods),
        judge.shared_memory_finding(limited),
        *limited,
        *judge.storage_findings(classes),
        judge.claim_finding(claims),
        judge.security_finding(namespace, space),
        *judge.quota_findings(quotas, limits),
        *judge.optional_findings(groups),
    ]


async def _read(question: Awaitable[_T]) -> judge.Reading[_T]:
    try:
        return await question
    except ForbiddenError as error:
        return judge.Unreadable(str(error).partition(":")[0])
    except ClusterError as error:
        return judge.Unreadable(str(error))


async def _operators(cluster: ClusterView) -> judge.Reading[list[Body]]:
    everywhere = await _read(cluster.list(DEPLOYMENT, selector=_OPERATOR_LABEL))
    if not isinstance(everywhere, judge.Unreadable):
        return everywhere
    usual = await _read(cluster.list(DEPLOYMENT, _USUAL_NAMESPACE, _OPERATOR_LABEL))
    # None there says nothing of the other namespaces.
    return usual if not isinstance(usual, judge.Unreadable) and usual else everywhere


async def _rights(cluster: ClusterView, deployments: judge.Reading[Sequence[Body]]) -> list[judge.Finding]:
    """Judge the rights of each operator's service account."""
    findings = []
    for body in [] if isinstance(deployments, judge.Unreadable) else deployments:
        own, name = (str(mapping(body, "metadata").get(key)) for key in ("namespace", "name"))
        pod = mapping(mapping(mapping(body, "spec"), "template"), "spec")
        account = pod.get("serviceAccountName", "default")
        served = sorted(judge.served_namespaces(body))
        places = [(scope, each) for each in served for scope in (Scope.SERVED, Scope.NAMED)]
        places = places or [(Scope.SERVED, ""), (Scope.CLUSTER, "")]
        rights = [(right, space) for scope, space in [*places, (Scope.OWN, own)] for right in rights_in(scope)]
        asked = [(right, verb, space) for right, space in rights for verb in right.verbs]
        reviews = []
        for right, verb, space in asked:
            qualified, _, subresource = right.resource.partition("/")
            plural, _, group = qualified.partition(".")
            attributes = {"verb": verb, "group": group, "resource": plural, "subresource": subresource}
            attributes["namespace"] = space
            if right.names:
                attributes["name"] = name if right.names == (RELEASE,) else right.names[0]
            spec = {
                "user": f"system:serviceaccount:{own}:{account}",
                "groups": ["system:serviceaccounts", f"system:serviceaccounts:{own}", "system:authenticated"],
                "resourceAttributes": attributes,
            }
            review = {"apiVersion": _REVIEW.api_version, "kind": _REVIEW.kind, "spec": spec}
            reviews.append(cluster.review(_REVIEW, review))
        missing: judge.Reading[list[str]]
        answers = await _read(asyncio.gather(*reviews))
        if isinstance(answers, judge.Unreadable):
            missing = answers
        else:
            missing = [
                f"{verb} {right.resource}" + (f" in namespace {space}" if space else "")
                for (right, verb, space), answer in zip(asked, answers, strict=True)
                if not mapping(answer, "status").get("allowed")
            ]
        findings.append(judge.rights_finding(f"service account {own}/{account}", missing))
    return findings


def doctor_command(
    *,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", help="Namespace that engines will run in; that of the kubeconfig's context."),
    ] = None,
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

    async def found() -> list[judge.Finding]:
        async with open_cluster(context) as cluster:
            return await examine(cluster, namespace or cluster.namespace)

    with ended(ClusterError):
        findings = asyncio.run(found())
    if output is TextOrJson.JSON:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        width = max(len(finding.subject) for finding in findings)
        for each in findings:
            fix = f" -> {each.fix}" if each.fix else ""
            say_line(f"{each.grade:<4}  {each.subject:<{width}}  {each.what}{fix}")
    failed = any(finding.grade is judge.Grade.FAIL for finding in findings)
    raise typer.Exit(ExitCode.DOES_NOT_FIT if failed else ExitCode.OK)
