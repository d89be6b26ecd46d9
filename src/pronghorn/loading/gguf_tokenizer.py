"""Rebuild the tokenizer that a GGUF file describes from its metadata.

Two kinds: byte-level BPE (`tokenizer.ggml.model` = gpt2), whose way of cutting text into words is known only by a name
(`tokenizer.ggml.pre`), and SentencePiece BPE (llama), whose merges follow from the pieces' scores. Any other name or
kind is refused: a tokenizer that cuts words differently from the one a model was trained with spoils it silently.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronghorn.errors import DataError, UnsupportedError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ROLES = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35_WORDS = _QWEN2_WORDS.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")


def _cased_words(digits: str, ending: str) -> str:
    """Return the expression of words that also end before a capital, with what each may end in."""
    capitals, small = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = f"{capitals}*{small}+{ending}|{capitals}+{small}*{ending}|{digits}"
    return words + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


PRE_TOKENIZERS = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3_WORDS,
    "qwen2": _QWEN2_WORDS,
    "qwen35": _QWEN35_WORDS,
    "gpt-4o": _cased_words(r"\p{N}{1,3}", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),
    "tekken": _cased_words(r"\p{N}", ""),
}
"""`tokenizer.ggml.pre` to the words' regular expression; None is GPT-2's own, which byte-level BPE has built in."""


def load_tokenizer(path: Path, metadata: dict[str, Any]) -> Any:
    """Load the tokenizer of the GGUF file at `path`: from a `tokenizer.json` beside it, or rebuilt from `metadata`.

    Special tokens and the chat template are the metadata's; a missing padding token becomes the stop token.

    Raises:
        DataError: the metadata holds no vocabulary or no stop token.
        UnsupportedError: a kind of tokenizer that can't be rebuilt from the metadata.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens or metadata.get("tokenizer.ggml.eos_token_id") is None:
        raise DataError(
            f"{path.name} names no {'stop token (tokenizer.ggml.eos_token_id)' if tokens else 'vocabulary'}",
            "use another GGUF file of this model",
        )
    ids = {role: metadata.get(f"tokenizer.ggml.{key}") for role, key in _ROLES.items()}
    if ids["pad"] is None:
        ids["pad"] = ids["eos"]
    outside = [index for index in ids.values() if index is not None and not 0 <= index < len(tokens)]
    if outside:
        raise DataError(
            f"{path.name}: special token {outside[0]} is outside the vocabulary of {len(tokens)}",
            "use another GGUF file of this model",
        )
    special = {f"{role}_token": tokens[index] for role, index in ids.items() if index is not None}
    beside = path.with_name("tokenizer.json")
    if beside.is_file() and beside.with_name("tokenizer_config.json").is_file():
        try:
            tokenizer = AutoTokenizer.from_pretrained(path.parent, trust_remote_code=False)
        except Exception as error:  # tokenizers, in Rust, has no class for what it can't read
            raise DataError(
                f"the tokenizer_config.json and tokenizer.json beside {path.name} don't load ({error})",
                "put the model's own there, without code, or take them away",
            ) from error
        tokenizer.add_special_tokens(special)
    elif beside.is_file():
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(beside), **special)
    else:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=_rebuild(path, metadata), **special)
    # what lies beside the file may be another model's
    for role, index in ids.items():
        if index is not None and getattr(tokenizer, f"{role}_token_id") != index:
            raise DataError(
                f"{beside} gives {special[f'{role}_token']!r} another id than {path.name} ({index})",
                "put the tokenizer.json of this very model there",
            )
    template, more = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.chat_templates")
    if template is not None:
        tokenizer.chat_template = template
    if more:  # for calls of tools, for instance
        named = {name: metadata[f"tokenizer.chat_template.{name}"] for name in more}
        tokenizer.chat_template = named if template is None else {"default": template, **named}
    architecture = metadata.get("general.architecture")
    tokenizer.model_max_length = int(metadata.get(f"{architecture}.context_length") or tokenizer.model_max_length)
    return tokenizer


_SAMPLES = (
    "It's 12,345.67 km from here; isn't it?  Yes.\n\n\tNo, you'LL see: x_1 += 2**10  # ok\r\n",
    "Übergröße naïve ΑΒΓ 你好，世界 مرحبا 12٣ e\u0301cole 🙂👍🏽 ½ ① नमस्ते",
)
"""Texts that the known ways of splitting split differently."""


def byte_level_names() -> tuple[str, ...]:
    """Return the names of ways of splitting text that byte-level BPE can be written with."""
    return tuple(PRE_TOKENIZERS)


def splits_alike(tokenizer: Tokenizer, name: str) -> bool:
    """Tell whether a byte-level tokenizer splits text as the way of this name does."""
    known = _byte_level({"tokenizer.ggml.tokens": [], "tokenizer.ggml.merges": []}, name)

    def split(each: Tokenizer, text: str) -> list[str]:
        text = text if each.normalizer is None else each.normalizer.normalize_str(text)
        return (
            [text] if each.pre_tokenizer is None else [piece for piece, _ in each.pre_tokenizer.pre_tokenize_str(text)]
        )

    return all(split(tokenizer, text) == split(known, text) for text in _SAMPLES)


