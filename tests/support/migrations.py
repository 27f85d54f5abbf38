"""What becomes of the one server of an object."""

from collections.abc import Iterable
from typing import Any

from specdecode_operator.migration.convert import Migration, migrate_workload
from specdecode_operator.migration.sources.reading import read_workloads


def migrate(
    body: dict[str, Any],
    services: Iterable[dict[str, Any]] = (),
    *,
    name: str | None = None,
    engine_version: str | None = None,
) -> Migration:
    """Return the object that means the same as the one server of an object, such as a Deployment of vLLM."""
    (workload,) = read_workloads(body)
    return migrate_workload(workload, services, name=name, engine_version=engine_version)
