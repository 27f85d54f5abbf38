"""Publication of a trained head on the claim."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdecode_operator.api.training import TrainingMethod
from specdecode_operator.api.training_status import RowCounts, TrainedHead
from specdecode_operator.capture.files.formats import CaptureError
from specdecode_operator.training.files import publish
from specdecode_operator.training.files.head_check import CheckedHead, check_head
from specdecode_operator.training.files.pod_settings import PodSettings, Source
from specdecode_operator.training.files.publish import export_job, message_of, publish_head
from specdecode_operator.training.job.settings import SETTINGS_VARIABLE
from tests.support.trained_heads import HIDDEN, LAYERS, VOCABULARY, head_config, write_checkpoint

COUNTS = RowCounts(training=540, holdout=60, duplicates=3, tokens=60_000)


class Claim:
    """The claim of a training after its trainer ended."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "default" / "head"
        self.checkpoints = self.folder / "checkpoints" / "uid-1"
        self.head = self.folder / "head"
        self.settings = PodSettings(
            namespace="default",
            training="head",
            uid="uid-1",
            root=str(root),
            folder="default/head",
            method=TrainingMethod.EAGLE3,
            sources=[Source(name="evening", mount="/captures/evening", path="default/evening/as-deployed/1")],
            target_model="org/target",
            target_quantization="BF16",
            target_layers=LAYERS,
            hidden_size=HIDDEN,
            vocabulary=VOCABULARY,
            engine_version="0.32",
            trainer_image="registry/trainer:1",
            holdout_percent=10,
            max_tokens=1000,
            min_rows=1,
            seed=0,
            epochs=3,
            sequence_length=128,
        )
        (self.folder / "rows").mkdir(parents=True)
        (self.folder / "rows" / "rows.json").write_text('{"schema": 1}')
        (self.folder / "hidden-states" / "dataset").mkdir(parents=True)

    def with_checkpoint(self, name: str = "2", config: Any = None) -> "Claim":
        write_checkpoint(self.checkpoints / name, config)
        return self

    def publish(self, **changes: Any) -> TrainedHead:
        return publish_head(msgspec.structs.replace(self.settings, **changes))

    def rejected(self, **changes: Any) -> CaptureError:
        with pytest.raises(CaptureError) as caught:
            self.publish(**changes)
        return caught.value

    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())
        return found


@pytest.fixture
def claim(tmp_path: Path) -> Claim:
    return Claim(tmp_path)


class TestSuccess:
    def test_two_files_that_every_engine_can_read(self, claim: Claim) -> None:
        claim.with_checkpoint().publish()
        modes = {each.name: each.stat().st_mode & 0o777 for each in claim.head.iterdir()}
        assert modes == {"config.json": 0o644, "model.safetensors": 0o644}
        assert claim.head.stat().st_mode & 0o777 == 0o755

    def test_status(self, claim: Claim) -> None:
        head = claim.with_checkpoint().publish()
        weights = (claim.head / "model.safetensors").read_bytes()
        assert head.path == "default/head/head"
        assert head.sha256 == hashlib.sha256(weights).hexdigest()
        assert head.bytes == len(weights)
        assert head.config == json.loads((claim.head / "config.json").read_text())
        assert head.validation_loss == "2.5"
        assert head.accuracy_percent == [75, 50]

    def test_manifest(self, claim: Claim) -> None:
        claim.with_checkpoint().publish()
        manifest = claim.manifest()
        assert manifest["target"] == {"model": "org/target", "revision": None, "quantization": "BF16"}
        assert manifest["trainer"]["image"] == "registry/trainer:1"
        assert manifest["sources"] == [{"capture": "evening", "path": "default/evening/as-deployed/1"}]
        assert manifest["rows"] == {"schema": 1}
        assert manifest["files"].keys() == {"config.json", "model.safetensors"}
        assert manifest["licence"]

    def test_hidden_states_are_deleted(self, claim: Claim) -> None:
        claim.with_checkpoint().publish()
        assert not (claim.folder / "hidden-states").exists()

    def test_newest_checkpoint_without_a_best_one(self, claim: Claim) -> None:
        claim.with_checkpoint("9").with_checkpoint("10").publish()
        assert claim.manifest()["checkpoint"] == "10"

    def test_best_checkpoint(self, claim: Claim) -> None:
        claim.with_checkpoint("0").with_checkpoint("1")
        (claim.checkpoints / "checkpoint_best").symlink_to("0")
        claim.publish()
        assert claim.manifest()["checkpoint"] == "0"

    @pytest.mark.parametrize("target", ["/etc", "../../../..", "nothing"])
    def test_link_to_another_place_is_not_the_best(self, claim: Claim, target: str) -> None:
        claim.with_checkpoint("0").with_checkpoint("1")
        (claim.checkpoints / "checkpoint_best").symlink_to(target)
        claim.publish()
        assert claim.manifest()["checkpoint"] == "1"

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[]",
            '{"loss_epoch": "low"}',
            '{"loss_epoch": 1e999}',
            '{"loss_epoch": true}',
            f'{{"loss_epoch": 1{"0" * 400}}}',
        ],
    )
    def test_metrics_that_cannot_be_read(self, claim: Claim, text: str) -> None:
        claim.with_checkpoint()
        (claim.checkpoints / "2" / "val_metrics.json").write_text(text)
        head = claim.publish()
        assert (head.validation_loss, head.accuracy_percent) == (None, None)

    def test_accuracy_of_a_head_for_blocks(self, claim: Claim) -> None:
        claim.with_checkpoint()
        metrics = {"loss_epoch": 1, "full_acc_epoch": 0.1, "position_1_acc_epoch": 0.5, "position_2_acc_epoch": 2}
        (claim.checkpoints / "2" / "val_metrics.json").write_text(json.dumps(metrics))
        assert claim.publish().accuracy_percent == [50, 100]


