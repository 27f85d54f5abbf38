"""Entry point that vLLM loads through the group vllm.stat_logger_plugins.

vLLM creates one such object in every process that serves requests, and in no other, after it has connected to the
engine and before it asks for the first message. The recorder needs only that moment: a stat logger sees neither
request ids nor chunks.
"""

from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from .hooks import start


class RecorderPlugin(AggregateStatLoggerBase):  # type: ignore[misc] # vLLM is not there where this is checked
    """A logger of statistics that logs none, but starts the recorder."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        start(vllm_config, engine_indexes)

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Ignore what every message brings."""

    def log_engine_initialized(self) -> None:
        """Ignore it."""
