"""`specdecode doctor`: is this cluster ready for engines that speculate."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer

from specdecode_operator.cli.options import Context, ExitCode, TextOrJson, fail
from specdecode_operator.cli.outputs.printing import print_json
from specdecode_operator.cli.terminal import say_line

if TYPE_CHECKING:
    from specdecode_operator.doctor.findings import Finding

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
    import asyncio  # noqa: PLC0415

    from specdecode_operator.cluster.errors import ClusterError  # noqa: PLC0415
    from specdecode_operator.doctor.findings import Grade  # noqa: PLC0415

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
    from specdecode_operator.cli.doctor.examination import examine  # noqa: PLC0415
    from specdecode_operator.cluster.inspection import open_cluster  # noqa: PLC0415

    async with open_cluster(context) as cluster:
        return await examine(cluster, namespace or cluster.namespace)


def _say(findings: "list[Finding]") -> None:
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        fix = f" -> {finding.fix}" if finding.fix else ""
        say_line(f"{finding.grade:<4}  {finding.subject:<{width}}  {finding.what}{fix}")
