"""Convert LoRA adapters of a server to spec.adapters and spec.adapterSlots."""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from specdecode_operator.importing.engine_fields import read_number
from specdecode_operator.importing.model_sources import find_location
from specdecode_operator.importing.server_arguments import Argument
from specdecode_operator.importing.spec_builder import Object, SpecBuilder
from specdecode_operator.untrusted import mapping

MODULES: Final = "--lora-modules"
_RANK, _GPU, _HOST, _LAYERS = "--max-lora-rank", "--max-loras", "--max-cpu-loras", "--lora-target-modules"
_TAKEN: Final = ("--enable-lora", MODULES, _RANK, _GPU, _HOST, _LAYERS)
_DEFAULT_RANK: Final = 16
_LARGEST_RANK: Final = 512


def split_adapters(given: Sequence[Argument]) -> tuple[list[Argument], list[Argument]]:
    """Return the arguments that spec.adapters replaces, and the others.

    A server without --lora-modules loads adapters by its API, and keeps its arguments.
    """
    if not any(each.name == MODULES and each.known and each.values for each in given):
        return [], list(given)
    chosen = [each for each in given if each.name in _TAKEN and each.known and not each.path]
    return chosen, [each for each in given if each not in chosen]


def take_adapters(flags: Sequence[Argument], pod: Object, container: Object, builder: SpecBuilder) -> set[str]:
    """Take the adapters of a server, whose models are taken already; return the volumes that the operator mounts."""
    values = {each.name: each for each in flags}
    if MODULES not in values:
        return set()
    # vLLM checks the rank only when it loads an adapter; this is an upper bound.
    rank = read_number(values[_RANK].value) if _RANK in values else _DEFAULT_RANK
    rank = rank if rank is not None and 1 <= rank <= _LARGEST_RANK else _DEFAULT_RANK
    layers = list(values[_LAYERS].values) if _LAYERS in values else []
    volumes, adapters = set[str](), list[dict[str, Any]]()
    volume = mapping(builder.get("models.volume") or {}, "persistentVolumeClaim").get("claimName")
    on_hub = builder.get("models.volume") is None
    for name, path in named_paths(values[MODULES].values):
        location, field = find_location(path, pod, container), f"spec.adapters[{len(adapters)}].model"
        adapter: dict[str, Any] = {"name": name, "model": location.model, "rank": rank}
        if layers:
            adapter["targetModules"] = layers
        if location.problem:
            builder.decide(field, path, location.problem)
        elif location.host_path is not None:
            builder.decide(field, path, "is in a directory of the node: copy it to a PersistentVolumeClaim")
        elif location.claim is not None:
            volumes |= {location.volume} if location.volume else set()
            if location.claim != volume:
                adapter["persistentVolumeClaim"] = {"claimName": location.claim}
        elif not on_hub:
            message = "is on the hub, and models.volume is not: copy the adapter to that volume, or to a claim"
            builder.decide(field, path, message)
        elif location.revision:
            adapter["revision"] = location.revision
        adapters.append(adapter)
    said = values[_RANK].text if _RANK in values else f"{_RANK} (absent)"
    remark = f"rank is {said}, an upper bound: set r of each adapter_config.json"
    builder.take(values[MODULES].text, "adapters", adapters, remark)
    _take_slots(values, len(adapters), builder)
    return volumes


def _take_slots(values: dict[str, Argument], count: int, builder: SpecBuilder) -> None:
    gpu = read_number(values[_GPU].value) if _GPU in values else 1
    host = read_number(values[_HOST].value) if _HOST in values else gpu
    left = ["--enable-lora", _RANK, _LAYERS]
    for name, path, given, usual in ((_GPU, "gpu", gpu, count), (_HOST, "host", host, max(count, gpu or 1))):
        if given is None or given == usual:
            left.append(name)
        else:
            builder.take(values[name].text if name in values else f"{name} (absent)", f"adapterSlots.{path}", given)
    for name in left:
        if name in values:
            builder.own(values[name].text, "the operator sets it from spec.adapters")


def named_paths(values: Iterable[str]) -> list[tuple[str, str]]:
    """Return name and path of each value of --lora-modules: NAME=PATH or JSON (entrypoints, LoRAParserAction)."""
    found = []
    for value in values:
        adapter: Any = {}
        with suppress(ValueError, RecursionError):
            adapter = json.loads(value)
        said = mapping({"": adapter}, "")
        name, _, path = value.partition("=")
        found.append((str(said.get("name") or name), str(said.get("path") or path)))
    return found
