"""`./just engine-new`: what it finds in two packages of vLLM, what it writes, and the order of its page."""

import json
from pathlib import Path

from tests.engine.new_version import profile
from tests.engine.new_version.answers import UNASKED, Difference, Sections, differences
from tests.engine.new_version.citations import Citation, citations, cited
from tests.engine.new_version.page import Findings, page
from tests.engine.new_version.sources import Change, SourceChanges, compare
from tests.engine.new_version.suites import Outcome, read

NOTHING = SourceChanges((), {})


def package(folder: Path, **modules: str) -> Path:
    for name, text in modules.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def named(path: str, *words: str) -> Citation:
    return Citation(path, frozenset(words), "ours")


def test_citations_of_vllm_files_and_functions_are_found_in_text() -> None:
    text = "vllm/v1/core/kv.py get_configs and Spec.pages; pool.py schedule. See v1/worker/gpu for the rest."
    found = list(cited(text, "data"))
    assert [each.path for each in found] == ["v1/core/kv.py", "v1/core/pool.py", "v1/worker/gpu"]
    assert {"get_configs", "Spec.pages"} <= found[0].words
    assert "schedule" in found[1].words
    assert "and" not in found[0].words
    assert not list(cited("see https://example.org/a/b.py and our own words", "data"))


def test_operator_facts_and_rules_cite_vllm_files() -> None:
    found = list(citations())
    assert {"config/speculative.py", "v1/core/kv_cache_utils.py"} <= {each.path for each in found}
    assert {"vllm", "sizing"} <= {each.place.partition("/")[0] for each in found}


def test_changes_to_comments_and_formatting_are_ignored(tmp_path: Path) -> None:
    before = package(tmp_path / "a", m='def f():\n    """Old."""\n    return 1  # one\n\n\ndef g():\n    return 1\n')
    now = package(tmp_path / "b", m='def f():\n    """New."""\n    return (1)\n\n\ndef g():\n    return 2\n')
    (change,) = compare(before, now, [named("m.py", "f", "g")], "new").named
    assert (change.name, change.what) == ("g", "+1 -1 lines")
    assert "+    return 2" in change.diff


def test_moved_functions_are_found_and_removed_ones_are_reported(tmp_path: Path) -> None:
    text = "def same():\n    return 1\n\n\ndef other():\n    return 1\n\n\ndef lost():\n    pass\n"
    before = package(tmp_path / "a", v1__old=text, v1__gone="def f():\n    pass\n")
    moved = "def same():\n    return 1\n\n\ndef other():\n    return 2\n"
    now = package(tmp_path / "b", v1__old="kept = 1\n", v1__new=moved)
    found = compare(before, now, [named("v1/old.py", "same", "other", "lost"), named("v1/gone.py")], "new")
    assert {each.name: each.what for each in found.named} == {
        "same": "moved to `v1/new.py`, unchanged",
        "other": "moved to `v1/new.py`, +1 -1 lines",
        "lost": "**gone**",
    }
    assert found.beside == {"v1/old.py": ("+kept",), "v1/gone.py": ("the file is gone",)}


def test_functions_cited_by_new_version_facts_count_as_reviewed(tmp_path: Path) -> None:
    text = "def moved():\n    return {}\n\n\ndef changed():\n    return {}\n\n\ndef other():\n    return {}\n"
    before = package(tmp_path / "a", v1__old=text.format(1, 1, 1))
    moved, kept = text.format(2, 2, 2).split("\n\n\n", 1)
    now = package(tmp_path / "b", v1__old=kept, v1__new=moved)
    said = [
        Citation("v1/new.py", frozenset({"moved"}), "new: facts"),
        Citation("old.py", frozenset({"changed"}), "new: "),
    ]
    found = compare(before, now, [named("v1/old.py", "moved", "changed", "other"), *said], "new:")
    assert {each.name: each.judged for each in found.named} == {"moved": True, "changed": True, "other": False}
    text = page(Findings("0.34", "0.33", [], found, None, []))
    assert "Cited functions: 3 changed, 2 of them reviewed." in text
    assert text.find("`other` | +1 -1 lines") < text.find("## Reviewed") < text.find("`v1/old.py` `moved`")


