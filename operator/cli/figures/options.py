"""Options of `specdecode figures`."""

from typing import Annotated

import typer

Name = Annotated[
    str | None, typer.Argument(metavar="NAME", help="A SpecDecodeDeployment, whose pods are asked through kubectl.")
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Its namespace; that of the kubeconfig's context.")
]
Engines = Annotated[
    list[str] | None,
    typer.Option("--engine", metavar="URL", help="Ask this engine in place of pods. May be repeated."),
]
Prometheus = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Ask this Prometheus in place of pods; it has to know specdecode_deployment."),
]
TokenFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="A file with the bearer token that Prometheus wants.")
]
Over = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=86_400,
        metavar="SECONDS",
        help="Seconds that figures are taken over: 30 between two looks at engines, 300 of a Prometheus.",
    ),
]
TtftLimit = Annotated[
    float | None,
    typer.Option(
        min=0.0, metavar="SECONDS", help="Tell the share of requests within; a bucket of vLLM's, such as 0.5."
    ),
]
TpotLimit = Annotated[
    float | None,
    typer.Option(min=0.0, metavar="SECONDS", help="The same of the time per output token, such as 0.05."),
]
