"""The page in a browser: it opens from a file, without a network, and there is nothing to complain of."""

from pathlib import Path

import pytest
from PIL import Image

from specdecode_operator.capture.report.report import Outputs, make_report
from tests.support.browser import find, visit
from tests.support.drawn_captures import write_capture

_HOSTILE = "<img src=x onerror=alert(1)>"
_FIGURES = 12


@pytest.fixture(scope="module")
def browser() -> str:
    found = find()
    if found is None:
        pytest.skip("no browser: apt-get install chromium-headless-shell (./just parts unit does, where it may)")
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    captured = write_capture(folder / "captured", capture=_HOSTILE)
    replayed = write_capture(folder / "replayed", 50, gap_ms=11.0)
    make_report([captured], [replayed], Outputs(folder / "report.html"))
    return folder / "report.html"


def test_it_opens_without_a_word_in_the_console(browser: str, page: Path, tmp_path: Path) -> None:
    seen = visit(browser, page, tmp_path / "profile")
    assert seen.console == []
    assert seen.document.count("<svg") == _FIGURES + 1, "all figures, and a timeline for each capture"
    assert "<img src" not in seen.document


def test_a_page_with_an_error_has_one_in_the_console(browser: str, page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("<main>", "<main><script>alert(1)</script><img src=http://x.invalid>"))
    assert len(visit(browser, broken, tmp_path / "profile").console) == 2


def test_figures_are_drawn_with_their_names(browser: str, page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    visit(browser, page, tmp_path / "profile", picture=picture)
    colours = {colour for _, colour in Image.open(picture).convert("RGB").getcolors(2**24)}
    assert {(0, 0x72, 0xB2), (0xD5, 0x5E, 0)} <= colours, "both captures have their bars"
