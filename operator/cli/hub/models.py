"""Models of the hub for the command line: read once, then from the cache."""

from dataclasses import dataclass, field
from typing import Final

from specdecode_operator.cli.hub.cache import HubCache, cache_folder
from specdecode_operator.cli.hub.client import HubClient, HubSettings
from specdecode_operator.cli.hub.repository import COMMIT, ListedRepository
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.problems import printable
from specdecode_operator.resolver.read_model_facts import Checkpoint, CheckpointError, read_checkpoint

_WHOLE_COMMIT: Final = 40


@dataclass
class HubModels:
    """The models that a command asks for, each asked for once."""

    _found: dict[tuple[str, str | None], Checkpoint | CheckpointError] = field(default_factory=dict)
    _client: HubClient | None = None

    def find(self, model: str, revision: str | None) -> Checkpoint:
        """Return what is known of a model at a revision; None is the hub's default.

        Raises
        ------
        CheckpointError
            When it cannot be had.
        """
        key = (model, revision)
        if key not in self._found:
            try:
                self._found[key] = self._read(model, revision)
            except CheckpointError as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, CheckpointError):
            # Names of files and tensors are anybody's.
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
            if error.reason != "HubUnreachable":
                raise
            return _last_known(cache, model, revision, error)
        commit = str(repository.commit)
        checkpoint = cache.checkpoint(model, commit)
        if checkpoint is None:
            checkpoint = _checkpoint(repository)
            cache.keep_checkpoint(model, commit, checkpoint)
        cache.keep_commit(model, revision, commit)
        say_line(f"{model} is read from {settings.host} at commit {commit[:12]}", err=True)
        return checkpoint


def _checkpoint(repository: ListedRepository) -> Checkpoint:
    """Return what the repository's files say; what else may go wrong with them has no name."""
    try:
        return read_checkpoint(repository)
    except (ValueError, RecursionError, OverflowError, MemoryError) as error:
        raise CheckpointError("HubRefused", "its files make no sense") from error


def _last_known(cache: HubCache, model: str, revision: str | None, error: CheckpointError) -> Checkpoint:
    """Return what was read of the model before, where the hub is out of reach now."""
    commit = cache.commit(model, revision)
    kept = None if commit is None else cache.checkpoint(model, commit)
    if kept is None:
        raise error
    say_line(f"warning: {error.message}; {model} is taken as it was at commit {str(commit)[:12]}", err=True)
    return kept
