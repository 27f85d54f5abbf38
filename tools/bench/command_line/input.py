"""What the command line takes to read: a folder of objects, and files of a megabyte that are made to hurt."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from bench.figures import Figure
from bench.machine import ROOT
from bench.processes import run_command

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


def figures() -> Iterator[Figure]:
    """Yield the CPU time of each."""
    with tempfile.TemporaryDirectory() as folder:
        manifests = Path(folder, "manifests")
        manifests.mkdir()
        text = (ROOT / EXAMPLE).read_text(encoding="utf-8")
        for number in range(55):
            (manifests / f"{number}.yaml").write_text(
                text.replace("name: llama-70b", f"name: llama-{number}"), encoding="utf-8"
            )
        yield _figure("plan of a folder of 55", "plan", str(manifests))
        for name, content in HOSTILE.items():
            file = Path(folder, name)
            file.write_text(content, encoding="utf-8")
            yield _figure(f"plan {name}, {len(content) / MEGABYTE:.1f} MB", "plan", str(file))
        config = f"my/model={folder}/nested.json"
        yield _figure("plan --model-config nested.json", "plan", EXAMPLE, "--model-config", config)
        yield _figure("plan --nodes keys.yaml", "plan", EXAMPLE, "--nodes", f"{folder}/keys.yaml")
        yield _figure("import -f nested.yaml", "import", "-f", f"{folder}/nested.yaml")


def _figure(name: str, *arguments: str) -> Figure:
    used = run_command(*arguments, exit_code=None)
    remark = f"{used.wall_s:.2f} s of wall time, {used.memory_mib:.0f} MiB, exit {used.exit_code}"
    return Figure(name, used.cpu_s, "s of CPU", None, remark)
