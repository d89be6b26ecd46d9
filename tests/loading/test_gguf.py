"""GGUF files: the weights of every dense family, tokenizers, special tokens, refusals; and a real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pronghorn.errors import ConfigError, DataError, UnsupportedError
from pronghorn.loading.gguf import load_gguf
from pronghorn.loading.gguf_tokenizer import PRE_TOKENIZERS
from pronghorn.loading.load import load_model
from support.tiny import tiny_model

gguf = pytest.importorskip("gguf")
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def byte_level_tokens() -> list[str]:
    """The special tokens, the 256 bytes in GPT-2's spelling, and one merge."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), "12"]


def architecture_of(model: Any) -> str:
    """`general.architecture` as llama.cpp writes it: Mistral's is llama."""
    return {"mistral": "llama", "gemma3_text": "gemma3"}.get(model.config.model_type, model.config.model_type)


def write_gguf(
    path: Path,
    model: Any,
    *,
    architecture: str | None = None,
    changes: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    skip: str = "",
    tokenizer: Callable[[Any], None] | None = None,
    pre: str = "gpt-2",
    name: str = "tiny",
) -> Path:
    """Write `model` as llama.cpp's converter does: query and key rows of Llama interleaved, Gemma's norms plus one."""
    config, arch = model.config, architecture_of(model)
    writer = gguf.GGUFWriter(str(path), architecture or arch)
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("rope_theta") or rope["full_attention"]["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    (tokenizer or (lambda w: add_byte_level(w, config.vocab_size, pre)))(writer)
    for key, (add, value) in (changes or {}).items():
        getattr(writer, add)(key, value)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers
    )
    for key, weight in model.state_dict().items():
        if (key == "lm_head.weight" and config.tie_word_embeddings) or (skip and skip in key):
            continue
        value = weight.detach().float()
        if arch == "llama" and key.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            value = value.view(heads, 2, config.head_dim // 2, -1).transpose(1, 2).reshape(value.shape)
        if arch == "gemma3" and key.endswith("norm.weight"):
            value = value + 1
        base, _, suffix = key.rpartition(".")
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", value.contiguous().numpy())
    for key, array in (extra or {}).items():
        writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_byte_level(writer: Any, vocab: int, pre: str = "gpt-2", eos: int | None = 2) -> None:
    """A byte-level BPE tokenizer of `vocab` tokens whose stop token is `<|im_end|>`."""
    tokens = byte_level_tokens()
    tokens += [f"<filler{index}>" for index in range(vocab - len(tokens))]
    types = [USER_DEFINED if t == "<tool>" else CONTROL if t in SPECIAL else NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens[:vocab])
    writer.add_token_types(types[:vocab])
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    if eos is not None:
        writer.add_eos_token_id(eos)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)


def tiny(family: str = "llama") -> Any:
    return tiny_model(family, vocab_size=300, num_hidden_layers=2, sliding_window=None, use_sliding_window=False)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_weights_of_every_family_arrive(family: str, tmp_path: Path) -> None:
    model = tiny(family).eval()
    loaded, _ = load_gguf(write_gguf(tmp_path / "m.gguf", model), torch.float32)
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_file_that_calls_itself_mistral_loads(tmp_path: Path) -> None:
    model = tiny("mistral").eval()
    loaded, _ = load_gguf(write_gguf(tmp_path / "m.gguf", model, name="mistral"), torch.float32)
    assert loaded.config.model_type == "mistral"
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from pronghorn.loading.gguf import load_gguf

def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def sample():
    while not done:
        grown.append(anonymous() - before)
        time.sleep(0.001)

load_gguf(Path(sys.argv[1]), torch.bfloat16, "meta")  # all is imported
before, grown, done = anonymous(), [], False
sampler = threading.Thread(target=sample)
sampler.start()
load_gguf(Path(sys.argv[2]), torch.bfloat16, "meta")
done = True
sampler.join()
print(max(grown))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_that_go_to_another_device_never_lie_in_memory_whole(tmp_path: Path) -> None:
    """260 MB go to the meta device, which keeps nothing: what grows is rows of one weight."""
    write_gguf(tmp_path / "small.gguf", tiny())
    wide = tiny_model("llama", vocab_size=300, hidden_size=512, intermediate_size=44_000, num_hidden_layers=1)
    size = write_gguf(tmp_path / "wide.gguf", wide).stat().st_size
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}  # what is held, not what the C library keeps
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small.gguf"), str(tmp_path / "wide.gguf")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert size > 256_000_000 and 2**20 < int(run.stdout) < 60_000_000


