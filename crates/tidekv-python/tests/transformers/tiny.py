"""Tiny random models, made here and never downloaded, and what several tests look at."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def make_model(kind: str = "llama", **changes: Any) -> PreTrainedModel:
    """The same random weights every time. `kind`: llama, mistral (sliding) or qwen2 (sliding and full)."""
    shape: dict[str, Any] = dict(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        # Weights large enough that the most likely token is not a near tie.
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    if kind == "mistral":
        shape |= dict(sliding_window=8)
    if kind == "qwen2":
        layers = ["sliding_attention", "full_attention"] * 2
        shape |= dict(use_sliding_window=True, sliding_window=8, layer_types=layers)
    shape |= changes
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **shape)
    return AutoModelForCausalLM.from_config(config).eval()


def make_prompts(count: int, *, shared: int = 0, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Prompts of different lengths; the first `shared` tokens are the same in all of them."""
    rng = random.Random(seed)
    prefix = [rng.randrange(3, 128) for _ in range(shared)]
    return [prefix + [rng.randrange(3, 128) for _ in range(rng.randrange(3, longest))] for _ in range(count)]


def pool_files(folder: Path) -> list[str]:
    """What pools left in their runtime folder, ledgers aside: those belong to the device and outlive every pool."""
    return sorted(
        name for name in os.listdir(folder) if not name.startswith(("kvcached-ledger", "kvcached-events"))
    )
