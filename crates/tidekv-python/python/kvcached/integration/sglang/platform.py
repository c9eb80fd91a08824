"""SGLang's platforms with pools and allocators of ours. Everything else is SGLang's platform of the same device."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.cuda import CudaSRTPlatform
from sglang.srt.platforms.interface import SRTPlatform

__all__ = ["ElasticCpuPlatform", "ElasticCudaPlatform", "ElasticHostPlatform", "ElasticPlatform"]


class ElasticPlatform(SRTPlatform):
    """SGLang asks for these classes and constructs them as it would its own. They are imported when it does: a platform is
    chosen while SGLang's modules are still being imported."""

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        from kvcached.integration.sglang import pools

        own = {"mha": pools.ElasticMHAPool, "mla": pools.ElasticMLAPool}.get(kind)
        return own or super().get_kv_pool_cls(kind=kind)

    def get_paged_allocator_cls(self) -> type | None:
        from kvcached.integration.sglang.allocators import ElasticPagedAllocator

        return ElasticPagedAllocator


class ElasticCudaPlatform(ElasticPlatform, CudaSRTPlatform):
    """A GPU of NVIDIA."""


class ElasticCpuPlatform(ElasticPlatform, CpuSRTPlatform):
    """SGLang's CPU engine."""


class ElasticHostPlatform(ElasticPlatform):
    """No device that SGLang knows: its schedulers and pools run on host memory, its models do not."""
