"""Read models from the hub, for commands with `--hub` and for the Jobs that read models.

Responses are bounded in size and time. Files are read at one commit, with range requests, and cached per commit.
"""

import asyncio
import hashlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx

from specdecode_operator.cli.terminal import say_line
from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint, CheckpointError, read_checkpoint
from specdecode_operator.deployment.models.model_facts import checkpoint_of
from specdecode_operator.problems import printable
from specdecode_operator.version import __version__

DEFAULT_ENDPOINT: Final = "https://huggingface.co"
"""Default of huggingface_hub (constants.py), which also reads HF_ENDPOINT and HF_TOKEN."""
_TOKEN: Final = re.compile(r"[!-~]{1,512}")
_MOST_REDIRECTS: Final = 5
_CONNECT_S: Final = 10
_SILENCE_S: Final = 30


@dataclass(frozen=True)
class HubSettings:
    """Endpoint and token of the hub."""

    endpoint: str
    host: str
    token: str = field(repr=False)

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> "HubSettings":
        """Read the settings from the environment variables of huggingface_hub."""
        try:
            url = httpx.URL(environment.get("HF_ENDPOINT", "").strip() or DEFAULT_ENDPOINT)
        except httpx.InvalidURL:
            url = httpx.URL("")
        if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
            raise CheckpointError("HubRefused", f"HF_ENDPOINT must be a URL such as {DEFAULT_ENDPOINT}")
        token = environment.get("HF_TOKEN", "").strip()
        if token and not _TOKEN.fullmatch(token):
            raise CheckpointError("HubRefused", "HF_TOKEN contains invalid characters: set it again")
        return cls(str(url).rstrip("/"), url.netloc.decode("ascii"), token)


@dataclass
class Allowance:
    """Limits for reading a repository: a deadline on the event loop's clock, and bytes in total and per request."""

    until_s: float
    left_bytes: int
    left_at_once_bytes: int


class HubClient:
    """Client of a hub. Requests run on an event loop, because only that can time out a server that sends slowly."""

    def __init__(self, settings: HubSettings) -> None:
        self.settings = settings
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._client = httpx.AsyncClient(
            # A compressed response could expand without bound, and does not support ranges.
            headers={"Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {settings.token}"} if settings.token else {}),
            timeout=httpx.Timeout(_SILENCE_S, connect=_CONNECT_S),
            # After a redirect to another host, httpx does not send the token.
            follow_redirects=True,
            max_redirects=_MOST_REDIRECTS,
            event_hooks={"request": [self._refuse_downgrade]},
        )

    def get(self, path: str, allowance: Allowance, *, start: int, length: int) -> bytes:
        """Return at most ``length`` bytes from ``start``; raise CheckpointError if the request fails."""
        answer = self._get(f"{self.settings.endpoint}/{path}", allowance, start, length)
        return asyncio.run_coroutine_threadsafe(answer, self._loop).result()

    async def _get(self, url: str, allowance: Allowance, start: int, length: int) -> bytes:
        host, found = self.settings.host, bytearray()
        wanted = {"Range": f"bytes={start}-{start + length - 1}"}
        try:
            async with asyncio.timeout_at(allowance.until_s), self._client.stream("GET", url, headers=wanted) as answer:
                if problem := _problem(answer, host, start):
                    raise CheckpointError(*problem)
                async for part in answer.aiter_raw():
                    found += part
                    if len(found) >= length:
                        break
                    if len(found) > min(allowance.left_at_once_bytes, allowance.left_bytes):
                        raise CheckpointError("HubRefused", f"{host} sends more data than the headers of a model need")
        except TimeoutError:
            raise CheckpointError("HubUnreachable", f"{host} responds too slowly: try again later") from None
        except httpx.TooManyRedirects:
            raise CheckpointError("HubRefused", f"{host} redirects more than {_MOST_REDIRECTS} times") from None
        except httpx.TimeoutException:
            raise CheckpointError("HubUnreachable", f"{host} does not answer: try again later") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError):
            message = f"{host} cannot be reached over HTTP: check HF_ENDPOINT and the network"
            raise CheckpointError("HubUnreachable", message) from None
        allowance.left_bytes -= len(found)
        return bytes(found[:length])

    async def _refuse_downgrade(self, request: httpx.Request) -> None:
        if self.settings.endpoint.startswith("https:") and request.url.scheme != "https":
            raise CheckpointError("HubRefused", f"{self.settings.host} redirects to a URL without TLS")


