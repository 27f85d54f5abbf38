"""`specdecode plan --batch`: size many engine configurations, one per line."""

from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from msgspec import Raw

from specdecode_operator.cli.json_text import json_text
from specdecode_operator.cli.options import ExitCode, ended, hub_models
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.cli.text_files import DocumentError, opened_line_files, read_calibration
from specdecode_operator.problems import shown
from specdecode_operator.sizing.calibration import Calibration
from specdecode_operator.sizing.catalogue import find_entry
from specdecode_operator.sizing.estimate import SWEPT, Sizer
from specdecode_operator.untrusted import JsonLines, UnreadableTextError

if TYPE_CHECKING:
    from specdecode_operator.cli.hub import HubModels


_MOST_LINE_BYTES: Final = 4 * 2**20
"""Maximum size of a line. The largest known config.json, with settings for each expert, has 3 MB."""
_MOST_NAMED: Final = 5
"""Number of unknown models in the summary on standard error. The results name all of them."""


def size_batch(cases: str, results: str, *, hub: bool, calibration: str | None, strict: bool) -> ExitCode:
    """Write the result of each line of a file, and return the exit code; ``-`` is standard input or output.

    The result of an invalid line is an error. With ``strict``, the exit code is then that of invalid input.
    """
    with ended(DocumentError, at="--calibration: "):
        measured = read_calibration(calibration)
    lookup, total, bad = Lookup(hub_models(wanted=hub)), 0, 0
    with opened_line_files(cases, results, _MOST_LINE_BYTES, "--batch") as (lines, target):
        batch = _Batch(lookup, measured)
        for number, line in enumerate(lines, start=1):
            if line.strip():
                result = batch.result(line, number)
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
            fix = "add --hub, or set model_config" if lookup.hub is None else "set model_config"
            say_line(f"not in the catalogue: {named}: {fix}", err=True)
    return ExitCode.INVALID if bad and strict else ExitCode.OK


class _Batch:
    """Sizes lines, most of which differ from an earlier one in a few numbers only."""

    def __init__(self, lookup: "Lookup", measured: Calibration) -> None:
        self._lookup, self._sizer = lookup, Sizer(measured)
        self._objects = JsonLines(_MOST_LINE_BYTES)

    def result(self, line: bytes, number: int) -> dict[str, Any]:
        """Return the result of a line, which is an error if the line is invalid."""
        others = None
        if (texts := self._objects.split(line)) is not None:
            numbers: dict[str, Raw] = {key: texts.pop(key) for key in ("id", *SWEPT) if key in texts}
            others = sha256(b"\0".join(["\0".join(texts).encode(), *texts.values()])).digest()
            if (found := self._swept(others, numbers)) is not None:
                return found
        try:
            case: Any = self._objects.parse(line)
        except UnreadableTextError as error:
            return {"id": None, "error": f"line {number}: {error}"}
        identity = _identity(case.get("id")) if isinstance(case, dict) else None
        try:
            return {"id": identity, **self._sizer.size(self._lookup.described(case), others)}
        except ValueError as error:
            return {"id": identity, "error": str(error)}
        except Exception as error:  # noqa: BLE001  one case must never stop the batch
            message = f"sizing failed ({type(error).__name__}: {error}); please report this case"
            return {"id": identity, "error": message}

    def _swept(self, others: bytes, texts: dict[str, Raw]) -> dict[str, Any] | None:
        """Return the result of a line that is like an earlier one; None if there is none, and for invalid values."""
        try:
            values = {key: self._objects.value(text) for key, text in texts.items()}
            result = self._sizer.size_swept(others, values)
        except Exception:  # noqa: BLE001  the line is then read in full, which reports the error
            return None
        return None if result is None else {"id": _identity(values.get("id")), **result}


def _identity(value: object) -> str | int | None:
    return value if isinstance(value, str | int) else None


@dataclass
class Lookup:
    """Looks up models that are not in the catalogue, and records those that stay unknown."""

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
        # Only the hub needs it.
        from specdecode_operator.deployment.models.checkpoint_reader import CheckpointError  # noqa: PLC0415

        try:
            found = self.hub.find(model, revision if isinstance(revision, str) else None)
        except CheckpointError as error:
            raise ValueError(f"model: {shown(model)}: {error.message}") from error
        del self.unknown[model]
        return {**part, "model_config": found.config}
