"""pfl-research's simulation.

    PYTHONPATH=bench python -m peers.by_pfl mlp

Clients' samples lie on the device as tensors, as in its own benchmarks. It takes batches in the order in
which samples lie and draws users with replacement, unless all take part.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import nn

from peers.network import accuracy, module, waiter
from peers.workload import WORKLOADS, Clock, Samples, Workload, arguments, report, samples, versions


class Net(nn.Module):
    """The workload's network with the two functions that pfl wants."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.cost = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.train()
        return self.cost(self(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        from pfl.metrics import Weighted

        return {"loss": Weighted(float(self.cost(self(x), y)) * len(y), len(y))}


def train(workload: Workload, data: Samples, rounds: int, device: str, clock: Clock) -> nn.Module:
    os.environ["PFL_PYTORCH_DEVICE"] = device
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    class Ticks(TrainingProcessCallback):
        def on_train_begin(self, *, model: Any) -> Any:
            clock.tick()
            return super().on_train_begin(model=model)

        def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> Any:
            clock.tick()
            return super().after_central_iteration(metrics, model, central_iteration=central_iteration)

    net = Net(module(workload)).to(device)
    model = PyTorchModel(
        model=net,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(net.parameters(), 1.0),
    )
    x, y = (torch.from_numpy(part).to(device) for part in (data.x, data.y))
    everyone = workload.drawn == workload.clients
    sampler = get_user_sampler("minimize_reuse" if everyone else "random", range(workload.clients))
    clients = FederatedDataset.from_slices(list(zip(x, y, strict=True)), sampler)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(rounds, 10**6, workload.drawn, 0),
        backend=SimulatedBackend(clients, clients, [WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_batch_size=workload.batch,
            local_num_epochs=workload.epochs,
            local_learning_rate=workload.lr,
        ),
        callbacks=[Ticks()],
    )
    return net


def main() -> None:
    asked = arguments(__doc__).parse_args()
    np.random.seed(0)
    workload = WORKLOADS[asked.workload]
    clock, data = Clock(waiter(asked.device)), samples(workload)
    net = train(workload, data, asked.warm_up + asked.rounds, asked.device, clock)
    report("pfl-research", clock, asked, accuracy(net, data), versions("pfl", "torch"))


if __name__ == "__main__":
    main()
