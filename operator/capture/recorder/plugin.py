"""Entry point that vLLM loads through the group vllm.stat_logger_plugins.

vLLM creates one such object in every process that serves requests, and in no other, after it has connected to the
engine and before it requests the first message. The recorder uses only that time: a stat logger does not get request
IDs or chunks.
"""

from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from .hooks import start


class RecorderPlugin(AggregateStatLoggerBase):  # type: ignore[misc] # vLLM is not there where this is checked
    """Starts the recorder, and ignores statistics."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        start(vllm_config, engine_indexes)

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Ignore statistics."""

    def log_engine_initialized(self) -> None:
        """Ignore the event."""