def _problem(answer: httpx.Response, host: str, start: int) -> tuple[str, str] | None:
    """Return reason and message for a failed request, without the untrusted text of the response."""
    code, status = answer.headers.get("X-Error-Code", ""), answer.status_code
    if code == "GatedRepo":
        return "HubRefused", "is gated: accept its terms on the hub, and set HF_TOKEN to a token of that account"
    if code == "RevisionNotFound":
        return "HubRefused", "has no such revision on the hub"
    if status in (401, 403, 404):
        # The hub hides repositories that the caller may not read.
        return "HubRefused", f"not found on {host}, or private: check the id, or set HF_TOKEN"
    encoded = answer.headers.get("Content-Encoding", "identity") != "identity"
    if status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
        return "HubUnreachable", f"{host} answers HTTP {status}: try again later"
    if encoded or (start and status != HTTPStatus.PARTIAL_CONTENT):
        why = "ignores Accept-Encoding: identity" if encoded else "does not support range requests"
        return "HubRefused", f"{host} {why}"
    return None


HUB_ID: Final = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
COMMIT: Final = re.compile(r"[0-9A-Za-z]{7,64}")

_DEADLINE_S: Final = 120
_LISTING_LIMIT_BYTES: Final = 8 * 2**20
_READ_LIMIT_BYTES: Final = 32 * 2**20
"""Maximum size of a header or index. The largest known has 200,000 tensors and takes 20 MiB."""
_TOTAL_LIMIT_BYTES: Final = 128 * 2**20
_MOST_FILES: Final = 4096


class ListedRepository:
    """A model on the hub at the commit of a revision. Only listed files are requested."""

    def __init__(self, hub: HubClient, model: str, revision: str | None) -> None:
        if not HUB_ID.fullmatch(model) or ".." in model:
            raise CheckpointError("HubRefused", "is not a hub id such as owner/model")
        self.where = "the repository"
        self._hub, self._model = hub, model
        self._allowance = Allowance(time.monotonic() + _DEADLINE_S, _TOTAL_LIMIT_BYTES, _READ_LIMIT_BYTES)
        path = f"api/models/{model}/revision/{quote(revision or 'main', safe='')}?blobs=true"
        listing = hub.get(path, self._allowance, start=0, length=_LISTING_LIMIT_BYTES)
        self.commit: str | None = None
        self._listed: dict[str, int | None] = {}
        try:
            listed: Any = json.loads(listing)
            self.commit, files = listed["sha"], listed["siblings"]
            self._listed = {each["rfilename"]: each.get("size") for each in files if "/" not in each["rfilename"]}
            sizes = self._listed.values()
            is_sound = all(size is None or (type(size) is int and size >= 0) for size in sizes)
            is_commit = isinstance(self.commit, str) and COMMIT.fullmatch(self.commit)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            is_sound = is_commit = False
        if not is_sound or not is_commit or len(self._listed) > _MOST_FILES:
            raise CheckpointError(
                "HubRefused", f"{hub.settings.host} returned no valid list of files: check HF_ENDPOINT"
            )

    def sizes(self) -> dict[str, int | None]:
        """Return the sizes of top-level files. vLLM loads no other files."""
        return self._listed

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes of a file, or fewer at its end."""
        path = f"{self._model}/resolve/{self.commit}/{quote(name, safe='')}"
        return self._hub.get(path, self._allowance, start=start, length=length)


_FILE_LIMIT_BYTES: Final = 2**20


class HubCache:
    """Cache of model facts by hub, id and commit. Without a usable folder, it stays empty."""

    def __init__(self, folder: Path | None, endpoint: str) -> None:
        self._folder, self._endpoint = folder, endpoint

    def commit(self, model: str, revision: str | None) -> str | None:
        """Return the commit of a revision at the last request."""
        found = self._read({"model": model, "revision": revision})
        return found if isinstance(found, str) else None

    def keep_commit(self, model: str, revision: str | None, commit: str) -> None:
        """Store the commit of a revision."""
        self._write({"model": model, "revision": revision}, commit)

    def checkpoint(self, model: str, commit: str) -> Checkpoint | None:
        """Return the facts of a model at a commit."""
        try:
            return checkpoint_of(self._read({"model": model, "commit": commit}))
        except (ValueError, LookupError, TypeError, AttributeError):
            return None

    def keep_checkpoint(self, model: str, commit: str, checkpoint: Checkpoint) -> None:
        """Store the facts of a model at a commit."""
        self._write({"model": model, "commit": commit}, asdict(checkpoint))

    def _read(self, key: dict[str, str | None]) -> Any:
        """Return the value of a key; None if it is missing or the file has another key."""
        whole, path = self._place(key)
        try:
            if path is None:
                return None
            with path.open("rb") as stream:
                entry = json.loads(stream.read(_FILE_LIMIT_BYTES))
            return entry["value"] if entry["key"] == whole else None
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None

    def _write(self, key: dict[str, str | None], value: Any) -> None:
        whole, path = self._place(key)
        if path is None:
            return
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, part = tempfile.mkstemp(dir=path.parent, suffix=".part")
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                    stream.write(json.dumps({"key": whole, "value": value}))
                Path(part).replace(path)
            except OSError:
                Path(part).unlink(missing_ok=True)

    def _place(self, key: dict[str, str | None]) -> tuple[dict[str, str | None], Path | None]:
        # Other versions may read different facts from the same files.
        whole = {"endpoint": self._endpoint, "version": __version__, **key}
        digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
        return whole, None if self._folder is None else self._folder / f"{digest[:40]}.json"


def cache_folder() -> Path | None:
    """Return the cache folder of the XDG Base Directory Specification; None without a home directory."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if given.startswith("/") else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "specdecode" / "hub"


