"""`specdecode estimate`: the memory budget of many engine configurations, one per line."""

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from pydantic import RootModel

from specdecode_operator.cli.input_files import read_calibration
from specdecode_operator.cli.options import CalibrationOption, ExitCode, HubOption, ended, hub_models
from specdecode_operator.cli.outputs import Output, json_text
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.cli.text_files import DocumentError, opened_line_files
from specdecode_operator.deployment.models.checkpoint_reader import CheckpointError
from specdecode_operator.problems import shown
from specdecode_operator.sizing.calibration import Calibration
from specdecode_operator.sizing.catalogue import find_entry
from specdecode_operator.sizing.estimate import size_case
from specdecode_operator.untrusted import JsonLines, UnreadableTextError

if TYPE_CHECKING:
    from specdecode_operator.cli.hub import HubModels


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
_MOST_NAMED: Final = 5
"""Unknown models in the summary on standard error; each has its own line in the results."""


def estimate_command(
    cases: Annotated[
        str, typer.Option("--in", help="File of JSON lines, one configuration per line; - for standard input.")
    ],
    results: Annotated[
        str, typer.Option("--out", help="File for the results, one line per case; - for standard output.")
    ],
    *,
    hub: HubOption = False,
    calibration: CalibrationOption = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 2 if a line has an error.")] = False,
) -> None:
    """Size engine configurations from a file. An invalid line gets an error, and the others are sized.

    Exits with 0 when all results are written, 2 when a file cannot be used
    or, with --strict, when a line has an error.
    """
    with ended(DocumentError, at="--calibration: "):
        measured = read_calibration(calibration)
    lookup, total, bad = Lookup(hub_models(wanted=hub)), 0, 0
    with opened_line_files(cases, results, _MOST_LINE_BYTES) as (lines, target):
        objects = JsonLines(_MOST_LINE_BYTES)
        for number, line in enumerate(lines, start=1):
            if line.strip():
                result = _estimated(line, number, objects, lookup, measured)
                total += 1
                bad += result["error"] is not None
                target.write(json_text(result) + "\n")
    if bad:
        say_line(f"{bad} of {total} cases have an error", err=True)
        if lookup.unknown:
            more = len(lookup.unknown) - _MOST_NAMED
            named = ", ".join(map(shown, islice(lookup.unknown, _MOST_NAMED))) + (
                f" and {more} more" if more > 0 else ""
            )
            fix = "add --hub, or give model_config" if lookup.hub is None else "give model_config"
            say_line(f"not in the catalogue: {named}: {fix}", err=True)
        if strict:
            raise typer.Exit(ExitCode.INVALID)


def _estimated(line: bytes, number: int, objects: JsonLines, lookup: "Lookup", measured: Calibration) -> dict[str, Any]:
    try:
        case: Any = objects.parse(line)
    except UnreadableTextError as error:
        return {"id": None, "error": f"line {number}: {error}"}
    identity = case.get("id") if isinstance(case, dict) else None
    identity = identity if isinstance(identity, str | int) else None
    try:
        return {"id": identity, **size_case(lookup.described(case), measured)}
    except ValueError as error:
        return {"id": identity, "error": str(error)}
    except Exception as error:  # noqa: BLE001  one case must never stop the batch, whatever it brings to light
        return {"id": identity, "error": f"sizing failed on this case ({type(error).__name__}: {error}), please report"}


@dataclass
class Lookup:
    """Models of cases that the catalogue lacks: read from a hub, if there is one, else remembered."""

    hub: "HubModels | None"
    unknown: dict[str, None] = field(default_factory=dict)

    def described(self, case: Any) -> Any:
        """Return a case with the hub's config.json for each model that needs one; ValueError if the hub fails."""
        if not isinstance(case, dict):
            return case
        found = self._described(case)
        for key in ("speculative", "speculative_config"):
            part = found.get(key)
            if isinstance(part, dict) and (known := self._described(part)) is not part:
                found = {**found, key: known}
        return found

    def _described(self, part: dict[str, Any]) -> dict[str, Any]:
        model, revision = part.get("model", part.get("model_tag")), part.get("revision")
        if not model or not isinstance(model, str) or part.get("model_config") is not None or find_entry(model):
            return part
        self.unknown[model] = None
        if self.hub is None:
            return part
        try:
            found = self.hub.find(model, revision if isinstance(revision, str) else None)
        except CheckpointError as error:
            raise ValueError(f"model: {shown(model)}: {error.message}") from error
        del self.unknown[model]
        return {**part, "model_config": found.config}
