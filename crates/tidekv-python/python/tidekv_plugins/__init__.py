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
from typing import NoReturn

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
        try:
            from kvcached.integration.sglang import plugin

            plugin.register()
        except Exception as error:
            _stop_sglang(error)


def sglang_platform() -> str | None:
    """The class that SGLang asks for pools and allocators, or None for SGLang's own."""
    if not is_wanted():
        return None
    try:
        from kvcached.integration.sglang import plugin

        return plugin.platform()
    except Exception as error:
        _stop_sglang(error)


def _stop_sglang(error: Exception) -> NoReturn:
    """SGLang logs what a plugin raises, whatever it is, and goes on with memory of its own. `SystemExit` it lets through."""
    said = " ".join(str(error).split())
    if type(error).__name__ != "EngineRefused":
        # A refusal is a whole sentence; a variable that cannot be read, or an engine of another shape, says only what it is.
        said = (
            f"sglang: refused: {type(error).__name__}: {said}. Mend that, or unset ENABLE_KVCACHED to run it with its own memory"
        )
    raise SystemExit(said) from error
