"""The pictures in the documents are those that the commands beside them make."""

import re
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageStat

from bench.site.screenshots import LARGEST_BYTES, PICTURES, SCREENSHOTS, Screenshot, ScreenshotError, make
from tests.support.documents import DOCUMENTS, ROOT, relative

ALIKE = 6
"""Mean difference of a pixel, of 255: fonts differ between machines, figures do not."""


def test_there_are_no_pictures_of_which_nobody_knows_how_they_came_about() -> None:
    assert {path.name for path in PICTURES.iterdir()} == {each.name for each in SCREENSHOTS}
    others = {path for path in ROOT.glob("docs/**/*.*") if path.suffix in (".png", ".jpg", ".gif", ".webp")}
    assert {relative(path) for path in others if path.parent != PICTURES} == set()


@pytest.mark.parametrize("screenshot", SCREENSHOTS, ids=lambda each: each.name)
def test_a_picture_is_small_and_shown_beside_its_command(screenshot: Screenshot) -> None:
    assert (PICTURES / screenshot.name).stat().st_size < LARGEST_BYTES
    assert screenshot.sources
    assert [relative(path) for path in screenshot.sources if not path.exists()] == []
    shown = [path for path in DOCUMENTS if f"pictures/{screenshot.name})" in path.read_text()]
    assert shown, "no document shows it"
    for document in shown:
        _, *after = re.split(rf"pictures/{re.escape(screenshot.name)}\)", document.read_text())
        assert all(f"`{screenshot.command}`" in text[:400] for text in after), relative(document)


def test_a_command_that_makes_nothing_is_told(tmp_path: Path) -> None:
    with pytest.raises(ScreenshotError, match=r"plan -f examples/gone.yaml wrote nothing: .*gone\.yaml"):
        make(Screenshot("gone.png", "specdecode plan -f examples/gone.yaml", "--plot=gone.png"), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("screenshot", SCREENSHOTS, ids=lambda each: each.name)
def test_a_picture_is_what_its_command_makes(screenshot: Screenshot, tmp_path: Path) -> None:
    with Image.open(make(screenshot, tmp_path)) as made, Image.open(PICTURES / screenshot.name) as kept:
        assert made.size == kept.size, "./just screenshots"
        difference = ImageChops.difference(made.convert("L"), kept.convert("L"))
    (mean,) = ImageStat.Stat(difference).mean
    assert mean < ALIKE, "./just screenshots"
