"""`specdecode replay`: its table of commands."""

from typing import ClassVar

from specdecode_operator.cli.command_groups import LazyGroup, application


class _Commands(LazyGroup):
    later: ClassVar = {
        "prepare": "replay.serve:prepare_command",
        "serve": "replay.serve:serve_command",
        "drive": "replay.drive:drive_command",
        "compare": "replay.fit:compare_command",
        "fit": "replay.fit:fit_command",
        "forecast": "replay.synth:forecast_command",
        "synth": "replay.synth:synth_command",
    }


replay_app = application("Captures without a GPU: played back, fitted, compared, forecast, made.", cls=_Commands)
