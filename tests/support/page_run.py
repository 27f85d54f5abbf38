"""Running the commands of a document in their order, as a reader would who follows the page."""

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Final

from tests.support.code_blocks import Block, Check, blocks_for
from tests.support.code_blocks import blocks as all_blocks
from tests.support.documented_commands import NOT_HERE
from tests.support.documents import ROOT

_LINKED: Final = (
    *("charts", "crds", "docs", "examples", "manifests", "operator", "src", "tools", ".venv"),
    *("Containerfile", "pyproject.toml", "justfile"),
)
_DEADLINE_S: Final = 300
_TOLERANCE: Final = 0.02
_MARK: Final = "#### "
_NO_NETWORK: Final = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
"""A network of its own, in which nothing is but this machine's loopback: ports of pages are free, and nothing leaks."""


def run_page(document: str, folder: Path, kubeconfig: Path | None = None, programs: str = "") -> dict[Block, str]:
    """Run the blocks of a document that are to be run, and return what each printed.

    Raises
    ------
    AssertionError
        With the output, where a command fails.
    """
    blocks = [each for each in blocks_for(Check.RUN_OFFLINE, Check.RUN_ON_API_SERVER) if each.document == document]
    folder.mkdir(parents=True, exist_ok=True)
    for name in _LINKED:
        (folder / name).symlink_to(ROOT / name)
    (folder / "specdecode-operator").symlink_to(ROOT)  # a clone beside it, as a kustomization has it
    environment = _environment(folder, kubeconfig, programs)
    prefix = () if kubeconfig else _without_network()
    log = folder / "output"
    with log.open("w") as output:
        done = subprocess.run(
            [*prefix, "bash", "-c", _script(blocks)],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            timeout=_DEADLINE_S, check=False,
        )  # fmt: skip
    text = log.read_text(errors="replace")
    assert done.returncode == 0, f"{document} ended with exit code {done.returncode}:\n{text[-6000:]}"
    _, *printed = re.split(rf"\n{_MARK}.*\n", text)
    return dict(zip(blocks, printed, strict=True))


def _environment(folder: Path, kubeconfig: Path | None, programs: str) -> dict[str, str]:
    path = [str(Path(sys.executable).parent), *([programs] if programs else []), os.environ["PATH"]]
    given = {"PATH": os.pathsep.join(path), "HOME": str(folder), "HF_TOKEN": "hf_made_up", "LC_ALL": "C.UTF-8"}
    return given | {"KUBECONFIG": str(kubeconfig or folder / "no-cluster")}


def _script(blocks: list[Block]) -> str:
    """Return one script of all blocks: the first command that fails ends it, and what still runs ends with it."""
    absent = [f"{program}() {{ echo {shlex.quote(why)}; }}" for program, why in NOT_HERE.items()]
    parts = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT", *absent]
    for block in blocks:
        page = block.page
        assert page is not None
        if shown := _shown_before(block):
            parts.append(f"shown=$(mktemp); printf %s {shlex.quote(shown.text)} >$shown")
        parts += [shell for start, shell in page.before.items() if block.text.startswith(start)]
        text = block.text
        for name, value in page.names.items():
            text = re.sub(rf"\b{name}\b", value, text)
        # Output does not always end with a newline.
        parts += [f"echo; echo '{_MARK}{block}'", _expecting(_as_shell(block.language, text), _exit_code(block))]
    return "\n".join(parts)


def _as_shell(language: str, text: str) -> str:
    return f"python <<'PAGE'\n{text}PAGE" if language == "python" else text


def _shown_before(block: Block) -> Block | None:
    """Return the YAML that the page shows last before a block."""
    above = (each for each in all_blocks() if each.document == block.document and each.line < block.line)
    return next((each for each in reversed([*above]) if each.language == "yaml"), None)


def _exit_code(block: Block) -> int:
    assert block.page is not None
    return next((code for start, code in block.page.exits.items() if block.text.startswith(start)), 0)


def _expecting(shell: str, code: int) -> str:
    return f"(\n{shell}\n) && status=0 || status=$?\n[ $status = {code} ]" if code else shell


@cache
def _without_network() -> tuple[str, ...]:
    try:
        may = subprocess.run([*_NO_NETWORK, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        may = False
    return _NO_NETWORK if may else ()


def same_output(shown: str, printed: str) -> bool:
    """Whether lines that a document shows are among those that were printed, with figures that are nearly the same.

    Floating-point arithmetic differs a little from processor to processor.
    """
    wanted = [_with_numbers(line) for line in shown.splitlines()]
    found = [_with_numbers(line) for line in printed.splitlines()]
    starts = range(len(found) - len(wanted) + 1)
    return any(all(map(_alike, wanted, found[start : start + len(wanted)])) for start in starts)


def _with_numbers(line: str) -> tuple[str, list[float]]:
    numbers = re.findall(r"\d[\d,]*(?:\.\d+)?", line)
    return re.sub(r"\d[\d,]*(?:\.\d+)?", "#", line).rstrip(), [float(each.replace(",", "")) for each in numbers]


def _alike(shown: tuple[str, list[float]], printed: tuple[str, list[float]]) -> bool:
    (text, numbers), (other, others) = shown, printed
    return text == other and all(abs(a - b) <= _TOLERANCE * abs(b) for a, b in zip(numbers, others, strict=True))
