"""Files that a Job gives to its pod."""

import asyncio
import time
from pathlib import Path

import pytest

from specdecode_operator.capture.job.pod_files import engine_image_id

IMAGE_ID = f"docker.io/vllm/vllm-openai@sha256:{'a' * 64}"


@pytest.mark.parametrize("before", [None, "", "uid-0 docker.io/other@sha256:b\n", "uid-1 \n", "uid-1\n"])
async def test_image_id_of_this_attempt_is_awaited(tmp_path: Path, before: str | None) -> None:
    """Until the operator says it, and of this pod: an earlier attempt may have had another image."""
    file = tmp_path / "engine-image-id"
    if before is not None:
        file.write_text(before)
    waiting = asyncio.create_task(engine_image_id(file, "uid-1", time.monotonic() + 60))
    await asyncio.sleep(0)  # it has looked
    assert not waiting.done()
    file.write_text(f"uid-1 {IMAGE_ID}\n")
    async with asyncio.timeout(120):
        assert await waiting == IMAGE_ID


async def test_image_id_is_none_without_mounted_file(tmp_path: Path) -> None:
    """An operator of an earlier version mounts nothing."""
    async with asyncio.timeout(120):
        assert await engine_image_id(tmp_path / "absent" / "engine-image-id", "uid-1", time.monotonic() + 3600) is None
