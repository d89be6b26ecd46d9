"""Small byte-level tokenizers."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pronghorn.export.conversations import built_in
from pronghorn.loading.gguf_tokenizer import PRE_TOKENIZERS

TEXTS = [
    *(str(message.content) for named in built_in() for message in named.conversation.messages if message.content),
    "It's 12,345.67 km; isn't it?  Yes.\n\n\tNo, you'LL see: x_1 += 2**10  # ok\r\n",
    "HelloWorld ÜBERgröße camelCase XMLHttpRequest DON'T we've ПРИВЕТмир path/to//file\r\n\r\n  x 你好，世界 🙂 ½",
]
MARKS = "e\u0301cole"
"""A letter and a combining accent, which llama.cpp splits where gpt-oss' and Mistral's tokenizers don't."""


def byte_level(name: str) -> Any:
    """Train a small byte-level tokenizer that splits text in the way of this name."""
    words = PRE_TOKENIZERS[name]
    assert words is not None
    tokenizer = Tokenizer(models.BPE())
    splits = pre_tokenizers.Split(Regex(words), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=["<|return|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator([*TEXTS, MARKS] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|return|>")
