"""Options that say a load, for the commands that run engines in virtual time."""

from typing import Annotated, Final

import typer

from specdecode_operator.api.capture_workload import Phase
from specdecode_operator.replay.synth.arrivals import FORMS as ARRIVAL_FORMS
from specdecode_operator.replay.synth.arrivals import InvalidArrivalsError, parse_arrivals
from specdecode_operator.replay.synth.lengths import FORMS as LENGTH_FORMS
from specdecode_operator.replay.synth.lengths import InvalidLengthsError, parse_lengths
from specdecode_operator.replay.synth.prompts import Prompts
from specdecode_operator.replay.synth.run import Outcome

USUAL_REQUESTS: Final = 200
_PHASE_OF_SEVERAL: Final = "{}-{}"

Arrivals = Annotated[
    list[str] | None,
    typer.Option("--arrivals", help=f"When requests come: {ARRIVAL_FORMS}. Given several times: one after the other."),
]
Requests = Annotated[int | None, typer.Option("--requests", help="Requests of each --arrivals.", min=1, max=10_000_000)]
Duration = Annotated[
    int | None,
    typer.Option("--duration", help="Seconds of each --arrivals, in place of --requests.", min=1, max=86_400),
]
PromptTokens = Annotated[str, typer.Option(help=f"Tokens of each prompt: {LENGTH_FORMS}.")]
OutputTokens = Annotated[str, typer.Option(help="Tokens of each answer, in the same forms.")]
SharedPrefixTokens = Annotated[
    int, typer.Option(help="Tokens before each prompt that all have in common.", min=0, max=16_777_216)
]
Seed = Annotated[int, typer.Option(help="The same seed makes the same files.")]


def phases_of(arrivals: list[str], requests: int | None, duration_s: int | None) -> list[Phase]:
    """Return what the options say, in their order.

    Raises
    ------
    typer.BadParameter
        They say nothing that can be sent.
    """
    if requests is not None and duration_s is not None:
        raise typer.BadParameter("give --requests or --duration, not both", param_hint="--duration")
    if requests is None and duration_s is None:
        requests = USUAL_REQUESTS
    try:
        found = [parse_arrivals(text, requests, duration_s) for text in arrivals]
    except InvalidArrivalsError as error:
        raise typer.BadParameter(str(error), param_hint="--arrivals") from error
    if len(found) == 1:
        return found
    return [
        each.model_copy(update={"name": _PHASE_OF_SEVERAL.format(each.name, number)})
        for number, each in enumerate(found, start=1)
    ]


def prompts_of(
    prompt_tokens: str, output_tokens: str, shared_prefix_tokens: int, block_size: int, seed: int
) -> Prompts:
    """Return what the options say.

    Raises
    ------
    typer.BadParameter
        They say no lengths.
    """
    lengths = {}
    for option, text in (("--prompt-tokens", prompt_tokens), ("--output-tokens", output_tokens)):
        try:
            lengths[option] = parse_lengths(text)
        except InvalidLengthsError as error:
            raise typer.BadParameter(str(error), param_hint=option) from error
    return Prompts(
        prompt_tokens=lengths["--prompt-tokens"],
        output_tokens=lengths["--output-tokens"],
        shared_prefix_tokens=shared_prefix_tokens,
        block_size=block_size,
        seed=seed,
    )


def refuse_nothing(outcome: Outcome) -> None:
    """Refuse a run of which nothing is left to be written.

    Raises
    ------
    typer.BadParameter
        When no request was answered to its end.
    """
    if outcome.finished:
        return
    if not outcome.failed:
        raise typer.BadParameter("no request comes in that time: give more", param_hint="--duration")
    raise typer.BadParameter("no request fits into so many: give more", param_hint="--num-gpu-blocks")