_WHOLE_COMMIT: Final = 40


@dataclass
class HubModels:
    """Models of one command. Each model is requested once."""

    _found: dict[tuple[str, str | None], Checkpoint | CheckpointError] = field(default_factory=dict)
    _client: HubClient | None = None

    def find(self, model: str, revision: str | None) -> Checkpoint:
        """Return the facts of a model at a revision, by default main; raise CheckpointError if it cannot be read."""
        key = (model, revision)
        if key not in self._found:
            try:
                self._found[key] = self._read(model, revision)
            except CheckpointError as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, CheckpointError):
            # The message may contain untrusted names of files and tensors.
            raise CheckpointError(found.reason, printable(found.message))
        return found

    def _read(self, model: str, revision: str | None) -> Checkpoint:
        settings = HubSettings.of()
        cache = HubCache(cache_folder(), settings.endpoint)
        if revision is not None and len(revision) == _WHOLE_COMMIT and COMMIT.fullmatch(revision):
            kept = cache.checkpoint(model, revision)
            if kept is not None:
                return kept
        if self._client is None:
            self._client = HubClient(settings)
        try:
            repository = ListedRepository(self._client, model, revision)
        except CheckpointError as error:
            last = cache.commit(model, revision) if error.reason == "HubUnreachable" else None
            kept = None if last is None else cache.checkpoint(model, last)
            if kept is None:
                raise
            say_line(f"warning: {error.message}; using cached facts of {model} at commit {str(last)[:12]}", err=True)
            return kept
        commit = str(repository.commit)
        checkpoint = cache.checkpoint(model, commit)
        if checkpoint is None:
            try:
                checkpoint = read_checkpoint(repository)
            except (ValueError, RecursionError, OverflowError, MemoryError) as error:
                raise CheckpointError("HubRefused", "its files are invalid") from error
            cache.keep_checkpoint(model, commit, checkpoint)
        cache.keep_commit(model, revision, commit)
        say_line(f"{model}: read from {settings.host} at commit {commit[:12]}", err=True)
        return checkpoint
