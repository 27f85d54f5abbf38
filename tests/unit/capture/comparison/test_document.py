"""docs/reference/comparison.md names every field of comparison.json."""

import re
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from specdecode_operator.capture.comparison import comparison_file

DOCUMENT = Path(__file__).parents[4] / "docs/reference/comparison.md"
SECTIONS: dict[str, type[Struct]] = {
    "Top": comparison_file.Comparison,
    "Arm": comparison_file.Arm,
    "Engine": comparison_file.Engine,
    "Load": comparison_file.Load,
    "Compared": comparison_file.LoadVerdict,
    "Drafting": comparison_file.Drafting,
    "Acceptance by chunks": comparison_file.AcceptanceOf,
    "Per request": comparison_file.PerRequest,
    "Prefix cache": comparison_file.PrefixCache,
    "KV cache": comparison_file.KvCache,
    "Outputs": comparison_file.OutputsFound,
}


@pytest.mark.parametrize(("title", "struct"), SECTIONS.items(), ids=SECTIONS.keys())
def test_names_every_field_and_no_other(title: str, struct: type[Struct]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    section = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    assert section, title
    names = re.findall(r"^\| (\w+) \|", section.group(1), re.MULTILINE)
    assert names == ["field", *(field.encode_name for field in msgspec.structs.fields(struct))]
