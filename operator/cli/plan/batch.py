"""`specdecode plan --batch`: size many engine configurations, one per line."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from specdecode_operator.cli.json_text import json_text
from specdecode_operator.cli.options import ExitCode, ended, hub_models
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.cli.text_files import DocumentError, opened_line_files, read_calibration
from specdecode_operator.problems import shown
from specdecode_operator.sizing.calibration import Calibration
from specdecode_operator.sizing.catalogue import find_entry
from specdecode_operator.sizing.estimate import SWEPT, Sized, Sizer
from specdecode_operator.untrusted import JsonLines, UnreadableTextError

if TYPE_CHECKING:
    from specdecode_operator.cli.hub import HubModels


_MOST_LINE_BYTES: Final = 4 * 2**20
"""Maximum size of a line. The largest known config.json, with settings for each expert, has 3 MB."""
_MOST_NAMED: Final = 5
"""Number of unknown models in the summary on standard error. The results name all of them."""

_LONGEST_KEY_BYTES: Final = 2**14
"""Maximum length of a key that is kept as is. Longer keys are hashed, which bounds the memory."""
_NUMBERS: Final = ("id", *SWEPT)
"""Keys whose values differ between the lines of a sweep."""
_LINE: Final = (
    '{"id": %s, "verdict": "%s", "per_gpu": {"total": %d, "requested": %d, "target_weights": %d, "draft_weights": %d, '
    '"state": %d, "activation": %d, "cuda_graphs": %d, "non_torch": %d, "available_kv": %d}, "margin_bytes": %d, '
    '"kv_cache_tokens": %d, "max_concurrency": %r, "error": null}'
)
"""Template for the result of most cases. Encoding a dict takes three times as long."""
_of_line: Final = attrgetter(
    *("verdict", "total_bytes", "requested_bytes", "target_weights_bytes", "draft_weights_bytes"),
    *("state_bytes", "activation_bytes", "cuda_graphs_bytes", "non_torch_bytes", "available_kv_bytes"),
    *("margin_bytes", "kv_cache_tokens", "max_concurrency"),
)


def size_batch(cases: str, results: str, *, hub: bool, calibration: str | None, strict: bool) -> ExitCode:
    """Write the result of each line of a file, and return the exit code; ``-`` is standard input or output.

    The result of an invalid line is an error. With ``strict``, the exit code is then that of invalid input.
    """
    with ended(DocumentError, at="--calibration: "):
        measured = read_calibration(calibration)
    lookup, total = Lookup(hub_models(wanted=hub)), 0
    with opened_line_files(cases, results, _MOST_LINE_BYTES, "--batch") as (lines, target):
        batch = _Batch(lookup, measured)
        for number, line in enumerate(lines, start=1):
            if not line.isspace():
                total += 1
                target.write(batch.result(line, number) + "\n")
        bad = batch.errors
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
        self.errors = 0

    def result(self, line: bytes, number: int) -> str:
        """Return the result of a line as JSON: its sizing, or an error if the line is invalid."""
        others: Hashable = None
        if (texts := self._objects.split(line)) is not None:
            try:
                values: dict[str, Any] = {key: self._objects.value(texts.pop(key)) for key in _NUMBERS if key in texts}
                others = _key(b"\0".join(["\0".join(texts).encode(), *texts.values()]))
                if (sized := self._sizer.size_swept(others, values)) is not None:
                    return _line(values.get("id"), sized)
            except Exception:  # noqa: BLE001, S110  the line is read in full, which reports the error
                pass
        result = self._sized(line, number, others)
        self.errors += result["error"] is not None
        return json_text(result)

    def _sized(self, line: bytes, number: int, others: Hashable) -> dict[str, Any]:
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


def _key(text: bytes) -> Hashable:
    """Return the text as a cache key, or its SHA-256 if it is long."""
    return text if len(text) <= _LONGEST_KEY_BYTES else sha256(text).hexdigest()


def _line(value: object, sized: Sized) -> str:
    """Return the result of a sized case as JSON; ``value`` is its id."""
    identity, budget = _identity(value), sized.budget
    if budget.uncalibrated_gpu or budget.calibration or sized.unmodelled:
        return json_text({"id": identity, **sized.line})
    return _LINE % (identity if type(identity) is int else json_text(identity), *_of_line(budget))


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