def answers(slots: int, *, ahead: bool, runner: str, traits: str, more: str = "") -> Sections:
    started = {"num_speculative_tokens": "4", "extra_draft_slots": slots, "async_scheduling": ahead, "runner": runner}
    return {
        "speculative methods": dict.fromkeys(["dflash", *(["medusa"] if more else [])], "known"),
        "flags": {"--a": "values: 1"} | ({more: "values: 0"} if more else {"--new": "values: 0, --swap-space"}),
        "targets": {"LlamaForCausalLM": traits},
        "configuration of an engine": {f"method dflash, {key}": str(value) for key, value in started.items()},
    }


def test_facts_reported_by_an_engine_are_written_with_their_source() -> None:
    before = answers(4, ahead=False, runner="V1", traits="stages", more="--b")
    now = answers(0, ahead=True, runner="V2", traits="hidden_states")
    image, *asked = json.loads(profile.facts(before, now, "0.34", "0.33"))
    assert image["images"] == {"gpu": "docker.io/vllm/vllm-openai:v0.34.0"}
    assert {fact.pop("source") for fact in asked} == {profile.ASKED}
    assert asked == [
        {"extra_draft_slots": {"dflash": None}},
        {"async_scheduling": {"dflash": True}},
        {"model_runner_v2": {"methods": {"dflash": True}}},
        {"model_runner_v2": {"methods": {}}, "ended_methods": {"medusa": "ngram"}},
        {"removed_flags": {"--b": "remove it; nothing replaces it"}},
        {"removed_flags": {"--swap-space": None}},
        {
            "targets": {
                "without_hidden_states": {"LlamaForCausalLM": None},
                "without_stages": {"LlamaForCausalLM": True},
            }
        },
    ]
    back = json.loads(profile.facts(now, before, "0.34", "0.33"))[1:]
    assert back[0]["extra_draft_slots"] == {"dflash": {"fixed": 0, "each_token": 1}}
    fewer = json.loads(profile.facts(now, answers(3, ahead=True, runner="V2", traits="hidden_states"), "0.34", "0.33"))[
        1:
    ]
    assert fewer[0]["extra_draft_slots"] == {"dflash": {"fixed": -1, "each_token": 1}}


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    assert profile.write("0.34", {"data": "[]", "flags": "{}"}, tmp_path) == [
        str(tmp_path / "data/0.34.json"),
        str(tmp_path / "flags/0.34.json"),
    ]
    (tmp_path / "data/0.34.json").write_text("[1]")
    assert profile.write("0.34", {"data": "[]", "flags": "{}"}, tmp_path) == []
    assert (tmp_path / "data/0.34.json").read_text() == "[1]"


def test_new_version_adds_its_model_classes_to_the_registry(tmp_path: Path) -> None:
    tables = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_SPECULATIVE_DECODING_MODELS")
    text = (
        "".join(f"{name} = {{}}\n" for name in tables) + '_TRANSFORMERS_SUPPORTED_MODELS = {"BrandNew": ("a", "B")}\n'
    )
    engine = package(tmp_path / "vllm", model_executor__models__registry=text)
    classes = tmp_path / "registry.json"
    classes.write_text(profile.CLASSES.read_text())
    newest = json.loads(classes.read_text())["newest"]
    assert profile.write_classes(newest, engine, tmp_path, classes) == [], "a version that is known changes nothing"
    assert profile.write_classes("9.1.2", engine, tmp_path, classes) == [str(classes)]
    now = json.loads(classes.read_text())
    assert (now["newest"], now["since"]["9.1"]) == ("9.1", ["BrandNew"])
    assert "LlamaForCausalLM" in now["until"][newest]


def test_engine_that_no_longer_starts_is_a_single_difference() -> None:
    before = {
        "configuration of an engine": {"experts, runner": "V2", "experts, --dtype": "auto", "plain, runner": "V1"}
    }
    now = {"configuration of an engine": {"experts, refused": "unrecognized arguments", "plain, runner": "V2"}}
    assert [(each.name, each.now) for each in differences(before, now)] == [
        ("experts, refused", "unrecognized arguments"),
        ("plain, runner", "V2"),
    ]


