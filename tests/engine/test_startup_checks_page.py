"""The pages about start-up errors name every `raise` of the newest vLLM's configuration and of its core."""

import ast
import re
from pathlib import Path

import pytest

from devcluster.host.errors import ClusterError
from devcluster.host.paths import REPOSITORY
from tests.engine.engine_versions import NEWEST, SERVED, install

PAGES = [REPOSITORY / "docs/reference" / name for name in ("startup-checks.md", "startup-errors-left-to-vllm.md")]
READ = ("config/*.py", "platforms/cuda.py", "v1/core/**/*.py")


def in_the_source(package: Path) -> set[tuple[str, int]]:
    return {
        (path.relative_to(package).as_posix(), node.lineno)
        for pattern in READ
        for path in package.glob(pattern)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise)
    }


def on_the_pages() -> list[tuple[str, int]]:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    rows = re.findall(r"^\| `([\w/]+\.py)`: ([\d, ]+) \|", text, re.MULTILINE)
    return [(file, int(line)) for file, lines in rows for line in lines.split(", ")]


def test_startup_error_pages_name_every_raise_once() -> None:
    if NEWEST == SERVED:
        pytest.skip("the pages are of a version that is asked only")
    try:
        package = Path(install(NEWEST)) / "vllm"
    except ClusterError as error:
        pytest.skip(f"no vLLM {NEWEST} here ({error})")
    named = on_the_pages()
    assert len(named) == len(set(named))
    assert set(named) == in_the_source(package)
