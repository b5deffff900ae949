"""Argument checks shared by the jagged and embedding operators.

Structural checks (rank, dtype, device) are free and run on every call. Checks of *values* (offsets decreasing, a row longer than
`max_len`, an id outside the table) read the tensors: on the CPU they always run; on CUDA they would make the host wait for the device,
so there they run only where a caller asks (`validate_offsets`), and the kernels trap on the device where that costs nothing.
"""

import torch
from torch import Tensor


def check_offsets(name: str, offsets: Tensor, *, device: torch.device) -> None:
    """Raise ValueError unless `offsets` is a 1-D int32/int64 tensor of at least one entry on `device`."""
    if offsets.dim() != 1 or offsets.numel() < 1:
        raise ValueError(f"{name}: expected shape (B+1,), got {tuple(offsets.shape)}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: expected int32 or int64, got {offsets.dtype}")
    if offsets.device != device:
        raise ValueError(f"{name}: on {offsets.device}, but the data is on {device}")


def check_same_device(device: torch.device, **tensors: Tensor | None) -> None:
    """Raise ValueError naming the first tensor that is not on `device`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name}: on {tensor.device}, but the data is on {device}")


def validate_offsets(name: str, offsets: Tensor, *, total: int | None = None, max_len: int | None = None) -> None:
    """Read `offsets` and raise ValueError if they decrease, leave `[0, total]`, or hold a row longer than `max_len`.

    Waits for the device when `offsets` lives on one.
    """
    first, last = (int(end) for end in offsets[[0, -1]].tolist())
    if first < 0:
        raise ValueError(f"{name}: starts at {first}, must be >= 0")
    if total is not None and last > total:
        raise ValueError(f"{name}: ends at {last}, past the {total} rows of the values")
    if offsets.numel() < 2:
        return
    lengths = offsets.diff()
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest < 0:
        raise ValueError(f"{name}: decreases at row {int(lengths.argmin())}")
    if max_len is not None and longest > max_len:
        raise ValueError(f"{name}: row {int(lengths.argmax())} has length {longest} > max_len={max_len}; raise max_len or cut the row")


def validate_ids(name: str, ids: Tensor, *, num_rows: int) -> None:
    """Read `ids` and raise ValueError if one is outside `[0, num_rows)`. Waits for the device when `ids` lives on one."""
    if ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= num_rows:
        raise ValueError(f"{name}: values span [{low}, {high}], but the table has rows [0, {num_rows})")


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type in which sums of `dtype` are accumulated: fp32 for 16-bit floats, else the type itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
