"""Make the pictures of the documents with the commands that are printed next to them: `./just screenshots`.

    python -m bench.site.screenshots [NAME …]

A page is drawn by a headless Chromium, from files that are in the repository: a capture of a real vLLM. Pictures of a
terminal need a cluster, so they are only made if they are named, in the cluster of KUBECONFIG.
"""

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from PIL import Image
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from typer.testing import CliRunner

from bench.site.pages import ROOT
from specdecode_operator.cli.main import app
from tests.support import browser

PICTURES: Final = ROOT / "docs/pictures"
LARGEST_BYTES: Final = 150_000

_WIDTH_PX: Final = 1000
_COLOURS: Final = 64


class ScreenshotError(RuntimeError):
    """A command did not make what was to be shown."""


@dataclass(frozen=True)
class Screenshot:
    """A picture: the command that makes what it shows, and how much of that is shown."""

    name: str
    command: str  # beside the picture, too; what it writes follows as `out`
    out: str
    height_px: int | None = None  # from the top; None: all of it

    @property
    def sources(self) -> list[Path]:
        """Files and folders of the repository that the command reads."""
        return [ROOT / each for each in shlex.split(self.command) if "/" in each]


SCREENSHOTS: Final = (
    Screenshot("plan.png", "specdecode plan -f examples/llama-70b.yaml", "--plot=shown.png"),
    Screenshot(
        "capture-report.png", "specdecode capture report tests/data/captures/draft_model", "--out=shown.html", 1893
    ),
)


@dataclass(frozen=True)
class Terminal:
    """A picture of a terminal with commands and their output."""

    name: str
    commands: tuple[str, ...]  # all on the page with the picture


TERMINALS: Final = (Terminal("status.svg", ("kubectl get sdd", "specdecode status tiny")),)
_COLUMNS: Final = 120
_WEB_FONT: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def draw(terminal: Terminal, folder: Path) -> Path:
    """Write the picture of a terminal into a folder. Raises ScreenshotError if a command fails."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    for command in terminal.commands:
        env = {**os.environ, "COLUMNS": str(_COLUMNS)}
        done = subprocess.run(shlex.split(command), env=env, capture_output=True, text=True, check=False)  # noqa: S603  ours
        if done.returncode:
            message = f"{command}: {done.stderr.strip()[-500:]}"
            raise ScreenshotError(message)
        console.print(Text(f"$ {command}", style="bold"))
        console.print(Text.from_ansi(done.stdout.rstrip()), "", sep="\n")
    # Pictures load nothing from other hosts.
    text = _WEB_FONT.sub("", console.export_svg(title="", theme=MONOKAI, unique_id="terminal"))
    target = folder / terminal.name
    target.write_text(re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE))
    return target


def make(screenshot: Screenshot, folder: Path) -> Path:
    """Write a picture into a folder.

    Raises
    ------
    ScreenshotError
        When its command fails.
    devcluster.host.errors.ClusterError
        When there is no browser, and none can be installed.
    """
    option, _, name = screenshot.out.partition("=")
    with tempfile.TemporaryDirectory(prefix="specdecode-screenshot-") as scratch:
        shown = Path(scratch) / name
        _, *arguments = shlex.split(screenshot.command)
        arguments = [str(ROOT / each) if "/" in each else each for each in arguments]
        done = CliRunner().invoke(app, [*arguments, option, str(shown)])
        if not shown.exists():
            message = f"{screenshot.command} wrote nothing: {done.output.strip()[-500:]}"
            raise ScreenshotError(message)
        if shown.suffix == ".html":
            shown = _drawn(shown)
        return _small(shown, folder / screenshot.name, screenshot.height_px)


def _drawn(page: Path) -> Path:
    browser.provide()
    found = browser.find()
    if found is None:
        message = f"{page}: no browser draws it: install chromium-headless-shell"
        raise ScreenshotError(message)
    picture = page.with_suffix(".png")
    browser.visit(found, page, page.parent / "profile", picture=picture, width=_WIDTH_PX)
    return picture


def _small(source: Path, target: Path, height_px: int | None) -> Path:
    """Write what is shown with few colours, which figures do not miss."""
    with Image.open(source) as opened:
        picture = opened.convert("RGB")
    if height_px is not None:
        picture = picture.crop((0, 0, picture.width, height_px))
    picture.thumbnail((_WIDTH_PX, picture.height))
    target.parent.mkdir(parents=True, exist_ok=True)
    picture.quantize(_COLOURS).save(target, optimize=True)
    return target


def main() -> int:
    """Make those that are named, or all that need no cluster."""
    by_name = {each.name: each for each in (*SCREENSHOTS, *TERMINALS)}
    wanted = sys.argv[1:] or [each.name for each in SCREENSHOTS]
    if unknown := set(wanted) - by_name.keys():
        sys.exit(f"screenshots: {', '.join(sorted(unknown))}: there are {', '.join(by_name)}")
    for each in map(by_name.__getitem__, wanted):
        made = draw(each, PICTURES) if isinstance(each, Terminal) else make(each, PICTURES)
        print(f"{made.relative_to(ROOT)}: {made.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
