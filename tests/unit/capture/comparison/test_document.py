"""docs/reference/comparison.md names every field of comparison.json."""

import re
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from specdecode_operator.capture.comparison import result

DOCUMENT = Path(__file__).parents[4] / "docs/reference/comparison.md"
SECTIONS: dict[str, type[Struct]] = {
    "Top": result.Comparison,
    "Arm": result.Arm,
    "Engine": result.Engine,
    "Load": result.Load,
    "Compared": result.LoadVerdict,
    "Drafting": result.Drafting,
    "Acceptance by chunks": result.AcceptanceOf,
    "Per request": result.PerRequest,
    "Prefix cache": result.PrefixCache,
    "KV cache": result.KvCache,
    "Outputs": result.OutputsFound,
}


@pytest.mark.parametrize(("title", "struct"), SECTIONS.items(), ids=SECTIONS.keys())
def test_names_every_field_and_no_other(title: str, struct: type[Struct]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    section = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    assert section, title
    names = re.findall(r"^\| (\w+) \|", section.group(1), re.MULTILINE)
    assert names == ["field", *(field.encode_name for field in msgspec.structs.fields(struct))]
