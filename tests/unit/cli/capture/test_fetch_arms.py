"""`specdecode capture fetch` of several arms: a folder for each repetition, and what they come to beside."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.unit.cli.capture.conftest import CONTENT, Cluster, capture, published

ROOT = "team/demo"
PARTS = ("deployed/1", "deployed/2", "plain/1", "plain/2")


def publish(cluster: Cluster, *parts: str, **said: str) -> None:
    for part in parts:
        folder = cluster.folder / "volume" / ROOT / part
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "trace.jsonl").write_bytes(CONTENT)
        files = {"trace.jsonl": {"bytes": len(CONTENT), "sha256": hashlib.sha256(CONTENT).hexdigest()}}
        manifest = {"namespace": "team", "capture": "demo", "capture_uid": "demo-uid", "files": files, "part": part}
        (folder / "manifest.json").write_text(json.dumps({**manifest, **said}))


@pytest.fixture
def volume(cluster: Cluster) -> Path:
    """A volume with two arms, each measured twice, and an attempt that failed."""
    cluster.holds(published(path=ROOT))
    cluster.volume.rmdir()
    cluster.volume.parent.rmdir()
    publish(cluster, *PARTS)
    folder = cluster.folder / "volume" / ROOT
    (folder / "plain" / "3.part-uid").mkdir()
    (folder / "comparison.json").write_text('{"arms": []}')
    return folder


def there(out: Path) -> set[str]:
    return {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}


WHOLE = {f"{part}/{name}" for part in PARTS for name in ("manifest.json", "trace.jsonl")} | {"comparison.json"}


def test_each_has_its_folder(volume: Path, run: Callable[..., Result], tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        answer = run("fetch", "demo", out)
        assert answer.exit_code == 0, answer.stderr
        assert there(out) == WHOLE, "nothing of an attempt that failed"
        assert (out / "plain/2/trace.jsonl").read_bytes() == CONTENT


def test_it_is_found_when_the_capture_is_gone(
    volume: Path, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
) -> None:
    cluster.holds()
    answer = run("fetch", "demo", tmp_path / "out", "--image=operator:1")
    assert answer.exit_code == 0, answer.stderr
    assert there(tmp_path / "out") == WHOLE


@pytest.mark.parametrize("stranger", ["notes.txt", "deployed/1/notes.txt"])
def test_nothing_is_written_beside_what_is_not_the_captures(
    volume: Path, run: Callable[..., Result], tmp_path: Path, stranger: str
) -> None:
    path = tmp_path / "out" / stranger
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    answer = run("fetch", "demo", tmp_path / "out")
    assert answer.exit_code == 1
    assert "holds notes.txt, which capture demo has not: name another folder" in answer.stderr
    assert there(tmp_path / "out") == {stranger}


def test_names_on_the_volume_lead_nowhere_else(
    volume: Path, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
) -> None:
    (volume / "..x" / "1").mkdir(parents=True)
    (volume / "plain" / "one").mkdir()
    answer = run("fetch", "demo", tmp_path / "out")
    assert answer.exit_code == 0, answer.stderr
    assert there(tmp_path / "out") == WHOLE


def test_files_of_another_run_of_the_name_stay(
    volume: Path, cluster: Cluster, run: Callable[..., Result], tmp_path: Path
) -> None:
    assert run("fetch", "demo", tmp_path / "out").exit_code == 0
    publish(cluster, *PARTS, capture_uid="another")
    answer = run("fetch", "demo", tmp_path / "out")
    assert answer.exit_code == 1
    assert "holds files of capture team/demo, recorded at another time" in answer.stderr
    cluster.holds({**published(path=ROOT), "metadata": {"name": "demo", "namespace": "team", "uid": "another"}})
    answer = run("run", "demo", f"--out={tmp_path / 'out'}")
    assert "recorded at another time" in answer.stderr, "before any load is sent"


def test_the_verdict_is_told_beside_what_became_of_it(cluster: Cluster, run: Callable[..., Result]) -> None:
    pays = {"type": "Pays", "status": "False", "reason": "DoesNotPay", "message": "ngram against plain: goodput -9 %"}
    cluster.holds(capture(conditions=[pays]))
    assert "  DoesNotPay: ngram against plain: goodput -9 %" in run("status", "demo").stdout
    cluster.holds(capture(conditions=[{**pays, "status": "Unknown", "reason": "NotCompared"}]))
    assert "NotCompared" not in run("status", "demo").stdout


def figures(sent: int) -> str:
    return json.dumps(
        {"phase": "closed-2", "sent": sent, "recorded": sent, "completed": sent, "failed": 0, "rate": 2.0}
    )


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ([], "  0 of 4 runs are published; no request of the next one yet"),
        ([figures(3)], "  0 of 4 runs are published; closed-2        sent      3"),
        ([figures(3), '{"published": "team/demo/plain/1"}'], "  1 of 4 runs are published; no request of the next one"),
        (['{"published": "team/demo/plain/1"}', "no JSON", "[]", figures(5)], "  1 of 4 runs are published; closed-2"),
    ],
)
def test_status_says_how_far_several_arms_are(
    cluster: Cluster, run: Callable[..., Result], log: list[str], said: str
) -> None:
    measured = capture(phase="Loading", job="demo-capture")
    measured["spec"]["arms"] = [{"name": "plain", "speculation": {"method": "none"}}, {"name": "deployed"}]
    cluster.holds(measured, streams={"log": "\n".join(log)})
    assert said in run("status", "demo").stdout


@pytest.mark.parametrize("figure", ["sent", "recorded", "completed", "failed", "rate", "eta_s"])
def test_a_progress_line_without_one_of_its_figures_is_shown(
    cluster: Cluster, run: Callable[..., Result], figure: str
) -> None:
    line = json.dumps({**json.loads(figures(7)), "eta_s": 2.0, figure: None})
    cluster.holds(capture(phase="Loading", job="demo-capture"), streams={"log": line})
    answer = run("status", "demo")
    assert answer.exit_code == 0, answer.exception
    assert "closed-2" in answer.stdout


def test_status_says_how_far_the_load_of_one_engine_is(cluster: Cluster, run: Callable[..., Result]) -> None:
    cluster.holds(capture(phase="Loading", job="demo-capture"), streams={"log": figures(7)})
    assert "  closed-2        sent      7" in run("status", "demo").stdout
    cluster.holds(capture(phase="Succeeded", job="demo-capture"), streams={"log": figures(7)})
    assert "sent" not in run("status", "demo").stdout
