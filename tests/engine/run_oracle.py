"""Ask the real vLLM about sizing cases, from the command line or a test.

    .venv/bin/python -m tests.engine.run_oracle CASES.json ANSWERS.json

A case: ``id``; ``config``, the content of config.json; and where they differ
from vLLM's defaults on an H100: ``tp``, ``pp``, ``ep``, ``quantization``,
``kv_cache_dtype``, ``block_size``, ``max_model_len``, ``max_num_seqs``,
``max_num_batched_tokens``, ``async``, ``prefix_caching``, ``argv`` (more
flags), ``available_bytes`` (spaces for the KV cache: bytes a GPU, or a list
with those of each pipeline stage), ``dump`` (also name every parameter) and
``speculative``: the keys of --speculative-config, with ``config`` (config.json
of the draft) instead of its model.

An answer: ``id``; ``stages``, one for each pipeline stage; ``settings`` that
the engine made of the flags; ``kv``, one for each space; ``error`` where a
step failed, after the parts that did not. Of a draft, ``draft_param_bytes``
is the whole and ``draft_unshared_param_bytes`` what is left once it took the
target's embedding and output head where they have the shape of its own.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from devcluster.images.engine_environment import install_engine_environment
from tests.engine.engine_process import Engine
from tests.engine.engine_versions import NEWEST, VERSIONS, at_version
from tests.engine.oracle_process import Oracle


class Asked:
    """Cases that a vLLM is busy with."""

    def __init__(self, oracle: Oracle, folder: Path, cases: list[dict[str, Any]]) -> None:
        """Ask, in one copy of an oracle on H100s."""
        self._answers = folder / "answers.json"
        self._copy = oracle.begin("sizing_oracle", folder, self._answers, given=json.dumps(cases))

    def get(self) -> list[dict[str, Any]]:
        """Return the answers to all cases, in their order."""
        self._copy.wait()
        result: list[dict[str, Any]] = json.loads(self._answers.read_text(encoding="utf-8"))
        return result


def main() -> None:
    """Read the cases of a file and write the answers to another."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--version", choices=VERSIONS, default=NEWEST)
    options = parser.parse_args()
    engine = at_version(Engine.at(Path(install_engine_environment())), options.version)
    cases = json.loads(options.cases.read_text(encoding="utf-8"))
    with Oracle(engine, h100=True) as oracle, tempfile.TemporaryDirectory() as folder:
        answers = Asked(oracle, Path(folder), cases).get()
    options.answers.write_text(json.dumps(answers, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
