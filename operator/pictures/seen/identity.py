"""Which capture a picture is of: what its manifest and its trace's header say, made safe to show."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from specdecode_operator.capture.files.formats import MANIFEST, TraceMeta
from specdecode_operator.documents.json_text import parse_json
from specdecode_operator.documents.limits import MAX_BYTES, UnreadableTextError
from specdecode_operator.problems import shown

_NAME: Final = 130
"""Two names of Kubernetes have 63 letters each; those of models are shorter."""

_HASH: Final = 12
_OURS: Final = "specdecode-operator"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A capture's identity, each part short enough for a caption; empty where it is not known."""

    name: str  # namespace/name, and its arm where it has several
    model: str
    gpu: str
    vllm: str
    config_hash: str
    speculation: str  # such as ``draft_model, K 4``; ``none`` for an engine without
    source: str  # who made it, where that was not our own recorder in front of a real engine
    plan: Mapping[str, Any] = field(default_factory=dict)  # what the operator planned, as the manifest repeats it
    kv_cache_tokens: int | None = None  # what the engine said it allocated

    def caption(self, requests: int) -> str:
        """Return who made a picture's figures, in one line."""
        vllm, config = self.vllm and f"vLLM {self.vllm}", self.config_hash and f"config {self.config_hash}"
        parts = (
            self.name,
            self.model,
            self.gpu,
            vllm,
            config,
            f"{requests:,} request{'s' * (requests != 1)}",
            self.source,
        )
        return " · ".join(filter(None, parts))


def identify(folder: Path | None, meta: TraceMeta, trace: str) -> tuple[Identity, str | None]:
    """Return what a capture is, and why its manifest could not be read, where it could not."""
    manifest, problem = _manifest(folder) if folder else ({}, None)
    context = _object(manifest.get("context"))
    named = f"{manifest.get('namespace')}/{manifest['capture']}" if manifest.get("capture") else meta.capture
    if named and manifest.get("arm") and isinstance(manifest.get("experiment"), dict):
        named = f"{named}/{manifest['arm']}"
    source = "" if meta.source in {None, _OURS} else f"made by {_text(meta.source)}"
    tokens = _object(manifest.get("engine_counters")).get("kv_cache_tokens")
    return Identity(
        name=_text(named or (folder.resolve().name if folder else trace)),
        model=_text(manifest.get("model") or meta.model),
        gpu=_text(manifest.get("gpu") or meta.gpu),
        vllm=_text(manifest.get("vllm") or meta.vllm_version),
        config_hash=_text(manifest.get("config_hash") or meta.config_hash)[:_HASH],
        speculation=_speculation(meta.speculative),
        source=source,
        plan=_object(context.get("plan")),
        kv_cache_tokens=tokens if isinstance(tokens, int) and tokens > 0 else None,
    ), problem


def _manifest(folder: Path) -> tuple[Mapping[str, Any], str | None]:
    path = folder / MANIFEST
    if not path.is_file():
        return {}, None
    try:
        with path.open("rb") as stream:
            return _object(parse_json(stream.read(MAX_BYTES + 1))), None
    except (OSError, UnreadableTextError) as error:
        return {}, f"{path}: {error.strerror if isinstance(error, OSError) else error}"


def _speculation(settings: dict[str, Any] | None) -> str:
    if not settings:
        return "none"
    return f"{_text(settings.get('method')) or 'unknown method'}, K {_text(settings.get('num_speculative_tokens'))}"


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return "" if value is None else shown(value, _NAME)
