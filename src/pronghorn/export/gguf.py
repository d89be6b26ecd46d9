"""Write a merged folder as a GGUF file, which llama.cpp, Ollama and LM Studio read.

Weights are read, reordered, quantised and written one by one. Names of tensors are those of the `gguf` package; what
the file must say of the model and its tokenizer is read back by `models.gguf`, which loads such files for training.

Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import ConfigError, DataError, TrainingError, UnsupportedError
from pronghorn.export.gguf_mxfp4 import pack_mxfp4
from pronghorn.export.gguf_rope import describe_rope, head_dim, llama3_factors, rope_note
from pronghorn.families.gguf_spec import Gguf, Part
from pronghorn.families.spec import FamilySpec
from pronghorn.models.composite import Composite
from pronghorn.models.families import check_config
from pronghorn.models.gguf import name_table
from pronghorn.models.gguf_tokenizer import byte_level_names, splits_alike
from pronghorn.precision.loader import StoredTensor, checkpoint

_AT_ONCE = 2**25
"""About how many numbers are float32 at once."""
Change = Callable[[Tensor], Tensor] | None
"""What is done to a weight, in float32, before it is written."""
QUANTISATIONS = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4")
"""What is computed here, most by the `gguf` package. `mxfp4` is of experts, as gpt-oss has them; the rest is q8_0."""
K_QUANTS = ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")
"""What llama.cpp's own program makes of an f16 file."""
QUANTISER = "llama-quantize"
MERGE = "export it merged (--to merged), and convert that with llama.cpp's convert_hf_to_gguf.py"
SERVE = "export it merged (--to merged), and serve that with vLLM or SGLang"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_ENDS_OF_TURNS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")


def write_gguf(source: str | Path, file: str | Path, quantisation: str = "q8_0") -> Path:
    """Write the model in a merged folder, with its tokenizer and chat template, as one file.

    Norms, biases, routers and what doesn't divide into blocks of 32 stay float32. Memory holds one tensor, as it is
    written.

    Args:
        source: a plain checkpoint in 16 or 32 bits; of one with towers the language model is written.
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
    config, stored_tensors = _language(source)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(f"{source} holds weights in few bits, which are not written as GGUF", "merge it first")
    family = written_family(config)
    form = family.gguf
    assert form is not None
    if quantisation == "mxfp4" and not form.values(config).get("expert_count"):
        raise ConfigError(f"mxfp4 is of experts, and {config.model_type} has none", "use q8_0 or q4_0")
    note = rope_note(config)
    if note is not None:
        logging.getLogger(__name__).warning("%s", note)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    writer = gguf.GGUFWriter(str(file), form.architecture)
    types = {"f32": "ALL_F32", "mxfp4": "MOSTLY_MXFP4_MOE"}
    writer.add_file_type(getattr(gguf.LlamaFileType, types.get(quantisation, f"MOSTLY_{quantisation.upper()}")))
    _describe(writer, config, form)
    _describe_tokenizer(writer, tokenizer, config, stop_tokens(source, tokenizer))
    _write_tensors(writer, lambda: _tensors(stored_tensors(), config, family), quantisation)
    return file


def _language(source: Path) -> tuple[Any, Callable[[], Iterator[StoredTensor]]]:
    """Return the configuration of a checkpoint's language model, and how its tensors are listed, without towers."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    composite = Composite.of(source, config)
    if composite is None:
        return config, lambda: checkpoint(source)
    return composite.text_config(), lambda: composite.language(checkpoint(source))


def gguf_package() -> Any:
    """Import the package gguf (UnsupportedError: it isn't installed)."""
    try:
        import gguf
    except ImportError:
        raise UnsupportedError("GGUF files need the package gguf", "pip install 'pronghorn[gguf]'") from None
    return gguf


def written_family(config: Any) -> FamilySpec:
    """Return the family of a model, and refuse one whose models aren't written as GGUF (UnsupportedError)."""
    family = check_config(config)
    if family.gguf is None:
        raise UnsupportedError(f"{config.model_type} is not written as GGUF here", MERGE)
    unlike = family.gguf.unlike(config)
    if unlike is not None:
        raise UnsupportedError(f"{config.model_type} with {unlike} is not written as GGUF: llama.cpp hasn't it", SERVE)
    return family


def check_quantisations(names: Iterable[str]) -> None:
    """Refuse a quantisation that isn't known (ConfigError), or that llama.cpp would make, which isn't here
    (UnsupportedError)."""
    for name in names:
        if name not in (*QUANTISATIONS, *K_QUANTS):
            known = f"one of {', '.join((*QUANTISATIONS, *K_QUANTS))}"
            near = {"not_quantized": "f16", "fast_quantized": "q8_0", "quantized": "q4_k_m"}.get(name, known)
            raise ConfigError(f"quantisation {name!r} is unknown", f"use {near}")
        if name in K_QUANTS and shutil.which(QUANTISER) is None:
            raise UnsupportedError(
                f"{name} is made by llama.cpp's {QUANTISER}, which is not on the PATH",
                f"install llama.cpp (its releases, brew, conda-forge), or use one of {', '.join(QUANTISATIONS)}",
            )


