"""Chat templates: the built-in ones, choosing one for a run, and rendering conversations with the tokenizer's.

The built-in templates write the assistant's text as it stands, so that labels are exact (data.labels). They render
what their originals do and refuse the rest of a conversation: tools go through llama-3.1, qwen-2.5, qwen-3, mistral and
gpt-oss, reasoning through qwen-3 and gpt-oss as a field of its own.
"""

import difflib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pronghorn.data import sandbox
from pronghorn.data.rows import Conversation, Message, texts_of
from pronghorn.errors import ConfigError, DataError, PronghornError
from pronghorn.text import short

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "pronghorn"
LEADS = ("", " ", "<think>\n\n</think>\n\n", "<|channel|>final<|message|>")
"""What a template may write between its generation prompt and the assistant's text, for the model to generate: nothing
(ChatML, Llama 3, Gemma), a space (Llama 2, Mistral), an empty reasoning block (Qwen3, last turn), gpt-oss's channel.
`_leads` finds others."""
_OPENED = re.compile(
    r"(?:(<think>)\s*(?:</think>\s*)?|(<\|channel>thought\n)<channel\|>|(<\|START_THINKING\|>)(?:<\|END_THINKING\|>)?)\Z"
)
"""What a generation prompt may end with: reasoning that it opens (Qwen3.5, DeepSeek R1, Command A) or leaves empty
(Gemma 4's larger models)."""
_EMPTY = ("<think>\n\n</think>\n\n", "<think>\n\n</think>\n", "<think></think>\n", "<think></think>", "</think>")
"""What a template may write in its place before a turn without reasoning."""


