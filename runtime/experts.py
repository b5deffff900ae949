"""Expert parallelism: the ranks of an expert group (consecutive, inside a host) hold different experts and compute them for each other's samples.

    all-gather    normed samples and gates are gathered; each rank applies its experts to all of them; outputs are reduce-scattered
    all-to-all    each rank gets the samples with the gates of its own experts, and sends its experts' part of every sample back

Both are the mathematics of one rank that holds all experts. FSDP2 averages an expert's gradients over the ranks that share its parameters, but each
of them has summed over an expert group already: in backward, gradients are divided by the group's size before the experts and multiplied by it behind
them.

Shape legend: R samples of a rank, G ranks of an expert group, W features, E experts, e = E / G of a rank.
"""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from runtime.mesh import Meshes, all_gather_single, all_to_all, reduce_scatter_single, wait
from runtime.model.experts import ExpertPool
from runtime.phases import PhaseTimer


def spread_experts(pool: ExpertPool, *, meshes: Meshes, timer: PhaseTimer) -> None:
    """Drops the experts that other ranks of the group hold and exchanges samples around the rest. In place; all ranks hold the whole pool before.

    Raises ValueError where ep does not divide the experts.
    """
    assert meshes.experts is not None, "experts are spread over a mesh"
    exchange = ExpertExchange(meshes, num_experts=len(list(pool.children())), timer=timer)
    for e in range(exchange.num_experts):
        if e not in exchange.own:
            delattr(pool, str(e))
    inner = pool.forward
    pool.forward = lambda x_RW, gates_RE: exchange(inner, x_RW, gates_RE)


class ExpertExchange:
    """What the ranks of an expert group send each other for one pool of experts. `own`: numbers of this rank's."""

    def __init__(self, meshes: Meshes, *, num_experts: int, timer: PhaseTimer) -> None:
        self.size, place = meshes.layout.ep, meshes.rank % meshes.layout.ep
        if num_experts % self.size:
            raise ValueError(f"ep {self.size} does not divide {num_experts} experts")
        self.group, self.timer, self.num_experts = meshes.experts["ep"].get_group(), timer, num_experts
        each = num_experts // self.size
        self.own, self.by_all_to_all = range(place * each, (place + 1) * each), meshes.layout.expert_all_to_all

    def __call__(self, experts, x_RW: Tensor, gates_RE: Tensor) -> Tensor:
        run = self._all_to_all if self.by_all_to_all else self._gathered
        if torch.is_grad_enabled():
            return run(experts, x_RW, gates_RE)
        # micro-batches of training are equally long, those of evaluation differ by one
        rows = x_RW.shape[0]
        most = torch.tensor(rows, device=x_RW.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        x_RW, gates_RE = (F.pad(t, (0, 0, 0, int(most) - rows)) for t in (x_RW, gates_RE))
        return run(experts, x_RW, gates_RE)[:rows].clone()

    def _gathered(self, experts, x_RW: Tensor, gates_RE: Tensor) -> Tensor:
        arrived = _Gather.apply(torch.cat([x_RW, gates_RE], dim=1), self)
        x_NW, gates_NE = arrived.split([x_RW.shape[1], self.num_experts], dim=1)
        return _Scatter.apply(experts(x_NW, gates_NE[:, self.own.start:self.own.stop]), self)

    def _all_to_all(self, experts, x_RW: Tensor, gates_RE: Tensor) -> Tensor:
        sent = torch.cat([torch.cat([x_RW, gates], dim=1) for gates in gates_RE.chunk(self.size, dim=1)])
        x_NW, gates_Ne = _Swap.apply(sent, self, float(self.size)).split([x_RW.shape[1], len(self.own)], dim=1)
        return _Swap.apply(experts(x_NW, gates_Ne), self, 1.0 / self.size).view(self.size, -1, x_RW.shape[1]).sum(0)

    def gather(self, x: Tensor) -> Tensor:
        """`(R, C) -> (G R, C)`."""
        out = x.new_empty((self.size * x.shape[0], x.shape[1]))
        wait(all_gather_single(out, x.contiguous(), group=self.group, async_op=True), self.timer)
        return out

    def scatter(self, x: Tensor) -> Tensor:
        """`(G R, C) -> (R, C)`, summed over ranks."""
        out = x.new_empty((x.shape[0] // self.size, x.shape[1]))
        wait(reduce_scatter_single(out, x.contiguous(), group=self.group, async_op=True), self.timer)
        return out

    def swap(self, x: Tensor) -> Tensor:
        """`(G R, C)`: part g goes to rank g of the group, whose part comes back in its place."""
        out, rows = torch.empty_like(x, memory_format=torch.contiguous_format), [x.shape[0] // self.size] * self.size
        wait(all_to_all(out, x.contiguous(), rows, rows, self.group), self.timer)
        return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, exchange: ExpertExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.gather(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return ctx.exchange.scatter(gradient) * ctx.exchange.size, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, exchange: ExpertExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.scatter(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return ctx.exchange.gather(gradient / ctx.exchange.size), None


class _Swap(torch.autograd.Function):
    """An all-to-all, whose transpose it is itself; `scale`: factor of its gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, exchange: ExpertExchange, scale: float) -> Tensor:
        ctx.exchange, ctx.scale = exchange, scale
        return exchange.swap(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return ctx.exchange.swap(gradient * ctx.scale), None, None
