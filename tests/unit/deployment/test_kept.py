"""Of what lies in a ConfigMap only entries that the operator has a digest of are read."""

from typing import Any

import pytest

from specdecode_operator.deployment import kept


def test_what_others_put_beside_it_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    whole = kept.digests

    def noting(config_map: str, entries: Any) -> dict[str, str]:
        read.extend(entries)
        return whole(config_map, entries)

    proofs = kept.digests("llama-downloads", {"ours": "1", "changed": "1"})
    monkeypatch.setattr(kept, "digests", noting)
    entries = {"ours": "1", "changed": "2", "theirs": "1" * 1_000}
    assert kept.believed("llama-downloads", entries, proofs) == {"ours": "1"}
    assert read == ["ours", "changed"]
