"""Which image the engine's container runs, as its node resolved it: what no container can ask for itself."""

import asyncio
import time
from pathlib import Path
from typing import Final

IMAGE_ID_FILE: Final = Path("/specdecode/podinfo/engine-image-id")
"""Of a ConfigMap that the operator writes when the pod's status has it: one line, ``<UID of the pod> <image id>``."""

_POLL_S: Final = 0.5


async def engine_image_id(file: Path, pod_uid: str, until_s: float) -> str | None:
    """Return the image's id with its digest; None where it does not come in time, or nothing is mounted there.

    What the file says of an earlier attempt's pod is passed over. ``until_s`` is on the monotonic clock.
    """
    while (found := _read_image_id(file, pod_uid)) is None:
        if not file.parent.is_dir() or time.monotonic() >= until_s:
            return None
        await asyncio.sleep(_POLL_S)
    return found


def _read_image_id(file: Path, pod_uid: str) -> str | None:
    try:
        uid, _, image_id = file.read_text(encoding="utf-8").strip().partition(" ")
    except (OSError, UnicodeDecodeError):
        return None
    return image_id if uid == pod_uid and image_id else None
