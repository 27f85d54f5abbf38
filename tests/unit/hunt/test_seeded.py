"""The seeded faults can be made in the operator as it is."""

import ast

import pytest

from hunt.seeded import SeededFault, seeded_faults
from hunt.states import REPOSITORY

FAULTS = seeded_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_seeded_fault_applies_and_is_valid_python(fault: SeededFault, tmp_path) -> None:
    assert not fault.is_stale(), f"{fault.file} has moved on: write the fault anew in tools/hunt/seeded_faults.toml"
    before = (REPOSITORY / "operator" / fault.file).read_text()
    changed = before.replace(fault.old, fault.new)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(before))


def test_fault_with_missing_or_ambiguous_text_is_stale() -> None:
    assert SeededFault("", "handlers/main.py", "no such words", "").is_stale()
    assert SeededFault("", "handlers/main.py", "import", "").is_stale()
    assert SeededFault("", "no/such/file.py", "import", "").is_stale()


def test_fault_is_applied_to_a_copy(tmp_path) -> None:
    with FAULTS[0].made(tmp_path / "copy") as environment:
        changed = tmp_path / "copy" / "specdecode_operator" / FAULTS[0].file
        assert FAULTS[0].old not in changed.read_text()
        assert environment == {"PYTHONPATH": str(tmp_path / "copy")}
    assert not FAULTS[0].is_stale()
    assert not (tmp_path / "copy").exists()
