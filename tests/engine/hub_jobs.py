"""Scripts that run with the engine's own huggingface_hub, as their Jobs do, against a hub on the loopback."""

import os
import subprocess
from pathlib import Path

from tests.engine.engine_process import Engine


def run_script(engine: Engine, hub_url: str, folder: Path, script: Path, *arguments: str, token: str | None) -> str:
    """Run a script as its Job does, with the engine's packages; return its answer."""
    folder.mkdir(parents=True, exist_ok=True)
    message = folder / "message"
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": str(engine.packages or ""),
        "HF_ENDPOINT": hub_url,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **({"HF_TOKEN": token} if token else {}),
    }
    command = [str(engine.python), "-c", script.read_text(), *arguments, f"--message={message}"]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert message.exists(), done.stderr
    return message.read_text()
