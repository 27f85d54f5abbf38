"""What the newest vLLM answered about sizing, so that sizing can be asked without it.

    .venv/bin/python -m tests.engine.recorded_answers

A test of this folder compares the file with the engine's answers, and writes nothing.
"""

import json
import tempfile
from pathlib import Path
from typing import Any, Final

from devcluster.images.engine_environment import install_engine_environment
from tests.engine.engine_process import Engine
from tests.engine.engine_versions import NEWEST, at_version
from tests.engine.oracle_batches import Truth, subjects
from tests.engine.oracle_process import Oracle

RECORDED: Final = Path(__file__).parents[1] / "unit/sizing/engine_answers.jsonl"
_BUFFERS: Final = "target_buffer_bytes"
_OF_STAGES: Final = (
    "target_param_bytes",
    "draft_param_bytes",
    "draft_unshared_param_bytes",
    "draft_copied_bytes",
)


def recorded() -> dict[str, Any]:
    """Return the answers of the file, by case."""
    return {line["case"]: line["answer"] for line in map(json.loads, RECORDED.read_text().splitlines())}


def answers(truth: Truth) -> dict[str, Any]:
    """Return the answers that every run asks for, by case, without what no comparison reads."""
    return {
        str(case): _shortened(answer) for batch in subjects(quick=True).all for case, answer in truth.of(batch).items()
    }


def _shortened(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        return {"error": answer["error"].splitlines()[0]}
    stages = [
        {
            **{key: stage[key] for key in _OF_STAGES if key in stage},
            _BUFFERS: {name: size for name, size in stage[_BUFFERS].items() if "cos_sin" in name},
        }
        for stage in answer["stages"]
    ]
    cache = {key: answer["kv"][0][key] for key in ("groups", "num_blocks", "tokens", "concurrency")}
    return {"settings": {"block_size": answer["settings"]["block_size"]}, "stages": stages, "kv": [cache]}


def main() -> None:
    """Ask the installed vLLM, and write its answers."""
    engine = at_version(Engine.at(Path(install_engine_environment())), NEWEST)
    with tempfile.TemporaryDirectory() as folder, Oracle(engine, h100=True, modules=("sizing_oracle",)) as oracle:
        found = answers(Truth(oracle, Path(folder)))
    lines = (json.dumps({"case": case, "answer": answer}) for case, answer in sorted(found.items()))
    RECORDED.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
