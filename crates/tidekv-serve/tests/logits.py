"""Usage: logits.py LOGITS-BINARY

Writes small random Llama, Qwen2 and Qwen3 folders with transformers, computes the logits of every token with both
implementations in 32-bit floats, and compares them: at most 1e-4 apart, in whole prompts and in chunks.

Exit code: 0 equal, 1 not equal, 2 it could not run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

TOLERANCE = 1e-4
LENGTHS = (1, 5, 16, 17, 70)
COMMON = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# name -> (model class, configuration, precision of the files, size of one file)
CASES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**COMMON), torch.float32, "1GB"),
    "llama, biases, tied": (
        LlamaForCausalLM,
        LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        torch.float32,
        "1GB",
    ),
    "llama, llama3 positions, head_dim, several files": (
        LlamaForCausalLM,
        LlamaConfig(**COMMON, head_dim=16, rope_parameters=LLAMA3),
        torch.float32,
        "40KB",
    ),
    "llama, linear positions, bf16": (
        LlamaForCausalLM,
        LlamaConfig(**COMMON, rope_parameters={"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0}),
        torch.bfloat16,
        "1GB",
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**COMMON), torch.float32, "1GB"),
    "qwen2, tied, f16": (Qwen2ForCausalLM, Qwen2Config(**COMMON, tie_word_embeddings=True), torch.float16, "1GB"),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**COMMON, head_dim=32), torch.float32, "1GB"),
    "qwen3, biases, several files": (
        Qwen3ForCausalLM,
        Qwen3Config(**COMMON, head_dim=16, attention_bias=True),
        torch.float32,
        "40KB",
    ),
}


def random_weights(model: torch.nn.Module) -> None:
    """Norms and biases too: a bias of zero or a norm of one would hide that it is not read."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)


def ours(binary: str, folder: Path, sequences: list[list[int]], chunk: int) -> list[torch.Tensor]:
    run = subprocess.run(
        [binary, str(folder), str(chunk)], input=json.dumps(sequences), capture_output=True, text=True, check=False
    )
    if run.returncode != 0:
        sys.exit(f"{binary} failed: {run.stderr.strip()}")
    vocab = COMMON["vocab_size"]
    return [torch.tensor(rows).view(-1, vocab) for rows in json.loads(run.stdout)]


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    torch.manual_seed(0)
    disable_progress_bar()
    failed = 0
    for name, (kind, config, precision, file_size) in CASES.items():
        model = kind(config).eval()
        random_weights(model)
        model = model.to(precision)
        sequences = [torch.randint(0, COMMON["vocab_size"], (length,)).tolist() for length in LENGTHS]
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder, max_shard_size=file_size)
            files = len(list(Path(folder).glob("*.safetensors")))
            if (file_size != "1GB") != (files > 1):
                print(f"{name}: {files} files were written", file=sys.stderr)
                return 2
            # Read back: casting the model would also have rounded its table of angles, which is not in the files.
            model = kind.from_pretrained(folder, dtype=torch.float32).eval()
            with torch.no_grad():
                theirs = [model(torch.tensor([tokens])).logits[0] for tokens in sequences]
            for chunk in (1, 7, 1000):
                pairs = zip(ours(sys.argv[1], Path(folder), sequences, chunk), theirs, strict=True)
                furthest = max((mine - other).abs().max().item() for mine, other in pairs)
                spread = max(other.abs().max().item() for other in theirs)
                is_equal = furthest <= TOLERANCE
                failed += not is_equal
                verdict = "ok" if is_equal else "FAILED"
                print(f"{verdict:6} {name}, {chunk} tokens at a time: {furthest:.1e} apart, logits up to {spread:.1f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
