"""Compares kvserve's arithmetic with that of transformers, on small random Llama, Qwen2 and Qwen3 folders.

Fifty texts of each model, teacher-forced: every logit of every token, in whole prompts and in chunks (`logits`); then sixty requests
at once to a server with memory for a few of them, so that some are preempted and computed again: the probabilities of what it
wrote (`kvserve`).

    on        in       the other side                     logits apart
    cpu       float    transformers in float              1e-4
    cuda      float    transformers in float, same GPU    1e-3
    cuda      bf16     transformers in float, same GPU    no more than twice as far as transformers' own bf16 is

The likeliest token may be another one only where its logit is within that distance of the largest.

Exit code: 0 equal, 1 not equal, 2 it could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

TEXTS = 50
CHUNKS = (1, 7, 1000)
REQUESTS = 60
ANSWER_TOKENS = 64
BLOCK_TOKENS = 16
PAGE_BLOCKS = 4
PAGES = 16
FLOAT_TOLERANCE = {"cpu": 1e-4, "cuda": 1e-3}
# How many deviations of an error two logits may be apart and still be a tie.
TIE_DEVIATIONS = 8.0

COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
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
    # Heads of 64 and 128 elements have kernels of their own on a GPU.
    "llama, heads of 64": (LlamaForCausalLM, LlamaConfig(**COMMON, head_dim=64), torch.bfloat16, "1GB"),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**COMMON), torch.float32, "1GB"),
    "qwen2, tied, f16": (Qwen2ForCausalLM, Qwen2Config(**COMMON, tie_word_embeddings=True), torch.float16, "1GB"),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**COMMON, head_dim=32), torch.float32, "1GB"),
    "qwen3, heads of 128": (Qwen3ForCausalLM, Qwen3Config(**COMMON, head_dim=128), torch.bfloat16, "1GB"),
    "qwen3, biases, several files": (
        Qwen3ForCausalLM,
        Qwen3Config(**COMMON, head_dim=16, attention_bias=True),
        torch.float32,
        "40KB",
    ),
}


@dataclass
class Side:
    """What is compared: a back-end of ours, and how far it may be from transformers."""

    backend: str
    device: str
    is_float: bool


SIDES = {
    "cpu": [Side("cpu", "cpu", True)],
    "cuda": [Side("cuda:f32", "cuda", True), Side("cuda", "cuda", False)],
}


def random_weights(model: torch.nn.Module) -> None:
    """Norms and biases too: a bias of zero or a norm of one would hide that it is not read."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)


def write_tokenizer(folder: Path) -> None:
    """A word for each id, so that ids can be read from answers."""
    vocab = {f"w{number}": number for number in range(COMMON["vocab_size"])}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def texts(count: int, longest: int) -> list[list[int]]:
    """Of every length up to the longest."""
    lengths = [1 + number * 37 % longest for number in range(count)]
    return [torch.randint(0, COMMON["vocab_size"], (length,)).tolist() for length in lengths]


class Theirs:
    """A folder in transformers, on the device of a side."""

    def __init__(self, kind: Any, folder: Path, side: Side) -> None:
        # Read back: casting the model would also have rounded its table of angles, which is not in the files.
        self.kind, self.folder, self.device = kind, folder, side.device

    def logits(self, sequences: list[list[int]], precision: torch.dtype) -> list[torch.Tensor]:
        """Of every token of every sequence, each computed alone."""
        model = self.kind.from_pretrained(self.folder, dtype=precision, attn_implementation="eager")
        model = model.to(self.device).eval()
        with torch.no_grad():
            rows = [model(torch.tensor([tokens], device=self.device)).logits[0] for tokens in sequences]
        return [row.float().cpu() for row in rows]


