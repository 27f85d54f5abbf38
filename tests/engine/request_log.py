"""Has the real vLLM log a request and its answer, as `--enable-log-requests` does: runs where vLLM is installed."""

import json
import logging.config
import sys
from pathlib import Path

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.utils.request_logger import RequestLogger
from vllm.sampling_params import SamplingParams

PROMPT = 'a secret wish\nRuntimeError: the secret wish\u2028ValueError: "secret wish" \u00e9'
"""With what looks like an error, and with what may end a line."""


def main() -> None:
    """Write the log to standard output, by the configuration of logging that is named."""
    logging.config.dictConfig(json.loads(Path(sys.argv[1]).read_text()))
    log = RequestLogger(max_log_len=None)
    log.log_request_body(ChatCompletionRequest(model="m", messages=[{"role": "user", "content": PROMPT}]))
    log.log_inputs("cmpl-1", PROMPT, [1, 2], None, SamplingParams(stop=[PROMPT]), None)
    log.log_outputs("cmpl-1", PROMPT, [3], "stop")
    log.log_outputs("cmpl-1", PROMPT, [3], "stop", is_streaming=True)


if __name__ == "__main__":
    main()