class TestAgain:
    def test_published_head_is_reported_again(self, claim: Claim) -> None:
        first = claim.with_checkpoint().publish()
        write_checkpoint(claim.checkpoints / "3")
        assert claim.publish() == first
        assert claim.manifest()["checkpoint"] == "2"

    @pytest.mark.parametrize("left", ["head.part", "head"])
    def test_killed_attempt_is_replaced(self, claim: Claim, left: str) -> None:
        (claim.folder / left).mkdir()
        (claim.folder / left / "model.safetensors").write_text("half")
        (claim.folder / left / "evil.py").write_text("code")
        claim.with_checkpoint().publish()
        assert sorted(each.name for each in claim.head.iterdir()) == ["config.json", "model.safetensors"]
        assert not (claim.folder / "head.part").exists()

    def test_killed_after_publication(self, claim: Claim) -> None:
        claim.with_checkpoint().publish()
        (claim.folder / "hidden-states").mkdir()
        claim.publish()
        assert not (claim.folder / "hidden-states").exists()

    def test_head_of_another_training_is_kept(self, claim: Claim) -> None:
        claim.with_checkpoint().publish()
        assert claim.rejected(uid="uid-2").reason == "AlreadyPublished"
        assert claim.manifest()["uid"] == "uid-1"

    def test_foreign_manifest_is_kept(self, claim: Claim) -> None:
        (claim.folder / "manifest.json").write_text("not JSON")
        assert claim.with_checkpoint().rejected().reason == "AlreadyPublished"


class TestExport:
    @pytest.fixture(autouse=True)
    def environment(self, claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = [{"input_ids": [1, number, 2, 3], "loss_mask": [0, 0, 1, 1]} for number in range(40)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources = [Source(mount=str(tmp_path), path="rows.jsonl")]
        claim.settings = msgspec.structs.replace(claim.settings, sources=sources)
        monkeypatch.setenv(SETTINGS_VARIABLE, msgspec.json.encode(claim.settings).decode())

    def test_folders_that_the_trainer_mounts(self, claim: Claim, tmp_path: Path) -> None:
        export_job(tmp_path / "training.zip")
        places = claim.settings.places
        assert all(each.is_dir() for each in (places.rows, places.hidden_states, places.checkpoints))

    def test_head_of_another_training_ends_it_before_gpus_are_used(self, claim: Claim, tmp_path: Path) -> None:
        (claim.folder / "manifest.json").write_text('{"uid": "uid-0"}')
        with pytest.raises(CaptureError) as caught:
            export_job(tmp_path / "training.zip")
        assert caught.value.reason == "AlreadyPublished"
        assert not claim.checkpoints.exists()


class TestFailure:
    def test_weights_that_changed_after_their_check(self, claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
        weights = claim.with_checkpoint().checkpoints / "2" / "model.safetensors"

        def checked(folder: Path, *rest: Any) -> CheckedHead:
            found = check_head(folder, *rest)
            weights.write_bytes(b"code")
            return found

        monkeypatch.setattr(publish, "check_head", checked)
        assert claim.rejected().reason == "InvalidHead"
        assert not claim.head.exists()
        assert not (claim.folder / "manifest.json").exists()

    def test_no_checkpoint(self, claim: Claim) -> None:
        assert claim.rejected().reason == "InvalidHead"

    def test_checkpoints_that_are_a_link(self, claim: Claim, tmp_path: Path) -> None:
        write_checkpoint(tmp_path / "elsewhere" / "0")
        claim.checkpoints.parent.mkdir()
        claim.checkpoints.symlink_to(tmp_path / "elsewhere")
        assert claim.rejected().reason == "InvalidHead"

    def test_invalid_head_is_not_published(self, claim: Claim) -> None:
        claim.with_checkpoint(config=head_config(draft_vocab_size=0))
        assert claim.rejected().reason == "InvalidHead"
        assert not claim.head.exists()
        assert (claim.folder / "hidden-states").exists(), "a retry needs them"


class TestMessage:
    def test_rows_and_head_as_in_the_status(self, claim: Claim) -> None:
        head = claim.with_checkpoint().publish()
        message = json.loads(message_of(COUNTS, head, 4096))
        assert RowCounts.parse(message["rows"]) == COUNTS
        assert TrainedHead.parse(message["head"]) == head

    def test_long_config_loses_what_sizing_does_not_need(self, claim: Claim) -> None:
        config = head_config(transformers_version="9" * 3000)
        head = claim.with_checkpoint(config=config).publish()
        message = message_of(COUNTS, head, 4096)
        assert len(message) <= 4096
        assert json.loads(message)["head"]["config"]["draft_vocab_size"] == VOCABULARY

    def test_notes_on_rows_give_way_to_the_config(self, claim: Claim) -> None:
        head = claim.with_checkpoint().publish()
        counts = COUNTS.model_copy(update={"left_out": ["9" * 500] * 8})
        message = json.loads(message_of(counts, head, 4096))
        assert RowCounts.parse(message["rows"]) == COUNTS
        kept = {name: value for name, value in head.config.items() if value is not None}
        assert TrainedHead.parse(message["head"]).config == kept

    def test_config_that_is_too_long(self, claim: Claim) -> None:
        head = claim.with_checkpoint(config=head_config(more="9" * 5000)).publish()
        with pytest.raises(CaptureError) as caught:
            message_of(COUNTS, head, 4096)
        assert caught.value.reason == "InvalidHead"