def _by_llama_cpp(source: str | Path, file: Path, quantisation: str) -> Path:
    """Write f16 beside the file, let llama.cpp quantise it, and delete it."""
    plain = write_gguf(source, file.with_name(f"{file.stem}.f16.gguf"), "f16")
    try:
        line = [QUANTISER, str(plain), str(file), quantisation.upper()]
        done = subprocess.run(line, capture_output=True, text=True, errors="replace")
    finally:
        plain.unlink()
    if done.returncode or not file.is_file():
        last = next(iter(reversed((done.stderr or done.stdout).strip().splitlines())), f"code {done.returncode}")
        raise TrainingError(
            f"{QUANTISER} made no {quantisation} of the model: {last}", "use q8_0, or another llama.cpp"
        )
    return file


def _describe(writer: Any, config: Any, form: Gguf) -> None:
    """Write what the file says of the model's shape."""
    values = form.values(config)
    if "sliding_window" not in values and _windows(config):
        what = f"{config.model_type} with a window of {config.sliding_window} tokens"
        raise UnsupportedError(f"{what} is not written as GGUF: llama.cpp's {form.architecture} has none", SERVE)
    writer.add_name(Path(str(config._name_or_path)).name or config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    describe_rope(writer, config, form, SERVE)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_vocab_size(config.vocab_size)
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)


def _windows(config: Any) -> bool:
    """Tell whether some layer's window is shorter than the context."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    return window is not None and "sliding_attention" in kinds and window < config.max_position_embeddings


def stop_tokens(source: Path, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer: the tokenizer's, the checkpoint's and the template's end of a turn."""
    from transformers import GenerationConfig

    form = written_family(_language(source)[0]).gguf
    assert form is not None
    own: Any = None
    if (source / "generation_config.json").is_file():
        own = GenerationConfig.from_pretrained(source).eos_token_id
    stops = [tokenizer.eos_token_id, *([own] if isinstance(own, int) else own or [])]
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    vocabulary = tokenizer.get_vocab()
    stops += [
        vocabulary[end] for end in _ENDS_OF_TURNS if end in template and end in vocabulary and end not in form.goes_on
    ]
    return [stop for stop in dict.fromkeys(stops) if stop is not None]


