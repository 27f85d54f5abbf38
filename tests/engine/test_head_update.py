"""A real vLLM that gets another draft head while it serves: by the sidecar, without a restart."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from specdecode_operator.deployment.canaries import CLOSE_NATS, DEFAULT_PROMPTS
from specdecode_operator.deployment.live_recorder import DRAFT_ENTRY, HEAD_LOADER
from specdecode_operator.vllm.engine_metrics import HeadUpdate, read_metrics
from specdecode_operator.vllm.profiles import find_profile
from tests.engine.engine_process import HERE, Engine
from tests.engine.engine_versions import SERVED
from tests.engine.live_traffic import Collector
from tests.engine.recorder_clients import prompt
from tests.engine.recorder_server import Line, Server, serving
from tests.support import plain_http
from tests.support.waiting import eventually

K = 1  # the head of tiny_heads.py foresees one token
CANARIES = {"prompts": list(DEFAULT_PROMPTS[:2]), "max_tokens": 16, "interval_s": 600, "model": "tiny"}
QUESTIONS = range(4)
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"


@pytest.fixture(scope="module")
def claim(engine: Engine, heads: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("claim")
    engine.run(str(HERE / "head_variants.py"), str(heads / "eagle3"), str(folder))
    return folder


def sha256(claim: Path, head: str) -> str:
    return hashlib.sha256((claim / f"tests/{head}/head/model.safetensors").read_bytes()).hexdigest()


@dataclass
class Updated:
    """An engine with a sidecar, and the file of its orders."""

    server: Server
    claim: Path
    file: Path

    def order(self, head: str, digest: str = "", pods: list[str] | None = None) -> HeadUpdate:
        """Order a head, and return what the engine says about it."""
        digest = digest or sha256(self.claim, head)
        self.write({"root": str(self.claim), "path": f"tests/{head}/head", "sha256": digest, "pods": pods})
        return eventually(lambda: self.told(digest), f"the engine reports on {head}", 600)

    def write(self, *heads: Line) -> None:
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps({"heads": heads, "canaries": CANARIES | {"margin_nats": CLOSE_NATS}}))
        part.replace(self.file)

    def told(self, digest: str) -> HeadUpdate | None:
        page = plain_http.get(f"{self.server.url}/metrics", timeout=120).text
        found = read_metrics(page, find_profile(SERVED)).head_update
        return found if found is not None and found.sha256 == digest else None

    def ask(self, number: int, tokens: int = 64) -> list[int]:
        body = {
            "model": "tiny",
            "prompt": prompt(40, number),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = plain_http.post(f"{self.server.url}/v1/completions", json=body, timeout=600).json()
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    def measure(self) -> tuple[list[list[int]], float]:
        """Return greedy answers, and the share of the drafted tokens that was accepted in them."""
        before = self.server.counters()
        answers = [self.ask(number) for number in QUESTIONS]
        drafted = self.server.counters() - before
        return answers, drafted[ACCEPTED] / drafted[DRAFTED]


@contextmanager
def updated(engine: Engine, heads: Path, claim: Path, folder: Path, *options: str) -> Iterator[Updated]:
    """Serve with the poor head."""
    collector = Collector(folder)
    head = {"method": "eagle3", "model": str(claim / "tests/poor/head"), "num_speculative_tokens": K}
    quiet = {"SPECDECODE_RECORD_DIR": "", "OBSERVER_DIR": "", "SPECDECODE_LIVE_DIR": str(collector.sockets)}
    with (
        serving(engine, heads, folder / "engine", *options, speculation=head, **quiet) as server,
        collector.beside(engine, SPECDECODE_ENGINE_URL=server.url),
    ):
        yield Updated(server, claim, folder / DRAFT_ENTRY)


def test_head_is_replaced_without_restart_and_answers_stay(
    engine: Engine, heads: Path, claim: Path, tmp_path: Path
) -> None:
    with updated(engine, heads, claim, tmp_path, f"--worker-extension-cls={HEAD_LOADER}") as engine_:
        answers, poor = engine_.measure()
        refusals = {
            head: engine_.order(head, digest)
            for head, digest in (
                ("wide", ""),
                ("lying", ""),
                ("stranger", ""),
                ("good", "0" * 64),
                ("linked", "1" * 64),
            )
        }
        assert {head: each.result for head, each in refusals.items()} == dict.fromkeys(refusals, "refused"), refusals
        assert "intermediate_size" in refusals["wide"].reason
        assert "midlayer.mlp" in refusals["lying"].reason
        assert "embed_tokens" in refusals["stranger"].reason
        assert "SHA-256" in refusals["good"].reason
        assert engine_.measure()[0] == answers
        running = threading.Thread(target=lambda: long_answers.append(engine_.ask(9, 900)))
        long_answers: list[list[int]] = []
        running.start()
        kept = engine_.order("good")
        running.join()
        assert (kept.result, kept.reason) == ("kept", "")
        assert kept.pause_s > 0
        after, good = engine_.measure()
        assert after == answers, "the target verifies what any head proposes"
        assert poor < 0.02, poor
        assert good > 0.1, good
        assert engine_.order("poor").result == "kept"
        back, poor_again = engine_.measure()
        assert (back, poor_again) == (answers, poor)
        assert long_answers == [engine_.ask(9, 900)], "a request that runs meanwhile gets the same answer"
        print(f"acceptance {poor:.3f} -> {good:.3f}, pause {kept.pause_s:.3f} s")  # noqa: T201 (pytest -s)


@pytest.mark.long
def test_engine_without_the_extension_refuses_a_head(engine: Engine, heads: Path, claim: Path, tmp_path: Path) -> None:
    with updated(engine, heads, claim, tmp_path) as engine_:
        other = {"root": str(claim), "path": "tests/good/head", "sha256": "1" * 64, "pods": ["another-pod"]}
        engine_.write(other)
        refused = engine_.order("good", pods=["tiny-0"])
        assert (refused.result, "without the extension" in refused.reason) == ("refused", True)
        assert engine_.told("1" * 64) is None
