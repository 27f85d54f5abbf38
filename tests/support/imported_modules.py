"""Modules that a `specdecode` command imports."""

import subprocess
import sys
from collections.abc import Collection, Sequence


def run_and_see_imports(arguments: Sequence[str], modules: Collection[str]) -> tuple[list[str], set[str]]:
    """Run a command in a new process; return the lines that it printed, and which of these modules it imported."""
    code = (
        "import sys; from specdecode_operator.cli.main import app\n"
        f"try: app({[*arguments]!r})\n"
        "except SystemExit: pass\n"
        f"print(*({{*{[*modules]!r}}} & set(sys.modules)))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *printed, imported = finished.stdout.splitlines()
    return printed, {*imported.split()}
