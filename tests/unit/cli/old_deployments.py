"""Deployments as people wrote them by hand, and what `specdecode import` says of them."""

from pathlib import Path
from typing import Any

import yaml

from tests.unit.cli.conftest import Specdecode

DATA = Path(__file__).parent / "import_data"
INVALID = 2
LLAMA_70B, LLAMA_8B = "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"


def engine(*args: str, **changes: Any) -> dict[str, Any]:
    """A Deployment with one engine; changes replace parts of its container."""
    container = {
        "name": "vllm",
        "image": "vllm/vllm-openai:v0.32.0",
        "command": ["vllm", "serve"],
        "args": list(args) or [LLAMA_8B],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
        **changes,
    }
    labels = {"app": "old"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "old"},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }


def imported(specdecode: Specdecode, source: Path, *options: object) -> tuple[dict[str, Any], str]:
    """The spec that an import which leaves nothing open prints, and what it says beside."""
    result = specdecode("import", "-f", source, *options)
    assert result.exit_code == 0, result.stderr
    body = yaml.safe_load(result.stdout)
    assert (body["apiVersion"], body["kind"]) == ("specdecode.io/v1alpha1", "SpecDecodeDeployment")
    return body["spec"], result.stderr


def asked(specdecode: Specdecode, source: Path, *options: object) -> str:
    """What is said where something is wrong or must be decided."""
    result = specdecode("import", "-f", source, *options)
    assert result.exit_code == INVALID, result.output
    assert not isinstance(result.exception, Exception), result.exception
    return " ".join(result.stderr.split())


def with_pod(**changes: Any) -> dict[str, Any]:
    """A Deployment with one engine; changes replace parts of its pod."""
    body = engine()
    body["spec"]["template"]["spec"] |= changes
    return body
