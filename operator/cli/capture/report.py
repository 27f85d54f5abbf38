"""`specdecode capture report`: pictures of captures, in one page and as files."""

from collections.abc import Sequence
from pathlib import Path

from specdecode_operator.cli.options import fail
from specdecode_operator.cli.terminal import say

_SHOWN_WARNINGS = 10


def report(  # noqa: PLR0913  each is an option
    captured: Sequence[Path],
    replayed: Sequence[Path],
    page: Path,
    *,
    png: Path | None = None,
    svg: Path | None = None,
    perfetto: Path | None = None,
) -> None:
    """Write what was asked for, and say what is in it, and what is left out and why."""
    try:
        from specdecode_operator.pictures.report import Outputs, ReportError, make_report  # noqa: PLC0415  heavy
        from specdecode_operator.replay.recording.read import RecordingError  # noqa: PLC0415
    except ImportError:
        fail("matplotlib is not installed: pip install '.[plot]' in a clone")
    try:
        made = make_report(captured, replayed, Outputs(page, png=png, svg=svg, perfetto=perfetto))
    except (RecordingError, ReportError) as error:
        fail(error)
    for warning in made.warnings[:_SHOWN_WARNINGS]:
        say(f"warning: {warning}", err=True)
    for each in made.left_out:
        say(f"left out: {each.title}: {each.why}")
    say(f"{page}: {len(made.pictures)} figure{'s' * (len(made.pictures) != 1)}")
    for what in (png, svg, perfetto):
        if what is not None:
            say(f"{what}: written")
