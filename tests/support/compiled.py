"""Kernels compiled for a card that needn't be here."""

from __future__ import annotations

from typing import Any


def compiled(
    kernel: Any, constants: dict[str, Any], warps: int, capability: int, stages: int | None = None, **types: str
) -> Any:
    """Compile for a card as a launch with aligned rows specialises it; pointers are to bf16 unless `types` says."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    rows = ("x_ptr", "w_ptr", "y_ptr", "dy_ptr", "dx_ptr", "more_ptr", "gu_ptr", "a_ptr", "da_ptr", "dgu_ptr")
    known = {
        **dict.fromkeys((*rows, "columns_ptr"), "*bf16"),
        "codes_ptr": "*fp8e4nv",
        "out_ptr": "*fp8e4nv",
        "eps": "fp32",
        "offset": "fp32",
    }
    known |= {**dict.fromkeys(("r_ptr", "dw_ptr", "scales_ptr", "inverse_ptr"), "*fp32"), **types}
    signature = {each: "constexpr" if each in constants else known.get(each, "i32") for each in kernel.arg_names}
    places = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
    aligned = [
        i for i, kind in enumerate(signature.values()) if kind not in ("constexpr", "fp32") and "desc" not in kind
    ]
    source = ASTSource(kernel, signature, places, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": warps} if stages is None else {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
