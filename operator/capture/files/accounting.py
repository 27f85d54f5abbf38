"""Where every request of a capture went: sent = HTTP-rejected + never admitted + engine records / n, by outcome.

The client's lines and the engine's are walked side by side in the order of their ids, sorted on the volume.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Final

import msgspec

from specdecode_operator.capture.files.formats import ClientRecord
from specdecode_operator.capture.files.lines import read_lines
from specdecode_operator.capture.files.manifest import AccountingEntry
from specdecode_operator.capture.merge.merge import read_client
from specdecode_operator.capture.merge.scratch import scratch_database
from specdecode_operator.capture.validation.totals import BY_ENGINE

_SHOWN: Final = 20
_UNADMITTED: Final = frozenset({"disconnected", "timed_out", "cancelled"})
_UNENDED: Final = frozenset({"abort", "unfinished"})


class EngineSide(msgspec.Struct, frozen=True):
    """What accounting needs of a line of trace or aborted requests."""

    request_id: str | None = None
    output_tokens: int = 0
    ended_by: str = BY_ENGINE


@dataclass(frozen=True)
class Mismatch:
    """One request that does not fit."""

    request_id: str
    what: str


@dataclass
class Accounting:
    """The terms of the equation."""

    # As in the manifest
    sent: int = 0
    http_rejected: int = 0
    never_admitted: int = 0
    engine: Counter[str] = field(default_factory=Counter)
    records: int = 0
    not_sent: int = 0
    warmup: int = 0
    mismatches: int = 0
    shown: list[Mismatch] = field(default_factory=list)  # the first of them
    token_mismatches: int = 0  # requests of which client and engine counted different numbers of tokens

    @property
    def holds(self) -> bool:
        """Whether every request is accounted for."""
        return self.mismatches == 0

    @property
    def equation(self) -> str:
        """All terms in one line, with = only where it holds."""
        by_outcome = ", ".join(f"{outcome} {count}" for outcome, count in sorted(self.engine.items()))
        served = f"{sum(self.engine.values())} in the engine{f' ({by_outcome})' if by_outcome else ''}"
        terms = f"{self.http_rejected} HTTP-rejected + {self.never_admitted} never admitted + {served}"
        return f"{self.sent} sent {'=' if self.holds else '!='} {terms}"

    def entry(self) -> AccountingEntry:
        """Return what stands in the manifest."""
        return AccountingEntry(
            sent=self.sent,
            http_rejected=self.http_rejected,
            never_admitted=self.never_admitted,
            engine=dict(sorted(self.engine.items())),
            records=self.records,
            not_sent=self.not_sent,
            warmup=self.warmup,
            mismatches=self.mismatches,
            equation=self.equation,
        )

    def add(self, key: str, clients: list[ClientRecord], records: list[EngineSide]) -> None:
        """Take all lines of one id."""
        if clients and clients[0].warmup:
            self.warmup += 1
            return
        self.records += len(records)
        problem = self._take(clients, records)
        if problem:
            self.mismatches += 1
            if len(self.shown) < _SHOWN:
                self.shown.append(Mismatch(key, problem))

    def _take(self, clients: list[ClientRecord], records: list[EngineSide]) -> str | None:
        if not clients:
            return "the engine served it, but no client sent it"
        client = clients[0]
        if client.outcome == "not_sent":
            self.not_sent += 1
            return "the engine served it, but the client says that it was not sent" if records else None
        self.sent += len(clients)
        if len(clients) > 1:
            return f"{len(clients)} lines of the client have this id"
        return self._take_sent(client, records)

    def _take_sent(self, client: ClientRecord, records: list[EngineSide]) -> str | None:
        if records:
            self.engine[client.outcome] += 1
            return self._contradiction(client, records)
        if client.outcome == "http_rejected":
            self.http_rejected += 1
            return None
        if client.outcome in _UNADMITTED and client.first_token_ms is None:
            self.never_admitted += 1
            return None
        return f"the client has {client.outcome} with {client.chunks} chunks, but the engine has no record"

    def _contradiction(self, client: ClientRecord, records: list[EngineSide]) -> str | None:
        if len(records) != client.n:
            return f"the engine has {len(records)} records for n = {client.n}"
        unended = next((record.ended_by for record in records if record.ended_by in _UNENDED), None)
        if client.outcome != "completed":
            return None
        if unended is not None:
            return f"the client got the whole answer, but the engine says {unended}"
        reported = client.completion_tokens
        produced = sum(record.output_tokens for record in records)
        if reported is not None and reported != produced and all(record.ended_by == BY_ENGINE for record in records):
            self.token_mismatches += 1
        return None


_ENGINE_SIDE: Final = msgspec.json.Decoder(EngineSide)
_CLIENT: Final = msgspec.json.Decoder(ClientRecord)


def account(client: Path, trace: Path, aborted: Path | None, scratch: Path) -> Accounting:
    """Return the equation of a capture, from its published files or their ``.part``.

    ``scratch`` is the folder to sort in.
    """
    accounting = Accounting()
    with scratch_database(scratch, "accounting") as database:
        database.execute("CREATE TABLE lines (id TEXT, is_engine INTEGER, line BLOB)")
        database.execute("CREATE INDEX in_order ON lines (id, is_engine)")
        for found, line in read_client(client):
            database.execute("INSERT INTO lines VALUES (?, 0, ?)", (found.id, line))
        for path in (trace, aborted):
            for side in _engine_side(path) if path else ():
                row = (side.request_id or "", msgspec.json.encode(side))
                database.execute("INSERT INTO lines VALUES (?, 1, ?)", row)
        rows = database.execute("SELECT id, is_engine, line FROM lines ORDER BY id, is_engine, rowid")
        for key, of_key in groupby(rows, itemgetter(0)):
            of_client, of_engine = [], []
            for _, is_engine, line in of_key:
                if is_engine:
                    of_engine.append(_ENGINE_SIDE.decode(line))
                else:
                    of_client.append(_CLIENT.decode(line))
            accounting.add(key, of_client, of_engine)
    return accounting


def _engine_side(path: Path) -> Iterator[EngineSide]:
    """Return the lines of the engine; a line that cannot be read is the business of validation."""
    for line in read_lines(path):
        if line.number == 1 and line.text.startswith(b'{"meta"'):
            continue
        try:
            yield _ENGINE_SIDE.decode(line.text)
        except msgspec.DecodeError:
            continue
