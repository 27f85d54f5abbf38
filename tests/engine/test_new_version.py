"""`./just engine-new` for a version that does not exist: one flag has another name, one message another shape."""

import json
from pathlib import Path
from typing import Any

from specdecode_operator.vllm.plugin_bundle import RECORDER
from specdecode_operator.vllm.versions import release
from tests.engine import made_up_version
from tests.engine.engine_process import HERE, Engine
from tests.engine.engine_versions import NEWEST
from tests.engine.new_version.command import Installed, examine
from tests.engine.new_version.page import page
from tests.engine.oracle_process import Oracle
from tests.engine.suffix_package import with_suffix

FLAG, RENAMED = "--enable-expert-parallel", "--share-experts"
EDITS = {
    "engine/arg_utils.py": (f'"{FLAG}"', f'"{RENAMED}"'),
    "v1/engine/output_processor.py": ("reqs_to_abort", "requests_to_abort"),
}
MISSING = "OutputProcessorOutput has no reqs_to_abort"


def test_engine_new_reports_renamed_flag_and_changed_message_shape(
    newest: Engine, h100: Oracle, models: Path, tmp_path: Path
) -> None:
    known = Installed(NEWEST, newest)
    version = f"0.{release(NEWEST)[1] + 1}"
    made = made_up_version.make(known.package, tmp_path / "packages", version, EDITS)
    new = Installed(version, with_suffix(newest.beside(made)))
    with Oracle(new.engine, h100=True) as oracle:
        text = page(examine((known, h100), (new, oracle), tmp_path, tmp_path))
        header, off, closed = _segment(oracle, models / "target", tmp_path)

    assert text.startswith(f"# vLLM {version}: changes to review since {NEWEST}\n")
    assert f"- The recorder **does not work**: {MISSING}." in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    (gone,) = (row for row in rows if f"`{FLAG}`" in row)
    assert gone[3] == "none"
    assert "vllm/arguments.py" in gone[4]
    refused = [row for row in rows if row[1].endswith(", refused`")]
    assert refused
    assert all(f"unrecognized arguments: {FLAG}" in row[3] for row in refused)
    assert any(f"| `{RENAMED}`" == row[0] for row in rows)
    assert "`OutputProcessorOutput.requests_to_abort`" in text
    assert "- `engine/arg_utils.py`: EngineArgs.add_cli_args" in text
    assert "models/" not in text, "nothing else has changed"

    flags = json.loads((tmp_path / f"flags/{version}.json").read_text())
    assert flags["flags"][FLAG] is None
    assert flags["flags"][RENAMED]["values"] == "0"
    facts = json.loads((tmp_path / f"data/{version}.json").read_text())
    assert {FLAG: "remove it; nothing replaces it"} in [fact.get("removed_flags") for fact in facts]

    assert header["vllm"] == f"{version}.0"
    assert (off["k"], off["reason"]) == ("off", MISSING)
    assert (closed["k"], closed["reason"]) == ("closed", "unknown_shape")


def _segment(oracle: Oracle, tokenizer: Path, folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a recorder in an engine that serves requests."""
    plugins, segments = folder / "plugins", folder / "segments"
    segments.mkdir()
    RECORDER.write(plugins)
    oracle.begin(HERE / "recorder_on_classes.py", folder / "copy", segments, tokenizer, packages=[plugins]).wait()
    (path,) = segments.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]
