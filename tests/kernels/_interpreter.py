"""Run Triton kernels on the CPU: import this before any module with kernels, in a process of its own.

Triton's interpreter converts one-element arrays to loop bounds in a way that NumPy 2.4 no longer allows; `.item()` still works.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_original = interpreter._patch_lang_tensor


def _patched(tensor, scope) -> None:
    _original(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patched
