"""Parses the answer of a model's reader. It comes from a user's namespace, so nothing is believed."""

import base64
import gzip
import io
from collections.abc import Mapping
from typing import Any

from specdecode_operator.documents.json_text import parse_json
from specdecode_operator.redaction import clip
from specdecode_operator.resolver.read_model_facts import (
    ERROR_LIMIT,
    MESSAGE_LIMIT_BYTES,
    Checkpoint,
    CheckpointError,
    Weights,
)

_UNPACKED_LIMIT_BYTES = 256 * 1024
_MAKES_NO_SENSE = (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError)


def unpack(message: str) -> Checkpoint:
    """Return the facts that a termination message carries.

    Raises
    ------
    CheckpointError
        The one that the message tells, or one that says that the message itself makes no sense.
    """
    try:
        answer = parse_json(message[:MESSAGE_LIMIT_BYTES])
        if "error" not in answer:
            packed = io.BytesIO(base64.b64decode(answer["facts"], validate=True))
            with gzip.GzipFile(fileobj=packed) as stream:
                return checkpoint_of(parse_json(stream.read(_UNPACKED_LIMIT_BYTES)))
        failure = CheckpointError(
            str(answer["error"]["reason"])[:64], clip(str(answer["error"]["message"]), ERROR_LIMIT)
        )
    except _MAKES_NO_SENSE as error:
        raise CheckpointError("ReaderFailed", f"the reader's answer makes no sense: {clip(message, 200)!r}") from error
    raise failure


def checkpoint_of(body: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint that its JSON describes.

    Raises
    ------
    ValueError, KeyError, TypeError, AttributeError
        When it describes no checkpoint.
    """
    weights = Weights(**body["weights"])
    counts = (weights.total_bytes, weights.tensors, *weights.bytes_by_dtype.values(), *weights.bytes_by_part.values())
    config, commit = body["config"], body.get("commit")
    holds_facts = isinstance(config, dict) and type(weights.output_head) is bool
    if not holds_facts or not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("not the facts of a checkpoint")
    return Checkpoint(config, weights, None if commit is None else str(commit)[:64])
