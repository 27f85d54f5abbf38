"""Replace the weights of the draft head in the workers of an engine.

vLLM adds `HeadLoader` to the class of its workers (--worker-extension-cls), and `head_update` calls its methods in all
of them. A thread reads and verifies the head while the engine serves. The head is loaded as in vLLM's own
weight transfer (distributed/weight_transfer), which copies into the tensors that CUDA graphs have captured.
"""

import hashlib
import json
import os
import signal
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
NEW, OLD = "new", "old"
SHARED = ("embed_tokens", "lm_head")
"""Modules that a head may share with the target."""

_LARGEST_CONFIG_BYTES = 2**20
_LARGEST_WEIGHTS_BYTES = 64 * 2**30
# Keys of config.json that describe how the head was made. vLLM does not read them if it gets the head by path.
_UNREAD = frozenset({"_name_or_path", "transformers_version", "speculators_version"})

Tensors = dict[str, Any]


class RefusedError(Exception):
    """The head cannot be loaded; the message is the reason."""


class HeadLoader:
    """Methods for vLLM's worker. None of them raises, because an exception in a worker may end the engine."""

    specdecode_update: "Update | None" = None
    specdecode_folder: Path | None = None

    def specdecode_read_head(self, root: str, path: str, sha256: str) -> None:
        """Start to read and verify a head: the folder ``path`` below the mount of the claim, ``root``."""
        self.specdecode_update = Update(self, Path(root), path, sha256, self.specdecode_folder)
        self.specdecode_update.start()

    def specdecode_is_read(self) -> str | None:
        """Return None while the head is being read, the reason why it is refused, or an empty string if it is read."""
        update = self.specdecode_update
        return "no update" if update is None else update.refused

    def specdecode_load_head(self, which: str) -> str:
        """Load the new or the old head; return why that failed, or an empty string. No step may run meanwhile.

        If the new head cannot be loaded, the old one is loaded again. An engine that can load neither ends.
        """
        update = self.specdecode_update
        if update is None or update.refused != "":
            return "no head has been read"
        try:
            update.load(which)
        except Exception as error:  # noqa: BLE001 (vLLM raises many types)
            reason = f"{type(error).__name__}: {error}"
            try:
                update.load(OLD)
            except Exception:  # noqa: BLE001 (as above)
                # The container restarts with the head of its command line.
                os.kill(os.getpid(), signal.SIGKILL)
            self.specdecode_folder = update.old_folder
            return reason
        self.specdecode_folder = update.folder if which == NEW else update.old_folder
        return ""

    def specdecode_end_update(self) -> None:
        """Free the memory of an update."""
        self.specdecode_update = None


