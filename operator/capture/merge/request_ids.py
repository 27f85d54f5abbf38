"""How the ids of a request in the engine tell which request of the client it was."""

from typing import Final

_CHAT: Final = "chatcmpl-"
_COMPLETION: Final = "cmpl-"


def client_id(external_id: str) -> str:
    """Return the X-Request-Id behind an engine's external id.

    ``cmpl-X-0`` is prompt 0 of the completion that came with X (entrypoints/openai/completion/serving.py), and
    ``chatcmpl-X`` a chat. The n answers to one prompt share the external id; only their internal ids differ
    (``0_cmpl-X-0-1f2e3d4c``, ``1_cmpl-X-0-...``; v1/engine/parallel_sampling.py and input_processor.py).
    """
    if external_id.startswith(_CHAT):
        return external_id.removeprefix(_CHAT)
    name, _, prompt = external_id.removeprefix(_COMPLETION).rpartition("-")
    return name if external_id.startswith(_COMPLETION) and name and prompt.isdigit() else external_id
