"""Chats with base and adapter of a run."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from pronghorn.cli.chat import converse
from pronghorn.cli.console import Console
from pronghorn.cli.main import app
from pronghorn.config.recipe import Recipe
from pronghorn.data.labels import label_rows
from pronghorn.data.packing import IGNORE_INDEX
from pronghorn.data.rows import Conversation, Message
from pronghorn.data.template import BUILT_IN
from pronghorn.errors import ConfigError, DataError
from pronghorn.loading.load import load_model
from pronghorn.train import evaluate
from pronghorn.train.chat import load_chat
from pronghorn.train.run import run
from pronghorn.train.run_state import changed_keys
from support.chats import CHATML, byte_level
from support.templates import with_template
from support.tiny import tiny_model

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def recipe(folder: Path, stories: Path, **changes: Any) -> Recipe:
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A cat sat on a mat."}]
    (folder / "train.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 40))
    (folder / "t.jinja").write_text(TEMPLATE)
    return Recipe.model_validate(
        {
            "model": {"name": str(stories), "max_seq_length": 256, **changes.get("model", {})},
            "adapter": {"r": 8, **changes.get("adapter", {})},
            "data": {
                "train": folder / "train.jsonl",
                "chat_template": str(folder / "t.jinja"),
                **changes.get("data", {}),
            },
            "train": {
                "output": folder / "run",
                "max_steps": 30,
                "learning_rate": 2e-2,
                "warmup_steps": 0,
                **changes.get("train", {}),
            },
            "memory": {"gradient_checkpointing": False},
            "report": {"html": False, **changes.get("report", {})},
        }
    )


@pytest.fixture(params=["lora", "full"])
def trained(request: pytest.FixtureRequest, stories: Path, tmp_path: Path) -> Path:
    run(recipe(tmp_path, stories, adapter={"method": request.param}), Console(quiet=True))
    return tmp_path / "run"


def ask(folder: Path, text: str | bytes, *options: str) -> Any:
    runner = CliRunner()
    return runner.invoke(app, ["chat", str(folder), *options], input=text, env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_both_sides_answer_from_a_pipe(trained: Path) -> None:
    result = ask(trained, "Who?\n\n/reset\n/help\nWho?\n", "--max-new-tokens", "24")
    assert result.exit_code == 0, result.output
    first, again = result.stdout.split("Forgotten.\n/help is not a command: /reset, /quit\n")
    base, trained_ = first.split("trained: ")
    assert trained_.startswith("A cat sat on a mat.") and base.startswith("base: ") and "A cat sat on a mat" not in base
    assert again.strip() == first.strip()


def test_each_side_remembers_its_own_words(short_run: Path) -> None:
    session = load_chat(short_run, max_new_tokens=8, system="Be kind.")
    first = dict(session.replies("Who?"))
    assert dict(session.replies("And then?")).keys() == {"base", "trained"}
    for side, answer in first.items():
        history = session.histories[side]
        assert [turn["role"] for turn in history] == ["user", "assistant"] * 2 and history[1]["content"] == answer
    assert session.tokenizer.chat_template == TEMPLATE


@pytest.mark.slow
def test_two_columns_on_a_wide_terminal(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(recipe(tmp_path, stories), Console(quiet=True))
    session = load_chat(tmp_path / "run", max_new_tokens=24)
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    asked = iter(["Who?", "/quit"])
    monkeypatch.setattr(console, "input", lambda _: next(asked))
    converse(session, console)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert any("base" in line and "trained" in line for line in output.splitlines())
    assert "A cat sat on a mat." in output


def test_folders_that_are_no_finished_run(tmp_path: Path) -> None:
    (tmp_path / "journal.json").write_text("{}")
    for folder, message in ((tmp_path / "none", "is not a folder"), (tmp_path, "is not finished")):
        result = ask(folder, "")
        assert result.exit_code == 1 and message in result.stderr and "remedy: " in result.stderr
    (tmp_path / "journal.json").unlink()
    assert "run.json does not exist" in ask(tmp_path, "").stderr
    (tmp_path / "model-q8_0.gguf").touch()
    told = " ".join(ask(tmp_path, "").stderr.split())
    assert "but an export's" in told and "give the GGUF file in it" in told and "model-q8_0.gguf" in told


def model_folder(folder: Path, stories: Path, **changes: Any) -> Path:
    """A random Qwen2, which has biases, or with `tokens` stories260k with these special tokens."""
    model, tokenizer = load_model(stories, max_seq_length=256)
    if changes:
        tokenizer.add_special_tokens({"additional_special_tokens": changes["tokens"]})
        model.resize_token_embeddings(len(tokenizer))
    else:
        model = tiny_model("qwen2", vocab_size=512)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_an_answer_ends_where_the_template_of_the_training_ends_turns(stories: Path, tmp_path: Path) -> None:
    """The checkpoint's own generation settings don't know the token."""
    base = model_folder(tmp_path / "base", stories, tokens=["<|im_start|>", "<|im_end|>"])
    changes: dict[str, Any] = {"model": {"name": str(base)}, "data": {"chat_template": "chatml"}}
    changes["report"] = {"sample_prompts": ["Who?"], "sample_tokens": 60}
    settings = recipe(tmp_path, stories, **changes, adapter={"modules_to_save": ["embed_tokens"]})
    record = run(settings, Console(quiet=True))
    session = load_chat(tmp_path / "run", max_new_tokens=60)
    assert dict(session.replies("Who?"))["trained"] == record.samples[0]["after"] == "A cat sat on a mat."


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "adapter",
    [
        {"method": "full"},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"new_tokens": ["cat sat"]},
        {"new_tokens": ["cat sat"], "bias": "all"},
    ],
    ids=str,
)
def test_the_base_is_the_base(adapter: dict[str, Any], stories: Path, tmp_path: Path) -> None:
    """Whatever was trained: switching the adapter off gives back no bias that was trained in place."""
    base = model_folder(tmp_path / "base", stories)
    settings = recipe(tmp_path, stories, model={"name": str(base)}, adapter=adapter, train={"max_steps": 5})
    run(settings, Console(quiet=True))
    session = load_chat(tmp_path / "run", max_new_tokens=2)
    assert list(dict(session.replies("A cat sat?"))) == ["base", "trained"]  # the base has rows for new tokens, too
    fresh, _ = load_model(base, max_seq_length=256)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = fresh.eval()(input_ids=ids).logits
        with session._side("base"):
            assert torch.equal(session.models["base"](input_ids=ids).logits[..., :512], expected)
        with session._side("trained"):
            assert not torch.allclose(session.models["trained"](input_ids=ids).logits[..., :512], expected, atol=1e-3)


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A finished run over a model folder of its own, for tests that only load it."""
    folder = tmp_path_factory.mktemp("short")
    stories = request.getfixturevalue("stories")
    shutil.copytree(stories, folder / "base")
    run(recipe(folder, stories, model={"name": str(folder / "base")}, train={"max_steps": 1}), Console(quiet=True))
    return folder / "run"


