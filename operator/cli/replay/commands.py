"""`specdecode replay`: captures played back without a GPU."""

from typing import ClassVar

from specdecode_operator.cli.application import LazyGroup, application


class _Commands(LazyGroup):
    later: ClassVar = {
        "prepare": "replay.prepare:prepare_command",
        "serve": "replay.serve:serve_command",
        "drive": "replay.drive:drive_command",
        "compare": "replay.compare:compare_command",
        "fit": "replay.fit:fit_command",
        "forecast": "replay.forecast:forecast_command",
        "synth": "replay.synth:synth_command",
    }


replay_app = application("Captures without a GPU: played back, fitted, compared, forecast, made.", cls=_Commands)
