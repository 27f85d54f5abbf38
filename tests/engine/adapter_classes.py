"""List vLLM's model classes that support LoRA adapters; runs in the engine's Python.

Writes a JSON object to the file named by the first argument: by architecture, the tables that the class gives adapters
to, and whether it stores gate and up of its experts as one. Classes whose module cannot be imported are null.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm.model_executor.models import registry
from vllm.model_executor.models.interfaces import supports_lora

TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")


def described(architecture: str) -> Any:
    """Return what the class says; False if it does not support adapters."""
    try:
        model = registry.ModelRegistry.models[architecture].load_model_cls()
    except Exception:  # noqa: BLE001 (a package that is not here)
        return None
    if not supports_lora(model):
        return False
    return {"tables": sorted(model.embedding_modules), "stacked": bool(model.is_3d_moe_weight)}


def main() -> None:
    """Answer."""
    names = {name for table in TABLES for name in getattr(registry, table)}
    found = {name: described(name) for name in sorted(names)}
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