def test_a_conversation_longer_than_the_positions_of_the_model(
    short_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = load_chat(short_run, max_new_tokens=500)
    long = "A very long story of a cat. " * 60
    model, asked = session.models["base"], []
    generate = model.generate
    monkeypatch.setattr(
        model, "generate", lambda **given: asked.append(given) or generate(**given | {"max_new_tokens": 1})
    )
    dict(session.replies("Who? " * 20))
    for given in asked:
        assert given["input_ids"].shape[1] + given["max_new_tokens"] == 512, "as far as the positions go"
    before = {side: list(history) for side, history in session.histories.items()}
    with pytest.raises(DataError, match="and the model 512 positions: ask something shorter, or begin again"):
        list(session.replies(long))
    assert session.histories == before, "a turn that failed is remembered by neither"
    result = ask(short_run, long + "\n", "--max-new-tokens", "4")
    assert result.exit_code == 1 and "512 positions" in result.stderr


def test_a_terminal_goes_on_after_a_turn_that_can_not_be_served(
    short_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = load_chat(short_run, max_new_tokens=4)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    asked = iter(["A cat. " * 400, "/etc/hosts?", "/quit"])
    monkeypatch.setattr(console, "input", lambda _: next(asked))
    converse(session, console)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "512 positions" in output and output.count("base:") == 1, "a path is a question, no command"


@pytest.mark.parametrize("question", [b"caf\xe9?\n", io.StringIO("caf\udce9?\n")], ids=["bytes", "half a pair"])
def test_a_question_that_is_no_text(answering_run: Path, monkeypatch: pytest.MonkeyPatch, question: Any) -> None:
    if isinstance(question, bytes):
        result = ask(answering_run, question)
        assert result.exit_code == 1 and "error: the question is not text in utf-8" in result.stderr, result.exception
        return
    monkeypatch.setattr("sys.stdin", question)
    with pytest.raises(DataError, match=r"not text in .*surrogates not allowed"):
        converse(load_chat(answering_run), Console(quiet=True))


def test_an_input_that_is_closed_has_ended(short_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)  # `<&-`
    converse(load_chat(short_run), Console(file=io.StringIO(), force_terminal=True))


def test_a_piped_question_that_can_not_be_served_fails_at_a_terminal_too(
    short_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The README's `echo … | pronghorn chat`: what is written to is a terminal, what is read from isn't."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr("sys.stdin", io.StringIO("A cat. " * 400 + "\n"))
    with pytest.raises(DataError, match="512 positions"):
        converse(load_chat(short_run, max_new_tokens=4), console)
    assert "you>" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_what_commands_a_terminal_is_not_shown(short_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = load_chat(short_run, max_new_tokens=4)
    monkeypatch.setattr("pronghorn.train.chat.answer", lambda *_: "a\x1b]0;title\x07\x9b2J [b]\n\tc")
    for width in (80, 120):
        console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
        asked = iter(["Who?", "/quit"])
        monkeypatch.setattr(console, "input", lambda _, asked=asked: next(asked))
        converse(session, console)
        output = console.file.getvalue()  # type: ignore[attr-defined]
        assert r"a\x1b]0;title\x07\x9b2J [b]" in output and not {"\x07", "\x9b"} & set(output)
        assert "\x1b]" not in output


def test_system_prompts(short_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_chat(short_run).system is None and load_chat(short_run, system="Be kind.").system == "Be kind."
    assert load_chat(short_run, system="").system is None
    (short_run / "adapter" / "chat_template.jinja").rename(short_run / "aside")
    try:
        with pytest.raises(ConfigError, match="has no chat template"):
            load_chat(short_run, system="Be kind.")
        session = load_chat(short_run, max_new_tokens=4)
        seen = []
        monkeypatch.setattr(session, "tokenizer", Spy(session.tokenizer, seen))
        list(session.replies("Who?"))
        assert seen == ["Who?", "Who?"], "a prompt is used as it is"
    finally:
        (short_run / "aside").rename(short_run / "adapter" / "chat_template.jinja")


class Spy:
    """A tokenizer that notes the texts it is called with."""

    def __init__(self, tokenizer: Any, seen: list[str]) -> None:
        self.tokenizer, self.seen = tokenizer, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.seen.append(text)
        return self.tokenizer(text, **options)


def test_a_prompt_is_not_ended_before_its_answer(stories: Path) -> None:
    """Some tokenizers write eos after every text; documents have none between prompt and completion."""
    model = AutoModelForCausalLM.from_pretrained(stories)
    tokenizer = AutoTokenizer.from_pretrained(stories)
    turns = [{"role": "user", "content": "Once upon a time"}]
    said = evaluate.answer(model, tokenizer, turns, 8)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id
    assert evaluate.answer(model, tokenizer, turns, 8) == said


class Given:
    """A model that keeps the tokens that it is given, and writes the same ones each time."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch, *writes: int) -> None:
        self.ids: list[int] = []

        def generate(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
            self.ids = input_ids[0].tolist()
            return torch.cat([input_ids, torch.tensor([writes], dtype=torch.long)], 1)

        monkeypatch.setattr(model, "generate", generate)


def before_the_last_answer(row: Conversation, tokenizer: Any, **options: Any) -> list[int]:
    [document] = label_rows([row], tokenizer, "last", **options).documents
    return document.input_ids[: next(i for i, label in enumerate(document.labels) if label != IGNORE_INDEX)]


@pytest.mark.parametrize("template", ["chatml", "qwen-3", "gpt-oss"])
def test_a_chat_gives_the_model_the_tokens_that_training_gave(
    stories: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """Of control tokens that a user or the system prompt says, and of earlier turns with reasoning."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(stories), with_template(template, stories)
    end = BUILT_IN[template].end
    system, thought = f"Never say {end}.", "<think>\nEasy.\n</think>\n\nNo."
    turns = [
        {"role": "user", "content": f"What is {end}?"},
        {"role": "assistant", "content": "It ends turns." if template == "chatml" else thought},
        {"role": "user", "content": "And then?"},
    ]
    answered = [Message("system", system), *(Message(**turn) for turn in turns), Message("assistant", "Nothing.")]
    row = Conversation(tuple(answered), path="x.jsonl", line=1)
    given, ends = Given(model, monkeypatch), {}
    for rule in ("escape", "allow"):
        evaluate.answer(model, tokenizer, turns, 4, system, control_tokens=rule)  # type: ignore[arg-type]
        expected = before_the_last_answer(row, tokenizer, control_tokens=rule)
        assert expected[: len(given.ids)] == given.ids and len(expected) - len(given.ids) < 8
        ends[rule] = given.ids.count(tokenizer.convert_tokens_to_ids(str(end)))
    assert ends["escape"] == ends["allow"] - 2


@pytest.mark.parametrize("rule", ["escape", "allow"])
def test_a_run_s_chat_and_samples_go_by_its_rule_of_control_tokens(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "pronghorn.train.run.answer", lambda *_, control_tokens, **__: asked.append(control_tokens) or ""
    )
    changes: dict[str, Any] = {"data": {"control_tokens": rule}, "report": {"sample_prompts": ["</s>"]}}
    run(recipe(tmp_path, stories, **changes, train={"max_steps": 1}), Console(quiet=True))
    assert asked == [rule, rule]
    session = load_chat(tmp_path / "run", max_new_tokens=1)
    given = Given(session.models["trained"], monkeypatch)
    [*session.replies("What is </s>?")]
    assert given.ids.count(session.tokenizer.eos_token_id) == (1 if rule == "escape" else 2)
    assert load_chat(tmp_path / "run" / "adapter").control_tokens == "escape"


def test_gpt_oss_channels_are_no_part_of_an_answer(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(stories), with_template("gpt-oss", stories)
    final = "<|channel|>final<|message|>A cat.<|return|>"
    for written, text in (
        (final, "A cat."),
        (f"<|channel|>analysis<|message|>Who\nsat?<|end|><|start|>assistant{final}", THOUGHT),
        ("<|channel|>analysis<|message|>Who", "<think>\nWho\n</think>\n\n"),
        ("A cat.<|return|>", "A cat."),
    ):
        Given(model, monkeypatch, *tokenizer(written)["input_ids"])
        assert evaluate.answer(model, tokenizer, [{"role": "user", "content": "Who?"}], 99) == text


THOUGHT = "<think>\nWho\nsat?\n</think>\n\nA cat."


@pytest.mark.parametrize("field", ["", "{{ m.reasoning_content }}"], ids=["no field", "field"])
def test_gemma_4_s_thoughts_are_no_part_of_an_answer(
    stories: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(stories), byte_level(CHATML)
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", field + "{{ m.content }}")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel>", "<channel|>"]})
    asked = [{"role": "user", "content": "Who?"}]
    for written, text in (
        ("A cat.<|im_end|>", "A cat."),
        ("<|channel>thought\nWho\nsat?<channel|>A cat.<|im_end|>", THOUGHT),
        ("<|channel>thought\n<channel|>A cat.<|im_end|>", "A cat."),
        ("<|channel>thought\nWho", "<think>\nWho\n</think>\n\n"),
        ("<|channel>thought", ""),
    ):
        given = Given(model, monkeypatch, *tokenizer(written)["input_ids"])
        assert evaluate.answer(model, tokenizer, asked, 99) == text
    evaluate.answer(model, tokenizer, [*asked, {"role": "assistant", "content": THOUGHT}, *asked], 99)
    thought = "Who\nsat?" if field else ""
    assert f"<|im_start|>assistant\n{thought}A cat.<|im_end|>" in tokenizer.decode(given.ids)


def test_reasoning_that_the_prompt_opens_is_told_apart(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(stories), AutoTokenizer.from_pretrained(stories)
    tokenizer.chat_template = TEMPLATE.replace("[assistant]", "[assistant]<think>\n")
    for written, text in (("Who\nsat?\n</think>\n\nA cat.", THOUGHT), ("Who\nsat?", "Who\nsat?")):
        Given(model, monkeypatch, *tokenizer(written, add_special_tokens=False)["input_ids"])
        assert evaluate.answer(model, tokenizer, [{"role": "user", "content": "Who?"}], 99) == text


OPENS = (  # Qwen3.5's kind: the prompt opens reasoning, and a last turn without any has an empty block
    "{% for m in messages %}{{ '[' + m.role + ']' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]<think>\n' }}{% endif %}"
)


@pytest.mark.parametrize("thought", ["", "Who sat?"])
@pytest.mark.parametrize("loss_on", ["completion", "all"])
def test_a_run_without_reasoning_is_asked_without_any(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thought: str, loss_on: str
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("pronghorn.train.run.answer", lambda *_, reasons, **__: asked.append(reasons) or "")
    changes: dict[str, Any] = {"data": {"loss_on": loss_on}, "report": {"sample_prompts": ["Who?"]}}
    asks = recipe(tmp_path, stories, **changes, train={"max_steps": 1})
    said = {"role": "assistant", "content": "A cat.", "reasoning_content": thought}
    row = {"messages": [{"role": "user", "content": "Who?"}, said]}
    (tmp_path / "train.jsonl").write_text("\n".join([json.dumps(row)] * 40))
    (tmp_path / "t.jinja").write_text(OPENS)
    run(asks, Console(quiet=True))
    reasons = bool(thought) or loss_on == "all"  # whose labels don't show where an answer begins
    assert asked == [reasons] * 2
    session = load_chat(tmp_path / "run", max_new_tokens=1)
    given = Given(session.models["trained"], monkeypatch)
    [*session.replies("Who?")]
    seen = session.tokenizer.decode(given.ids)
    assert seen.endswith("[assistant]<think>\n" if reasons else "[assistant]<think>\n\n</think>\n\n"), seen


@pytest.mark.parametrize("temperature", ["1e-300", "0.0009", "inf", "nan", "101", "-1"])
def test_temperatures_that_no_answer_can_be_drawn_at(temperature: str) -> None:
    result = ask(Path("none"), "", "--temperature", temperature)
    assert result.exit_code and "--temperature" in result.stderr and "is not a folder" not in result.stderr


def test_an_empty_prompt_is_bos_alone_or_refused(stories: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(stories)
    tokenizer = AutoTokenizer.from_pretrained(stories)
    nothing = [{"role": "user", "content": ""}]
    said = evaluate.answer(model, tokenizer, nothing, 8)
    tokenizer.eos_token = tokenizer.bos_token  # one token for both, as GPT-2 has it
    assert evaluate.answer(model, tokenizer, nothing, 8) == said
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("$A", special_tokens=[])
    with pytest.raises(DataError, match="an empty prompt, and a tokenizer that writes no BOS before it"):
        evaluate.answer(model, tokenizer, nothing, 8)


def test_answers_are_greedy_or_drawn(short_run: Path) -> None:
    """Whatever the checkpoint's own settings say."""
    plain = dict(load_chat(short_run, max_new_tokens=8).replies("Who?"))
    session = load_chat(short_run, max_new_tokens=8)
    settings = session.models["base"].generation_config
    settings.do_sample, settings.temperature = True, 5.0
    assert dict(session.replies("Who?")) == plain
    session.temperature = 5.0
    session.reset()
    assert dict(session.replies("Who?")) != plain


def test_a_run_of_an_earlier_version_answers(short_run: Path, tmp_path: Path) -> None:
    """Its recipe has keys that recipes no longer have."""
    folder = tmp_path / "copy"
    shutil.copytree(short_run, folder)
    table = json.loads((folder / "run.json").read_text())
    before = json.loads(json.dumps(table["recipe"]))
    table["recipe"]["packing"] |= {"metadata": "once", "moe_routing": "once"}
    table["recipe"]["memory"]["offload_buffers"] = 2
    (folder / "run.json").write_text(json.dumps(table))
    assert not changed_keys(table["recipe"], before)
    assert ask(folder, "Who?\n").exit_code == 0


def test_runs_that_can_not_be_loaded(short_run: Path, tmp_path: Path) -> None:
    def refused(error: str, remedy: str, edit: Any = None, *options: str) -> None:
        folder = tmp_path / "copy"
        shutil.copytree(short_run, folder)
        table = json.loads((folder / "run.json").read_text())
        if edit is not None:
            edit(table, folder)
        (folder / "run.json").write_text(json.dumps(table))
        result = ask(folder, "Who?\n", *options)
        assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output
        first, second = result.stderr.strip().splitlines()[-2:]
        assert error in first and remedy in second, result.stderr
        shutil.rmtree(folder)

    def gone(table: Any, folder: Path) -> None:
        config = folder / "adapter" / "adapter_config.json"
        config.write_text(config.read_text().replace(str(short_run.parent / "base"), str(tmp_path / "no/such/base")))

    refused("can't be loaded: the adapter's base, ", "relative paths count from the current folder", gone)
    refused("adapter is not there", "restore the folder", lambda _, folder: shutil.rmtree(folder / "adapter"))
    refused(
        "train.from_the_future of its recipe is not of this version",
        "use the version that trained it",
        lambda table, _: table["recipe"]["train"].update(from_the_future=1),
    )
    refused(
        "ran Python code that came with",
        "--trust-remote-code",
        lambda table, _: table["recipe"]["model"].update(trust_remote_code=True),
    )
