"""Writes `operator/vllm/flags/`: what each vLLM version's own parsers take, against the version before it.

Beside flags and keys, that is which environment variables it reads.

    .venv/bin/python -m tests.engine.flag_table

Installs every version that is missing.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from devcluster.images.engine_environment import install_engine_environment
from specdecode_operator.vllm import versions
from tests.engine.engine_process import Engine
from tests.engine.engine_versions import VERSIONS, at_version
from tests.engine.oracle_process import Oracle

FLAGS = Path(versions.__file__).parent / "flags"


def keyed(flags: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rows of a parser by their long names."""
    found = {}
    for flag in flags:
        long = next(name for name in flag["names"] if name.startswith("--"))
        aliases = [name for name in flag["names"] if name != long]
        found[long] = {"values": flag["values"]} | ({"aliases": aliases} if aliases else {})
    return found


def patch(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return what turns the rows of one version into those of the next, as a JSON merge patch; null removes.

    Rows are replaced as a whole: one that loses its aliases says so with an empty list.
    """
    changed = {name: now.get(name) for name in sorted({*before, *now}) if before.get(name) != now.get(name)}
    for name, row in changed.items():
        if row is not None and "aliases" in (before.get(name) or {}):
            changed[name] = {"aliases": []} | row
    return changed


def written(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a file's text, a row a line so that changes read well."""
    lists = []
    for name, rows in parts.items():
        lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
        lists.append(f'  "{name}": {{\n{lines}\n  }}' if rows else f'  "{name}": {{}}')
    return "{\n" + ",\n".join(lists) + "\n}\n"


def main() -> None:
    """Ask every version and write the table."""
    engine = Engine.at(Path(install_engine_environment()))
    before: dict[str, dict[str, Any]] = {"flags": {}, "speculative_keys": {}, "variables": {}}
    for version in VERSIONS:
        with Oracle(at_version(engine, version)) as oracle:
            flags = keyed(oracle.ask("flags").value)
            keys = dict.fromkeys(oracle.ask("speculative_keys").value, True)
            variables = dict.fromkeys(oracle.ask("variables").value, True)
        now = {"flags": flags, "speculative_keys": keys, "variables": variables}
        parts = {name: patch(before[name], rows) for name, rows in now.items()}
        (FLAGS / f"{version}.json").write_text(written(parts), encoding="utf-8")
        before = now


if __name__ == "__main__":
    main()
