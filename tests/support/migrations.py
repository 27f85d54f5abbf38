"""What becomes of the one server of an object."""

from collections.abc import Iterable
from typing import Any

from specdecode_operator.importing.convert import Migration, migrate_workload
from specdecode_operator.importing.sources import read_workloads
from specdecode_operator.importing.spec_builder import MigrationError


def migrate(
    body: dict[str, Any],
    services: Iterable[dict[str, Any]] = (),
    *,
    name: str | None = None,
    engine_version: str | None = None,
) -> Migration:
    """Return the object that means the same as the one server of an object, such as a Deployment of vLLM."""
    found = read_workloads(body)
    if len(found) != 1:
        raise MigrationError("kind", str(body.get("kind")), f"holds {len(found)} servers")
    return migrate_workload(found[0], services, name=name, engine_version=engine_version)
