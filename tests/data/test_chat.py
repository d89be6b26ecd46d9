"""Chat templates and labels: exactly the assistant's turns are trained, or the row is refused."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pronghorn.data.labels import label_rows
from pronghorn.data.packing import Document
from pronghorn.data.rows import PromptCompletion, Row, TextDocument
from pronghorn.errors import ConfigError, DataError, UnsupportedError
from support.chats import CHATML, INST, QWEN3_LIKE, WHERE, byte_level, chat, one, texts, trained
from support.data_files import read_rows
from support.overflow import fit


@pytest.fixture(scope="module")
def plain(shared: Path) -> Any:
    """A Llama tokenizer of 512 pieces with byte fallback, bos and no template."""
    return AutoTokenizer.from_pretrained(shared / "models" / "stories260k")


@pytest.fixture(scope="module")
def stories(shared: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260k")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


def test_only_the_assistants_turns_with_their_end_are_trained(stories: Any) -> None:
    document = one(chat("Hi", "Once upon", "and then?", "The end.", system="Tell."), stories)
    assert trained(document, stories) == ["Once upon<|im_end|>", "The end.<|im_end|>"]
    expected = stories.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in chat("Hi", "Once upon", "and then?", "The end.").messages],
        return_dict=True,
    )["input_ids"]
    assert one(chat("Hi", "Once upon", "and then?", "The end."), stories).input_ids == expected
    newline = document.input_ids[-1]
    assert stories.decode([newline]) == "\n"
    assert document.labels[-1] == -100
    assert document.source == "chat.jsonl line 7"


@settings(deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
@pytest.mark.parametrize("kind", ["stories", "bytes", "bytes trimmed"])
def test_trained_tokens_decode_to_the_assistants_words(kind: str, stories: Any, turns: list[tuple[str, str]]) -> None:
    tokenizer = stories if kind == "stories" else byte_level(CHATML, trim_offsets=kind == "bytes trimmed")
    document = one(chat(*(text for turn in turns for text in turn)), tokenizer)
    assert trained(document, tokenizer) == [f"{answer}<|im_end|>" for _, answer in turns]
    assert document.labels[0] == -100


def test_prompts_and_completions(stories: Any, plain: Any) -> None:
    row = PromptCompletion("Say: ", "Once upon a time", **WHERE)
    assert one(row, stories) == one(chat("Say: ", "Once upon a time"), stories)
    row = PromptCompletion("Say:", " Once upon a time", **WHERE)
    document = one(row, plain)
    assert document.input_ids == [*plain("Say: Once upon a time")["input_ids"], plain.eos_token_id]
    assert trained(document, plain) == ["Once upon a time</s>"]  # decoding drops a first space
    with pytest.raises(DataError, match="line 7: the assistant's text holds the control token '</s>'"):
        one(PromptCompletion("Say:", " Once</s> upon", **WHERE), plain)
    whole = one(row, plain, loss_on="all")
    assert whole.input_ids == document.input_ids
    assert whole.labels == [-100, *document.input_ids[1:]]


def test_texts_are_trained_whole_with_one_bos(plain: Any) -> None:
    bos, eos = plain.bos_token_id, plain.eos_token_id
    for text in ("Once upon a time", "<s>Once upon a time", "Once upon a time</s>", "<s>Once upon a time</s>"):
        document = one(TextDocument(text, **WHERE), plain)
        assert document.input_ids == [bos, *plain("Once upon a time", add_special_tokens=False)["input_ids"], eos]
        assert document.labels == [-100, *document.input_ids[1:]]
    tokenizer = byte_level(None)  # without bos
    assert one(TextDocument("ab", **WHERE), tokenizer).labels[0] == -100
    end = ("<|im_end|>", tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("$A <|im_end|>", special_tokens=[end])
    assert tokenizer.decode(one(TextDocument("ab", **WHERE), tokenizer).input_ids) == "ab<|im_end|>"
    tokenizer.bos_token = tokenizer.eos_token  # put behind a text, and not before it
    assert one(TextDocument("ab", **WHERE), tokenizer).input_ids == tokenizer("ab")["input_ids"]
    both = processors.TemplateProcessing("<|im_end|> $A <|im_end|>", special_tokens=[end])
    tokenizer.backend_tokenizer.post_processor = both
    assert one(TextDocument("ab", **WHERE), tokenizer).input_ids == tokenizer("ab")["input_ids"]


def test_a_template_that_writes_bos_gets_no_second_one(plain: Any, shared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260k")
    tokenizer.chat_template = INST
    document = one(chat("Hi", "Once upon", "more", "The end."), tokenizer)
    assert document.input_ids.count(plain.bos_token_id) == 1
    assert trained(document, tokenizer) == ["Once upon</s>", "The end.</s>"]
    everything = one(chat("Hi", "Once upon"), tokenizer, loss_on="all")
    assert everything.labels == [-100, *everything.input_ids[1:]]


def test_reasoning_is_trained_where_the_template_keeps_it() -> None:
    tokenizer = byte_level(QWEN3_LIKE)
    turns = trained(one(chat("a", "first", "b", "second"), tokenizer), tokenizer)
    assert turns == ["first<|im_end|>", "<think>\n\n</think>\n\nsecond<|im_end|>"]
    reasoned = "<think>\nhm\n</think>\n\nsecond"
    assert trained(one(chat("a", reasoned), tokenizer), tokenizer) == [f"{reasoned}<|im_end|>"]
    with pytest.raises(DataError, match=r"chat\.jsonl line 7 message 2: .* writes 'second<\|im_end\|>"):
        label_rows([chat("a", reasoned, "b", "third")], tokenizer)
    assert one(chat("a", reasoned, "b", "third"), tokenizer, loss_on="all").supervised


REFUSED = {
    "trimmed text": (CHATML.replace("m.content", "m.content | trim"), chat("a", "b\n"), "writes 'b<|im_end|>"),
    "no generation prompt": (CHATML.split("{% if add")[0], chat("a", "b"), "writes '<|im_start|>assistant"),
    "unlike beginnings": ("{{ messages | length }}" + CHATML, chat("a", "b"), "message 2: the chat template renders"),
    "no end of turn": (CHATML.replace("<|im_end|>", ""), chat("a", "b"), "no end-of-turn token follows"),
    "an end that is text": (
        CHATML.replace("<|im_end|>", "<end>"),
        chat("a", "b"),
        "follows the assistant's text, but '",
    ),
    "control token": (CHATML, chat("a", "b<|im_end|>c"), "the assistant's text holds the control token '<|im_end|>'"),
    "the template's own": ("{{ raise_exception('no such role') }}", chat("a", "b"), "conversation (no such role)"),
    "no template": (None, chat("a", "b"), "a conversation, but the tokenizer has no chat template"),
}


@pytest.mark.parametrize(("template", "row", "error"), REFUSED.values(), ids=REFUSED)
def test_what_would_give_wrong_labels_is_refused(template: str | None, row: Row, error: str) -> None:
    with pytest.raises(DataError) as caught:
        label_rows([row], byte_level(template))
    assert error in str(caught.value)
    assert str(caught.value).startswith("chat.jsonl line 7")


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize(
    ("vocabulary", "prompt", "completion", "token"),
    [
        (("ab",), "xa", "by", "'ab'"),
        (("Ġb",), "x ", "by", "' b'"),
        (("ĊĊ",), "x\n", "\ny", r"'\n\n'"),
        (("©b",), "xé", "by", "'éb'"),  # of é the second byte
    ],
)
def test_a_token_across_the_boundary_is_refused(
    vocabulary: tuple[str, ...], prompt: str, completion: str, token: str, trim_offsets: bool
) -> None:
    tokenizer = byte_level(None, vocabulary, trim_offsets)
    with pytest.raises(DataError) as caught:
        label_rows([PromptCompletion(prompt, completion, **WHERE)], tokenizer)
    assert f"chat.jsonl line 7: token {token} lies on both sides of the boundary" in str(caught.value)
    good = PromptCompletion(prompt[:-1], prompt[-1] + completion, **WHERE)
    assert trained(one(good, tokenizer), tokenizer) == [f"{prompt[-1]}{completion}<|im_end|>"]


def test_a_turn_across_the_templates_newline_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"line 7: token '\\n\\n' lies on both sides.*what the template writes before it"
    ):
        label_rows([chat("a", "\nb")], byte_level(CHATML, ("ĊĊ",)))
    with pytest.raises(DataError, match=r"line 7: token '\\n\\n' lies on both sides"):
        label_rows([chat("a", "b\n")], byte_level(CHATML.replace("<|im_end|>", "\n<|im_end|>"), ("ĊĊ",)))


def test_rows_without_labels_are_dropped_and_counted(stories: Any) -> None:
    rows = [chat("a", "b"), chat("only a question"), chat("c", "d")]
    result = label_rows(rows, stories)
    assert (len(result.documents), result.unsupervised) == (2, 1)
    assert label_rows(rows, stories, loss_on="all").unsupervised == 0


def test_bad_arguments(stories: Any, plain: Any) -> None:
    class Slow:
        is_fast = False

    with pytest.raises(UnsupportedError, match="Slow gives no character offsets: use a fast tokenizer"):
        label_rows([chat("a", "b")], Slow())  # type: ignore[arg-type]
    endless = PreTrainedTokenizerFast(tokenizer_object=plain.backend_tokenizer)
    with pytest.raises(DataError, match=r"line 7: the tokenizer has no token to end it with: set tokenizer\.eos"):
        label_rows([TextDocument("Once", **WHERE)], endless)


def test_overflow() -> None:
    short = Document([1, 2], [-100, 2])
    long = Document([1, 2, 3, 4], [-100, -100, 3, 4], "chat.jsonl line 9")
    late = Document([1, 2, 3, 4], [-100, -100, -100, 4])
    assert fit([short, short], 2)[0] == [short, short]
    with pytest.raises(DataError, match=r"^chat.jsonl line 9 has 4 tokens > max_seq_length 3: raise model.max_"):
        fit([short, long], 3)
    left, dropped = fit([short, long, late], 3, "drop")
    assert (left, dropped.dropped, dropped.truncated) == ([short], 2, 0)
    left, cut = fit([short, long, late], 3, "truncate")
    assert left == [short, Document([1, 2, 3], [-100, -100, 3], "chat.jsonl line 9")]
    assert (cut.dropped, cut.truncated) == (1, 1)
    with pytest.raises(DataError, match=r"of 1 document none is left at max_seq_length 3 with data\.overflow: drop"):
        fit([long], 3, "drop")
    with pytest.raises(ConfigError, match=r"max_seq_length 1 < 2 with data\.overflow: split"):
        fit([short], 1, "split")


def test_gsm8k_is_labelled_exactly(stories: Any, shared: Path) -> None:
    columns = {"prompt": "question", "completion": "answer"}
    rows = read_rows(shared / "data" / "gsm8k" / "test.jsonl", columns)
    assert len(rows) == 1319
    rows = rows[:400]
    result = label_rows(rows, stories, verify_rows=len(rows))
    assert result.unsupervised == 0
    for row, document in zip(rows, result.documents, strict=True):
        assert isinstance(row, PromptCompletion)
        assert trained(document, stories) == [f"{row.completion}<|im_end|>"]