class NoTemplateError(DataError):
    """A conversation, and a tokenizer without a chat template."""


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template. `needs` are the special tokens that a built-in one writes, last the one that ends the
    assistant's turns."""

    name: str
    text: str
    needs: tuple[str, ...] = ()

    @property
    def end(self) -> str | None:
        """The token that ends the assistant's turns, None where it isn't known."""
        return self.needs[-1] if self.needs else None

    def apply(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Make this the tokenizer's chat template, saved with it, and `end` its eos token: generation stops there.

        Raises:
            ConfigError: a tokenizer without the special tokens that the template writes. It would spell them letter by
                letter, and no turn would ever end.
        """
        missing = [token for token in self.needs if token not in special_tokens(tokenizer)]
        if self.needs and "bos_token" in self.text and tokenizer.bos_token is None:
            missing.append("bos_token")
        if missing:
            raise ConfigError(
                f"chat_template {self.name} needs special tokens that the tokenizer lacks: {', '.join(missing)}",
                "choose the template of the model's own family, or one of yours that writes tokens it has; tokens are "
                "added by adapter.new_tokens, in scripts by tokenizer.add_tokens and model.resize_token_embeddings",
            )
        tokenizer.chat_template = self.text
        if self.end is not None:
            tokenizer.eos_token = self.end


def _built_in(name: str, files: str, needs: str) -> Template:
    """Join a built-in template of the files that are its parts."""
    folder = Path(__file__).with_name("templates")
    text = "".join((folder / f"{file}.jinja").read_text(encoding="utf-8").rstrip("\n") for file in files.split())
    return Template(name, text, tuple(needs.split()))


BUILT_IN = {
    template.name: template
    for template in (
        _built_in("chatml", "only_text chatml", "<|im_start|> <|im_end|>"),
        _built_in("llama-3", "only_text llama_3", "<|start_header_id|> <|end_header_id|> <|eot_id|>"),
        _built_in("llama-3.1", "llama_3_1", "<|start_header_id|> <|end_header_id|> <|eot_id|>"),
        _built_in("qwen-2.5", "qwen_2_5 qwen", "<|im_start|> <|im_end|>"),
        _built_in("qwen-3", "qwen_3 qwen", "<|im_start|> <|im_end|>"),
        _built_in("gemma", "only_text system_in_user gemma", "<start_of_turn> <end_of_turn>"),
        _built_in(
            "mistral",
            "system_in_user mistral",
            "[AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] [INST] [/INST] </s>",
        ),
        _built_in("gpt-oss", "gpt_oss", "<|start|> <|channel|> <|message|> <|end|> <|call|> <|return|>"),
        _built_in("phi-4", "only_text phi_4", "<|im_start|> <|im_sep|> <|im_end|>"),
    )
}


def _nearest(choice: str) -> str | None:
    """Return the built-in template whose name resembles a choice."""
    plain = {re.sub(r"[^a-z0-9]", "", name): name for name in BUILT_IN}
    asked = re.sub("llama3[23]$", "llama31", re.sub(r"[^a-z0-9]", "", choice.lower()))  # which has the same template
    near = difflib.get_close_matches(asked, plain, n=1, cutoff=0.8)
    return plain[near[0]] if near else None


def find_template(choice: str | None) -> Template | None:
    """Return the template of `data.chat_template`: a built-in's name, the path of a .jinja file, or None for the
    tokenizer's.

    Raises:
        ConfigError: a name that is none, a file that is missing, empty or not UTF-8.
    """
    if choice is None or choice in BUILT_IN:
        return None if choice is None else BUILT_IN[choice]
    path = Path(os.path.expanduser(choice))  # leaves a home that isn't there as it is
    if path.suffix not in (".jinja", ".jinja2", ".j2"):
        near = _nearest(choice)
        remedy = f"set it to {', '.join(BUILT_IN)} or the path of a .jinja file"
        remedy = f"{remedy}: did you mean {near}?" if near else remedy
        if choice in ("default", "auto", "none", "tokenizer", "tokenizer_default"):
            remedy = "leave it out: the tokenizer's own is used"
        elif "{%" in choice or "{{" in choice:
            remedy = "write the template into a .jinja file, and give its path"
        elif path.is_file():
            remedy = f"name the file {path.with_suffix('.jinja')}"
        raise ConfigError(
            f"data.chat_template {short(choice)} is neither a built-in template nor a .jinja file", remedy
        )
    try:
        if not path.is_file():
            raise ConfigError(
                f"data.chat_template: {short(str(path))} does not exist", "fix the path of the .jinja file"
            )
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"data.chat_template: {_short(path)} can't be read ({error.strerror})", "fix the path"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.chat_template: {path} is not UTF-8 ({error})", "save the file as UTF-8") from error
    if not text.strip():
        raise ConfigError(f"data.chat_template: {path} is empty", "write a template that renders `messages`")
    return Template(str(path), text)


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """Return the texts of the tokenizer's special tokens, the unknown token aside where it is nothing else (GPT-2's is
    the beginning and the end, too)."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    unknown = {tokenizer.unk_token} - {tokenizer.bos_token, tokenizer.eos_token}
    return added.union(tokenizer.all_special_tokens) - unknown


def render(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    tokenizer: "PreTrainedTokenizerBase",
    source: str,
    answer: bool,
) -> str:
    """Render the conversation with the tokenizer's chat template; `answer` adds the generation prompt.

    Raises:
        DataError: the template refuses the conversation, fails on it or leaves its tools out; names `source`.
            ConfigError: no template at all, or one that takes more time or memory than `sandbox` allows.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    functions = [dict(tool) for tool in tools] or None
    try:
        text = sandbox.render(
            tokenizer.get_chat_template(None, functions),
            messages=[message.as_dict() for message in messages],
            tools=functions,
            documents=None,
            add_generation_prompt=answer,
            **tokenizer.special_tokens_map,
        )
    except TemplateSyntaxError as error:
        raise ConfigError(f"the chat template's line {error.lineno}: {error.message}", "fix the template") from error
    except sandbox.LimitError as error:
        raise ConfigError(
            f"{source}: the chat template {error}", "set data.chat_template to one that you trust and that ends"
        ) from error
    except TemplateError as error:
        raise DataError(
            f"{source}: the chat template refuses the conversation ({_short(error)})",
            "fix the row's roles or the template",
        ) from error
    except PronghornError:
        raise
    except Exception as error:  # a template is a program: it may divide by zero, recurse, join an object to a text
        raise DataError(
            f"{source}: the chat template fails on the conversation ({type(error).__name__}: {_short(error)})",
            "set data.chat_template to one that renders such conversations",
        ) from error
    _check_holds(text, [tool["function"]["name"] for tool in tools], f"{source}: the chat template leaves the tool")
    return text


class Turn(NamedTuple):
    """The supervised characters [start, end), without the end-of-turn token that the template writes. Up to `said` the
    template wrote them, control tokens too; from there on they are the row's own, which may hold none."""

    start: int
    end: int
    said: int