def _describe_tokenizer(writer: Any, tokenizer: Any, config: Any, stops: list[int]) -> None:
    """Write the vocabulary, how text is split, special tokens, every stop token and the chat template.

    Raises:
        UnsupportedError: text is split in a way that llama.cpp has no name for here.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    model = backend["model"]
    if model["type"] != "BPE":
        raise UnsupportedError(f"a {model['type']} tokenizer is not written as GGUF here", MERGE)
    pieces = model["byte_fallback"]  # SentencePiece's; otherwise byte-level
    tokens, types = _vocabulary(tokenizer, model["vocab"], config.vocab_size, pieces)
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if pieces:
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
        normalizer = json.dumps(backend["normalizer"])
        writer.add_add_space_prefix("Prepend" in normalizer)
    else:
        name = next((name for name in byte_level_names() if splits_alike(tokenizer.backend_tokenizer, name)), None)
        if name is None:
            raise UnsupportedError("the tokenizer splits text in a way that has no name here", MERGE)
        writer.add_tokenizer_pre(name)
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        writer.add_token_merges(merges)
    if len(stops) > 3:
        raise UnsupportedError(f"{len(stops)} stop tokens, and a GGUF file names three", MERGE)
    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    writer.add_add_bos_token(begins and tokenizer.bos_token_id is not None)
    writer.add_add_eos_token(False)
    for index, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        *zip(stops, (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id), strict=False),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    ):
        if index is not None:
            add(index)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _vocabulary(tokenizer: Any, vocabulary: dict[str, int], size: int, pieces: bool) -> tuple[list[str], list[int]]:
    """Return every token with its kind, in the order of ids; places that no token has are filled."""
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = [_UNUSED] * size
    for token, index in vocabulary.items():
        tokens[index] = token
        is_byte = pieces and len(token) == 6 and token.startswith("<0x")
        types[index] = _BYTE if is_byte else _NORMAL
    for index, added in tokenizer.added_tokens_decoder.items():
        tokens[index] = added.content
        types[index] = _CONTROL if added.special else _USER_DEFINED
    if pieces and tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = _UNKNOWN
    return tokens, types


def _tensors(
    source: Iterator[StoredTensor], config: Any, family: FamilySpec
) -> Iterator[tuple[str, StoredTensor | Tensor, Change]]:
    """Yield (the file's name of a tensor, the tensor, how it is changed)."""
    assert family.gguf is not None
    architecture = family.gguf.architecture
    table = name_table(architecture, config.num_hidden_layers)
    rope = family.gguf.rope(config)
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_factors(rope, config), None
    count = family.gguf.values(config).get("expert_count")
    for whole in _stacked(source, count) if count else source:
        for stored in _parts(whole, config, family.gguf):
            module, _, leaf = stored.name.rpartition(".")
            name = table.get_name(module)
            if name is None:
                raise UnsupportedError(f"{stored.name} has no name in a GGUF file of {architecture}", MERGE)
            if name == "output" and config.tie_word_embeddings:
                continue  # the embeddings are read for it
            yield f"{name}.{leaf}", stored, tensor_change(name, config, family)


def _parts(stored: StoredTensor, config: Any, form: Gguf) -> Iterator[StoredTensor]:
    """Yield what the file holds of a checkpoint's tensor, by the names that modules of their own would have."""
    for name, part in form.parts(stored.name, config).items():

        def rows(start: int, stop: int, part: Part = part) -> Tensor:
            return part(stored.rows(start, stop))

        shape = tuple(part(torch.empty(stored.shape, device="meta")).shape)
        yield replace(stored, name=name, shape=shape, rows=rows)


def _stacked(source: Iterator[StoredTensor], count: int) -> Iterator[StoredTensor]:
    """Yield a checkpoint's tensors, and of so many experts' alike ones a tensor with all of them."""
    from safetensors import safe_open

    waiting: dict[str, dict[int, StoredTensor]] = {}
    for stored in source:
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", stored.name)
        if expert is None:
            yield stored
            continue
        name = f"{expert[1]}.{expert[3]}"
        alike = waiting.setdefault(name, {})
        alike[int(expert[2])] = stored
        if len(alike) < count:
            continue
        del waiting[name]

        def rows(start: int, stop: int, alike: dict[int, StoredTensor] = alike) -> Tensor:
            with ExitStack() as stack:
                origins = dict.fromkeys(alike[number].origin for number in range(start, stop))
                files = {origin: stack.enter_context(safe_open(origin, "pt")) for origin in origins}
                return torch.stack(
                    [files[alike[number].origin].get_tensor(alike[number].name) for number in range(start, stop)]
                )

        yield replace(stored, name=name, shape=(count, *stored.shape), rows=rows)
    if waiting:
        name, alike = next(iter(waiting.items()))
        raise DataError(f"the checkpoint has {len(alike)} of {count} experts' {name}", "export or download it again")


def tensor_change(name: str, config: Any, family: FamilySpec) -> Change:
    """Return how a family's tensor is changed for the file, by its name there without the leaf."""
    if family.norm_offset and name.endswith("norm"):
        return partial(torch.add, other=family.norm_offset)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.rpartition(".")[2])
    if heads is None or family.gguf is None or not family.gguf.interleaved:
        return None
    return partial(_interleaved, heads=heads)


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Put the rows of each head as llama.cpp turns them: neighbours, where transformers turns halves."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _write_tensors(
    writer: Any, tensors: Callable[[], Iterator[tuple[str, StoredTensor | Tensor, Change]]], quantisation: str
) -> None:
    """Write the tensors' table, then each tensor as it is read: `tensors` gives the same ones twice."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import quantize

    kinds = []
    for name, stored, _ in tensors():
        of_experts = name.endswith("_exps.weight")
        wanted = GGMLQuantizationType[("q8_0" if quantisation == "mxfp4" and not of_experts else quantisation).upper()]
        shape, block = tuple(stored.shape), GGML_QUANT_SIZES[wanted][0]
        kept = len(shape) < 2 or ".ffn_gate_inp." in name or name.endswith(".bias")
        kind = GGMLQuantizationType.F32 if kept or shape[-1] % block else wanted
        kinds.append(kind)
        per_block, size = GGML_QUANT_SIZES[kind]
        plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}.get(kind)
        if plain is not None:
            writer.add_tensor_info(name, shape, np.dtype(plain), math.prod(shape) * np.dtype(plain).itemsize)
        else:
            stored_shape = (*shape[:-1], shape[-1] // per_block * size)
            writer.add_tensor_info(name, stored_shape, np.dtype(np.uint8), math.prod(stored_shape), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for (_, stored, change), kind in zip(tensors(), kinds, strict=True):
        count = stored.shape[0] if stored.shape else 1
        # only heads are changed as a whole
        at_once = count if change is not None else max(1, _AT_ONCE * count // max(math.prod(stored.shape), 1))
        parts = []
        for start in range(0, count, at_once):
            part = (stored if isinstance(stored, Tensor) else stored.rows(start, min(start + at_once, count))).float()
            part = part if change is None else change(part)
            packed = kind == GGMLQuantizationType.MXFP4
            parts.append(pack_mxfp4(part).numpy() if packed else quantize(part.numpy(), kind))
        writer.write_tensor_data(np.concatenate(parts) if len(parts) > 1 else parts[0])
    writer.close()
