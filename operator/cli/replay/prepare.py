"""`specdecode replay prepare`: an emulated engine as a folder, for whatever has vLLM and nothing of ours."""

from pathlib import Path
from typing import Annotated

import typer

from specdecode_operator.cli import options
from specdecode_operator.cli.replay import emulated_options as emulated


def prepare_command(  # noqa: PLR0913  each is an option
    model: Annotated[Path, typer.Argument(help="Model that `specdecode replay fit` made.", metavar="MODEL")],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write, which must not hold an engine yet.")],
    plan: Annotated[str, typer.Option("--plan", metavar="FILE", help="The SpecDecodeDeployment whose engine it is.")],
    num_gpu_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the KV cache. Absent: those of the plan.", min=1, max=2**32)
    ] = None,
    tokenizer: emulated.Tokenizer = None,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    nodes: options.NodesOption = None,
    model_config: options.ModelConfigOption = None,
    hub: options.HubOption = False,
    calibration: options.CalibrationOption = None,
) -> None:
    """Write what vLLM needs to be emulated: models without weights, plugins, settings, and a script that starts it.

    `replay serve --mode emulated` does it in one go, where vLLM is installed.
    This is for a container that has vLLM: start.py in the folder takes further
    arguments of vLLM, and must be run where the folder lies at the same path.

    For example: specdecode replay prepare model.json --plan deployment.yaml -o /emulated
    """
    from specdecode_operator.cli.options import hub_models  # noqa: PLC0415
    from specdecode_operator.cli.render.answers import Options  # noqa: PLC0415
    from specdecode_operator.cli.replay.emulated import Asked, prepare  # noqa: PLC0415

    rendering = Options(nodes, model_config or [], calibration, models=hub_models(wanted=hub))
    prepare(Asked(models=[model], plan=plan, rendering=rendering, tokenizer=tokenizer, seed=seed), out, num_gpu_blocks)
