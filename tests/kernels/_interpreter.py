"""Run Triton kernels on the CPU: import this before any module with kernels, in a process of its own.

Three repairs of Triton 3.6's interpreter: it turns one-element arrays into loop bounds in a way that NumPy 2.4 no longer allows, its
conversion of fp32 to fp8 loses the carry when a mantissa rounds up to the next power of two, and that to bf16 cuts instead of rounding.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_convert_float = interpreter._convert_float


def _patched_tensor(tensor, scope) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _exact_convert(data, input_dtype, output_dtype, rounding_mode):
    if input_dtype.name == "fp32" and output_dtype.name == "fp8e4nv":
        clamped = torch.from_numpy(data.copy()).clamp(-448, 448)  # the hardware's conversion saturates
        return clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    if input_dtype.name == "fp32" and output_dtype.name == "bf16":
        return torch.from_numpy(data.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    return _convert_float(data, input_dtype, output_dtype, rounding_mode)


interpreter._patch_lang_tensor = _patched_tensor
interpreter._convert_float = _exact_convert
