"""Sizing stays free of I/O libraries and of the rest of the operator."""

import subprocess
import sys

FORBIDDEN = ("pydantic", "kopf", "kubernetes", "torch", "vllm", "httpx", "urllib.request", "socket", "yaml")

SCRIPT = """
import sys
import specdecode_operator.sizing.plan
ours = [name for name in sys.modules if name.startswith("specdecode_operator.")]
rooms = ("sizing", "untrusted", "vllm.versions", "enums", "problems", "redaction")
may = tuple(f"specdecode_operator.{name}" for name in rooms)
print([name for name in ours if not name.startswith(may) and name != "specdecode_operator.vllm"])
print([name for name in sys.argv[1:] if name in sys.modules])
"""


def test_importing_sizing_loads_no_io_or_operator_modules() -> None:
    result = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{SCRIPT}", *FORBIDDEN],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines() == ["[]", "[]"]
