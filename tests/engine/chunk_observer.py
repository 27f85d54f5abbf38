"""Inside EngineCore, independent of the recorder: what the scheduler hands out in every step.

A general plugin of vLLM (see recorder_server.py). It writes a line a request and step:
request id, engine timestamp, tokens, finish reason.
"""

import json
import os
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "OBSERVER_DIR"


def register() -> None:
    """Wrap Scheduler.update_from_output; vLLM calls this in each of its processes."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.update_from_output
    if getattr(original, "is_observed", False):
        return

    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        by_client = original(self, *args, **kwargs)
        lines = [
            json.dumps([output.request_id, message.timestamp, len(output.new_token_ids), str(output.finish_reason)])
            for message in by_client.values()
            for output in message.outputs
        ]
        if lines:
            with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
                file.write("\n".join(lines) + "\n")
        return by_client

    update_from_output.is_observed = True  # type: ignore[attr-defined]
    Scheduler.update_from_output = update_from_output
