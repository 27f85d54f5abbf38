"""Where the code says no: the places that make a `Problem`, and which of them a case comes to."""

import ast
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from specdecode_operator.problems import Problem

MAKERS = ("Problem", "_problem")
"""What makes a problem: the class, and the helpers of modules that fill in a field."""


def refusal_sites(modules: Sequence[ModuleType]) -> set[str]:
    """Return a name for each place of the modules that makes a problem."""
    return {name for module in modules for name, _ in _sites(Path(str(module.__file__)))}


@contextmanager
def sites_visited() -> Iterator[set[str]]:
    """Yield the names of the places that made problems until the end of the block."""
    visited: set[str] = set()
    made = Problem.__init__

    def remember(problem: Problem, *arguments: Any, **more: Any) -> None:
        visited.add(_site_of(sys._getframe(1)))
        made(problem, *arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Problem, "__init__", remember)
        yield visited


def _site_of(frame: FrameType) -> str:
    while frame.f_code.co_name in MAKERS:
        assert frame.f_back is not None
        frame = frame.f_back
    line = frame.f_lineno
    return next(name for name, lines in _sites(Path(frame.f_code.co_filename)) if line in lines)


def _sites(path: Path) -> Iterator[tuple[str, range]]:
    """Yield the name and the lines of each place: the module, the function, and a number where it has several."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef) and function.name not in MAKERS:
            calls = [call for call in ast.walk(function) if isinstance(call, ast.Call) and _makes(call)]
            for number, call in enumerate(sorted(calls, key=lambda call: call.lineno), start=1):
                suffix = f" {number}" if len(calls) > 1 else ""
                yield f"{path.stem}.{function.name}{suffix}", range(call.lineno, (call.end_lineno or call.lineno) + 1)


def _makes(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in MAKERS
