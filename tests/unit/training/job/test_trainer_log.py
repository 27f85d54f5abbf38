"""Figures and failures in the output of speculators."""

import signal

import pytest

from specdecode_operator.training.job.trainer_log import Progress, how_it_ended, is_disk_full

STEP = (
    "[18:34:23] INFO     train/loss_0=4.61, train/loss={loss}, epoch=0, lr=0.003, global_step={step}   trainer.py:578"
)
EPOCH = "           INFO     Training epoch {done}/3 completed           trainer.py:741"
VALIDATION = "[18:35:27] INFO     val/full_acc_0_epoch=0.749, val/loss_epoch=5.176, epoch=2           trainer.py:671"
TRACEBACK = """\
Traceback (most recent call last):
  File "/opt/trainer/speculators/train/cli.py", line 12, in main
    raise ValueError("the prompt was: my password is swordfish")
  File "/opt/trainer/speculators/train/trainer.py", line 34, in train
    text = "swordfish"
torch.cuda.{kind}: my password is swordfish
"""


class TestProgress:
    def test_loss_and_step(self) -> None:
        assert Progress(3).feed(STEP.format(loss="18.320", step=7)) == {
            "step": 7,
            "loss": 18.32,
            "epochsDone": 0,
            "epochs": 3,
        }

    def test_small_losses(self) -> None:
        report = Progress(3).feed(STEP.format(loss="4.20e-04", step=1))
        assert report is not None
        assert report["loss"] == 0.00042

    def test_time_left_follows_from_the_epochs_of_this_attempt(self) -> None:
        now_s = 100.0
        progress = Progress(3, clock=lambda: now_s)
        progress.feed("first line")
        now_s = 160.0
        report = progress.feed(EPOCH.format(done=2))  # the first epoch was trained by an earlier attempt
        assert report is not None
        assert report["etaSeconds"] == 60
        assert progress.ends_epoch

    def test_validation(self) -> None:
        report = Progress(3).feed(VALIDATION)
        assert report is not None
        assert report["validationLoss"] == 5.176

    def test_validation_loss_that_is_no_number(self) -> None:
        progress = Progress(3)
        progress.feed(STEP.format(loss="2.0", step=9))
        progress.feed(VALIDATION.replace("val/loss_epoch=5.176", "val/loss_epoch=nan"))
        assert progress.diverged_at == 9

    def test_only_the_last_line_can_end_an_epoch(self) -> None:
        progress = Progress(3)
        progress.feed(EPOCH.format(done=1))
        progress.feed(STEP.format(loss="2.0", step=9))
        assert not progress.ends_epoch

    def test_saved_checkpoint_is_reported_once(self) -> None:
        progress = Progress(3)
        progress.feed("INFO     Checkpoint saved to /training/0           trainer.py:700")
        assert [progress.take_saved(), progress.take_saved()] == [True, False]

    @pytest.mark.parametrize("loss", ["nan", "inf", "-inf"])
    def test_loss_that_is_no_number(self, loss: str) -> None:
        progress = Progress(3)
        report = progress.feed(STEP.format(loss=loss, step=9))
        assert progress.diverged_at == 9
        assert report is not None
        assert "loss" not in report, "JSON has no NaN"

    @pytest.mark.parametrize(
        "line",
        [
            "",
            "INFO     the user said: my password is swordfish",
            "train/loss=1.0",
            "train/loss=1.0, global_step=nan",
            "train/loss=" + "9" * 20_000,
            STEP.format(loss="1.0", step=1) + " " * 20_000,
            STEP.format(loss="1e9999", step=1)[:60],
            "\x1b[31mtrain/loss=\x00",
        ],
    )
    def test_other_lines_report_nothing(self, line: str) -> None:
        progress = Progress(3)
        assert progress.feed(line) is None
        assert progress.diverged_at is None


class TestEnd:
    def test_type_and_place_are_told_and_no_text(self) -> None:
        told = how_it_ended(1, TRACEBACK.format(kind="OutOfMemoryError"))
        assert "OutOfMemoryError" in told
        assert "trainer.py:34" in told
        assert "swordfish" not in told

    def test_signal(self) -> None:
        assert "SIGKILL" in how_it_ended(-signal.SIGKILL, "")
        assert "out of memory" in how_it_ended(-signal.SIGKILL, "")
        assert "SIGSEGV" in how_it_ended(-signal.SIGSEGV, "")

    def test_no_traceback(self) -> None:
        assert how_it_ended(3, "my password is swordfish") == "exit code 3"

    @pytest.mark.parametrize("line", ["\n", "-\n", " \n", "#" * 4096])
    def test_output_without_words_is_read_in_linear_time(self, line: str) -> None:
        # A quadratic search would take more than an hour, while the pod holds its GPUs.
        assert how_it_ended(1, line * (2**18 // len(line))) == "exit code 1"

    @pytest.mark.parametrize("path", ["/x/swordfish is it.py", "/x/" + "a" * 65])
    def test_odd_file_names_are_left_out(self, path: str) -> None:
        told = how_it_ended(1, f'  File "{path}", line 3\nValueError: x')
        assert path.rpartition("/")[2] not in told

    @pytest.mark.parametrize(
        ("text", "full"),
        [("OSError: [Errno 28] No space left on device", True), ("Disk quota exceeded", True), ("Errno 281", False)],
    )
    def test_full_disk(self, text: str, *, full: bool) -> None:
        assert is_disk_full(text) is full
