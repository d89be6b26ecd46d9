"""Write a merged folder as a GGUF file, which llama.cpp, Ollama and LM Studio read.

Weights are read, reordered, quantised and written one by one. Names of tensors are those of the `gguf` package; what
the file must say of the model and its tokenizer is read back by `models.gguf`, which loads such files for training.

Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pronghorn.errors import ConfigError, TrainingError, UnsupportedError
from pronghorn.export.gguf_mxfp4 import pack_mxfp4
from pronghorn.export.gguf_rope import FACTORED, head_dim_of, rope_factors, rope_note, rope_values
from pronghorn.export.gguf_tensors import MERGE, changed, parts_of, shape_of, split, stacked
from pronghorn.export.original import composite_of
from pronghorn.families.gguf_spec import Gguf, Part
from pronghorn.families.spec import FamilySpec
from pronghorn.loading.composite import Composite
from pronghorn.loading.gguf import name_table
from pronghorn.loading.gguf_tokenizer import byte_level_names, space_before, splits_alike, warn_of_added_tokens
from pronghorn.models.families import check_config
from pronghorn.precision.loader import StoredTensor, checkpoint

_AT_ONCE = 2**25
"""About how many numbers are float32 at once."""
_FLOAT32 = (".ffn_gate_inp", ".ssm_conv1d.")
"""Tensors that llama.cpp reads in float32 alone, or that choose experts."""
QUANTISATIONS = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4")
"""What is computed here, most by the `gguf` package. `mxfp4` is of experts, as gpt-oss has them; the rest is q8_0."""
K_QUANTS = ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")
"""What llama.cpp's own program makes of an f16 file."""
QUANTISER = "llama-quantize"
_CARRIER = "ik_llama_cpp"
"""A package with that program in its folder bin (`pip install ik-llama-cpp-python`, of a fork of llama.cpp)."""
SERVE = "export it merged (--to merged, in scripts save_pretrained_merged), and serve that with vLLM or SGLang"
_ENDS_OF_TURNS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>")


def write_gguf(source: str | Path, file: str | Path, quantisation: str = "q8_0") -> Path:
    """Write the language model in a merged folder, with its tokenizer and chat template, as one file.

    Norms, biases, routers and what doesn't divide into blocks of 32 stay float32. Memory holds one tensor, as it is
    written.

    Args:
        source: a plain checkpoint in 16 or 32 bits.
        file: the file to write; an earlier one is replaced.
        quantisation: one of QUANTISATIONS, or of K_QUANTS where llama.cpp is installed.
    Raises:
        ConfigError: an unknown quantisation.
        TrainingError: llama.cpp didn't quantise the file.
        UnsupportedError: a family, RoPE scaling or tokenizer that isn't written; or `gguf` isn't installed.
    """
    check_quantisations([quantisation])
    if quantisation in K_QUANTS:
        return _by_llama_cpp(source, Path(file), quantisation)
    gguf = gguf_package()
    from transformers import AutoTokenizer

    source, file = Path(source), Path(file)
    config, composite = _language(source)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(f"{source} holds weights in few bits, which are not written as GGUF", "merge it first")
    family, form = written_family(config)
    if quantisation == "mxfp4" and not form.values(config).get("expert_count"):
        raise ConfigError(f"mxfp4 is of experts, and {config.model_type} has none", "use q8_0 or q4_0")
    note = rope_note(config)
    if note is not None:
        logging.getLogger(__name__).warning("%s", note)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    writer = gguf.GGUFWriter(str(file), form.architecture)
    types = {"f32": "ALL_F32", "mxfp4": "MOSTLY_MXFP4_MOE"}
    writer.add_file_type(getattr(gguf.LlamaFileType, types.get(quantisation, f"MOSTLY_{quantisation.upper()}")))
    _describe(writer, config, family, form)
    _describe_tokenizer(writer, tokenizer, config, form, stop_tokens(source, tokenizer))
    experts = form.values(config).get("expert_count")

    def language() -> Iterator[StoredTensor]:
        whole = stacked(checkpoint(source), experts) if experts else checkpoint(source)
        named = whole if composite is None else composite.language(whole)
        return (own for stored in named for own in split(stored, config, form))

    _write_tensors(writer, lambda: _tensors(language(), config, family, form), quantisation)
    return file


