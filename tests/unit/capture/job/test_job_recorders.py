"""Recorders begin and end in their own time, and are waited for."""

import asyncio
from pathlib import Path

from specdecode_operator.capture.job.pod_files import Places
from specdecode_operator.capture.job.record_part import Recorders
from tests.support.recordings import closed, header, write_lines


async def test_the_last_api_server_to_record_is_waited_for_and_so_is_its_last_line(tmp_path: Path) -> None:
    places = Places(tmp_path, "team", "demo", "uid-1")
    places.segments.mkdir(parents=True)
    files = [places.segments / f"segment-a-{server}.jsonl" for server in range(2)]
    first = [header(server, 2, boot="a") for server in range(2)]
    recorders = Recorders(places)

    write_lines(files[0], first[:1])
    beginning = asyncio.create_task(recorders.wait_until_recording(60))
    await asyncio.sleep(0)  # it has looked
    assert not beginning.done()
    write_lines(files[1], first[1:])
    await beginning
    assert [segment.path for segment in recorders.segments()] == files

    write_lines(files[0], [first[0], closed(0, 0)])
    ending = asyncio.create_task(recorders.close(60))
    await asyncio.sleep(0)
    assert places.close_file.exists()
    assert not ending.done()
    write_lines(files[1], [first[1], closed(0, 0)])
    await ending
