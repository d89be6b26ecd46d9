"""gpt-oss (`transformers.models.gpt_oss`): attention sinks, windows in every other layer, experts with biases."""

from collections.abc import Mapping
from typing import Any

from pronghorn.families.gguf_spec import Gguf, Rows, all_rows, of_experts
from pronghorn.families.spec import Attention, Experts, FamilySpec, llama_blocks, same_blocks, window_of_module

EXPERTS = Experts(clamped_gate="GptOssExperts._apply_gate", served="together")


def _values(config: Any) -> Mapping[str, Any]:
    return {"sliding_window": config.sliding_window, **of_experts(config, "num_local_experts", "intermediate_size")}


def _unlike(config: Any) -> str | None:
    kinds = ["full_attention" if number % 2 else "sliding_attention" for number in range(config.num_hidden_layers)]
    if list(config.layer_types) != kinds or not config.sliding_window:
        return "windows in other layers than every second"
    # transformers 5.17 has them in its code
    alpha, limit = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
    if (alpha, limit) != (1.702, 7.0):
        return f"a gate of α = {alpha}, clamped at {limit}, not of 1.702 at 7,"
    if not config.attention_bias:
        return "attention without biases"
    return "a head that is the embeddings" if config.tie_word_embeddings else None


def _split(name: str, config: Any) -> Mapping[str, Rows]:
    """Turn experts' matrices, which lie transposed, and take gates and ups, in turns there, apart."""
    path, _, leaf = name.rpartition(".")
    gate, up, down = (f"{path}.{part}_proj" for part in ("gate", "up", "down"))
    if leaf == "gate_up_proj":
        return {f"{gate}.weight": lambda rows: rows.mT[:, ::2], f"{up}.weight": lambda rows: rows.mT[:, 1::2]}
    if leaf == "gate_up_proj_bias":
        return {f"{gate}.bias": lambda rows: rows[:, ::2], f"{up}.bias": lambda rows: rows[:, 1::2]}
    if leaf == "down_proj":
        return {f"{down}.weight": lambda rows: rows.mT}
    return {{"down_proj_bias": f"{down}.bias", "sinks": f"{name}.weight"}.get(leaf, name): all_rows}


GPT_OSS = FamilySpec(
    model_type="gpt_oss",
    members="gpt-oss 20b and 120b",
    source="transformers.models.gpt_oss",
    blocks=same_blocks(*llama_blocks(Attention(window=window_of_module, sinks="sinks"), EXPERTS)),
    experts=EXPERTS,
    load_attention="eager",
    halved_rotary=True,
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    gguf=Gguf(
        "gpt-oss", values=_values, unlike=_unlike, split=_split, goes_on=("<|end|>",), biases=("attention_bias",)
    ),
)
