"""What the command line takes to read: one object, a folder of them, and files of a megabyte that are made to hurt.

    python -m bench.input

CPU time and memory are those of whole processes, the start of Python included.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
EXAMPLE: Final = "examples/llama-70b.yaml"
MEGABYTE: Final = 1_000_000

HEAD: Final = "apiVersion: specdecode.io/v1alpha1\nkind: SpecDecodeDeployment\nmetadata: {name: a}\nspec:\n"

NAME: Final = {"metadata": {"name": "a"}}

HOSTILE: Final[Mapping[str, str]] = {
    "nested.json": "[" * MEGABYTE,
    "nested.yaml": "- " * (MEGABYTE // 2),
    "keys.yaml": "".join(f"k{index:06}: 1\n" for index in range(MEGABYTE // 11)),
    "keys.json": json.dumps({f"k{index:06}": 1 for index in range(MEGABYTE // 14)}),
    "aliases.yaml": "a0: &a0 [x]\n"
    + "".join(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 9))
    + "# " * (MEGABYTE // 2),
    "documents.yaml": "---\n" * (MEGABYTE // 4),
    "lists.json": f"[{'[],' * (MEGABYTE // 3)}[]]",
    "number.json": f'{{"a": {"9" * MEGABYTE}}}',
    "tags.yaml": "".join(f"%TAG !a{index}! x\n" for index in range(MEGABYTE // 16)) + "--- a",
    "unknown-fields.yaml": HEAD + "".join(f"  k{index:06}: {{}}\n" for index in range(20_000)),
    "arguments.yaml": HEAD
    + "  engine:\n    extraArgs:\n"
    + "".join(f"    - --k{index:05}\n" for index in range(40_000)),
    "entries.yaml": HEAD + f"  engine: {{extraArgs: [{'{}, ' * 40_000}]}}\n",
    "dates.yaml": "- 2001-01-01\n" * (MEGABYTE // 14),
    "twins.json": json.dumps(
        {
            "apiVersion": "v1",
            "kind": "List",
            "items": [{"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment"} | NAME] * 8_000,
        }
    ),
    "name.yaml": HEAD + f"  target: {{model: {'m' * MEGABYTE}}}\n",
}


def main() -> None:
    """Print a line for each."""
    print(f"{'read':<44}{'CPU s':>8}{'wall s':>8}{'MB':>6}{'exit':>6}")
    _measure("plan of one object", "plan", EXAMPLE)
    with tempfile.TemporaryDirectory() as folder:
        manifests = Path(folder, "manifests")
        manifests.mkdir()
        text = (ROOT / EXAMPLE).read_text(encoding="utf-8")
        for number in range(55):
            (manifests / f"{number}.yaml").write_text(
                text.replace("name: llama-70b", f"name: llama-{number}"), encoding="utf-8"
            )
        _measure("plan of a folder of 55", "plan", str(manifests))
        for name, content in HOSTILE.items():
            file = Path(folder, name)
            file.write_text(content, encoding="utf-8")
            _measure(f"plan {name}, {len(content) / MEGABYTE:.1f} MB", "plan", str(file))
        config = f"my/model={folder}/nested.json"
        _measure("plan --model-config nested.json", "plan", EXAMPLE, "--model-config", config)
        _measure("plan --nodes keys.yaml", "plan", EXAMPLE, "--nodes", f"{folder}/keys.yaml")
        _measure("import -f nested.yaml", "import", "-f", f"{folder}/nested.yaml")


def _measure(what: str, *arguments: str) -> None:
    began_s = time.perf_counter()
    process = subprocess.Popen(  # noqa: S603  the command is ours
        [sys.executable, "-m", "specdecode_operator", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    _, status, used = os.wait4(process.pid, 0)
    cpu_s, wall_s = used.ru_utime + used.ru_stime, time.perf_counter() - began_s
    code = os.waitstatus_to_exitcode(status)
    print(f"{what:<44}{cpu_s:>8.2f}{wall_s:>8.2f}{used.ru_maxrss / 1024:>6.0f}{code:>6}")


if __name__ == "__main__":
    main()
