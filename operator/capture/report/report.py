"""Draws all pictures of some captures and writes them, all or none."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from specdecode_operator.pictures.figures.acceptance import (
    by_concurrency,
    by_context,
    by_position,
    by_temperature,
    over_time,
)
from specdecode_operator.pictures.figures.arms import pictures_of
from specdecode_operator.pictures.figures.budget import budgets
from specdecode_operator.pictures.figures.bursts import step_time, tokens_per_step
from specdecode_operator.pictures.figures.cache import cache_use
from specdecode_operator.pictures.figures.drawing import STYLES, LeftOut, Picture, Series, looks, series_of
from specdecode_operator.pictures.figures.latency import by_load, client_ttft, distributions
from specdecode_operator.pictures.figures.timeline import timelines
from specdecode_operator.pictures.files import write_alone
from specdecode_operator.pictures.page import page
from specdecode_operator.pictures.perfetto import write_perfetto
from specdecode_operator.pictures.seen.arms import Arms, arms_of
from specdecode_operator.pictures.seen.capture import Capture, captures_below, read_capture
from specdecode_operator.problems import printable

MOST_CAPTURES: Final = len(STYLES)


class ReportError(Exception):
    """A report that cannot be made, in one line that says what to do."""


@dataclass(frozen=True)
class Outputs:
    """Where what goes; None: not wanted."""

    page: Path
    png: Path | None = None  # folder
    svg: Path | None = None  # folder
    perfetto: Path | None = None


@dataclass(frozen=True)
class Report:
    """What was made."""

    pictures: Sequence[Picture]
    left_out: Sequence[LeftOut]
    warnings: Sequence[str]


def make_report(captured: Sequence[Path], replayed: Sequence[Path], outputs: Outputs) -> Report:
    """Read captures, draw what there is to draw, and write it.

    Raises
    ------
    ReportError
        When there are more captures than can be told apart, or something cannot be written.
    RecordingError
        When a capture cannot be read.
    """
    for folder in (outputs.png, outputs.svg):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ReportError(f"{printable(str(folder))}: is no folder: name one for the figures")
    found = [(path, arms_of(path)) for path in captured]
    arms = [each for _, each in found if each is not None]
    folders = [
        (folder, False) for path, each in found for folder in (captures_below(path) if each is None else each.folders)
    ]
    folders += [(folder, True) for path in replayed for folder in captures_below(path)]
    if len(folders) > MOST_CAPTURES and not arms:
        raise ReportError(f"{len(folders)} captures cannot be told apart in a picture: name {MOST_CAPTURES} at most")
    # Where the page cannot be written, that is said before anything is read and drawn.
    with _written(outputs.page) as partial:
        captures = [read_capture(folder, replayed=is_replay) for folder, is_replay in folders[:MOST_CAPTURES]]
        report = _drawn(captures, arms, partial, outputs)
        if outputs.perfetto is not None:
            with _written(outputs.perfetto) as traced:
                write_perfetto(captures, traced)
    return report


def _drawn(captures: Sequence[Capture], arms: Sequence[Arms], file: Path, outputs: Outputs) -> Report:
    series = series_of(captures)
    comparison = next((each.comparison for each in arms if each.comparison is not None), None)
    warnings = [*(warning for each in captures for warning in each.warnings), *_of_arms(arms)]
    if not arms:
        warnings += _differences(captures)
    with looks():
        drawn = [*(pictures_of(comparison, captures) if comparison is not None else ()), *draw_all(series)]
        # The page first: what stands alone gets its title into the same figure.
        file.write_text(page(series, drawn, warnings, comparison), encoding="utf-8")
        pictures = [each for each in drawn if isinstance(each, Picture)]
        for picture in pictures:
            _write_alone(picture, outputs)
    return Report(pictures, [each for each in drawn if isinstance(each, LeftOut)], warnings)


def draw_all(series: Sequence[Series]) -> list[Picture | LeftOut]:
    """Return every picture, or why there is none, in the order in which they are read."""
    return [
        tokens_per_step(series),
        step_time(series),
        by_position(series),
        over_time(series),
        by_concurrency(series),
        by_context(series),
        by_temperature(series),
        distributions(series),
        by_load(series),
        client_ttft(series),
        cache_use(series),
        *timelines(series),
        budgets(series),
    ]


def _of_arms(arms: Sequence[Arms]) -> Iterator[str]:
    """Yield what is not drawn of arms, and what makes their comparison doubtful."""
    compared = [each for each in arms if each.comparison is not None]
    yield from (printable(each.warning) for each in arms if each.warning is not None)
    if len(compared) > 1:
        yield "Of several captures with arms only the first one's are compared: name one."
    for each in compared[:1]:
        if len(each.folders) > MOST_CAPTURES:
            yield f"The capture has {len(each.folders)} arms: {MOST_CAPTURES} are drawn, all are in the table."
        yield from each.comparison.notes if each.comparison is not None else ()


def _differences(captures: Sequence[Capture]) -> Iterator[str]:
    """Yield what makes a comparison one of different things."""
    for what in ("model", "speculation"):
        found = dict.fromkeys(getattr(each.identity, what) or "not known" for each in captures)
        if len(found) > 1:
            yield f"The captures have different settings: {what} is {' and '.join(found)}."


def _write_alone(picture: Picture, outputs: Outputs) -> None:
    files = [
        folder / f"{picture.name}{suffix}"
        for folder, suffix in ((outputs.svg, ".svg"), (outputs.png, ".png"))
        if folder is not None
    ]
    if not files:
        return
    try:
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
        write_alone(picture, files)
    except OSError as error:
        raise _cannot_write(files[0].parent, error) from error


@contextmanager
def _written(file: Path) -> Iterator[Path]:
    """Give a file beside the wanted one, which takes its place once it is whole."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    except OSError as error:
        raise _cannot_write(file, error) from error
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        # As any new file: mkstemp lets nobody else read it.
        mask = os.umask(0)
        os.umask(mask)
        partial.chmod(0o666 & ~mask)
        partial.replace(file)
    except OSError as error:
        raise _cannot_write(file, error) from error
    finally:
        partial.unlink(missing_ok=True)


def _cannot_write(file: Path, error: OSError) -> ReportError:
    return ReportError(f"{printable(str(file))}: {error.strerror}: name a place that can be written")
