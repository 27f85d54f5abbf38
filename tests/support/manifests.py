"""Manifests of published captures."""

from typing import Any

from specdecode_operator.capture.files.formats import AccountingEntry, Manifest
from specdecode_operator.capture.recorder.segment_format import EngineConfig

_COUNTS = ("sent", "http_rejected", "never_admitted", "records", "not_sent", "warmup", "mismatches")


def published_manifest(**fields: Any) -> Manifest:
    """Return the manifest of a capture without a request; its fields as given."""
    usual: dict[str, Any] = {
        "namespace": "team",
        "capture": "demo",
        "arm": "as-deployed",
        "repetition": 1,
        "attempt": "uid-1",
        "specdecode": "0",
        "vllm": "0.33.0",
        "model": None,
        "gpu": "H100",
        "host": "node",
        "config": EngineConfig(),
        "node": None,
        "context": {},
        "workload": {},
        "seed": 0,
        "record": {},
        "zero_monotonic_s": 0.0,
        "zero_wall_s": 0.0,
        "published_wall_s": 0.0,
        "config_hash": "",
        "engine_hash": "",
        "accounting": AccountingEntry(**dict.fromkeys(_COUNTS, 0), engine={}, equation="0 sent"),
        "engine_counters": None,
        "files": {},
        "gates": {},
        "segments": [],
        "notes": [],
        "summary": {},
    }
    return Manifest(**(usual | fields))
