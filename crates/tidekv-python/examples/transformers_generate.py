"""HF transformers on elastic memory: `generate`, then continuous batching, with a random model that needs no download.

    python crates/tidekv-python/examples/transformers_generate.py            # a GPU where there is one, else the CPU

Prints how much memory the cache holds while tokens come, and that it is back at the end.
"""

from __future__ import annotations

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from tidekv.transformers import TideCache, elastic_memory

MIB = 1 << 20


def random_model(device: str) -> LlamaForCausalLM:
    """Eight layers of 512: small enough for a CPU, large enough that its cache can be seen."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        pad_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().to(device)


class Watch(LogitsProcessor):
    """Called once for every token: says what the cache holds, whenever that has changed."""

    def __init__(self, cache: TideCache) -> None:
        self.cache = cache
        self.seen = -1

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        held = sum(pool.snapshot()["used_bytes"] for pool in self.cache.pools)
        if held != self.seen:
            self.seen = held
            print(f"  {input_ids.shape[1]:4d} tokens: {held // MIB:3d} MiB")
        return scores


def generate(model: LlamaForCausalLM, device: str) -> None:
    print("generate:")
    prompt = torch.randint(3, 512, (2, 32), device=device)
    with TideCache(model.config, name="example") as cache:
        watch = LogitsProcessorList([Watch(cache)])
        ours = model.generate(prompt, past_key_values=cache, max_new_tokens=160, do_sample=False, logits_processor=watch)
        theirs = model.generate(prompt, max_new_tokens=160, do_sample=False)
        print("  the same tokens as without tidekv:", torch.equal(ours, theirs))
        cache.reset()
        print(f"  after reset: {cache.mapped_bytes // MIB} MiB")


def serve(model: LlamaForCausalLM) -> None:
    print("continuous batching:")
    prompts = [torch.randint(3, 512, (10 + 7 * request,)).tolist() for request in range(6)]
    settings = {
        "generation_config": GenerationConfig(max_new_tokens=32, do_sample=False, eos_token_id=-1, pad_token_id=0),
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=128),
        "progress_bar": False,
    }
    with elastic_memory(name="example") as memory:
        print(f"  {memory.report}")
        ours = model.generate_batch(inputs=prompts, **settings)
        print(f"  pools that are left: {len(memory.pools)}")
    theirs = model.generate_batch(inputs=prompts, **settings)
    same = [a.generated_tokens == b.generated_tokens for a, b in zip(ours.values(), theirs.values(), strict=True)]
    print("  the same tokens as without tidekv:", all(same))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_model(device)
    generate(model, device)
    serve(model)


if __name__ == "__main__":
    main()
