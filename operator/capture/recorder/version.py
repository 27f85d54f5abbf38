"""Version of the recorder: raised when what it records, or how, changes."""

RECORDER_VERSION = "0.1.0"