class Rewritten(DataError):
    """A turn that the template renders otherwise once the conversation goes on than when the model wrote it."""


def turns(
    row: Conversation, text: str, tokenizer: "PreTrainedTokenizerBase", indices: Sequence[int]
) -> tuple[list[Turn], dict[int, Rewritten]]:
    """Return the character ranges of `text` (`row` rendered) that the model generates in those messages, and the error
    of each message that is rendered otherwise there.

    Raises:
        DataError: a turn without text, or one whose text doesn't follow what the model sees before it.
    """
    ranges, rewritten = list[Turn](), dict[int, Rewritten]()
    for index in indices:
        at, message = f"{row.source} message {index + 1}", row.messages[index]
        calls = message.extra.get("tool_calls")
        if not message.content.strip() and not calls:
            raise DataError(
                f"{at}: the assistant's text is empty: nothing but the template's own tokens would be trained",
                "fill it in or delete the row",
            )
        try:
            prompt = render(row.messages[:index], row.tools, tokenizer, row.source, answer=True)
            start = _begin(message, prompt, text)
            if start is None:
                raise Rewritten(
                    f"{at}: the chat template renders the conversation before this turn "
                    "otherwise than the same messages within the whole conversation",
                    "set data.chat_template to one that renders a beginning the same whatever follows, or split the "
                    "row so that each ends with the assistant turn to train (data.loss_on: last)",
                )
            if calls or message.reasoning:
                end = said = _end_of_turn(row, index, start, text, tokenizer)
            else:
                leads = chain(LEADS, _leads(row, index, prompt, start, tokenizer))
                lead = next((lead for lead in leads if text.startswith(lead + message.content, start)), None)
                if lead is None:
                    raise DataError(
                        f"{at}: after the generation prompt the chat template writes "
                        f"{clip(text[start:])}, not the assistant's text {clip(message.content)} as it stands",
                        "trim white space around the text, or set data.chat_template to one that keeps the text and "
                        "knows add_generation_prompt",
                    )
                said = start + len(lead)
                end = said + len(message.content)
            ranges.append(Turn(start, end, said))
        except Rewritten as error:
            rewritten[index] = error
    return ranges, rewritten


