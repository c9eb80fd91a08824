"""What engines load at their start: the entry points of this distribution, and nothing else.

    vllm.general_plugins  -> vllm               sglang.srt.plugins -> sglang       sglang.srt.platforms -> sglang_platform

Engines load the plugins of every distribution that is installed, whether anybody wants them or not. So this package imports
nothing of ours before the switches say so: with them off an engine runs as if we were not there.

| ENABLE_KVCACHED | KVCACHED_AUTOPATCH | what happens                                                       |
|-----------------|--------------------|--------------------------------------------------------------------|
| on              | unset, or on       | the adapter is put in, or the engine stops with one sentence       |
| on              | off                | nothing: who calls ``kvcached`` by hand does so                    |
| off, or unset   | anything           | nothing                                                            |
"""

from __future__ import annotations

import os

__all__ = ["is_wanted", "sglang", "sglang_platform", "vllm"]

_ON = ("true", "1")


def is_wanted() -> bool:
    """Whether engines are to be given elastic memory: ``ENABLE_KVCACHED`` is on, and nobody switched the adapters off."""
    if os.environ.get("ENABLE_KVCACHED", "").strip().lower() not in _ON:
        return False
    return os.environ.get("KVCACHED_AUTOPATCH", "1").strip().lower() in _ON


def vllm() -> None:
    """vLLM calls it in every process: front end, scheduler and workers."""
    if is_wanted():
        from kvcached.integration.vllm import plugin

        plugin.register()


def sglang() -> None:
    """SGLang calls it in every process."""
    if is_wanted():
        from kvcached.integration.capability import EngineRefused
        from kvcached.integration.sglang import plugin

        try:
            plugin.register()
        except EngineRefused as refusal:
            # SGLang logs what a plugin raises and goes on with memory of its own. This it lets through.
            raise SystemExit(str(refusal)) from None


def sglang_platform() -> str | None:
    """The class that SGLang asks for pools and allocators, or None for SGLang's own."""
    if not is_wanted():
        return None
    from kvcached.integration.sglang import plugin

    return plugin.platform()
