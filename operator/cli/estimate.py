"""`specdecode estimate`: the memory budget of many engine configurations, one per line."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TextIO

import typer
from pydantic import RootModel

from specdecode_operator.cli.options import CalibrationOption, ExitCode, HubOption, fail, hub_models
from specdecode_operator.cli.outputs import Output, json_text
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.cli.text_files import DocumentError, opened_line_files
from specdecode_operator.problems import shown
from specdecode_operator.untrusted import UnreadableTextError

if TYPE_CHECKING:
    from specdecode_operator.cli.hub import HubModels
    from specdecode_operator.sizing.calibration import Calibration


class CasePerGpu(Output):
    """Memory of one GPU in bytes; null but for available_kv where a case gives the KV cache alone."""

    total: int | None
    """Memory of the device."""
    requested: int | None
    """What the engine claims of it."""
    target_weights: int | None
    """Weights of the target."""
    draft_weights: int | None
    """Weights of the draft."""
    state: int | None
    """Buffers for the state of requests."""
    activation: int | None
    """Peak of one step."""
    cuda_graphs: int | None
    """CUDA graphs."""
    non_torch: int | None
    """Memory outside torch, corrections of a calibration among it."""
    available_kv: int
    """What is left for the KV cache, before the margin."""


class CaseOutput(Output):
    """A case that could be sized."""

    id: str | int | None
    """That of the case."""
    verdict: Literal["Fits", "Tight", "DoesNotFit"]
    """Whether it fits."""
    per_gpu: CasePerGpu
    """The budget of each GPU."""
    margin_bytes: int
    """What the verdict keeps back because estimates err."""
    kv_cache_tokens: int
    """Tokens that the KV cache of each data-parallel copy holds, before the margin."""
    max_concurrency: float
    """Requests of full length that it holds, in each copy."""
    calibration: str | None = None
    """Which measurements correct it; absent without any."""
    error: None
    """Nothing is wrong with it."""


class CaseErrorOutput(Output):
    """A case that could not be sized."""

    id: str | int | None
    """That of the case; null where the line cannot be read."""
    error: str
    """Why."""


class EstimateOutput(RootModel[CaseOutput | CaseErrorOutput]):
    """One line of the results."""


_MOST_LINE_BYTES: Final = 4 * 2**20
"""Of a configuration: the largest config.json, with a word on each of its experts, has 3 MB."""


def estimate_command(
    cases: Annotated[str, typer.Option("--in", help="JSON lines, one configuration each; - for standard input.")],
    results: Annotated[str, typer.Option("--out", help="Where results go, a line a case; - for standard output.")],
    *,
    hub: HubOption = False,
    calibration: CalibrationOption = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail (2) where a line has an error.")] = False,
) -> None:
    """Size each configuration; a bad line gets an error in its place, and the batch goes on.

    Exits with 0 when all results are written, 2 when a file cannot be used
    or, with --strict, when a line has an error.
    """
    measured = _read_calibration(calibration)
    lookup = Lookup(hub_models(wanted=hub))
    with opened_line_files(cases, results, _MOST_LINE_BYTES) as (lines, target):
        total, bad = _write(estimated(lines, measured, lookup), target)
    if bad:
        say_line(f"{bad} of {total} cases have an error", err=True)
        lookup.name_unknown()
        if strict:
            raise typer.Exit(ExitCode.INVALID)


_MOST_NAMED: Final = 5
"""Unknown models that standard error names; each has its own line in the results."""


@dataclass
class Lookup:
    """Models of cases that the catalogue lacks: read from a hub, if there is one, or remembered."""

    hub: "HubModels | None" = None
    unknown: dict[str, None] = field(default_factory=dict)

    def described(self, case: Any) -> Any:
        """Return a case with the config.json of the hub in it, for each model that needs one."""
        if not isinstance(case, dict):
            return case
        found = self._described(case)
        for key in ("speculative", "speculative_config"):
            part = found.get(key)
            if isinstance(part, dict) and (known := self._described(part)) is not part:
                found = {**found, key: known}
        return found

    def _described(self, part: dict[str, Any]) -> dict[str, Any]:
        model, revision = _model(part), part.get("revision")
        if not model or part.get("model_config") is not None:
            return part
        from specdecode_operator.sizing.catalogue import find_entry  # noqa: PLC0415

        if find_entry(model) is not None:
            return part
        self.unknown[model] = None
        if self.hub is None:
            return part
        from specdecode_operator.deployment.models.checkpoint_reader import CheckpointError  # noqa: PLC0415

        try:
            found = self.hub.find(model, revision if isinstance(revision, str) else None)
        except CheckpointError as error:
            raise ValueError(f"model: {shown(model)}: {error.message}") from error
        del self.unknown[model]
        return {**part, "model_config": found.config}

    def name_unknown(self) -> None:
        """Say on standard error all models at once that stayed unknown, and what would help."""
        if self.unknown:
            more = len(self.unknown) - _MOST_NAMED
            names = ", ".join(map(shown, islice(self.unknown, _MOST_NAMED))) + (f" and {more} more" if more > 0 else "")
            fix = "add --hub, or give model_config" if self.hub is None else "give model_config"
            say_line(f"not in the catalogue: {names}: {fix}", err=True)


def _model(part: dict[str, Any]) -> str:
    name = part.get("model", part.get("model_tag"))
    return name if isinstance(name, str) else ""


def estimated(
    lines: Iterable[str | bytes], calibration: "Calibration | None" = None, lookup: Lookup | None = None
) -> Iterator[dict[str, Any]]:
    """Return the result of each line that is not blank."""
    # Sizing takes longer to load than the rest of the command line.
    from specdecode_operator.sizing.calibration import UNCALIBRATED  # noqa: PLC0415
    from specdecode_operator.sizing.estimate import size_case  # noqa: PLC0415
    from specdecode_operator.untrusted import JsonLines  # noqa: PLC0415

    objects, measured, models = JsonLines(_MOST_LINE_BYTES), calibration or UNCALIBRATED, lookup or Lookup()

    def sized(case: Any) -> dict[str, Any]:
        return size_case(models.described(case), measured)

    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                case = objects.parse(line)
            except UnreadableTextError as error:
                yield {"id": None, "error": f"line {number}: {error}"}
            else:
                yield _estimated(case, sized)


def _read_calibration(file: str | None) -> "Calibration | None":
    if file is None:
        return None
    from specdecode_operator.cli.input_files import read_calibration  # noqa: PLC0415

    try:
        return read_calibration(file)
    except DocumentError as error:
        fail(f"--calibration: {error}")


def _write(results: Iterator[dict[str, Any]], target: TextIO) -> tuple[int, int]:
    total = bad = 0
    for result in results:
        total += 1
        bad += result["error"] is not None
        target.write(json_text(result) + "\n")
    return total, bad


def _estimated(case: Any, size: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    identity = _identity(case)
    try:
        return {"id": identity, **size(case)}
    except ValueError as error:
        return {"id": identity, "error": str(error)}
    except Exception as error:  # noqa: BLE001  one case must never stop the batch, whatever it brings to light
        return {"id": identity, "error": f"sizing failed on this case ({type(error).__name__}: {error}), please report"}


def _identity(case: Any) -> str | int | None:
    identity = case.get("id") if isinstance(case, dict) else None
    return identity if isinstance(identity, str | int) else None