def _leads(
    row: Conversation, index: int, prompt: str, start: int, tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[str]:
    """Yield what the template writes from `start` to whatever the message says, for the model to generate behind the
    generation prompt (Kimi K2 Thinking's empty block, functionary's recipient): in a last turn, and in the row's.
    Nothing if the template doesn't know generation prompts: it would be the turn's header."""
    if render(row.messages[:index], row.tools, tokenizer, row.source, answer=False) == prompt:
        return
    said = (*row.messages[:index], replace(row.messages[index], content=_PROBE), *row.messages[index + 1 :])
    for messages in (said[: index + 1], said):
        text = render(messages, row.tools, tokenizer, row.source, answer=False)
        if (end := text.find(_PROBE, start)) >= 0:
            yield text[start:end]


def _begin(message: Message, prompt: str, text: str) -> int | None:
    """Return where in `text` the model begins to write a turn after this generation prompt; None if it isn't there.

    A turn without reasoning begins behind an empty block of reasoning, though the prompt opens one: the model is given
    the block where thinking is switched off. Where the template writes no block, the turn begins in its place.
    """
    opened = _OPENED.search(prompt, _last_two(prompt))
    before = prompt[: opened.start()] if opened else prompt
    if opened and not message.reasoning:
        for block in _EMPTY:
            if text.startswith(before + block):
                return len(before + block)
    if text.startswith(prompt):
        return len(prompt)
    if not opened or not text.startswith(before + opened[opened.lastindex or 0] if message.reasoning else before):
        return None
    return len(before)


def is_open(prompt: str) -> bool:
    """Tell whether a generation prompt opens reasoning, which the model then goes on with."""
    opened = _OPENED.search(prompt, _last_two(prompt))
    return opened is not None and not opened[0].rstrip().endswith(("</think>", "<channel|>", "<|END_THINKING|>"))


def without_reasoning(messages: Sequence[Message], tokenizer: "PreTrainedTokenizerBase", source: str) -> str:
    """Render a conversation up to an answer without reasoning, as such turns are trained (`_begin`)."""
    prompt, said = render(messages, (), tokenizer, source, answer=True), Message("assistant", _PROBE)
    if not is_open(prompt):
        return prompt
    text = render([*messages, said], (), tokenizer, source, answer=False)
    start = _begin(said, prompt, text)
    return prompt if start is None else text[:start]


def _last_two(prompt: str) -> int:
    """Return where the last two tokens of a prompt may begin, behind which `_OPENED` finds nothing more: searching all
    of it, once a turn, would take as long as a long conversation's rendering."""
    return max(0, prompt.rfind("<", 0, max(0, prompt.rfind("<"))))


def _end_of_turn(row: Conversation, index: int, start: int, text: str, tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return where a turn with tool calls or reasoning ends, which each template writes its own way: where the
    conversation up to this turn ends, less its end-of-turn token. A lead that only a last turn has (Qwen3's) may be
    missing in `text`.

    Control tokens of this turn (Mistral's [TOOL_CALLS]) are the template's: the message itself may hold none.
    """
    at, message = f"{row.source} message {index + 1}", row.messages[index]
    calls = message.extra.get("tool_calls", ())
    upto = render(row.messages[: index + 1], row.tools, tokenizer, row.source, answer=False).rstrip()
    special = special_tokens(tokenizer)
    _check_no_control(message, special, row.source)
    end_token = max((token for token in special if upto.endswith(token)), key=len, default="")
    alone = upto[start:] if upto.startswith(text[:start]) else ""
    if not end_token or not alone:
        raise DataError(
            f"{at}: the chat template ends this turn otherwise when more follows, or without an end-of-turn token",
            "set data.chat_template to one that renders tool calls and reasoning and ends each turn with a special "
            "token",
        )
    alone = alone.removesuffix(end_token)
    parts = [*(call["function"]["name"] for call in calls), message.reasoning.strip(), message.content.strip()]
    what = "tool call's" if calls else "reasoning's"
    _check_holds(alone, parts, f"{at}: the chat template leaves the {what}")
    without_lead = [alone.removeprefix(lead) for lead in LEADS if alone.startswith(lead)]
    turn = next((candidate for candidate in without_lead if candidate and text.startswith(candidate, start)), None)
    if turn is None:
        raise Rewritten(
            f"{at}: the chat template renders this turn otherwise when more follows",
            "set data.chat_template to one that keeps tool calls and reasoning, or set data.loss_on: last",
        )
    return start + len(turn)


def check_said(said: Sequence[Message], text: str, special: Collection[str], source: str) -> None:
    """Check what the assistant says in a conversation that is trained whole, rendered as `text`. Raises DataError for
    special tokens in it, and for a template that leaves all of it out."""
    for message in said:
        _check_no_control(message, special, source)
    contents = [message.content.strip() for message in said]
    if any(contents) and not any(content and content in text for content in contents):
        raise DataError(
            f"{source}: the chat template leaves the assistant's text out: only its own tokens would be trained",
            "set data.chat_template to one that renders every message's content",
        )


def _check_no_control(message: Message, special: Collection[str], source: str) -> None:
    said = [*texts_of([message.content, message.reasoning, message.extra.get("tool_calls")])]
    held = next((token for token in sorted(special) if any(token in text for text in said)), None)
    if held is not None:
        raise DataError(f"{source}: the assistant's text holds the control token {clip(held)}", "delete it there")


def _check_holds(text: str, parts: Sequence[str], problem: str) -> None:
    missing = next((part for part in parts if text.count(part) < parts.count(part)), None)
    if missing is not None:
        raise DataError(f"{problem} {clip(missing)} out", "use a chat template that renders tools and their calls")


def clip(text: str) -> str:
    """Return the text as an error message shows it."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 300 else f"{text[:300]}…"
