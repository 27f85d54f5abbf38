"""The script in the engine's container: which engine it starts, and that nothing is left of the one before."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.capture.files.formats import CaptureError
from specdecode_operator.capture.job.pod_files import RECORDER, switcher_command
from specdecode_operator.capture.job.record_part import EngineSwitch
from tests.support.waiting import eventually

IMPATIENT = (
    "import sys; from pathlib import Path; from specdecode_operator.capture.recorder import switcher as s;"
    "sys.exit(s.main(Path(sys.argv[1]), s.Grace(told_s=0.1, rest_s=0.1)))"
)
SAYS_AND_WAITS = ["sh", "-c", 'echo "$NAME $$" >> "$LOG"; exec sleep 1000']
LEAVES_CHILDREN = ["sh", "-c", 'sleep 1000 & echo $! >> "$LOG"; setsid sleep 1000 & echo $! >> "$LOG"; exec sleep 1000']


class Container:
    """An engine's container: the switcher as its image would run it."""

    def __init__(self, root: Path, command: list[str]) -> None:
        self.folder = root / "switch"
        self.folder.mkdir(exist_ok=True)
        self.log = root / "log"
        self.said = root / "said"
        with self.said.open("ab") as said:
            self.process = subprocess.Popen(command, stdout=said, stderr=said)

    @property
    def state(self) -> tuple[int, str, int | None]:
        if not (self.folder / "state.json").exists():
            return 0, "nothing", None
        found = json.loads((self.folder / "state.json").read_bytes())
        return found["number"], found["state"], found["exit_code"]

    def order(self, document: Any) -> None:
        text = document if isinstance(document, bytes) else json.dumps(document).encode()
        (self.folder / "new").write_bytes(text)
        (self.folder / "new").rename(self.folder / "order.json")

    def start(self, number: int, command: list[str], **env: str) -> None:
        self.order({"number": number, "command": command, "env": {"LOG": str(self.log), **env}})
        eventually(lambda: self.state[0] == number, f"order {number} is followed")

    def logged(self, lines: int) -> list[str]:
        return eventually(lambda: found if len(found := self.lines()) >= lines else None, f"{lines} lines")

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def exit_code(self) -> int:
        return self.process.wait(timeout=60)


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    """The switcher from the bundle, as the image's python3 runs it."""
    RECORDER.write(tmp_path / "bundle")
    _, *arguments = switcher_command(str(tmp_path / "bundle"), str(tmp_path / "switch"))
    (tmp_path / "switch").mkdir()
    yield from _running(Container(tmp_path, [sys.executable, *arguments]))


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Container]:
    """One that kills at once what does not end."""
    (tmp_path / "switch").mkdir()
    yield from _running(Container(tmp_path, [sys.executable, "-c", IMPATIENT, str(tmp_path / "switch")]))


def _running(container: Container) -> Iterator[Container]:
    yield container
    if container.process.poll() is None:
        container.process.terminate()
        container.exit_code()


