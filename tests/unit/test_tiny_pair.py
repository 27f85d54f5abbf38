"""The tiny pair's script and the manifest that carries a copy of it.

Run as a script, this file brings the copy up to date.
"""

import ast
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from tests.support.objects import Body
from tests.support.small_pair import small_pair

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = EXAMPLES / "tiny_pair.py"
MANIFEST = EXAMPLES / "tiny-models.yaml"
COPIES = {MANIFEST: ("tiny_pair.py",), EXAMPLES / "tiny-language.yaml": ("tiny_language.py", "tiny_pair.py")}
"""Manifests, each with the scripts that it carries."""


def manifest_with_scripts(manifest: Path) -> str:
    """The manifest's text with its scripts as they are now."""
    scripts = COPIES[manifest]
    head, _, _ = manifest.read_text().partition(f"  {scripts[0]}: |\n")
    copies = (f"  {each}: |\n{textwrap.indent((EXAMPLES / each).read_text(), '    ')}" for each in scripts)
    return head + "".join(copies)


def documents(manifest: Path = MANIFEST) -> dict[str, dict[str, object]]:
    """The manifest's objects by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(manifest.read_text())}


@pytest.mark.parametrize("manifest", COPIES, ids=lambda each: each.name)
def test_manifest_carries_its_scripts(manifest: Path) -> None:
    copies = documents(manifest)["ConfigMap"]["data"]
    expected = {each: (EXAMPLES / each).read_text() for each in COPIES[manifest]}
    assert copies == expected, "run: .venv/bin/python -m tests.unit.test_tiny_pair"


@pytest.mark.parametrize("manifest", COPIES, ids=lambda each: each.name)
def test_rewriting_the_manifest_changes_nothing_when_it_is_up_to_date(manifest: Path) -> None:
    assert manifest_with_scripts(manifest) == manifest.read_text()


def passed(name: str) -> dict[str, str]:
    """The options that the Job passes to make one of the pairs."""
    containers = documents()["Job"]["spec"]["template"]["spec"]["containers"]  # type: ignore[index]
    (arguments,) = (each["args"] for each in containers if each["name"] == name)
    return dict(argument.split("=") for argument in arguments)


@pytest.mark.parametrize("pair", ["pair", "deep"])
def test_job_passes_only_options_of_the_script(pair: str) -> None:
    assert passed(pair).keys() <= script_options()
    assert passed(pair)["--out"] == f"/models/{pair}"


def test_script_imports_no_slow_packages() -> None:
    """The script starts an interpreter each time; transformers alone doubles its time."""
    allowed = {"torch", "safetensors", "tokenizers"}
    assert imported_packages() - sys.stdlib_module_names <= allowed


def test_demo_uses_the_volume_of_the_tiny_models() -> None:
    volume = demo()["spec"]["models"]["volume"]
    assert volume["persistentVolumeClaim"]["claimName"] == documents()["PersistentVolumeClaim"]["metadata"]["name"]


def demo() -> Body:
    body: Body = yaml.safe_load((EXAMPLES / "tiny-cpu.yaml").read_text())
    return body


@pytest.mark.parametrize(("body", "pair"), [(demo(), "deep"), (small_pair(), "pair")], ids=["demo", "small"])
def test_config_of_a_deployment_matches_its_models(body: Body, pair: str) -> None:
    sizes = script_constants()
    expected = {
        "num_hidden_layers": int(passed(pair).get("--target-layers", sizes["TARGET_LAYERS"])),
        "hidden_size": sizes["HIDDEN"],
        "intermediate_size": sizes["INTERMEDIATE"],
        "num_attention_heads": sizes["HEADS"],
        "num_key_value_heads": sizes["KV_HEADS"],
        "head_dim": sizes["HEAD_DIM"],
        "vocab_size": sizes["VOCAB"],
        "max_position_embeddings": sizes["MAX_POSITIONS"],
    }
    target, draft = body["spec"]["target"], body["spec"]["speculation"]["draft"]
    assert {key: target["config"][key] for key in expected} == expected
    assert draft["config"]["num_hidden_layers"] == sizes["DRAFT_LAYERS"]
    assert (target["model"], draft["model"]) == (f"{pair}/target", f"{pair}/draft")


def test_target_of_the_demo_has_ten_times_the_layers_of_its_draft() -> None:
    spec = demo()["spec"]
    layers, of_draft = (each["config"]["num_hidden_layers"] for each in (spec["target"], spec["speculation"]["draft"]))
    assert layers >= 10 * of_draft, "or the draft does not pay off"


def script_tree() -> ast.Module:
    """The script's syntax tree: torch, which it imports, is not installed for unit tests."""
    return ast.parse(SCRIPT.read_text())


def script_constants() -> dict[str, int]:
    """The script's whole-number constants by name."""
    return {
        statement.targets[0].id: statement.value.value
        for statement in script_tree().body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, int)
    }


def script_options() -> set[str]:
    """The command-line options that the script declares."""
    calls = [node for node in ast.walk(script_tree()) if isinstance(node, ast.Call)]
    names = [call.args[0] for call in calls if call.args]
    texts = [name.value for name in names if isinstance(name, ast.Constant)]
    return {text for text in texts if isinstance(text, str) and text.startswith("--")}


def imported_packages() -> set[str]:
    """The top-level packages that the script imports."""
    found: set[str] = set()
    for node in ast.walk(script_tree()):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


if __name__ == "__main__":
    for each in COPIES:
        each.write_text(manifest_with_scripts(each))
