"""FedAvg as one would write it by hand in PyTorch for one workload: what frameworks are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn


def expert_loop(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    clients: Sequence[tuple[int, int]],
    cohorts: Iterator[Sequence[int]],
    *,
    lr: float,
    batch: int,
    epochs: int = 1,
) -> Callable[[], None]:
    """A function that does a round: a model, an optimizer, a loop over clients and batches.

    Samples lie on the model's device already; a client is its first sample and how many it has.
    """
    loss_function = nn.CrossEntropyLoss()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=lr)

    def one_round() -> None:
        start = [parameter.detach().clone() for parameter in parameters]
        total = [torch.zeros_like(parameter) for parameter in parameters]
        cohort = [clients[number] for number in next(cohorts)]
        samples = sum(count for _, count in cohort)
        for first, count in cohort:
            with torch.no_grad():
                torch._foreach_copy_(parameters, start)
            for _ in range(epochs):
                order = first + torch.randperm(count, device=x.device)
                for index in order.split(batch):
                    optimizer.zero_grad(set_to_none=True)
                    loss_function(model(x[index]), y[index]).backward()
                    optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(total, parameters, alpha=count / samples)
        with torch.no_grad():
            torch._foreach_copy_(parameters, total)

    return one_round