def _language(source: Path) -> tuple[Any, Composite | None]:
    """Return the configuration of a checkpoint's language model, and the model with towers that it is a part of."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    composite = Composite.of(source, config)
    return (config if composite is None else composite.text_config()), composite


def gguf_package() -> Any:
    """Import the package gguf (UnsupportedError: it isn't installed)."""
    try:
        import gguf
    except ImportError:
        raise UnsupportedError("GGUF files need the package gguf", "pip install 'pronghorn[gguf]'") from None
    return gguf


def written_family(config: Any) -> tuple[FamilySpec, Gguf]:
    """Return the family of a model and its form in GGUF files, and refuse one that has none (UnsupportedError)."""
    family = check_config(config)
    if family.gguf is None:
        raise UnsupportedError(f"{config.model_type} is not written as GGUF here", MERGE)
    unlike = family.gguf.lacks(config)
    if unlike is not None:
        raise UnsupportedError(f"{config.model_type} with {unlike} is not written as GGUF: llama.cpp hasn't it", SERVE)
    return family, family.gguf


def left_out(model: Any) -> str | None:
    """Say which parts of the model that a language model was loaded out of are not in its GGUF file, if it has some."""
    composite = composite_of(model)
    if composite is None:
        return None
    return f"The GGUF file holds the language model alone; not written: {', '.join(composite.towers)}."


def check_quantisations(names: Iterable[str]) -> None:
    """Refuse a quantisation that isn't known (ConfigError), or that llama.cpp would make, which isn't here
    (UnsupportedError)."""
    for name in names:
        if name not in (*QUANTISATIONS, *K_QUANTS):
            known = f"one of {', '.join((*QUANTISATIONS, *K_QUANTS))}"
            near = {"not_quantized": "f16", "fast_quantized": "q8_0", "quantized": "q4_k_m"}.get(name, known)
            raise ConfigError(f"quantisation {name!r} is unknown", f"use {near}")
        if name in K_QUANTS and quantiser() is None:
            raise UnsupportedError(
                f"{name} is made by llama.cpp's {QUANTISER}, which is not on the PATH",
                "install llama.cpp (its releases, brew, conda-forge) or, on Linux, pip install ik-llama-cpp-python; "
                f"or use one of {', '.join(QUANTISATIONS)}",
            )


def quantiser() -> str | None:
    """Return the path of llama.cpp's quantising program: the one on the PATH, else a package's, else None."""
    package = importlib.util.find_spec(_CARRIER)
    folders = (package.submodule_search_locations if package else None) or []
    return shutil.which(QUANTISER) or shutil.which(
        QUANTISER, path=os.pathsep.join(f"{folder}/bin" for folder in folders)
    )


def _by_llama_cpp(source: str | Path, file: Path, quantisation: str) -> Path:
    """Write f16 beside the file, let llama.cpp quantise it, and delete it."""
    plain = write_gguf(source, file.with_name(f"{file.stem}.f16.gguf"), "f16")
    try:
        line = [str(quantiser()), str(plain), str(file), quantisation.upper()]
        done = subprocess.run(line, capture_output=True, text=True, errors="replace")
    finally:
        plain.unlink()
    if done.returncode or not file.is_file():
        last = next(iter(reversed((done.stderr or done.stdout).strip().splitlines())), f"code {done.returncode}")
        raise TrainingError(
            f"{QUANTISER} made no {quantisation} of the model: {last}", "use q8_0, or another llama.cpp"
        )
    return file


def _describe(writer: Any, config: Any, family: FamilySpec, form: Gguf) -> None:
    """Write what the file says of the model's shape."""
    values = form.values(config)
    if "sliding_window" not in values and _windows(config):
        what = f"{config.model_type} with a window of {config.sliding_window} tokens"
        raise UnsupportedError(f"{what} is not written as GGUF: llama.cpp's {form.architecture} has none", SERVE)
    head_dim = values.get("key_length") or head_dim_of(config)  # which differs among layers of some
    writer.add_name(Path(str(config._name_or_path)).name or config.model_type)
    described: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None),  # some have experts alone
        "head_count": config.num_attention_heads,
        "head_count_kv": values.get("head_count_kv") or config.num_key_value_heads,
        "layer_norm_rms_eps": config.rms_norm_eps,
        **rope_values(form.rope(config), head_dim, family.partial_rotary, "rope_dimension_count" in values, SERVE),
        "key_length": head_dim,
        "value_length": head_dim,
        "vocab_size": config.vocab_size,
    }
    for name, value in {**described, **values}.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)