class Update(threading.Thread):
    """Reads and verifies a new head and the old one, then loads either of them.

    Parameters
    ----------
    worker
        Worker of vLLM.
    root, path, sha256
        Mount of the claim, folder of the new head in it, and checksum of its weights.
    folder
        Folder of the head in force; None for the one that the engine started with.
    """

    def __init__(self, worker: Any, root: Path, path: str, sha256: str, folder: Path | None) -> None:
        super().__init__(name="specdecode-head", daemon=True)
        self._worker, self._root, self._path, self._sha256 = worker, root, path, sha256
        self.folder = root / path
        self.old_folder = folder
        self.refused: str | None = None
        self._tensors: dict[str, Tensors] = {}

    def run(self) -> None:
        """Read both heads; set ``refused``."""
        try:
            self._read()
        except RefusedError as error:
            self.refused = str(error)
        except Exception as error:  # noqa: BLE001 (a file that safetensors rejects, for example)
            self.refused = f"{type(error).__name__}: {error}"
        else:
            self.refused = ""

    def _read(self) -> None:
        from safetensors.torch import load  # noqa: PLC0415 (only inside an engine)

        draft = _draft_of(self._worker)
        if self.old_folder is None:
            self.old_folder = Path(self._worker.vllm_config.speculative_config.draft_model_config.model)
        if self._root not in self.old_folder.parents:
            raise RefusedError(f"{self.old_folder}: the current head is not in {self._root}")
        present = str(self.old_folder.relative_to(self._root))
        config = read_below(self._root, f"{self._path}/{CONFIG_FILE}", _LARGEST_CONFIG_BYTES)
        content = read_below(self._root, f"{self._path}/{WEIGHTS_FILE}", _LARGEST_WEIGHTS_BYTES)
        found = hashlib.sha256(content).hexdigest()
        if found != self._sha256:
            raise RefusedError(f"{WEIGHTS_FILE}: SHA-256 is {found}, not {self._sha256}")
        check_configs(config, read_below(self._root, f"{present}/{CONFIG_FILE}", _LARGEST_CONFIG_BYTES))
        new = load(content)
        del content
        old = load(read_below(self._root, f"{present}/{WEIGHTS_FILE}", _LARGEST_WEIGHTS_BYTES))
        check_tensors(new, old)
        for name in _shared_weights(draft, self._worker.get_model(), new):
            # Loading it would change the target.
            if not bool((new.pop(name) == old.pop(name)).all()):
                raise RefusedError(f"{name}: differs from the current head's, which the engine shares with the target")
        self._tensors = {NEW: new, OLD: old}

    def load(self, which: str) -> None:
        """Load a head, as vLLM's transfer engines do (distributed/weight_transfer/nccl_engine.py)."""
        import torch  # noqa: PLC0415 (only inside an engine)
        from vllm.config import set_current_vllm_config  # noqa: PLC0415
        from vllm.model_executor.model_loader.reload import (  # noqa: PLC0415
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        draft = _draft_of(self._worker)
        config = self._worker.vllm_config.speculative_config.draft_model_config
        with set_current_vllm_config(self._worker.vllm_config):
            initialize_layerwise_reload(draft)
            try:
                draft.load_weights(self._tensors[which].items())
            finally:
                finalize_layerwise_reload(draft, config)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()


def _draft_of(worker: Any) -> Any:
    """Return the head that vLLM serves; raise RefusedError if it cannot be reloaded."""
    settings = worker.vllm_config.speculative_config
    if settings is None or settings.method != "eagle3":
        raise RefusedError("vLLM can only reload EAGLE-3 heads")
    if getattr(settings, "parallel_drafting", False):
        # Its mask_hidden is copied to places that a reload does not reach (llama_eagle3.py, load_weights).
        raise RefusedError("vLLM cannot reload a head that drafts in parallel")
    draft = worker.get_draft_model()
    if draft is None:
        raise RefusedError("the engine has no draft head")
    return draft


def _shared_weights(draft: Any, target: Any, tensors: Mapping[str, Any]) -> list[str]:
    """Return the tensors of a head's file that belong to modules of the target."""
    of_target = {id(module) for module in target.modules()}
    shared = [name for name, module in draft.named_modules() if id(module) in of_target]
    kinds = [kind for kind in SHARED if any(kind in name.split(".") for name in shared)]
    return [name for name in tensors if any(kind in name for kind in kinds)]


def read_below(root: Path, path: str, most_bytes: int) -> bytes:
    """Return a regular file below a folder, without following links; raise RefusedError."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    *folders, name = path.split("/")
    try:
        for part in folders:
            inner = _open_in(folder, part, os.O_DIRECTORY)
            os.close(folder)
            folder = inner
        file = _open_in(folder, name, os.O_NONBLOCK)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise RefusedError(f"{path}: not a regular file")
            if found.st_size > most_bytes:
                raise RefusedError(f"{path}: more than {most_bytes} bytes")
            with os.fdopen(file, "rb", closefd=False) as stream:
                return stream.read(found.st_size)
        finally:
            os.close(file)
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror}") from error
    finally:
        os.close(folder)


def _open_in(folder: int, name: str, flags: int) -> int:
    if name in {"", ".", ".."}:
        raise RefusedError(f"{name!r}: not the name of a file")
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=folder)


def check_configs(new: bytes, old: bytes) -> None:
    """Raise RefusedError unless two heads have the same config.json, except for how they were made."""
    try:
        parsed = [read_by_vllm(json.loads(each)) for each in (new, old)]
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{CONFIG_FILE}: invalid JSON") from error
    first, second = parsed
    for key in sorted(first.keys() | second.keys()):
        if first.get(key) != second.get(key):
            raise RefusedError(f"{CONFIG_FILE}: {key} differs from the current head's")


def read_by_vllm(config: Any) -> dict[str, Any]:
    """Return the keys of a head's config.json that vLLM reads; raise RefusedError if it is not an object."""
    if not isinstance(config, dict):
        raise RefusedError(f"{CONFIG_FILE}: not an object")
    kept = {key: value for key, value in config.items() if key not in _UNREAD}
    speculators = kept.get("speculators_config")
    if isinstance(speculators, dict):
        kept["speculators_config"] = {key: value for key, value in speculators.items() if key != "verifier"}
    return kept


def check_tensors(new: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    """Raise RefusedError unless two files have the same tensors, by name, shape and type."""
    for name in sorted(new.keys() ^ old.keys()):
        raise RefusedError(f"{name}: only in the {'new' if name in new else 'current'} head")
    for name, tensor in new.items():
        if (tensor.shape, tensor.dtype) != (old[name].shape, old[name].dtype):
            forms = (f"{list(each.shape)} {each.dtype}" for each in (tensor, old[name]))
            raise RefusedError(f"{name}: {' and '.join(forms)} differ")
