"""A real vLLM with adapters and speculation, started with the arguments that the operator renders."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.engine_settings import engine_settings
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.vllm.arguments import ADAPTERS, ARGUMENTS
from tests.engine.engine_process import HERE, Engine
from tests.engine.engine_versions import SERVED
from tests.engine.recorder_server import Line, Server, serving
from tests.support.objects import Body, tiny_cpu

RANKS: Final = {"first": 8, "second": 12}
"""Rank of each adapter, by name."""


@contextmanager
def serving_adapters(engine: Engine, models: Path, folder: Path, speculation: Line) -> Iterator[Server]:
    """Run a healthy engine with the adapters, without a recorder, until the block ends."""
    adapters = folder / "adapters"
    engine.run(str(HERE / "tiny_adapters.py"), str(adapters))
    quiet = {"SPECDECODE_RECORD_DIR": "", "OBSERVER_DIR": ""}
    options = _arguments(adapters)
    with serving(engine, models, folder / "server", *options, speculation=speculation, **quiet) as server:
        yield server


def _arguments(folder: Path) -> list[str]:
    """Return an engine's arguments for adapters, with local paths."""
    adapters: list[Body] = [{"name": name, "model": name, "rank": rank} for name, rank in RANKS.items()]
    spec = SpecDecodeDeploymentSpec.parse(
        tiny_cpu(adapters=adapters, adapterSlots={"gpu": 1}, engine={"version": SERVED, "image": "localhost/engine:1"})
    )
    facts = valid_facts(spec)
    settings = engine_settings(spec, facts.pair, 1)
    words: list[str] = []
    for each in ARGUMENTS:
        if each.field == ADAPTERS and (values := each.values(settings, facts.profile)) is not None:
            words += [each.flag, *(value.replace("/models/", f"{folder}/") for value in values)]
    return words
