"""Of what lies in a ConfigMap only entries that the operator has a digest of are read."""

from typing import Any

import pytest

from specdecode_operator.deployment import tamper_check


def test_what_others_put_beside_it_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    whole = tamper_check.digests

    def noting(config_map: str, entries: Any) -> dict[str, str]:
        read.extend(entries)
        return whole(config_map, entries)

    proofs = tamper_check.digests("llama-downloads", {"ours": "1", "changed": "1"})
    monkeypatch.setattr(tamper_check, "digests", noting)
    entries = {"ours": "1", "changed": "2", "theirs": "1" * 1_000}
    assert tamper_check.believed("llama-downloads", entries, proofs) == {"ours": "1"}
    assert read == ["ours", "changed"]
