"""The pod of a capture with several arms without a cluster: its switcher, and engines that record."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from specdecode_operator.capture.files.formats import Manifest, PartialManifest
from specdecode_operator.capture.job.entrypoint import Job
from specdecode_operator.capture.job.pod_files import RECORDER, switcher_command
from specdecode_operator.capture.job.record_part import Timeouts
from tests.support.capture_pods import PATIENT, environment

WORKLOAD = {
    "prompts": {"synthetic": {"promptTokens": 12, "outputTokens": 6, "sharedPrefixTokens": 4}},
    "phases": [{"name": "single", "pattern": "Closed", "concurrency": 1, "requests": 3}],
    "warmupRequests": 2,
}
RECORD = {"tokenIds": False, "stepStats": False}


class ArmPod:
    """A pod whose arms all have their engine at the same port: two at once there cannot be."""

    def __init__(self, root: Path, attempt: str = "uid-1", timeouts: Timeouts = PATIENT, **changes: Any) -> None:
        self.root = root / attempt
        self.volume = root / "volume"
        self.switch = self.root / "switch"
        for folder in (self.volume, self.switch):
            folder.mkdir(parents=True, exist_ok=True)
        self.environment = environment(
            self.volume,
            "http://127.0.0.1:1",
            attempt,
            **{"workload": WORKLOAD, "record": RECORD, "repetitions": 2, **changes},
        )
        self.job = Job(self.environment, timeouts, switch_folder=self.switch)

    @contextmanager
    def containers(self) -> Iterator[None]:
        """Run what the pod's other containers run: first `prepare`, then the engine's beside the body."""
        self.job.prepare(self.root / "bundle")
        RECORDER.write(self.root / "bundle")
        _, *arguments = switcher_command(str(self.root / "bundle"), str(self.switch))
        with subprocess.Popen([sys.executable, *arguments]) as self.switcher:
            try:
                yield
            finally:
                self.switcher.terminate()

    def published(self) -> list[str]:
        """Return the parts that are published, by path."""
        found = (self.volume / "team/demo").glob("*/*/manifest.json")
        return sorted(str(path.parent.relative_to(self.volume / "team/demo")) for path in found if _is_final(path))

    def manifest(self, arm: str, repetition: int) -> Manifest:
        """Return the manifest of a part that is published."""
        path = self.volume / f"team/demo/{arm}/{repetition}/manifest.json"
        return msgspec.json.decode(path.read_bytes(), type=Manifest)

    def label(self, arm: str, repetition: int) -> PartialManifest:
        """Return why a part is not published."""
        (path,) = (self.volume / "team/demo" / arm).glob(f"{repetition}.part-*/manifest.partial.json")
        return msgspec.json.decode(path.read_bytes(), type=PartialManifest)


def _is_final(manifest: Path) -> bool:
    return manifest.parent.name.isdigit()


def arm(name: str, port: int, *arguments: str, **changes: Any) -> dict[str, Any]:
    """Return an arm as the operator writes it into the settings."""
    return {
        "name": name,
        "engine": {
            "url": f"http://127.0.0.1:{port}",
            "model": "tiny",
            "max_model_len": 2048,
            "vocab_size": 1000,
        },
        "command": [sys.executable, "-m", "tests.support.recording_engine", "--port", str(port), *arguments],
        "context": {"image": "vllm:0.32", "command": ["vllm", "serve", name]},
        **changes,
    }
