"""What SGLang calls in each of its processes when the switches are on."""

from __future__ import annotations

import os

from kvcached.integration.capability import Capability, EngineRefused, examine
from kvcached.integration.versions import SUPPORT, installed
from kvcached.utils import KVCachedConfigError, get_kvcached_logger

__all__ = ["platform", "register", "require_hooks"]

logger = get_kvcached_logger()

_PLATFORMS = "kvcached.integration.sglang.platform"
_is_registered = False


def platform() -> str | None:
    """The platform to use; None for SGLang's own, and then `register` says why. SGLang asks while its modules are being imported,
    so nothing of it may be looked at here."""
    version = installed("sglang")
    if version is None or SUPPORT["sglang"].is_too_old(version):
        return None
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return f"{_PLATFORMS}.ElasticCpuPlatform"
    import torch

    if torch.cuda.is_available():
        return f"{_PLATFORMS}.ElasticCudaPlatform" if torch.version.hip is None else None
    others = (getattr(torch, name, None) for name in ("npu", "xpu", "musa", "mps"))
    if any(other is not None and other.is_available() for other in others):
        return None
    return f"{_PLATFORMS}.ElasticHostPlatform"


def register() -> None:
    """Registers the hooks. `EngineRefused` where this SGLang cannot be used: nothing in it has been changed then."""
    global _is_registered
    capability = examine("sglang").require()
    _require_platform(capability)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvcached.integration.sglang.hooks import HOOKS

    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
    _is_registered = True
    logger.info("%s", capability.used().line())


def require_hooks() -> None:
    """That `register` has run in this process. With `SGLANG_PLATFORM` SGLang loads a platform alone where `SGLANG_PLUGINS` leaves its
    hooks out, and would then give out ids that have no memory."""
    if not _is_registered:
        raise KVCachedConfigError(
            "SGLang has our platform and not our hooks, so its ids would have no memory: add tidekv to SGLANG_PLUGINS or unset it, "
            "or unset ENABLE_KVCACHED to run SGLang with its own memory"
        )


def _require_platform(capability: Capability) -> None:
    """Another platform would make its own pools, and our hooks would have nothing to stand on."""
    from sglang.srt.platforms import current_platform

    from kvcached.integration.sglang.platform import ElasticPlatform

    if isinstance(current_platform, ElasticPlatform):
        return
    reason = f"its platform is {type(current_platform).__name__}, and pools are elastic on CUDA and on the CPU alone"
    advice = "Unset SGLANG_PLATFORM where it is set, or unset ENABLE_KVCACHED to run it with its own memory"
    raise EngineRefused(
        Capability(capability.engine, capability.version, "refused", capability.points, reason, advice)
    )
