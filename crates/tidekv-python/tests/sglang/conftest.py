"""SGLang as it is installed, on the CPU: a small model, and schedulers in processes of their own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# The helpers beside the tests.
sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from players import Play, Player

# scripts/test-sglang has it; where it is missing there is nothing to test.
if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch

    # The models are so small that threads would only wait for each other.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's ledgers and segments are: apart from those of the machine."""
    monkeypatch.setenv("KVCACHED_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def save_model(config: Any, folder: Path) -> str:
    """Random weights, large enough that a model's tokens depend on everything that it has read."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers. It has no rotary embedding, for which SGLang has no code on this platform; a token's K has 1024 floats, so a
    page of the pool holds 512 tokens."""
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=512, n_positions=2048, n_embd=1024, n_layer=2, n_head=16, n_inner=256, bos_token_id=1, eos_token_id=2,
        initializer_range=0.2,
    )  # fmt: skip
    return save_model(config, tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="session")
def splittable_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same for two ranks: SGLang does not split the K and V heads of the other."""
    from transformers import OPTConfig

    config = OPTConfig(
        vocab_size=512, hidden_size=1024, num_hidden_layers=2, ffn_dim=256, num_attention_heads=16,
        max_position_embeddings=2048, word_embed_proj_dim=1024, bos_token_id=1, eos_token_id=2, pad_token_id=0, init_std=0.2,
    )  # fmt: skip
    return save_model(config, tmp_path_factory.mktemp("opt"))


@pytest.fixture
def play(model: str, runtime_dir: Path) -> Iterator[Play]:
    """Starts schedulers that share a device."""
    from players import starter

    players: list[Player] = []
    yield starter(model, runtime_dir, players)
    for player in players:
        player.kill()


@pytest.fixture(scope="session")
def play_apart(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    """Starts schedulers that several tests look at, each with a device of its own."""
    from players import starter

    players: list[Player] = []

    def play(*args: Any, **kwargs: Any) -> Player:
        return starter(model, tmp_path_factory.mktemp("runtime"), players)(*args, **kwargs)

    yield play
    for player in players:
        player.kill()
