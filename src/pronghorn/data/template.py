"""Chat templates: the built-in ones, choosing one for a run, and rendering conversations with the tokenizer's.

The built-in templates write a conversation's beginning the same whatever follows it, and the assistant's text as it
stands, so that labels are exact (data.chat). They know messages of a system, a user and an assistant and refuse what
else a conversation holds, tools among it; a model's own template serves those.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pronghorn.data.row_types import Conversation, Message
from pronghorn.data.sandbox import ChatTemplate, LimitError
from pronghorn.errors import ConfigError, DataError, PronghornError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEADS = ("", " ", "<think>\n\n</think>\n\n", "<|channel|>final<|message|>")
"""What a template may write between its generation prompt and the assistant's text, for the model to generate: nothing
(ChatML, Llama 3, Gemma), a space (Llama 2, Mistral), an empty reasoning block (Qwen3, last turn), gpt-oss's channel."""


class Turn(NamedTuple):
    """The characters [start, end) to train, without the end-of-turn token that the template writes. Up to `said` the
    template wrote them, control tokens too; from there on they are the row's own, which may hold none."""

    start: int
    end: int
    said: int


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template. `needs` are the special tokens that it writes; `end` is the one that ends the assistant's turns
    (None: not known). `begins` says that it writes the tokenizer's bos token."""

    name: str
    text: str
    needs: tuple[str, ...] = ()
    end: str | None = None
    begins: bool = False

    def apply(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Makes this the tokenizer's chat template, saved with it, and `end` its eos token: generation stops there.

        Raises ConfigError, naming the tokens, for a tokenizer without the special tokens that the template writes: it
        would spell them letter by letter, and no turn would ever end.
        """
        missing = [token for token in self.needs if token not in special_tokens(tokenizer)]
        if self.begins and tokenizer.bos_token is None:
            missing.append("bos_token")
        if missing:
            raise ConfigError(
                f"data.chat_template: {self.name} needs special tokens that the tokenizer lacks: {', '.join(missing)}",
                "choose the template of the model's own family, or a .jinja file that writes tokens it has",
            )
        tokenizer.chat_template = self.text
        if self.end is not None:
            tokenizer.eos_token = self.end


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """The texts of the tokenizer's special tokens, the unknown token aside."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return added.union(tokenizer.all_special_tokens) - {tokenizer.unk_token}


# A system message is the first or there is none (data.rows), and nothing but text is rendered.
_ONLY_TEXT = (
    "{%- for message in messages %}{%- if message['role'] not in ['system', 'user', 'assistant']"
    " or message['content'] is not string or message['tool_calls'] %}"
    "{{- raise_exception('this template renders only texts of system, user and assistant') }}{%- endif %}"
    "{%- endfor %}{%- if tools %}{{- raise_exception('this template renders no tools') }}{%- endif %}"
)
_CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_QWEN_SYSTEM = (
    "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. "
    "You are a helpful assistant.<|im_end|>\\n' }}{%- endif %}"
)
_LLAMA_3 = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{- message['content'] if message['role'] == 'assistant' else message['content'] | trim }}{{- '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{%- endif %}"
)
# Gemma and Mistral have no system turn: its text begins the first user's.
_SYSTEM_IN_USER = (
    "{%- set first = namespace(text='') %}{%- set turns = messages %}{%- if messages[0]['role'] == 'system' %}"
    "{%- set first.text = messages[0]['content'] | trim + '\\n\\n' %}{%- set turns = messages[1:] %}{%- endif %}"
    "{%- for message in turns %}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('turns must be user, assistant, user, assistant and so on') }}{%- endif %}{%- endfor %}"
)
_GEMMA = (
    "{{- bos_token }}{%- for message in turns %}{%- if message['role'] == 'assistant' %}"
    "{{- '<start_of_turn>model\\n' + message['content'] }}{%- else %}"
    "{{- '<start_of_turn>user\\n' + (first.text if loop.first else '') + message['content'] | trim }}{%- endif %}"
    "{{- '<end_of_turn>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"
)
_MISTRAL = (  # as Mistral 7B Instruct v0.3; the generation prompt is empty
    "{{- bos_token }}{%- for message in turns %}{%- if message['role'] == 'assistant' %}"
    "{{- ' ' + message['content'] + '</s>' }}{%- else %}"
    "{{- '[INST] ' + (first.text if loop.first else '') + message['content'] + '[/INST]' }}{%- endif %}{%- endfor %}"
)

BUILT_IN = {
    template.name: template
    for template in (
        Template("chatml", _ONLY_TEXT + _CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
        Template(
            "llama-3",
            _ONLY_TEXT + _LLAMA_3,
            ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            "<|eot_id|>",
            begins=True,
        ),
        Template("qwen-2.5", _ONLY_TEXT + _QWEN_SYSTEM + _CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
        Template(
            "gemma",
            _ONLY_TEXT + _SYSTEM_IN_USER + _GEMMA,
            ("<start_of_turn>", "<end_of_turn>"),
            "<end_of_turn>",
            begins=True,
        ),
        Template(
            "mistral", _ONLY_TEXT + _SYSTEM_IN_USER + _MISTRAL, ("[INST]", "[/INST]", "</s>"), "</s>", begins=True
        ),
    )
}


def find_template(choice: str | None) -> Template | None:
    """The template of `data.chat_template`: a built-in's name, the path of a .jinja file, or None for the tokenizer's.

    Raises ConfigError for a name that is none, a file that is missing, empty or not UTF-8.
    """
    if choice is None or choice in BUILT_IN:
        return None if choice is None else BUILT_IN[choice]
    path = Path(os.path.expanduser(choice))  # leaves a home that isn't there as it is
    if path.suffix not in (".jinja", ".jinja2", ".j2"):
        raise ConfigError(
            f"data.chat_template is {choice!r}", f"set it to {', '.join(BUILT_IN)} or the path of a .jinja file"
        )
    try:
        if not path.is_file():
            raise ConfigError(f"data.chat_template: {path} does not exist", "mend the path of the .jinja file")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"data.chat_template: {_short(Exception(path))} can't be read ({error.strerror})", "mend the path"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.chat_template: {path} is not UTF-8 ({error})", "save the file as UTF-8") from error
    if not text.strip():
        raise ConfigError(f"data.chat_template: {path} is empty", "write a template that renders `messages`")
    return Template(str(path), text)


Write = Callable[[Conversation, int | None], str]
"""Renders a conversation whole (None), or what the model sees before it writes the message of that index."""


def writer(tokenizer: "PreTrainedTokenizerBase") -> Write:
    """Make the function that renders conversations with the tokenizer's chat template. It raises as `render`."""
    made: dict[bool, ChatTemplate] = {}

    def write(row: Conversation, before: int | None) -> str:
        return _rendered(made, row.messages[:before], row.tools, tokenizer, row.source, before is not None)

    return write


def render(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    tokenizer: "PreTrainedTokenizerBase",
    source: str,
    answer: bool,
) -> str:
    """The conversation as the tokenizer's chat template writes it; `answer` adds the generation prompt.

    Raises DataError, naming `source`, where the template refuses the conversation, fails on it or leaves its tools out;
    ConfigError for one that is no template, or that takes more time or memory than `sandbox` allows.
    """
    return _rendered({}, messages, tools, tokenizer, source, answer)


def _rendered(
    made: dict[bool, ChatTemplate],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    tokenizer: "PreTrainedTokenizerBase",
    source: str,
    answer: bool,
) -> str:
    """`render` with the templates that it `made` before, for conversations with tools and for those without."""
    from jinja2 import TemplateError, TemplateSyntaxError

    chat, functions = [message.as_dict() for message in messages], [dict(tool) for tool in tools] or None
    try:
        if bool(tools) not in made:
            text = tokenizer.get_chat_template(None, functions)
            made[bool(tools)] = ChatTemplate(text, tokenizer.special_tokens_map)
        text = made[bool(tools)].render(chat, functions, answer)
    except TemplateSyntaxError as error:
        raise ConfigError(f"the chat template's line {error.lineno}: {error.message}", "mend the template") from error
    except LimitError as error:
        raise ConfigError(
            f"{source}: the chat template {error}", "set data.chat_template to one that you trust and that ends"
        ) from error
    except TemplateError as error:
        raise DataError(
            f"{source}: the chat template refuses the conversation ({_short(error)})",
            "mend the row's roles or the template",
        ) from error
    except PronghornError:
        raise
    except Exception as error:  # a template is a program: it may divide by zero, recurse, join an object to a text
        raise DataError(
            f"{source}: the chat template fails on the conversation ({type(error).__name__}: {_short(error)})",
            "set data.chat_template to one that renders such conversations",
        ) from error
    _has_all([tool["function"]["name"] for tool in tools], text, f"{source}: the chat template leaves the tool")
    return text


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= 300 else f"{text[:300]}…"


def turns(
    row: Conversation, text: str, write: Write, tokenizer: "PreTrainedTokenizerBase", last: bool = False
) -> list[Turn]:
    """The character ranges of `text` (`row` rendered) that the model generates in the assistant's turns, or only in the
    last of them; end-of-turn tokens excluded.

    Raises DataError where what it would see before the turn is not how `text` begins, or its text doesn't follow.
    """
    asked = [index for index, message in enumerate(row.messages) if message.role == "assistant"]
    ranges = []
    for index in asked[-1:] if last else asked:
        where, message, prompt = f"{row.source} message {index + 1}", row.messages[index], write(row, index)
        if not message.content.strip() and not message.extra.get("tool_calls"):
            raise DataError(
                f"{where}: the assistant's text is empty: nothing but the template's own tokens would be trained",
                "fill it in or delete the row",
            )
        if not text.startswith(prompt):
            raise DataError(
                f"{where}: the chat template renders the conversation before this turn "
                "otherwise than the same messages within the whole conversation",
                "set data.chat_template to one that renders a beginning the same whatever follows, or split the "
                "row so that each ends with the assistant turn to train (data.loss_on: last)",
            )
        if message.extra.get("tool_calls"):
            end = _end_of_calls(row, index, len(prompt), text, tokenizer)
            ranges.append(Turn(len(prompt), end, said=end))
        else:
            end = _end_of_text(message.content, len(prompt), text, where)
            ranges.append(Turn(len(prompt), end, said=end - len(message.content)))
    return ranges


def _end_of_text(content: str, start: int, text: str, where: str) -> int:
    """Where the assistant's text ends that begins at `start`, a lead before it allowed."""
    for lead in LEADS:
        if text.startswith(lead + content, start):
            return start + len(lead) + len(content)
    raise DataError(
        f"{where}: after the generation prompt the chat template writes "
        f"{clip(text[start:])}, not the assistant's text {clip(content)} as it stands",
        "trim white space around the text and leave reasoning out of turns before the last, or set "
        "data.chat_template to one that keeps the text and knows add_generation_prompt",
    )


def _end_of_calls(row: Conversation, index: int, start: int, text: str, tokenizer: "PreTrainedTokenizerBase") -> int:
    """Where a turn with tool calls ends, which each template writes its own way: where the conversation up to this turn
    ends, less its end-of-turn token. A lead that only a last turn has (Qwen3's) may be missing in `text`.

    Control tokens of this turn (Mistral's [TOOL_CALLS]) are the template's: the message itself may hold none.
    """
    where, message = f"{row.source} message {index + 1}", row.messages[index]
    upto = render(row.messages[: index + 1], row.tools, tokenizer, row.source, answer=False).rstrip()
    special = special_tokens(tokenizer)
    own = json.dumps([message.content, message.extra["tool_calls"]], ensure_ascii=False)
    held = next((token for token in sorted(special) if token in own), None)
    if held is not None:
        raise DataError(f"{row.source}: the assistant's text holds the control token {clip(held)}", "delete it there")
    tokens = sorted((token for token in special if upto.endswith(token)), key=len)
    said = upto[start:] if upto.startswith(text[:start]) else ""
    bare = [said.removeprefix(lead) for lead in LEADS if said.startswith(lead)]
    said = next((turn for turn in bare if text.startswith(turn, start)), "")
    if not said or not tokens:
        raise DataError(
            f"{where}: the chat template ends this turn with tool calls otherwise when more follows, or without an "
            "end-of-turn token",
            "set data.chat_template to one that renders tool calls and ends each turn with a special token",
        )
    end = start + len(said) - len(tokens[-1])
    needed = [call["function"]["name"] for call in message.extra["tool_calls"]]
    _has_all([*needed, message.content.strip()], text[start:end], f"{where}: the chat template leaves the tool call's")
    return end


def _has_all(needed: Sequence[str], text: str, problem: str) -> None:
    missing = [part for part in needed if part not in text]
    if missing:
        raise DataError(f"{problem} {clip(missing[0])} out", "use a chat template that renders tools and their calls")


def clip(text: str) -> str:
    """The text as an error message shows it."""
    return repr(text if len(text) <= 40 else text[:37] + "...")
