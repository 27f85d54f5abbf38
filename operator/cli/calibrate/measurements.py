"""Measures engines by their status, their logs, or by running them, prints the comparison, and keeps the entries."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from specdecode_operator.calibration.deployment_status import UnusableObjectError, measure_deployment
from specdecode_operator.calibration.engine_log import Given, Measurement, UnusableLogError, measure
from specdecode_operator.cli.calibrate.engine_runs import EngineRun
from specdecode_operator.cli.input_files import read_deployments, refuse_unused, with_configs
from specdecode_operator.cli.options import fail
from specdecode_operator.cli.terminal import say
from specdecode_operator.cli.text_files import DocumentError, open_to_read, place_of, read_text, replaced_whole
from specdecode_operator.deployment.spec.checkpoints import MODEL_UNKNOWN
from specdecode_operator.documents.limits import MAX_BYTES
from specdecode_operator.engine.startup_log import MalformedLogError, read_startup_log
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.sizing.pair.calibration import (
    Calibration,
    CalibrationEntry,
    CalibrationError,
    parse_calibration,
    serialize_calibration,
)

_GIB: Final = 2**30


def of_deployments(files: list[str], configs: Mapping[str, dict[str, Any]]) -> list[CalibrationEntry]:
    """Print the comparison of each object and return their entries."""
    reading = read_deployments(files)
    if reading.errors or not reading.documents:
        fail(str(reading.errors[0]) if reading.errors else f"{', '.join(files)}: holds no SpecDecodeDeployment")
    try:
        refuse_unused(configs, reading.documents)
    except DocumentError as error:
        fail(error)
    entries = []
    for document in reading.documents:
        try:
            measurement = measure_deployment(
                {**document.body, "spec": with_configs(document.body.get("spec"), configs)}
            )
        except UnusableObjectError as error:
            fail(f"{document.name} ({document.place}): {error}")
        except InvalidSpecError as error:
            hint = "; or use --model-config ID=PATH" if error.reason == MODEL_UNKNOWN else ""
            fail(f"{document.name} ({document.place}): {error}{hint}")
        say("\n".join(_table(document.name, measurement)))
        entries.append(measurement.entry)
    return entries


def of_logs(files: list[Path], given: Given) -> list[CalibrationEntry]:
    """Print the comparison of each log, once all could be read, and return their entries."""
    logs = [(place_of(str(file)), _log(file)) for file in files]
    return [_measured(name, text, given) for name, text in logs]


def of_runs(runs: list[EngineRun], given: Given, out: Path) -> list[CalibrationEntry]:
    """Print the comparison of each run and return their entries; each is kept at once, for runs take minutes."""
    entries: list[CalibrationEntry] = []
    for run in runs:
        say(f"starting {' '.join(run.command)}", err=True)
        try:
            entries.append(_measured(run.name, run.start(), run.settle(given)))
        except RuntimeError as error:
            fail(error)
        write_entries(out, entries)
    return entries


def _measured(name: str, text: str, given: Given) -> CalibrationEntry:
    """Print one comparison and return its entry."""
    try:
        measurement = measure(read_startup_log(text), given)
    except (MalformedLogError, UnusableLogError, InvalidSpecError) as error:
        fail(f"{name}: {error}")
    say("\n".join(_table(name, measurement)))
    return measurement.entry


def _table(name: str, measurement: Measurement) -> list[str]:
    entry = measurement.entry
    precisions = " + ".join(filter(None, (entry.target_precision, entry.draft_precision)))
    tokens_a_step = f" K={entry.num_speculative_tokens}" if entry.num_speculative_tokens else ""
    engine = (
        f"{name}: {entry.model} in {precisions}, vLLM {entry.engine_version} ({entry.runner}) on {entry.tensor} x"
        f" {entry.product}, {entry.max_num_seqs} sequences, {entry.max_num_batched_tokens} batched tokens,"
        f" {entry.method}{tokens_a_step}"
    )
    lines = [
        engine,
        f"{'GiB on each GPU':<30}{'predicted':>10}{'reported':>10}{'residual':>10}",
    ]
    for term in measurement.terms:
        reported = term.reported_bytes
        residual = None if reported is None else term.predicted_bytes - reported
        lines.append(f"{term.name:<30}{_gib(term.predicted_bytes)}{_gib(reported)}{_gib(residual, sign='+')}")
    tokens = measurement.reported_tokens
    said = "not said" if tokens is None else f"{tokens:,}"
    return [*lines, f"KV cache tokens: {measurement.predicted_tokens:,} predicted, {said} reported", ""]


def _gib(size_bytes: int | None, sign: str = "") -> str:
    return f"{'-':>10}" if size_bytes is None else f"{size_bytes / _GIB:>{sign}10.2f}"


def write_entries(out: Path, entries: list[CalibrationEntry]) -> None:
    """Add entries to the file; it is replaced whole, so that an interruption leaves the old one."""
    try:
        old = parse_calibration(read_text(str(out))) if out.exists() else Calibration()
        with replaced_whole(out) as stream:
            stream.write(serialize_calibration(old.with_entries(entries)))
    except DocumentError as error:
        fail(error)
    except CalibrationError as error:
        fail(f"{place_of(str(out))}: {error}")
    except OSError as error:
        fail(f"{place_of(str(out))}: {error.strerror}: name a file that can be written")


def _log(file: Path) -> str:
    """Return the beginning of a log, which is where an engine's start is."""
    try:
        with open_to_read(str(file)) as stream:
            return stream.read(MAX_BYTES).decode(errors="replace")
    except DocumentError as error:
        fail(error)
    except OSError as error:
        fail(f"{place_of(str(file))}: {error.strerror}: name a file that can be read")