def space_before(tokenizer: Any, told: dict[str, Any]) -> bool:
    """Tell whether llama.cpp is to put a space before text: it does so at the beginning and after each special token.

    Tokenizers that do so at the beginning alone (Metaspace's `first`: Llama 2's, Mistral's) are served where their
    conversations are right: with the space unless these begin with a special token. A warning says where tokens differ.

    Args:
        told: its tokenizer.json.
    """
    from jinja2 import TemplateError

    scheme = re.search(r'"prepend_scheme": "(\w+)"', json.dumps(told["pre_tokenizer"]))
    if scheme is None or scheme[1] != "first":
        return "Prepend" in json.dumps(told["normalizer"]) or (scheme is not None and scheme[1] == "always")
    text = ""
    if tokenizer.chat_template:
        try:
            text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        except (TemplateError, ValueError):  # of a template that asks for more
            text = tokenizer.bos_token or ""
    space = not text.startswith(tuple(tokenizer.all_special_tokens))
    where = (
        "and llama.cpp after each special token, too" if space else "and llama.cpp never: plain text is other tokens"
    )
    logging.getLogger(__name__).warning("the tokenizer puts a space before text at its beginning alone, %s", where)
    return space


def warn_of_added_tokens(tokenizer: Any) -> None:
    """Warn of added tokens that llama.cpp, which takes them as they are written, finds elsewhere or with other spaces
    than the tokenizer does."""
    normalizer = tokenizer.backend_tokenizer.normalizer
    unlike = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.lstrip
        or token.rstrip
        or token.single_word
        or (token.normalized and normalizer and normalizer.normalize_str(token.content) != token.content)
    ]
    if unlike:
        logging.getLogger(__name__).warning(
            "llama.cpp looks for added tokens as they are written, and the tokenizer with the spaces beside them, in "
            "normalised text or as whole words: text with %s may be other tokens there",
            ", ".join(map(repr, unlike[:3])) + (f" and {len(unlike) - 3} more" if len(unlike) > 3 else ""),
        )


def _rebuild(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    from gguf import TokenType
    from tokenizers import AddedToken

    kind = metadata.get("tokenizer.ggml.model")
    remedy = f"put the model's tokenizer.json beside {path.name}"
    needed = {"gpt2": "merges", "llama": "scores"}.get(str(kind))
    if needed is not None and not metadata.get(f"tokenizer.ggml.{needed}"):
        raise DataError(f"{path.name} holds no tokenizer.ggml.{needed}", remedy)
    if kind == "gpt2":
        pre = metadata.get("tokenizer.ggml.pre")
        if pre not in PRE_TOKENIZERS:
            raise UnsupportedError(f"{path.name}: byte-level BPE with unknown tokenizer.ggml.pre {pre!r}", remedy)
        tokenizer = _byte_level(metadata, pre)
    elif kind == "llama":
        of_gemma = metadata["general.architecture"].startswith("gemma")
        metadata = _with_pieces_of_spaces(metadata) if of_gemma else metadata
        tokenizer = _sentence_piece(metadata, of_gemma)
    else:
        raise UnsupportedError(
            f"{path.name}: the {kind!r} tokenizer of {metadata['general.architecture']} can't be rebuilt", remedy
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or []
    for special, kinds in ((True, (TokenType.UNKNOWN, TokenType.CONTROL)), (False, (TokenType.USER_DEFINED,))):
        named = (token for token, kind_of_token in zip(tokens, types, strict=False) if kind_of_token in kinds)
        added = [AddedToken(token, normalized=False, special=special) for token in named]
        # all at once: one by one Gemma's 6,000 take seconds; each keeps its id
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    _add_ends(tokenizer, metadata, kind)
    return tokenizer


def _byte_level(metadata: dict[str, Any], pre: str) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in ("llama-bpe", "tekken")))
    words = PRE_TOKENIZERS[pre]
    steps: list[Any] = []
    if pre == "smollm":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if words is not None:
        steps.append(pre_tokenizers.Split(Regex(words), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if pre in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _with_pieces_of_spaces(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a Gemma with its own pieces of spaces alone, and the score of such pieces: files have
    spaces there, and a score below all others', as llama.cpp looks for them in the text beforehand."""
    from gguf import TokenType

    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    types = metadata.get("tokenizer.ggml.token_type") or []
    kinds = [*types, *[TokenType.NORMAL] * (len(tokens) - len(types))]
    pieces = ["▁" * len(token) if token and not token.strip(" ") else token for token in tokens]
    best = [0.0 if kind == TokenType.USER_DEFINED else score for kind, score in zip(kinds, scores, strict=True)]
    return metadata | {"tokenizer.ggml.tokens": pieces, "tokenizer.ggml.scores": best}


def _sentence_piece(metadata: dict[str, Any], longest_first: bool) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    scores = metadata["tokenizer.ggml.scores"]
    merges = _merges_from_scores(vocabulary, scores)
    if longest_first:  # where scores are alike, and of the halves of one piece, as Gemma's tokenizer.json has them
        merges.sort(key=lambda pair: (-scores[vocabulary["".join(pair)]], -len(pair[0]), -len(pair[1])))
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces] if prefix else [spaces])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return all halves of all pieces, best piece first: SentencePiece joins neighbours whose union scores highest."""
    merges = []
    for piece in sorted(vocabulary, key=lambda piece: (-scores[vocabulary[piece]], vocabulary[piece])):
        halves = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        pairs = [(left, right) for left, right in halves if left in vocabulary and right in vocabulary]
        merges += sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return merges


def _add_ends(tokenizer: Tokenizer, metadata: dict[str, Any], kind: str) -> None:
    """Begin (and end) plain text with bos (and eos) where the file says so, or where llama.cpp does by default."""
    from tokenizers import processors

    tokens = metadata["tokenizer.ggml.tokens"]
    default = kind == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    template, special = ["$A"], []
    for role, by_default, at in (("bos", default, 0), ("eos", False, 2)):
        index = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if metadata.get(f"tokenizer.ggml.add_{role}_token", by_default) and index is not None:
            template.insert(at, tokens[index])
            special.append((tokens[index], index))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
