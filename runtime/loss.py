"""What is trained for. A file of its own: it is what a calibration's `bce` times, which no other change of the loop makes stale."""
from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def task_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross entropy with logits `(B, num_heads)`, summed over samples and tasks, in fp32."""
    return F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="sum")


def model_loss(output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """The tasks' loss, and that of predicted next events where the model has it, summed over samples."""
    logits, events = output if isinstance(output, tuple) else (output, None)
    loss = task_loss(logits, labels)
    return loss if events is None else loss + events
