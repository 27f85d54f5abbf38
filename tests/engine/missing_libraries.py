"""Stand-ins for what the engine's image for GPUs holds and the CPU build lacks; runs in the engine's Python.

vLLM's modules import these libraries for the names in them. No kernel can run.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

KERNEL_LIBRARIES = (
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn",
    "vllm._moe_C_stable_libtorch",
    "vllm._moe_C",
    "vllm._flashkda_C",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm.third_party.flashmla.flash_mla_interface",
)
COMPILER_PASSES = "vllm.compilation.passes.pass_manager"
"""Names kernels of the GPU build while being imported; nothing is compiled here."""

FLASH_ATTENTION = "vllm.vllm_flash_attn.flash_attn_interface"
FLASH_ATTENTION_VERSIONS = (2, 3, 4)
WITH_OTHER_LAYOUT = ("triton_kernels", "vllm.third_party.triton_kernels")
"""Runs experts in MXFP4 from weights that it pads only once they are loaded, to what Marlin asks for at once: public
logs have that size."""

PACKAGES = ("torchvision", "cutlass", "quack", "deep_gemm")


class Anything(type):
    """A class whose attributes, results and subscripts are classes of the same kind."""

    def __getattr__(cls, name: str) -> Any:
        """Return another."""
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing

    def __call__(cls, *_: Any, **__: Any) -> Any:
        """Return it, or as a decorator do nothing."""
        return cls

    def __getitem__(cls, _: Any) -> Any:
        """Return it."""
        return cls


class Nothing(metaclass=Anything):
    """Whatever a missing library would have offered."""


class Missing(types.ModuleType):
    """A library or package whose contents do not matter."""

    __version__ = "1.0"

    def __getattr__(self, name: str) -> Any:
        """Return a placeholder."""
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class MissingPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds missing packages and all of their modules."""

    def __init__(self, *packages: str) -> None:
        """Stand in for them."""
        self._packages = packages

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Return a place for their modules only."""
        if fullname.partition(".")[0] in self._packages:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        """Return an empty package."""
        return Missing(spec.name)

    def exec_module(self, module: Any) -> None:
        """Run nothing."""


class HiddenPackages(importlib.abc.MetaPathFinder):
    """Lets what is there not be found."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Find nothing; end the search for what is hidden."""
        if fullname in WITH_OTHER_LAYOUT:
            raise ModuleNotFoundError(fullname)


class TuningConfig:
    """One of the variants that Triton could compile a kernel in; modules filter lists of them while being imported."""

    def __init__(self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, **_: Any) -> None:
        """Keep what they look at."""
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


class Kernel:
    """A kernel that is not there: it can be named, and asked for sizes of workspaces, which are not weights."""

    def __call__(self, *_: Any, **__: Any) -> int:
        """Return nothing needed."""
        return 0

    def __getattr__(self, name: str) -> "Kernel":
        """Return one of its variants."""
        return self


class Handle:
    """A stream or event of a device that is not there."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Make one."""


def install() -> None:
    """Make imports of everything above work."""
    sys.meta_path.append(MissingPackages(*PACKAGES))
    sys.meta_path.insert(0, HiddenPackages())
    for library in (*KERNEL_LIBRARIES, COMPILER_PASSES, FLASH_ATTENTION):
        sys.modules[library] = Missing(library)
    flash_attention: Any = sys.modules[FLASH_ATTENTION]
    flash_attention.is_fa_version_supported = lambda version, *_: version in FLASH_ATTENTION_VERSIONS