def is_alive(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


class TestOrders:
    def test_engine_gets_its_command_and_environment(self, container: Container) -> None:
        container.start(1, ["sh", "-c", 'echo "to stdout $NAME"; echo "to stderr" >&2; exec sleep 1000'], NAME="a$b")
        eventually(lambda: {"to stdout a$b", "to stderr"} <= set(container.said.read_text().splitlines()), "both said")
        assert container.state == (1, "running", None)

    def test_one_engine_runs_at_a_time(self, container: Container) -> None:
        container.start(1, SAYS_AND_WAITS, NAME="first")
        first = container.logged(1)[0].split()[1]
        assert is_alive(first)
        alone = f'kill -0 {first} && said=both || said=alone; echo "$said" >> "$LOG"; exec sleep 1000'
        container.start(2, ["sh", "-c", alone])
        container.logged(2)
        container.start(3, SAYS_AND_WAITS, NAME="third")
        assert [line.split()[0] for line in container.logged(3)] == ["first", "alone", "third"]

    def test_all_processes_of_stopped_engine_are_killed(self, impatient: Container) -> None:
        """Neither what is in its group, nor what made a session of its own, nor what hears no signal."""
        impatient.start(1, ["sh", "-c", f"trap '' TERM; {LEAVES_CHILDREN[2].replace('exec ', '')}; sleep 1000"])
        children = impatient.logged(2)
        assert all(map(is_alive, children))
        impatient.order({"number": 2, "command": None, "env": {}})
        eventually(lambda: impatient.state == (2, "stopped", None), "stopped")
        assert not any(map(is_alive, children))

    def test_engine_can_be_stopped_and_another_started(self, container: Container) -> None:
        container.start(1, SAYS_AND_WAITS, NAME="first")
        container.order({"number": 2, "command": None, "env": {}})
        eventually(lambda: container.state == (2, "stopped", None), "stopped")
        container.start(3, SAYS_AND_WAITS, NAME="second")
        assert len(container.logged(2)) == 2

    @pytest.mark.parametrize(
        "order",
        [
            b"",
            b'{"number": 1, "command": ["touch", "hurt"], "env": {}',
            b"[" * 100_000,
            b"\xff\xfe",
            b" " * (2**20 + 1),
            [],
            {"number": 1, "command": ["touch", "hurt"]},
            {"number": 1, "command": ["touch", "hurt"], "env": {}, "user": "root"},
            {"number": 0, "command": ["touch", "hurt"], "env": {}},
            {"number": True, "command": ["touch", "hurt"], "env": {}},
            {"number": 2**60, "command": ["touch", "hurt"], "env": {}},
            {"number": 1, "command": "touch hurt", "env": {}},
            {"number": 1, "command": [], "env": {}},
            {"number": 1, "command": [""], "env": {}},
            {"number": 1, "command": ["touch", 1], "env": {}},
            {"number": 1, "command": ["touch", "hu\0rt"], "env": {}},
            {"number": 1, "command": ["touch", "\ud800"], "env": {}},
            {"number": 1, "command": ["touch", "hurt"], "env": ["A"]},
            {"number": 1, "command": ["touch", "hurt"], "env": {"A=B": "C"}},
            {"number": 1, "command": ["touch", "hurt"], "env": {"A": 1}},
        ],
    )
    def test_invalid_order_is_ignored_and_logged_once(
        self, container: Container, order: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.chdir(tmp_path)
        container.order(order)
        eventually(lambda: "order.json is ignored" in container.said.read_text(), "it says so")
        assert not (container.folder / "state.json").exists()
        container.start(1, SAYS_AND_WAITS, NAME="whole")
        assert container.logged(1)
        assert container.said.read_text().count("\n") == 1, "one line, however often it looked"

    def test_order_file_must_be_regular_file(self, container: Container, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").write_text(json.dumps({"number": 1, "command": ["true"], "env": {}}))
        (container.folder / "order.json").symlink_to(tmp_path / "elsewhere")
        eventually(lambda: "is ignored" in container.said.read_text(), "it says so")
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "pipe").rename(container.folder / "order.json")
        eventually(lambda: "not a regular file" in container.said.read_text(), "it waits for no writer")
        container.start(1, SAYS_AND_WAITS, NAME="whole")


class TestEnd:
    def test_sigterm_is_forwarded_and_engine_exit_code_returned(self, container: Container) -> None:
        container.start(1, ["sh", "-c", 'trap "echo bye; exit 5" TERM; echo up >> "$LOG"; while :; do sleep 0.1; done'])
        container.logged(1)
        container.process.terminate()
        assert container.exit_code() == 5
        assert "bye" in container.said.read_text()

    def test_sigterm_without_engine_exits_with_0(self, container: Container) -> None:
        container.start(1, SAYS_AND_WAITS, NAME="a")
        container.order({"number": 2, "command": None, "env": {}})
        eventually(lambda: container.state[0] == 2, "stopped")
        container.process.terminate()
        assert container.exit_code() == 0

    @pytest.mark.parametrize(
        ("command", "code"),
        [(["sh", "-c", "exit 3"], 3), (["sh", "-c", "kill -9 $$"], 137), (["no-such-engine"], 127)],
    )
    def test_engine_that_ends_by_itself_ends_the_container(
        self, container: Container, command: list[str], code: int
    ) -> None:
        container.start(1, command)
        assert container.exit_code() == code
        assert container.state == (1, "ended", code)

    def test_children_of_ended_engine_are_killed(self, impatient: Container) -> None:
        impatient.start(1, [*LEAVES_CHILDREN[:2], LEAVES_CHILDREN[2].replace("exec sleep 1000", "exit 1")])
        children = impatient.logged(2)
        assert impatient.exit_code() == 1
        assert not any(map(is_alive, children))

    def test_restarted_container_does_not_restart_engine(self, container: Container) -> None:
        container.start(1, SAYS_AND_WAITS, NAME="first")
        container.process.send_signal(signal.SIGKILL)
        container.exit_code()
        os.kill(int(container.logged(1)[0].split()[1]), signal.SIGKILL)
        again = Container(container.folder.parent, container.process.args)  # type: ignore[arg-type]
        eventually(lambda: again.state == (1, "ended", None), "its engine is gone")
        again.start(2, SAYS_AND_WAITS, NAME="second")
        assert [line.split()[0] for line in again.logged(2)] == ["first", "second"]
        again.process.terminate()
        again.exit_code()


class TestEngineSwitch:
    """Through the files, as the load generator has it."""

    async def test_engine_switch_starts_and_stops_engines_in_turn(self, container: Container) -> None:
        switch = EngineSwitch(container.folder)
        for name in ("first", "second"):
            await switch.start(SAYS_AND_WAITS, {"NAME": name, "LOG": str(container.log)})
            await asyncio.to_thread(container.logged, 1)
            await switch.stop()
        assert container.state == (4, "stopped", None)
        assert [line.split()[0] for line in container.logged(2)] == ["first", "second"]

    async def test_engine_exit_is_reported_with_exit_code(self, container: Container) -> None:
        switch = EngineSwitch(container.folder)
        await switch.start(["sh", "-c", "sleep 0.5; exit 4"], {})
        assert "exit code 4" in await switch.wait_until_ended()
        container.exit_code()
        with pytest.raises(CaptureError, match="exit code 4") as failure:
            await switch.stop()
        assert failure.value.reason == "EngineExited"

    async def test_missing_engine_command_fails_with_exit_code_127(self, container: Container) -> None:
        with pytest.raises(CaptureError, match="exit code 127"):
            await EngineSwitch(container.folder).start(["no-such-engine"], {})

    async def test_missing_switcher_is_engine_not_ready(self, tmp_path: Path) -> None:
        with pytest.raises(CaptureError, match="must have python3") as failure:
            await EngineSwitch(tmp_path, answer_s=0).start(["true"], {})
        assert failure.value.reason == "EngineNotReady"

    @pytest.mark.parametrize("text", [b"", b"{", b'{"number": 1, "state": "asleep"}'])
    async def test_invalid_state_file_is_refused(self, tmp_path: Path, text: bytes) -> None:
        (tmp_path / "state.json").write_bytes(text)
        with pytest.raises(CaptureError, match=r"state\.json"):
            EngineSwitch(tmp_path)
