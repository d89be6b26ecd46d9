"""Chat templates, a tokenizer of bytes, and the turns that a row trains."""

from typing import Any

from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pronghorn.data.labels import label_rows
from pronghorn.data.packing import Document
from pronghorn.data.rows import Conversation, Message, Row
from pronghorn.data.template import render

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


INST = (  # Llama 2 and Mistral: no generation prompt, a space before the answer
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


QWEN3_LIKE = CHATML.replace(  # drops reasoning before the last turn, writes an empty block in the last
    "{{ m.content }}",
    "{% if m.role == 'assistant' and loop.last and '</think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content if loop.last else m.content.split('</think>')[-1].lstrip('\n') }}",
)


WHERE: dict[str, Any] = {"path": "chat.jsonl", "line": 7}


def chat(*contents: str, system: str | None = None) -> Conversation:
    """A conversation of user's and assistant's turns by turns."""
    head = () if system is None else (Message("system", system),)
    roles = ("user", "assistant")
    return Conversation(head + tuple(Message(roles[i % 2], text) for i, text in enumerate(contents)), **WHERE)


def trained(document: Document, tokenizer: Any) -> list[str]:
    """The decoded runs of trained tokens."""
    runs: list[list[int]] = []
    previous = -100
    for token, label in zip(document.input_ids, document.labels, strict=True):
        assert label in (token, -100)
        if label != -100:
            if previous == -100:
                runs.append([])
            runs[-1].append(label)
        previous = label
    return [tokenizer.decode(run) for run in runs]


def one(row: Row, tokenizer: Any, **options: Any) -> Document:
    (document,) = label_rows([row], tokenizer, **options).documents
    return document


def written(row: Conversation, tokenizer: Any, before: int | None = None) -> str:
    """The whole conversation as the tokenizer's template writes it, or what the model sees before a message."""
    return render(row.messages[:before], row.tools, tokenizer, row.source, answer=before is not None)


def byte_level(template: str | None, vocabulary: tuple[str, ...] = (), trim_offsets: bool = False) -> Any:
    """A GPT-2-like tokenizer of single bytes and of the words of `vocabulary` (in its alphabet: Ġ for a space)."""
    merges, tokens = [], {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for word in vocabulary:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens[word[:end]] = len(tokens)
                merges.append((word[: end - 1], word[end - 1]))
    backend = Tokenizer(models.BPE(vocab=tokens, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not vocabulary)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<s>"]})
    tokenizer.chat_template = template
    return tokenizer


edge = st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zs", "Zl", "Zp"), exclude_characters="<▁")


inner = st.text(st.one_of(edge, st.sampled_from("  \n\té😀")), max_size=20)


texts = st.builds(lambda first, middle, last: first + middle + last, edge, inner, edge)