def test_unreadable_facts_do_not_count_as_removed() -> None:
    before = {"flags": {"--a": "values: 1"}, "recorder": {}, UNASKED: {}}
    now = {UNASKED: {"flags": "ModuleNotFoundError: cli_args", "recorder, messages and signatures": "moved"}}
    found = differences(before, now)
    assert [each.section for each in found] == [UNASKED, UNASKED]
    text = page(Findings("0.34", "0.33", found, NOTHING, None, []))
    assert "- **Not readable from this version**: flags; recorder, messages and signatures" in text
    assert "`ModuleNotFoundError: cli_args`" in text
    assert "The recorder" not in text


def test_page_lists_the_most_important_changes_first() -> None:
    found = Findings(
        "0.34",
        "0.33",
        [
            Difference("flags", "--enable-expert-parallel", "values: 0", None),
            Difference("flags", "--expert-parallel", None, "values: 0"),
            Difference("flags", "--enforce-eager", "values: 0", "values: 1"),
            Difference("flags", "--max-model-len", "values: 1", "values: 1, --longest"),
            Difference(
                "fields of configurations",
                "SpeculativeConfig.method",
                "Literal['a', 'b', 'c']",
                "Literal['a', 'b', 'd']",
            ),
            Difference("metrics", "vllm:new_total", None, "counter: engine"),
            Difference("recorder", "EngineCoreOutput has no new_token_ids", None, "does not work"),
        ],
        SourceChanges(
            (
                Change("a.py", "f", ("vllm/serving_rules.py",), "a.py", "x"),
                Change("b.py", "g", ("vllm/data/0.28.json: kv_cache", "vllm/data/0.30.json: kv_cache"), None, ""),
            ),
            {"models/llama.py": ("+new",), "v1/core/pool.py": tuple("abcdefghijkl")},
        ),
        Outcome("3 passed, 1 failed, 0 skipped", (("test_contract.py test_x[0.34]", "assert 1 == 2"),)),
        ["operator/vllm/data/0.34.json"],
    )
    text = page(found)
    in_this_order = [
        "# vLLM 0.34: changes to review since 0.33",
        "- Tests: 3 passed, 1 failed",
        "- The recorder **does not work**: EngineCoreOutput has no new_token_ids.",
        "| `test_contract.py test_x[0.34]` | `assert 1 == 2` |",
        "| `--enable-expert-parallel` | `values: 0` | none | importing/",
        "| `--enforce-eager` | `values: 0` | `values: 1` |",
        "| `SpeculativeConfig.method` | -`c` | +`d` |",
        "additional spellings |  | +`--longest` |",
        "| `b.py` `g` | **gone** | kv_cache (0.28, 0.30) |",
        "## Other changed source that the operator cites",
        "| `a.py` `f` |",
        "| `--expert-parallel` | none | `values: 0` |",
        "| `vllm:new_total` | none | `counter: engine` |",
        "- `v1/core/pool.py`: a, b, c, d, e, f, g, h and 4 more\n- `models/llama.py`: +new",
    ]
    places = [text.find(part) for part in in_this_order]
    assert -1 not in places, in_this_order[places.index(-1)]
    assert places == sorted(places)


def test_junit_report_gives_counts_and_names_of_failures(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.engine.test_contract" name="test_a[0.34]"/>'
        '<testcase classname="tests.engine.test_contract" name="test_b[0.34]"><failure message="E x">long</failure>'
        '</testcase><testcase classname="c" name="d"><skipped message="no"/></testcase>'
        '<testcase classname="tests.engine.test_kv_oracle" name="test_c"><error message="E y">long</error></testcase>'
        "</testsuite></testsuites>"
    )
    failures = (("test_contract.py test_b[0.34]", "E x"), ("test_kv_oracle.py test_c", "E y"))
    assert read(report) == Outcome("1 passed, 2 failed, 1 skipped", failures)
