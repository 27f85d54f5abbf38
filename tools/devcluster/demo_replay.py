"""What the demo's capture is good for afterwards, without the engine: it is played back, asked again, and pictured."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devcluster.host.errors import ClusterError
from devcluster.host.progress import step

SPECDECODE = Path(sys.executable).with_name("specdecode")
_END_S = 60


def replay_and_report(capture: Path) -> Path:
    """Play a capture back under its own load, record that, and return a page with both."""
    replayed, asked, page = (capture.with_name(f"{capture.name}-{what}") for what in ("replay", "asked", "report.html"))
    # Those of another demo's run with the same capture
    for folder in (replayed, asked):
        shutil.rmtree(folder, ignore_errors=True)
    with (
        _serving(capture, replayed) as url,
        step("playing it back without vLLM: specdecode replay serve, replay drive"),
    ):
        _specdecode("replay", "drive", str(capture), f"--url={url}", f"--out={asked}")
    # What client and server wrote is one capture, as of an engine.
    for file in asked.iterdir():
        file.rename(replayed / file.name)
    asked.rmdir()
    with step("drawing both: specdecode capture report --replayed"):
        _specdecode("capture", "report", str(capture), f"--replayed={replayed}", f"--output={page}")
    return page


@contextmanager
def _serving(capture: Path, replayed: Path) -> Iterator[str]:
    """Serve a capture, and record that; yields the URL."""
    options = ("--match=request-id", "--unmatched=refuse", "--port=0", f"--record={replayed}")
    command = [str(SPECDECODE), "replay", "serve", str(capture), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = []
        try:
            for line in process.stdout:
                said.append(line)
                if " on http://" in line:
                    break
            else:
                raise ClusterError(f"specdecode replay serve {capture}: {''.join(said).strip()}")
            yield said[-1].rpartition(" on ")[2].strip()
        finally:
            # It writes the end of its recording.
            process.terminate()
            process.communicate(timeout=_END_S)


def _specdecode(*arguments: str) -> None:
    done = subprocess.run([SPECDECODE, *arguments], check=False, text=True, capture_output=True)
    if done.returncode:
        said = f"{done.stdout}{done.stderr}".strip()
        raise ClusterError(f"specdecode {' '.join(arguments)} ended with exit code {done.returncode}:\n{said}")
