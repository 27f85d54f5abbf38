"""vLLM's platform entry point; it must not import vLLM's platforms, which are still being chosen."""


def platform() -> str:
    """Return the class that vLLM is to take."""
    return "specdecode_emulated.platform.EmulatedPlatform"