def pieces_of(text: str, scores: dict[str, float]) -> list[str]:
    """A slow reference: join the two neighbours whose union scores highest, of equal ones the longest, as long as any
    is a piece."""
    parts = list(text.replace(" ", "▁"))
    while pairs := [(scores[a + b], len(a), len(b), -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]:
        at = -max(pairs)[-1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def test_gemma_s_tokenizer_is_rebuilt(tmp_path: Path) -> None:
    """Its file has spaces in pieces of spaces, and a score below all others' for what llama.cpp looks up beforehand."""
    model = tiny_model("gemma3_text", vocab_size=300, num_hidden_layers=7).eval()
    spaces, joined = [" " * n for n in range(2, 9)], ["▁t", "th", "he", "▁th", "the", "▁the", "en", "then", "tt"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<unused0>", "\n\n", *spaces, *(f"<0x{n:02X}>" for n in range(256))]
    own = [*joined, "▁", "t", "h", "e", "n"]
    filler = [f"[PAD{n}]" for n in range(300 - len(tokens) - len(own))]
    scores = [*[-1000.0] * 13, *[0.0] * 256, *(-float(n) for n in range(len(own))), *[-1000.0] * len(filler)]

    def pieces(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([*tokens, *own, *filler])
        writer.add_token_scores(scores)
        writer.add_token_types(
            [*[CONTROL] * 4, *[USER_DEFINED] * 9, *[6] * 256, *[NORMAL] * len(own), *[5] * len(filler)]
        )
        writer.add_bos_token_id(2)
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(3)
        writer.add_add_space_prefix(False)

    loaded, tokenizer = load_gguf(write_gguf(tmp_path / "gemma.gguf", model, tokenizer=pieces), torch.float32)
    known = dict.fromkeys(("▁" * n for n in range(2, 9)), 0.0) | {piece: -float(n) for n, piece in enumerate(own)}
    for text in ("the then", "  the", " " * 13 + "then", "tttt thethe   n", "hen  t" + " " * 20):
        assert tokenizer.tokenize(text) == pieces_of(text, known), text
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert tokenizer.tokenize(" " * 13) == ["▁" * 8, "▁" * 5]  # as Gemma's own: the longest first
    assert tokenizer("t\n\né").input_ids == [2, *tokenizer.convert_tokens_to_ids(["t", "\n\n", "<0xC3>", "<0xA9>"])]
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        got, want = loaded.eval()(ids).logits, model(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_tokenizer_that_is_not_rebuilt_may_lie_beside_the_file(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    path = write_gguf(tmp_path / "m.gguf", tiny(), pre="exotic")
    with pytest.raises(UnsupportedError, match=r"put the model's tokenizer\.json beside m\.gguf"):
        load_gguf(path, torch.float32)
    words = {token: index for index, token in enumerate(byte_level_tokens())}
    Tokenizer(models.WordLevel(words, SPECIAL[0])).save(str(tmp_path / "tokenizer.json"))
    _, tokenizer = load_gguf(path, torch.float32)
    assert tokenizer.eos_token_id == 2 and tokenizer("12").input_ids == [len(words) - 1]


def test_stories260k_through_gguf_is_the_same_model(stories: Path, tmp_path: Path) -> None:
    """A real Llama with a SentencePiece tokenizer: same logits, and merges rebuilt from scores."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(stories).eval()
    model.config.head_dim = model.config.hidden_size // model.config.num_attention_heads
    original = AutoTokenizer.from_pretrained(stories)
    stored = json.loads((stories / "tokenizer.json").read_text())["model"]
    tokens = sorted(stored["vocab"], key=stored["vocab"].get)
    rank = {a + b: index for index, (a, b) in reversed(list(enumerate(map(tuple, stored["merges"]))))}

    def pieces(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(rank.get(token, 10_000)) for token in tokens])
        writer.add_token_types([2, CONTROL, CONTROL, *[6] * 256, *[NORMAL] * (len(tokens) - 259)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    loaded, tokenizer = load_gguf(write_gguf(tmp_path / "s.gguf", model, tokenizer=pieces), torch.float32)
    text = 'Once upon a time, there was a girl named Zoë.  She said: "Hi!"\nThe end 123.'
    assert tokenizer(text).input_ids == original(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    ids = torch.tensor([tokenizer(text).input_ids])
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_an_adapter_beside_the_file_is_left_alone(tmp_path: Path) -> None:
    """transformers would load the adapter's base instead, or put the adapter into the model."""
    model = tiny().eval()
    write_gguf(tmp_path / "m.gguf", model)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "some/other"}')
    loaded, _ = load_gguf(tmp_path / "m.gguf", torch.float32)
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_special_tokens_and_template_are_the_metadata_s(tmp_path: Path) -> None:
    model, tokenizer = load_gguf(write_gguf(tmp_path / "m.gguf", tiny()), torch.float32)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")  # no pad in the file: eos
    assert (tokenizer.bos_token, tokenizer.unk_token) == ("<|im_start|>", "<|endoftext|>")
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
    assert added == {"<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True, "<tool>": False}
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer("<|im_end|>").input_ids == [2]  # no bos unless the file says so
    assert tokenizer.model_max_length == 512


def test_generation_stops_at_the_end_of_a_turn_too(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny(), tokenizer=lambda w: add_byte_level(w, 300, eos=0))
    model, tokenizer = load_gguf(path, torch.float32)
    assert tokenizer.eos_token == "<|endoftext|>"
    assert model.generation_config.eos_token_id == [0, 2] and model.config.eos_token_id == 0


@pytest.mark.parametrize(("pre", "pieces"), [("gpt-2", ["12"]), ("smollm", ["1", "2"]), ("qwen2", ["1", "2"])])
def test_digits_are_cut_as_the_model_learned_them(pre: str, pieces: list[str], tmp_path: Path) -> None:
    _, tokenizer = load_gguf(write_gguf(tmp_path / "m.gguf", tiny(), pre=pre), torch.float32)
    assert tokenizer.tokenize("12") == pieces


def test_word_patterns_are_the_models_own() -> None:
    from transformers.models.qwen2 import tokenization_qwen2
    from transformers.models.qwen3_5 import tokenization_qwen3_5

    assert PRE_TOKENIZERS["qwen2"] == tokenization_qwen2.PRETOKENIZE_REGEX
    assert PRE_TOKENIZERS["qwen35"] == tokenization_qwen3_5.PRETOKENIZE_REGEX


def test_the_model_is_dense_and_saves(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

    path = write_gguf(tmp_path / "m.gguf", tiny())
    model, tokenizer = load_gguf(path, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not getattr(model, "is_quantized", False) and getattr(model, "hf_quantizer", None) is None
    assert getattr(model.config, "quantization_config", None) is None
    assert getattr(model, "quantization_method", None) is None
    Trainer(model=model)
    model.save_pretrained(tmp_path / "folder")
    tokenizer.save_pretrained(tmp_path / "folder")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    same = AutoTokenizer.from_pretrained(tmp_path / "folder")
    text = "def f(x):  # Zoë 12\n\treturn x<|im_end|>"
    assert same(text).input_ids == tokenizer(text).input_ids
    assert (same.eos_token_id, same.pad_token_id, same.chat_template) == (2, 2, TEMPLATE)


def llama3_factors(factor: float, pairs: int, theta: float) -> np.ndarray:
    """Frequency factors as transformers' own llama3 RoPE has them."""
    plain = theta ** (-2 * np.arange(pairs) / (2 * pairs))
    waves = 2 * np.pi / plain
    mix = np.clip((8192 / waves - 1) / 3, 0, 1)
    return (1 / ((1 - mix) / factor + mix)).astype(np.float32)


def test_llama3_rope_factors_are_kept(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=300, num_hidden_layers=1, rope_parameters={
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    })  # fmt: skip
    factors = llama3_factors(32.0, 8, 500000.0)
    loaded, _ = load_gguf(write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": factors}), torch.float32)
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    lower = factors.copy()
    lower[1:-1] *= 0.99
    for others in (factors[::-1].copy(), lower):
        path = write_gguf(tmp_path / "n.gguf", model, extra={"rope_freqs.weight": others})
        with pytest.raises(UnsupportedError, match="frequency factors"):
            load_gguf(path, torch.float32)


def no_merges(writer: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(byte_level_tokens())
    writer.add_eos_token_id(2)


def test_rows_longer_than_the_positions_of_the_model(tmp_path: Path) -> None:
    model = tiny()
    path, limit = write_gguf(tmp_path / "m.gguf", model), model.config.max_position_embeddings
    with pytest.raises(ConfigError, match=f"max_seq_length {limit + 1} > {limit}"):
        load_model(path, max_seq_length=limit + 1, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"load_in_4bit with m\.gguf"):
        load_model(path, max_seq_length=limit, load_in_4bit=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"architecture": "falcon"}, UnsupportedError, "architecture 'falcon' is not served"),
        ({"architecture": "mistral"}, UnsupportedError, "architecture 'mistral' is not served"),
        (
            {"extra": {"blk.0.attn_q_norm.weight": np.zeros(64)}},
            DataError,
            "attn_q_norm.weight has no place in the model",
        ),
        ({"extra": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, DataError, "lacks 7 of the model's weights"),
        ({"extra": {"blk.0.attn_q.bias": np.zeros(64)}}, UnsupportedError, "attn_q.bias of m.gguf is in F64, which"),
        ({"pre": "exotic"}, UnsupportedError, "tokenizer.ggml.pre 'exotic': put the model's tokenizer.json beside"),
        ({"changes": {"llama.expert_count": ("add_uint32", 8)}}, UnsupportedError, "mixture of 8 experts"),
        ({"changes": {"llama.rope.scaling.type": ("add_string", "yarn")}}, UnsupportedError, "RoPE scaling 'yarn'"),
        (
            {"changes": {"llama.block_count": ("add_uint32", 10**6)}},
            DataError,
            "block_count 1,000,000, but .* 2 layers",
        ),
        *(
            ({"changes": {f"llama.rope.{key}": ("add_float32", 8.0)}}, UnsupportedError, "RoPE scaling 'linear'")
            for key in ("scaling.factor", "scale_linear")  # linear where no type says otherwise
        ),
        ({"changes": {"llama.rope.dimension_count": ("add_uint32", 8)}}, UnsupportedError, "RoPE of 8 of a head's 16"),
        ({"changes": {"llama.attention.causal": ("add_bool", False)}}, UnsupportedError, "in both directions"),
        *(
            ({"changes": {"llama.attention.head_count": value}}, DataError, "its metadata make no configuration")
            for value in (("add_uint32", 0), ("add_uint32", 3), ("add_string", "4"))
        ),
        ({"changes": {"llama.attention.key_length": ("add_uint32", 0)}}, DataError, "head_dim 0 is not an integer"),
        ({"changes": {"llama.block_count": ("add_uint32", 1)}}, DataError, "layers 1 to 1 would be left out"),
        ({"changes": {"llama.embedding_length": ("add_uint32", 10**6)}}, DataError, "embedding_length 1,000,000, but"),
        ({"skip": "layers.1.mlp.up_proj"}, DataError, "lacks 1 of the model's weights"),
        ({"tokenizer": lambda w: add_byte_level(w, 300, eos=None)}, DataError, "names no stop token"),
        ({"tokenizer": lambda w: add_byte_level(w, 300, eos=300)}, DataError, "token 300 is outside the vocabulary"),
        ({"tokenizer": lambda w: None}, DataError, "names no vocabulary"),
        ({"tokenizer": no_merges}, DataError, "holds no tokenizer.ggml.merges"),
    ],
)
def test_what_would_train_wrong_is_refused(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        load_gguf(write_gguf(tmp_path / "m.gguf", tiny(), **options), torch.float32)


def test_code_beside_the_file_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word about it transformers asks on the terminal, and "y" runs the code."""
    path = write_gguf(tmp_path / "m.gguf", tiny())
    load_gguf(path, torch.float32)[1].save_pretrained(tmp_path)
    table = json.loads((tmp_path / "tokenizer_config.json").read_text())
    table |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(table))
    (tmp_path / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast as Own\n"
    )
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": asked.append(question) or "y")
    with pytest.raises(DataError, match="tokenizer_config"):
        load_gguf(path, torch.float32)
    assert not asked and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_damaged_file_is_an_error(share: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny())
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))] or b"not GGUF at all, not at all")
    with pytest.raises(DataError, match="download it again"):
        load_gguf(path, torch.float32)


PARAGRAPH = (
    "The Eiffel Tower is a tower in Paris, the capital of France. It was built in 1889 by the company of the engineer "
    "Gustave Eiffel, and it is 330 metres tall. Every year, millions of people visit it to see the city from above."
)


@pytest.mark.slow
class TestSmolLM2:
    """The demo's model, fetched (and, without a hub, converted) by the demo itself; `smollm2` is in conftest.py."""

    def test_it_predicts_english(self, smollm2: Path) -> None:
        model, tokenizer = load_model(smollm2, max_seq_length=512, device=torch.device("cpu"))
        ids = tokenizer(PARAGRAPH, return_tensors="pt").input_ids
        with torch.no_grad():
            assert model(ids, labels=ids).loss < 3.0  # 1.97; wrongly permuted heads or digits give more than 5
        assert not getattr(model, "is_quantized", False)
        assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (2, 2)

    def test_its_tokenizer(self, smollm2: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(smollm2)
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
        assert tokenizer.tokenize("in 1889") == ["in", "Ġ", "1", "8", "8", "9"]
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
        assert added["<|im_end|>"] and added["<|im_start|>"]
        chat = [{"role": "user", "content": "hi"}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert rendered.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")

    def test_it_saves(self, smollm2: Path, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_pretrained(smollm2).save_pretrained(tmp_path)
        assert (tmp_path / "model.safetensors").is_file()
