"""Generate the tables of docs/serve/size-a-node.md: which plans fit on a node with eight GPUs."""

import json
from collections.abc import Iterator
from typing import Any, Final

from typer.testing import CliRunner

from specdecode_operator.cli.main import app

_NODE_GPUS: Final = 8
_LENGTH: Final = 8192
_PRECISIONS: Final = ("FP8", "BF16")
_PAIR: Final = (
    *("--model", "meta-llama/Llama-3.1-70B-Instruct", "--draft", "meta-llama/Llama-3.1-8B-Instruct"),
    *("--num-speculative-tokens", "5", "--max-model-len", str(_LENGTH)),
)
_HEADER: Final = (
    f"| target | `tensor` | replicas per node | tokens per replica | requests of {_LENGTH} | tokens per node |\n"
    "| --- | --- | --- | --- | --- | --- |\n"
)


def node_plans(gpu: str) -> str:
    """Return a table with one row per precision and tensor size, planned by ``specdecode plan``."""
    return _HEADER + "".join(_row(each) for precision in _PRECISIONS for each in _candidates(gpu, precision))


def _candidates(gpu: str, precision: str) -> Iterator[dict[str, Any]]:
    options = ("--gpu", gpu, "--quantization", precision, "-o", "json")
    (planned,) = json.loads(CliRunner().invoke(app, ["plan", *_PAIR, *options]).stdout)["objects"]
    yield from sorted(planned["candidates"], key=lambda each: int(each["tensor"]))


def _row(candidate: dict[str, Any]) -> str:
    tensor, tokens = candidate["tensor"], candidate["kv_cache_tokens"]
    split = f"| {candidate['target_precision']} | {tensor} |"
    if candidate["verdict"] != "Fits":
        return f"{split} - | does not fit | - | - |\n"
    replicas = _NODE_GPUS // tensor
    return f"{split} {replicas} | {tokens:,} | {candidate['max_concurrency']:.1f} | {replicas * tokens:,} |\n"
