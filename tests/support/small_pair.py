"""The demo's deployment with a smaller pair: its engines start and answer faster, but its draft does not pay off."""

from pathlib import Path

import yaml

from tests.support.objects import Body, tiny_cpu

EXAMPLES = Path(__file__).parents[2] / "examples"


def small_pair() -> Body:
    """Return examples/tiny-cpu.yaml with the models that examples/tiny-models.yaml writes to `pair`."""
    body: Body = yaml.safe_load((EXAMPLES / "tiny-cpu.yaml").read_text())
    small = tiny_cpu()
    body["spec"] |= {"target": small["target"], "speculation": small["speculation"]}
    return body