def ours(binary: str, folder: Path, sequences: list[list[int]], chunk: int, side: Side) -> list[torch.Tensor]:
    run = subprocess.run(
        [binary, str(folder), str(chunk), side.backend],
        input=json.dumps(sequences),
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        print(f"{binary} failed: {run.stderr.strip()}", file=sys.stderr)
        sys.exit(2)
    return [torch.tensor(rows).view(-1, COMMON["vocab_size"]) for rows in json.loads(run.stdout)]


def deviation(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root of the mean square."""
    return (found - wanted).square().mean().sqrt().item()


@dataclass
class Bound:
    """How far logits may be apart: each of them, or all of them in the mean."""

    each: float | None
    mean: float
    tie: float


def bound_of(side: Side, wanted: list[torch.Tensor], rounded: list[torch.Tensor] | None) -> Bound:
    if rounded is None:
        tolerance = FLOAT_TOLERANCE[side.device]
        return Bound(each=tolerance, mean=tolerance, tie=2 * tolerance)
    theirs = deviation(torch.cat(rounded), torch.cat(wanted))
    return Bound(each=None, mean=2 * theirs, tie=TIE_DEVIATIONS * theirs)


class Report:
    """Lines for people, an object for programs."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failed = 0

    def add(self, name: str, problems: list[str], **figures: Any) -> None:
        self.failed += bool(problems)
        self.rows.append({"name": name, "ok": not problems, "problems": problems, **figures})
        shown = ", ".join(
            f"{key.replace('_', ' ')} {value:.2g}" if isinstance(value, float) else f"{key.replace('_', ' ')} {value}"
            for key, value in figures.items()
        )
        print(f"{'FAILED' if problems else 'ok':6} {name}: {shown}", flush=True)
        for problem in problems:
            print(f"       {problem}", flush=True)


def judge(found: torch.Tensor, wanted: torch.Tensor, bound: Bound) -> tuple[list[str], dict[str, Any]]:
    """What is wrong with rows of logits, and their figures."""
    apart = (found - wanted).abs().max().item()
    mean = deviation(found, wanted)
    chosen = found.argmax(dim=-1)
    gaps = wanted.max(dim=-1).values - wanted.gather(-1, chosen[:, None])[:, 0]
    problems = []
    if bound.each is not None and not apart <= bound.each:
        problems.append(f"a logit is {apart:.2g} away, and {bound.each:.2g} are allowed")
    if not mean <= bound.mean:
        problems.append(f"logits are {mean:.2g} away in the mean, and {bound.mean:.2g} are allowed")
    if not gaps.max().item() <= bound.tie:
        problems.append(f"a choice is {gaps.max().item():.2g} below the largest logit, and {bound.tie:.2g} is a tie")
    figures = {
        "apart": apart,
        "in_the_mean": mean,
        "other_choices": int((gaps > 0).sum().item()),
        "tokens": found.shape[0],
    }
    return problems, figures


@contextmanager
def serving(binary: str, folder: Path, side: Side, config: Any) -> Iterator[str]:
    """A server with memory for a quarter of what it will be asked for; its address."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element = 4 if side.is_float else 2
    chunk = PAGE_BLOCKS * BLOCK_TOKENS * config.num_key_value_heads * head * element
    granularity = 4096 if side.device == "cpu" else 2 << 20
    page = -(-2 * config.num_hidden_layers * chunk // granularity) * granularity
    with tempfile.TemporaryDirectory() as shared:
        command = [binary, str(folder), "--backend", side.backend, "--port", "0", "--dir", shared]
        command += ["--kv-chunk", str(chunk), "--kv-budget", str(PAGES * page), "--threads", "1"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVCACHED_")}
        environment["KVCACHED_MAX_CACHED_TOKENS"] = "0"
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
            try:
                assert server.stdout is not None
                first, second = server.stdout.readline(), server.stdout.readline()
                address = second.removeprefix("listening on ").strip()
                if not address.startswith("http://"):
                    print(f"{' '.join(command)} does not serve: {first}{second}", file=sys.stderr)
                    sys.exit(2)
                yield address
            finally:
                server.send_signal(signal.SIGKILL)


def ask(address: str, path: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read().decode()


def answers(address: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """The likeliest tokens behind each prompt, with probabilities, all asked for at once."""

    def one(prompt: list[int]) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "logprobs": 5, "ignore_eos": True}
        return json.loads(ask(address, "/v1/completions", body))["choices"][0]["logprobs"]

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


def preemptions(address: str) -> int:
    lines = ask(address, "/metrics").splitlines()
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_preemptions_total{")))


def word(text: str) -> int:
    return int(text.strip().removeprefix("w"))


def judge_answers(
    prompts: list[list[int]], said: list[dict[str, Any]], theirs: Theirs, side: Side
) -> tuple[list[str], dict[str, Any]]:
    """Compares the probabilities of what a server wrote with those of transformers for the same text."""
    ids = [[word(token) for token in answer["tokens"]] for answer in said]
    whole = [prompt + answer for prompt, answer in zip(prompts, ids, strict=True)]
    parts = [slice(len(prompt) - 1, -1) for prompt in prompts]
    wanted = [rows[part] for rows, part in zip(theirs.logits(whole, torch.float32), parts, strict=True)]
    rounded = None
    if not side.is_float:
        rounded = [rows[part] for rows, part in zip(theirs.logits(whole, torch.bfloat16), parts, strict=True)]
    bound = bound_of(side, wanted, rounded)
    apart, squares, gap, others = 0.0, [], 0.0, 0
    for answer, tokens, rows in zip(said, ids, wanted, strict=True):
        likely = rows.log_softmax(dim=-1)
        for at, (token, logprob, top) in enumerate(
            zip(tokens, answer["token_logprobs"], answer["top_logprobs"], strict=True)
        ):
            named = {token: logprob} | {word(text): value for text, value in top.items()}
            far = [abs(value - likely[at, number].item()) for number, value in named.items()]
            apart = max(apart, *far)
            squares += [distance * distance for distance in far]
            lower = (rows[at].max() - rows[at, token]).item()
            gap, others = max(gap, lower), others + (lower > 0)
    mean = (sum(squares) / len(squares)) ** 0.5
    problems = []
    # A probability is a logit less the logarithm of a sum of all: twice as far at most.
    if bound.each is not None and not apart <= 2 * bound.each:
        problems.append(f"a log-probability is {apart:.2g} away, and {2 * bound.each:.2g} are allowed")
    if not mean <= 2 * bound.mean:
        problems.append(f"log-probabilities are {mean:.2g} away in the mean, and {2 * bound.mean:.2g} are allowed")
    if not gap <= bound.tie:
        problems.append(f"a token is {gap:.2g} below the likeliest, and {bound.tie:.2g} is a tie")
    if any(len(tokens) != ANSWER_TOKENS for tokens in ids):
        problems.append("an answer is shorter than asked for")
    tokens = sum(len(tokens) for tokens in ids)
    return problems, {"apart": apart, "in_the_mean": mean, "other_choices": others, "tokens": tokens}


def compare(name: str, side: Side, arguments: argparse.Namespace, report: Report) -> None:
    kind, config, precision, file_size = CASES[name]
    model = kind(config).eval()
    random_weights(model)
    # In 16 bits both sides shall begin with the same numbers.
    model = model.to(precision if side.is_float else torch.bfloat16)
    sequences, prompts = texts(TEXTS, 97), texts(REQUESTS, 29)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        model.save_pretrained(folder, max_shard_size=file_size)
        write_tokenizer(folder)
        files = len(list(folder.glob("*.safetensors")))
        if side.is_float and (file_size != "1GB") != (files > 1):
            print(f"{name}: {files} files were written", file=sys.stderr)
            sys.exit(2)
        theirs = Theirs(kind, folder, side)
        wanted = theirs.logits(sequences, torch.float32)
        rounded = None if side.is_float else theirs.logits(sequences, torch.bfloat16)
        bound = bound_of(side, wanted, rounded)
        extra = {} if rounded is None else {"theirs_in_the_mean": deviation(torch.cat(rounded), torch.cat(wanted))}
        for chunk in CHUNKS:
            found = ours(arguments.logits, folder, sequences, chunk, side)
            problems, figures = judge(torch.cat(found), torch.cat(wanted), bound)
            report.add(f"{side.backend}: {name}, {chunk} tokens at a time", problems, **figures, **extra)
        if arguments.kvserve is None:
            return
        with serving(arguments.kvserve, folder, side, config) as address:
            said = answers(address, prompts)
            preempted = preemptions(address)
        problems, figures = judge_answers(prompts, said, theirs, side)
        if preempted == 0:
            problems.append("no request was preempted: there was memory for all of them")
        report.add(f"{side.backend}: {name}, served", problems, **figures, preemptions=preempted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logits", required=True, metavar="BINARY", help="the example `logits` of tidekv-serve")
    parser.add_argument("--kvserve", metavar="BINARY", help="kvserve; without it nothing is served")
    parser.add_argument("--backend", choices=list(SIDES), default="cpu")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this model; may be repeated")
    parser.add_argument("--output", type=Path, metavar="FILE", help="figures as JSON")
    arguments = parser.parse_args()
    if arguments.backend == "cuda" and not torch.cuda.is_available():
        print("torch has no GPU here", file=sys.stderr)
        return 2
    # Floats are floats.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    disable_progress_bar()
    report = Report()
    for name in arguments.case or CASES:
        for side in SIDES[arguments.backend]:
            compare(name, side, arguments, report)
    if arguments.output:
        device = torch.cuda.get_device_name(0) if arguments.backend == "cuda" else "cpu"
        result = {"name": "logits", "torch": torch.__version__, "device": device, "rows": report.rows}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{len(report.rows) - report.failed} equal, {report.failed} not")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
