"""A model's repository on the hub: what it lists at one commit, and ranges of its files."""

import json
import re
import time
from typing import Any, Final
from urllib.parse import quote

from specdecode_operator.cli.hub.client import Allowance, HubClient
from specdecode_operator.resolver.read_model_facts import CheckpointError

HUB_ID: Final = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
COMMIT: Final = re.compile(r"[0-9A-Za-z]{7,64}")

_DEADLINE_S: Final = 120
_LISTING_LIMIT_BYTES: Final = 8 * 2**20
_READ_LIMIT_BYTES: Final = 32 * 2**20
"""Of one header or index: the longest known, of 200,000 tensors, takes 20 MiB."""

_TOTAL_LIMIT_BYTES: Final = 128 * 2**20
_MOST_FILES: Final = 4096


class ListedRepository:
    """A model on the hub, at the commit of a revision. Only what is listed is asked for."""

    def __init__(self, hub: HubClient, model: str, revision: str | None) -> None:
        if not HUB_ID.fullmatch(model) or ".." in model:
            raise CheckpointError("HubRefused", "is no hub id such as owner/model")
        self.where = "the repository"
        self._hub, self._model = hub, model
        self._allowance = Allowance(time.monotonic() + _DEADLINE_S, _TOTAL_LIMIT_BYTES, _READ_LIMIT_BYTES)
        path = f"api/models/{model}/revision/{quote(revision or 'main', safe='')}?blobs=true"
        listing = hub.get(path, self._allowance, start=0, length=_LISTING_LIMIT_BYTES)
        self.commit: str | None
        self.commit, self._listed = _listing(listing, hub.settings.host)

    def sizes(self) -> dict[str, int | None]:
        """Files at the top of the repository: vLLM loads no others."""
        return self._listed

    def read(self, name: str, start: int, length: int) -> bytes:
        """Bytes of a file: fewer where it ends."""
        path = f"{self._model}/resolve/{self.commit}/{quote(name, safe='')}"
        return self._hub.get(path, self._allowance, start=start, length=length)


def _listing(text: bytes, host: str) -> tuple[str, dict[str, int | None]]:
    """Return the commit, and the sizes of the files at its top."""
    try:
        listing: Any = json.loads(text)
        commit, files = listing["sha"], listing["siblings"]
        sizes = {file["rfilename"]: file.get("size") for file in files if "/" not in file["rfilename"]}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError("HubRefused", f"{host} lists no files of it: check HF_ENDPOINT") from error
    sound = all(size is None or (type(size) is int and size >= 0) for size in sizes.values())
    if not sound or not isinstance(commit, str) or not COMMIT.fullmatch(commit) or len(sizes) > _MOST_FILES:
        raise CheckpointError("HubRefused", f"{host} lists no files of it: check HF_ENDPOINT")
    return commit, sizes
