"""CUDA path of jagged attention: picks tiles from a table, builds the work map on the device, launches `_attention_kernels`.

Nothing here reads a tensor's values, so nothing synchronises. Tiles depend on dtype, head dim and the caller's `max_q`, `max_k`
(rounded up to a power of two); every other size is a run-time argument, so a new batch neither tunes nor compiles.

Paths of the backward, all without atomics across programs, so that results repeat bitwise:
    few            few queries (max_q <= 64): one pass over the keys per (sequence, head)                       5 products
    hopper         dQ (`_attention_hopper_queries`), then dK and dV (`_attention_hopper_keys`)                  7 products
    wide           heads of 256: dV, dK and dQ one after the other, `_attention_wide`                            8 products
    split          the same in Triton: bias, float32, head dims below 64, other GPUs                             7 products

Bias always runs the generic Triton kernels; its tables' gradients are a pass more (`_attention_tables`, 2 products) behind `few` and `split`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import _attention_kernels as kernel
from kernels._launch import cdiv, next_power_of_2, run
from kernels._masks import edges_on
from kernels._tiles import longest_first, tile_map, zero_unowned

PATHS = ("few", "hopper", "wide", "split")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """M query rows, N keys, warps, pipeline stages, `registers` a thread at most; `split`: keys (or queries) without a mask have their own loop."""

    m: int
    n: int
    warps: int
    stages: int
    split: bool = True
    registers: int | None = None

    @property
    def launch(self) -> dict[str, int]:
        """Options of the compiler."""
        return {"num_warps": self.warps} if self.registers is None else {"num_warps": self.warps, "maxnreg": self.registers}


def forward_tiles(dtype: torch.dtype, head_dim: int, max_q: int, max_k: int, kind: str, biased: bool = False) -> Tiles:
    """Tiles of the forward kernel."""
    if dtype == torch.float32:
        return Tiles(m=32, n=32, warps=4, stages=1)
    if head_dim == 256:
        return Tiles(m=128, n=64, warps=8, stages=2)
    if max_q <= 64:  # [Measured H200, q <= 32, kv <= 2048] 64 keys, 3 stages: 4.23 TB/s, 99 % of the copy rate; 128 keys: 3.89
        return Tiles(m=64, n=64, warps=4, stages=3)
    if biased:  # [Measured H200, HSTU's two tables, L <= 2048] 6.1 ms; 3 stages 6.5, in 168 registers 6.2; 128 rows 7.7; 64 keys 6.7
        return Tiles(m=64, n=32, warps=4, stages=2, split=False, registers=128)
    # [Measured H200, D=128, L <= 1024] one masked loop, 3 stages: 326 TFLOPS; split loops 253; 64 rows 307; 128 keys 276
    return Tiles(m=128, n=64, warps=8, stages=3, split=False)


def keys_tiles(dtype: torch.dtype, head_dim: int, max_q: int, max_k: int, kind: str, biased: bool = False) -> Tiles:
    """Tiles of the dK and dV kernel."""
    if dtype == torch.float32:
        return Tiles(m=32, n=32, warps=4, stages=1)
    if head_dim == 256:  # [Measured H200, L <= 256] 69 TFLOPS in all; 64 queries in one stage 67
        return Tiles(m=32, n=64, warps=8, stages=2, split=False)
    if biased:  # [Measured H200, as above] 8.4 ms; 128 keys 9.6, 64 queries 10.1, both 10.5
        return Tiles(m=32, n=64, warps=4, stages=2, split=False)
    # [Measured H200, D=128, L <= 1024] one masked loop 241 TFLOPS in all, split loops 226
    return Tiles(m=64, n=128, warps=8, stages=2, split=False)


def queries_tiles(dtype: torch.dtype, head_dim: int, max_q: int, max_k: int, kind: str, biased: bool = False) -> Tiles:
    """Tiles of the dQ kernel."""
    if dtype == torch.float32:
        return Tiles(m=32, n=32, warps=4, stages=1)
    if head_dim == 256:  # [Compiled for sm_90] with bias 64 keys in one stage spill, 32 in two do not; neither was timed with one
        return Tiles(m=128, n=32, warps=8, stages=2, split=False) if biased else Tiles(m=64, n=64, warps=8, stages=1)
    if biased:  # [Measured H200, as above] 7.2 ms; 190 registers, a program less on each multiprocessor, 10.1; 128 rows 12.0, with 64 keys 12.2
        return Tiles(m=64, n=32, warps=4, stages=2, split=False, registers=168)
    return Tiles(m=128, n=64, warps=8, stages=2)


# [Compiled for sm_90, Triton 3.6] heads of 256, 8 warps: none of these spills; 64 queries of dK in two stages would need 256 KiB of shared memory
WIDE_TILES = {"values": Tiles(m=64, n=128, warps=8, stages=2, split=False), "keys": Tiles(m=64, n=128, warps=8, stages=1, split=False),
              "queries": Tiles(m=128, n=32, warps=8, stages=2, split=False)}  # fmt: skip


def few_queries_tiles(dtype: torch.dtype, head_dim: int, max_q: int, max_k: int, kind: str) -> Tiles:
    """Tiles of the backward for queries that fit one tile."""
    # one stage made an illegal access on the H200 (Triton 3.6), so the path is for sizes that fit two; `backward_path` sees to it
    # [Measured H200, q <= 32, kv <= 2048] 32 keys, 3 stages: 3.38 TB/s; 64 keys: 2.89 (2 stages), 1.94 (3: one program per SM)
    return Tiles(m=32 if max_q <= 32 else 64, n=32 if max_q <= 32 else 64, warps=4, stages=3 if max_q <= 32 else 2)


def forward(
    q, k, v, offsets, bias, options, *, max_q: int, max_k: int, tiles: Tiles | None = None, hopper: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; arguments as `kernels._attention_cpu.forward`, plus the announced maxima.

    `tiles` and `hopper` force a choice (tests and tuning).
    """
    q, k, v = (_unit_stride(x) for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    softmax = options.kind == "softmax"
    rows, heads, head_dim = q.shape
    lse = torch.empty((heads, rows if softmax else 0), dtype=torch.float32, device=q.device)
    if 0 in (rows, heads) or offsets[0].shape[0] < 2:
        return out.zero_(), lse.fill_(float("-inf"))
    if tiles is None and hopper is not False:
        from kernels import _hopper_launch  # Gluon's Hopper half; only where there is a GPU

        if hopper or (max_q > 64 and _hopper_launch.fits((q, k, v), offsets[0].shape[0] - 1, bias, options)):
            _hopper_launch.forward(q, k, v, out, lse, offsets, options, max_q, max_k)
            return out, lse
    tiles = tiles or forward_tiles(q.dtype, head_dim, _bucket(max_q), _bucket(max_k), options.kind, _has_bias(bias))
    slots = tile_map(offsets[0], rows, tiles.m, out)
    run(
        kernel.attention_forward_kernel, (slots.shape[0] * heads,),
        q, k, v, out, lse, *offsets, slots, *_bias_arguments(bias, q),
        *_strides(q, k, v), rows, heads, heads // k.shape[1], options.window, _score_scale(options), 1.0 / options.divisor,
        **_meta(q, bias, options), M=tiles.m, N=tiles.n, D=head_dim, SPLIT=tiles.split, STAGES=tiles.stages,
        **tiles.launch,
    )  # fmt: skip
    return out, lse


def backward(
    grad, q, k, v, out, lse, offsets, bias, options, *, max_q: int, max_k: int, tiles: Tiles | None = None, path: str | None = None
):  # fmt: skip
    """Gradients of q, k, v and the bias tables. `path` forces one of `PATHS` (tests and tuning)."""
    grad, q, k, v = (_unit_stride(x) for x in (grad, q, k, v))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if 0 in (q.shape[0], k.shape[0], q.shape[1]) or offsets[0].shape[0] < 2:
        return dq.zero_(), dk.zero_(), dv.zero_(), *(None if t is None else torch.zeros_like(t) for t in bias[:2])
    path = path or backward_path(grad, q, k, v, out, offsets, bias, options, max_q)
    if path == "hopper":
        from kernels import _hopper_launch

        _hopper_launch.backward(grad, q, k, v, out, lse, dq, dk, dv, offsets, options, max_q)
        return dq, dk, dv, None, None
    if offsets[0] is offsets[1] and dq.shape[0] == dk.shape[0]:
        zero_unowned(offsets[0], dq, dk, dv)
    else:
        zero_unowned(offsets[0], dq)
        zero_unowned(offsets[1], dk, dv)
    delta = _softmax_delta(grad, out) if options.kind == "softmax" else lse
    maxima = (_bucket(max_q), _bucket(max_k))
    if path == "few":
        _few_queries(grad, q, k, v, lse, delta, dq, dk, dv, offsets, bias, options, maxima, tiles)
    elif path == "wide":
        for which, target in (("values", dv), ("keys", dk)):
            _wide_keys(grad, q, k, v, lse, delta, target, offsets, options, tiles or WIDE_TILES[which], values=which == "values")
    else:
        _keys(grad, q, k, v, lse, delta, dk, dv, offsets, bias, options, maxima, tiles)
    if path in ("split", "wide"):
        _queries(grad, q, k, v, lse, delta, dq, offsets, bias, options, maxima, (tiles or WIDE_TILES["queries"]) if path == "wide" else None)
    return dq, dk, dv, *_table_gradients(grad, q, k, v, lse, delta, offsets, bias, options)


def _table_gradients(grad, q, k, v, lse, delta, offsets, bias, options, launch: dict | None = None) -> list[Tensor | None]:
    if not _has_bias(bias):
        return [None, None]
    from kernels._attention_tables import table_gradients

    *arguments, share = _bias_arguments(bias, q)
    meta = {"SHARE": share, **_meta(q, bias, options)}
    found = table_gradients(
        grad, q, k, v, lse, delta, offsets, bias, bias_arguments=[*arguments, share], strides=_strides(grad, q, k, v), window=options.window,
        scale=_score_scale(options), meta=meta, launch=launch,
    )  # fmt: skip
    return [
        None if d is None else ((d if d.shape[1] == t.shape[1] else d.sum(1, keepdim=True)) / options.divisor).to(t.dtype)
        for d, t in zip(found, bias[:2], strict=True)
    ]  # fmt: skip


def backward_path(grad, q, k, v, out, offsets, bias, options, max_q: int) -> str:
    """Which kernels run, from what the host knows."""
    if max_q <= 64 and q.shape[1] == k.shape[1] and q.shape[2] <= 128 and q.dtype != torch.float32:
        return "few"
    from kernels import _hopper_launch  # Gluon's Hopper half; only where there is a GPU

    if _hopper_launch.fits((q, k, v, grad, out), offsets[0].shape[0] - 1, bias, options):
        return "hopper"
    wide = q.shape[2] == 256 and q.dtype != torch.float32 and not _has_bias(bias)
    return "wide" if wide else "split"


def _few_queries(grad, q, k, v, lse, delta, dq, dk, dv, offsets, bias, options, maxima, tiles):
    tiles = tiles or few_queries_tiles(q.dtype, q.shape[2], *maxima, options.kind)
    order = longest_first(*offsets)
    run(
        kernel.few_queries_kernel, (order.shape[0] * q.shape[1],),
        grad, q, k, v, lse, delta, dq, dk, dv, *offsets, order, *_bias_arguments(bias, q),
        *_strides(grad, q, k, v), q.shape[0], q.shape[1], options.window, *_backward_scales(options),
        **_meta(q, bias, options), M=tiles.m, N=tiles.n, D=q.shape[2], STAGES=tiles.stages,
        **tiles.launch,
    )  # fmt: skip


def _keys(grad, q, k, v, lse, delta, dk, dv, offsets, bias, options, maxima, tiles):
    tiles = tiles or keys_tiles(q.dtype, q.shape[2], *maxima, options.kind, _has_bias(bias))
    slots = tile_map(offsets[1], k.shape[0], tiles.n)
    run(
        kernel.keys_kernel, (slots.shape[0] * k.shape[1],),
        grad, q, k, v, lse, delta, dk, dv, *offsets, slots, *_bias_arguments(bias, q),
        *_strides(grad, q, k, v), q.shape[0], q.shape[1], q.shape[1] // k.shape[1], options.window, *_backward_scales(options),
        **_meta(q, bias, options), M=tiles.m, N=tiles.n, D=q.shape[2],
        SPLIT=tiles.split, STAGES=tiles.stages, **tiles.launch,
    )  # fmt: skip


def _wide_keys(grad, q, k, v, lse, delta, target, offsets, options, tiles: Tiles, *, values: bool):
    from kernels._attention_wide import wide_keys_kernel

    slots = tile_map(offsets[1], k.shape[0], tiles.n)
    scale, dq_scale, dv_scale = _backward_scales(options)
    meta = {name: value for name, value in _meta(q, (None,) * 4, options).items() if name not in ("POSITION", "TIME")}
    run(
        wide_keys_kernel, (slots.shape[0] * k.shape[1],),
        grad, q, k, v, lse, delta, target, *offsets, slots, *_strides(grad, q, k, v), q.shape[0], q.shape[1], q.shape[1] // k.shape[1],
        options.window, scale, dv_scale if values else dq_scale, VALUES=values, **meta,
        M=tiles.m, N=tiles.n, D=q.shape[2], SPLIT=tiles.split, STAGES=tiles.stages, **tiles.launch,
    )  # fmt: skip


def _queries(grad, q, k, v, lse, delta, dq, offsets, bias, options, maxima, tiles: Tiles | None = None):
    tiles = tiles or queries_tiles(q.dtype, q.shape[2], *maxima, options.kind, _has_bias(bias))
    slots = tile_map(offsets[0], q.shape[0], tiles.m)
    scale, dq_scale, _ = _backward_scales(options)
    run(
        kernel.queries_kernel, (slots.shape[0] * q.shape[1],),
        grad, q, k, v, lse, delta, dq, *offsets, slots, *_bias_arguments(bias, q), *_strides(grad, q, k, v),
        q.shape[0], q.shape[1], q.shape[1] // k.shape[1], options.window, scale, dq_scale,
        **_meta(q, bias, options), M=tiles.m, N=tiles.n, D=q.shape[2], SPLIT=tiles.split, STAGES=tiles.stages, **tiles.launch,
    )  # fmt: skip


def _softmax_delta(grad: Tensor, out: Tensor) -> Tensor:
    rows, heads, head_dim = grad.shape
    delta = torch.empty((heads, rows), dtype=torch.float32, device=grad.device)
    block = max(16, 4096 // head_dim)
    run(
        kernel.softmax_delta_kernel, (cdiv(rows, block),),
        grad, out, delta, rows, *_strides(grad, out), HEADS=heads, M=block, D=head_dim, num_warps=4
    )
    return delta


def _bucket(length: int) -> int:
    return next_power_of_2(max(length, 1))


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


def _score_scale(options) -> float:
    return options.scale * kernel.LOG2E.value if options.kind == "softmax" else options.scale


def _backward_scales(options) -> tuple[float, float, float]:
    """Scale of the scores, of dQ and dK, and of dV."""
    return _score_scale(options), options.scale / options.divisor, 1.0 / options.divisor


def _has_bias(bias: tuple) -> bool:
    return bias[0] is not None or bias[1] is not None


def _bias_arguments(bias: tuple, q: Tensor) -> list:
    """Tables as fp32 `(columns, rows)`, times, edges of the time buckets, rows of the tables, and how many heads share a column of them."""
    position_table, time_table, q_times, k_times = bias
    heads = q.shape[1]
    widest = max((t.shape[1] for t in (position_table, time_table) if t is not None), default=heads)
    tables = [q if t is None else t.float().expand(-1, widest).t().contiguous() for t in (position_table, time_table)]
    times = [q if x is None else x.contiguous() for x in (q_times, k_times)]
    edges = q if time_table is None else edges_on(q.device)
    return [*tables, *times, edges, *(0 if table is None else table.shape[0] for table in (position_table, time_table)), heads // widest]


def _meta(q: Tensor, bias: tuple, options) -> dict:
    return {
        "KIND": "gelu" if options.kind == "gelu_fast" else options.kind,
        # SiLU too, whose weights are rounded to bfloat16 anyway: 2**-9 against the approximation's 2**-11
        "APPROX": options.kind == "gelu_fast" or (options.kind == "silu" and q.dtype == torch.bfloat16),
        "CAUSAL": options.causal,
        "WINDOW": options.window > 0,
        "POSITION": bias[0] is not None,
        "TIME": bias[1] is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }
