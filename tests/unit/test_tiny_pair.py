"""The tiny pair's script and the manifest that carries a copy of it.

Run as a script, this file brings the copy up to date.
"""

import ast
import sys
import textwrap
from pathlib import Path

import yaml

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = EXAMPLES / "tiny_pair.py"
MANIFEST = EXAMPLES / "tiny-models.yaml"
COPY_STARTS_AFTER = "  tiny_pair.py: |\n"


def manifest_with_script() -> str:
    """The manifest's text with the script as it is now."""
    head, start, _ = MANIFEST.read_text().partition(COPY_STARTS_AFTER)
    return head + start + textwrap.indent(SCRIPT.read_text(), "    ")


def documents() -> dict[str, dict[str, object]]:
    """The manifest's objects by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}


def test_manifest_carries_the_script() -> None:
    copy = documents()["ConfigMap"]["data"]
    assert copy == {SCRIPT.name: SCRIPT.read_text()}, f"run: python {Path(__file__).name}"


def test_rewriting_the_manifest_changes_nothing_when_it_is_up_to_date() -> None:
    assert manifest_with_script() == MANIFEST.read_text()


def test_job_passes_only_options_of_the_script() -> None:
    job = documents()["Job"]
    container = job["spec"]["template"]["spec"]["containers"][0]  # type: ignore[index]
    passed = {argument.partition("=")[0] for argument in container["args"]}
    assert passed <= script_options()
    assert "--out" in passed


def test_script_imports_no_slow_packages() -> None:
    """The script starts an interpreter each time; transformers alone doubles its time."""
    allowed = {"torch", "safetensors", "tokenizers"}
    assert imported_packages() - sys.stdlib_module_names <= allowed


def test_demo_uses_the_volume_and_folders_of_the_tiny_models() -> None:
    demo = yaml.safe_load((EXAMPLES / "tiny-cpu.yaml").read_text())["spec"]
    assert demo["models"]["volume"]["persistentVolumeClaim"]["claimName"] == "tiny-models"
    assert demo["target"]["model"] == "pair/target"
    assert demo["speculation"]["draft"]["model"] == "pair/draft"


def test_demo_config_matches_the_models_of_the_script() -> None:
    demo = yaml.safe_load((EXAMPLES / "tiny-cpu.yaml").read_text())["spec"]
    sizes = script_constants()
    expected = {
        "num_hidden_layers": sizes["TARGET_LAYERS"],
        "hidden_size": sizes["HIDDEN"],
        "intermediate_size": sizes["INTERMEDIATE"],
        "num_attention_heads": sizes["HEADS"],
        "num_key_value_heads": sizes["KV_HEADS"],
        "head_dim": sizes["HEAD_DIM"],
        "vocab_size": sizes["VOCAB"],
        "max_position_embeddings": sizes["MAX_POSITIONS"],
    }
    target = demo["target"]["config"]
    draft = demo["speculation"]["draft"]["config"]
    assert {key: target[key] for key in expected} == expected
    assert draft["num_hidden_layers"] == sizes["DRAFT_LAYERS"]


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
    MANIFEST.write_text(manifest_with_script())