def _windows(config: Any) -> bool:
    """Tell whether some layer's window is shorter than the context."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    return window is not None and "sliding_attention" in kinds and window < config.max_position_embeddings


def stop_tokens(source: Path, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer: the tokenizer's, the checkpoint's and the template's end of a turn."""
    from transformers import GenerationConfig

    _, form = written_family(_language(source)[0])
    own: Any = None
    if (source / "generation_config.json").is_file():
        own = GenerationConfig.from_pretrained(source).eos_token_id
    stops = [tokenizer.eos_token_id, *([own] if isinstance(own, int) else own or [])]
    template = _template_of(tokenizer)
    vocabulary = tokenizer.get_vocab()
    ends = [end for end in _ENDS_OF_TURNS if end in template and end not in form.goes_on]
    stops += [vocabulary[end] for end in ends if end in vocabulary]
    return [stop for stop in dict.fromkeys(stops) if stop is not None]


def _template_of(tokenizer: Any) -> str:
    """Return the chat template that conversations without tools are rendered by, empty without one."""
    own = tokenizer.chat_template
    return (own.get("default") if isinstance(own, dict) else own) or ""


def read_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Return what `tokenizer.json` says of a tokenizer.

    Raises:
        UnsupportedError: it is of a kind that isn't written as GGUF.
    """
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        raise UnsupportedError(f"a {type(tokenizer).__name__}, without tokenizer.json, is not written as GGUF", SERVE)
    told: dict[str, Any] = json.loads(backend.to_str())
    if told["model"]["type"] != "BPE":
        raise UnsupportedError(f"a {told['model']['type']} tokenizer is not written as GGUF here", MERGE)
    if not told["model"]["merges"]:  # without them no reader takes a byte-level one; of others it would make some up
        raise UnsupportedError("a BPE tokenizer without merges is not written as GGUF", SERVE)
    return told


def _describe_tokenizer(writer: Any, tokenizer: Any, config: Any, form: Gguf, stops: list[int]) -> None:
    """Write the vocabulary, how text is split, special tokens, every stop token and the chat template.

    Raises:
        UnsupportedError: text is split in a way that llama.cpp has no name for here.
    """
    from gguf import TokenType

    backend = read_tokenizer(tokenizer)
    model = backend["model"]
    pieces = model["byte_fallback"]  # SentencePiece's; otherwise byte-level
    tokens, types = _vocabulary(tokenizer, model["vocab"], config.vocab_size, pieces)
    for index in tokenizer.convert_tokens_to_ids([token for token in form.shown if token in tokens]):
        types[index] = TokenType.USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    warn_of_added_tokens(tokenizer)
    prefix = pieces and space_before(tokenizer, backend)
    merged = form.merged_pieces if pieces and not prefix else None
    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    if merged and not begins:
        raise UnsupportedError(f"a {merged} tokenizer without BOS, which llama.cpp adds, is not written as GGUF", MERGE)
    writer.add_tokenizer_model(merged or ("llama" if pieces else "gpt2"))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if pieces:
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
        writer.add_add_space_prefix(prefix)
    else:
        name = next((name for name in byte_level_names() if splits_alike(tokenizer.backend_tokenizer, name)), None)
        if name is None:
            raise UnsupportedError("the tokenizer splits text in a way that has no name here", MERGE)
        writer.add_tokenizer_pre(name)
    if merged or not pieces:
        writer.add_token_merges(merges)
    if len(stops) > 3:
        raise UnsupportedError(f"{len(stops)} stop tokens, and a GGUF file names three", MERGE)
    writer.add_add_bos_token(begins and tokenizer.bos_token_id is not None)
    writer.add_add_eos_token(False)
    for index, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        *zip(stops, (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id), strict=False),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    ):
        if index is not None and index < len(tokens):
            add(index)
    own = tokenizer.chat_template
    if own:  # several have names
        named = own if isinstance(own, str) else [{"name": name, "template": text} for name, text in own.items()]
        writer.add_chat_template(named)


def _vocabulary(tokenizer: Any, vocabulary: dict[str, int], size: int, pieces: bool) -> tuple[list[str], list[int]]:
    """Return every token with its kind, in the order of ids; places that no token has are filled. Added tokens beyond
    the model's embeddings are left out: no answer holds them (Gemma 3 1B has one, of images).

    Raises:
        UnsupportedError: other tokens are beyond the embeddings.
    """
    from gguf import TokenType

    added_tokens = {index: added for index, added in tokenizer.added_tokens_decoder.items() if index < size}
    beyond = {index for index in vocabulary.values() if index >= size} - tokenizer.added_tokens_decoder.keys()
    if beyond:
        raise UnsupportedError(f"a tokenizer of {max(beyond) + 1:,} tokens, and the model embeds {size:,}", SERVE)
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = [int(TokenType.UNUSED)] * size
    for token, index in vocabulary.items():
        if index >= size:
            continue
        tokens[index] = token
        is_byte = pieces and len(token) == 6 and token.startswith("<0x")
        types[index] = TokenType.BYTE if is_byte else TokenType.NORMAL
    for index, added in added_tokens.items():
        # llama.cpp looks for Gemma's runs of spaces in the text, before spaces are replaced; the longest comes first
        is_run = pieces and added.content == "▁" * len(added.content)
        tokens[index] = " " * len(added.content) if is_run else added.content
        types[index] = TokenType.CONTROL if added.special else TokenType.USER_DEFINED
    if pieces and tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = TokenType.UNKNOWN
    return tokens, types


def _tensors(
    source: Iterator[StoredTensor], config: Any, family: FamilySpec, form: Gguf
) -> Iterator[tuple[str, StoredTensor | Tensor, Part]]:
    """Yield (the file's name of a tensor, the tensor that it is made of, how)."""
    table = name_table(form.architecture, config.num_hidden_layers)
    rope = dict(form.rope(config))
    if rope.get("rope_type") in FACTORED:
        yield "rope_freqs.weight", rope_factors(rope, config), Part()
    for stored in source:
        for part in parts_of(stored.name, table, config, family, form):
            if part.name != "output.weight" or not config.tie_word_embeddings:  # then the embeddings are read for it
                yield part.name, stored, part


def _write_tensors(
    writer: Any, tensors: Callable[[], Iterator[tuple[str, StoredTensor | Tensor, Part]]], quantisation: str
) -> None:
    """Write the tensors' table, then each tensor as it is read: `tensors` gives the same ones twice."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import quantize

    kinds = []
    for name, stored, made in tensors():
        of_experts = name.endswith("_exps.weight")
        wanted = GGMLQuantizationType[("q8_0" if quantisation == "mxfp4" and not of_experts else quantisation).upper()]
        shape, block = shape_of(made, stored.shape), GGML_QUANT_SIZES[wanted][0]
        kept = math.prod(shape) == max(shape, default=1) or any(part in name for part in _FLOAT32)
        kept |= name.endswith(".bias")  # experts' have two dimensions
        kind = GGMLQuantizationType.F32 if kept or shape[-1] % block else wanted
        kinds.append(kind)
        per_block, size = GGML_QUANT_SIZES[kind]
        stored_bytes = math.prod(shape) // per_block * size
        writer.add_tensor_info(name, shape, np.dtype(np.float32), stored_bytes, raw_dtype=kind)  # a shape of numbers
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for (name, stored, made), kind in zip(tensors(), kinds, strict=True):
        count = stored.shape[0] if stored.shape else 1
        # what is changed is changed as a whole: heads are
        whole = replace(made, name="") != Part()
        at_once = count if whole else max(1, _AT_ONCE * count // max(math.prod(stored.shape), 1))
        parts = []
        for start in range(0, count, at_once):
            part = (stored if isinstance(stored, Tensor) else stored.rows(start, min(start + at_once, count))).float()
            part = changed(made, part) if whole else part
            if kind == GGMLQuantizationType.F16 and not (part.abs() <= np.finfo(np.float16).max).all():
                raise UnsupportedError(f"{name} holds numbers beyond float16's", "use bf16, f32 or q8_0")
            packed = kind == GGMLQuantizationType.MXFP4
            parts.append(pack_mxfp4(part).numpy() if packed else quantize(part.numpy(), kind))
        writer.write_tensor_data(np.concatenate(parts) if len(parts) > 1 else parts[0])
    writer.close()
