"""Quantise experts to NF4 while transformers loads a model, one tensor at a time, beside bitsandbytes' linears."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from pronghorn.kernels.nf4_experts import check_experts, quantise_experts
from pronghorn.models.experts import weight_names

NAME = "pronghorn_nf4"
"""What the quantiser is called in transformers' registry while a model loads."""


@cache
def config_class() -> Any:
    """Register the quantiser under `NAME`, and return the configuration that asks for it.

    A loaded model's configuration is bitsandbytes' own, but for its class.
    """
    from transformers import BitsAndBytesConfig
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
    from transformers.utils.quantization_config import QuantizationMethod

    @register_quantization_config(NAME)
    class ExpertsConfig(BitsAndBytesConfig):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.quant_method = NAME  # type: ignore[assignment]

    class Quantise(ConversionOps):
        def __init__(self, quantizer: Any, linears: ConversionOps) -> None:
            self.quantizer, self.linears = quantizer, linears

        def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
            model, made = kwargs["model"], dict[str, Any]()
            for name, value in input_dict.items():
                if name not in self.quantizer.experts(model):
                    made |= self.linears.convert({name: value}, *args, **kwargs)
                    continue
                dense = value[0] if isinstance(value, list) else value
                nested = self.quantizer.quantization_config.bnb_4bit_use_double_quant
                made[name] = nn.Parameter(quantise_experts(dense, nested), requires_grad=False)
                # transformers would draw the weights of a module without this mark anew
                model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True
            return made

    @register_quantizer(NAME)
    class ExpertsQuantizer(Bnb4BitHfQuantizer):
        def experts(self, model: Any) -> set[str]:
            if not hasattr(self, "_experts"):
                self._experts = set(weight_names(model))
            return self._experts

        def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
            return param_name in self.experts(model) or super().param_needs_quantization(model, param_name, **kwargs)

        def _process_model_before_weight_loading(self, model: Any, *args: Any, **kwargs: Any) -> None:
            for name in self.experts(model):
                check_experts(name, model.get_parameter(name).shape)
            super()._process_model_before_weight_loading(model, *args, **kwargs)

        def get_quantize_ops(self) -> Any:
            return Quantise(self, super().get_quantize_ops())

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            self.quantization_config.quant_method = QuantizationMethod.BITS_AND_BYTES
            return super()._process_model_after_weight_loading(model, **kwargs)

    return ExpertsConfig
