"""Tokenizers and chat templates beside transformers': the same ids for every text and conversation.

The folders are written here: tokenizers trained on a few lines, templates in the manner of well-known models, and random
weights so that kvserve has something to serve.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import numpy
import pytest
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog, 1234567890 times; isn't that nice?",
    "def main():\n    print('Grüße aus Zürich')\n\treturn 0\n",
    "Größe, naïve café, 你好世界, こんにちは, Привет, 😀😃😄 and a family 👨‍👩‍👧.",
]
TEXTS = [
    *CORPUS, "", " ", "a", "  two  spaces  ", "\n\n\t mixed \r\n", "NEVER SEEN ÆØÅ ∑∫ ☃ 𝒳", "e\u0301 combining", "x" * 300,
    "text with <eos> and <turn> inside", "<bos>", "\u200bzero width\ufeff", "'s 're I'll don't",
]
SPECIAL = ["<bos>", "<eos>", "<turn>", "<end>"]

CHATML = """{%- for message in messages %}
    {{- '<turn>' + message.role + '\\n' + message['content'] + '<end>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<turn>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
TRIMMED = """{{ bos_token }}{% if messages[0].role == 'system' %}
{% set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{% else %}
{% set system = '' %}
{% endif %}
{% if system %}<turn>system {{ system }}<end>{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    <turn>{{ message['role'] }} {{ message['content'].strip() }}{{ eos_token if loop.last else '' }}
{% endfor %}
"""
METHODS = """{%- set ns = namespace(count=0) -%}
{%- for message in messages -%}
{%- set ns.count = ns.count + 1 -%}
{{ ns.count }}/{{ messages|length }} {{ message.role.upper() }}{% if message.content.startswith('def') %} (code){% endif %}: \
{{ message.content.split('\\n')[0] | trim }} {{ message | tojson }} {{ message.name }} {{ none }} {{ loop.last }}
{% endfor -%}
{{ bos_token ~ eos_token }}"""

CHATS = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "  Be brief.\n"}, {"role": "user", "content": "Grüße <eos> & 'quotes'"}],
    [{"role": "user", "content": "def f():\n  pass"}, {"role": "assistant", "content": " 0\n"}, {"role": "user", "content": "你好 😀"}],
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        # As newer models split: this needs look-ahead.
        pre_tokenizers.Split(
            pattern=Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            behavior="isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    trained = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", *SPECIAL, *fallback], show_progress=False)
    trained.train_from_iterator(["The quick brown fox", "isn't that nice"], trainer)
    # Bytes are ordinary tokens: only so does the decoder put them together.
    raw = json.loads(trained.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] not in fallback]
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", bos)]
    )
    return tokenizer


def write_weights(folder, vocab: int) -> None:
    hidden, heads, size, inner = 32, 2, 16, 48
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": heads,
        "head_dim": size, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "eos_token_id": 1, "hidden_act": "silu", "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = numpy.random.default_rng(0)
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden), "model.norm.weight": (hidden,),
        f"{layer}.input_layernorm.weight": (hidden,), f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (heads * size, hidden), f"{layer}.self_attn.k_proj.weight": (heads * size, hidden),
        f"{layer}.self_attn.v_proj.weight": (heads * size, hidden), f"{layer}.self_attn.o_proj.weight": (hidden, heads * size),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden), f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
    }
    save_file({name: random.standard_normal(shape, numpy.float32) for name, shape in shapes.items()}, folder / "model.safetensors")


@pytest.fixture(scope="module", params=[
    (byte_level, CHATML), (byte_level, TRIMMED), (byte_fallback, METHODS), (byte_fallback, None),
], ids=["byte-level-chatml", "byte-level-trimmed", "byte-fallback-methods", "byte-fallback-plain"])
def served(request, start, tmp_path_factory):
    """transformers' tokenizer of a folder, and a server of the same folder."""
    make, template = request.param
    folder = tmp_path_factory.mktemp("model")
    fast = make()
    theirs = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<bos>", eos_token="<eos>", chat_template=template)
    theirs.save_pretrained(folder)
    write_weights(folder, fast.get_vocab_size())
    return PreTrainedTokenizerFast.from_pretrained(folder), start(str(folder))


def ask(server, path: str, **body):
    request = urllib.request.Request(server.url + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_prompts_have_the_same_ids_and_texts(served):
    theirs, server = served
    for text in TEXTS:
        for special in (True, False):
            ids = ask(server, "/tokenize", prompt=text, add_special_tokens=special)["tokens"]
            assert ids == theirs.encode(text, add_special_tokens=special), text
            wanted = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert ask(server, "/detokenize", tokens=ids)["prompt"] == wanted


def test_conversations_have_the_same_ids(served):
    theirs, server = served
    for messages in CHATS:
        for generation in (True, False):
            for own in ({}, {"enable_thinking": False}):
                ask_ids = ask(server, "/tokenize", messages=messages, add_generation_prompt=generation, chat_template_kwargs=own)["tokens"]
                if theirs.chat_template is None:
                    text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
                    wanted = theirs.encode(text + ("assistant:" if generation else ""))
                else:
                    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation, **own)
                    wanted = theirs.encode(text, add_special_tokens=False)
                assert ask_ids == wanted, (messages, text)


def test_what_a_template_refuses_is_the_clients_error(served):
    theirs, server = served
    if not theirs.chat_template or "alternate" not in theirs.chat_template:
        pytest.skip("this template takes anything")
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(server, "/v1/chat/completions", messages=twice)
    assert refused.value.code == 400
    assert "roles must alternate" in json.load(refused.value)["error"]["message"]


def test_a_folder_answers(served):
    _theirs, server = served
    answer = ask(server, "/v1/chat/completions", messages=CHATS[0], max_tokens=12, temperature=0)
    assert answer["usage"]["completion_tokens"] >= 1 and answer["choices"][0]["finish_reason"] in ("stop", "length")
    text = ask(server, "/v1/completions", prompt="The quick", max_tokens=12, temperature=0, ignore_eos=True)
    assert text["usage"]["completion_tokens"] == 12


def test_a_hub_id_is_served_from_the_local_cache(start, tmp_path):
    """As `hf download` leaves it: refs/main names the snapshot."""
    model = tmp_path / "hub/models--org--tiny-llama"
    snapshot = model / "snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs/main").write_text("0123abcd")
    fast = byte_level()
    PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<bos>", eos_token="<eos>").save_pretrained(snapshot)
    write_weights(snapshot, fast.get_vocab_size())
    server = start("org/tiny-llama", HF_HOME=str(tmp_path))
    for name in ("org/tiny-llama", "default"):
        answer = ask(server, "/v1/completions", model=name, prompt="The quick", max_tokens=4, ignore_eos=True)
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("org/tiny-llama", 4)
