"""Flower's simulation, on its ray backend: as many clients at a time as there are cores.

    PYTHONPATH=bench python -m peers.by_flower mlp

Each of ray's processes reads the data once and keeps one module; a client trains it on its own samples.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from peers.network import accuracy, module, waiter
from peers.workload import WORKLOADS, Clock, Workload, arguments, report, samples, versions


@cache
def kept(name: str, device: str) -> tuple[torch.Tensor, torch.Tensor, nn.Module]:
    """What a process of ray's keeps between clients."""
    workload = WORKLOADS[name]
    data = samples(workload)
    torch.set_num_threads(1)
    x, y = torch.from_numpy(data.x).to(device), torch.from_numpy(data.y).to(device)
    return x, y, module(workload).to(device)


def fit(message: Message, client: int, name: str, device: str) -> Message:
    workload = WORKLOADS[name]
    x, y, model = kept(name, device)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer, cost = torch.optim.SGD(model.parameters(), lr=workload.lr), nn.CrossEntropyLoss()
    for _ in range(workload.epochs):
        for rows in torch.randperm(workload.samples, device=device).split(workload.batch):
            optimizer.zero_grad(set_to_none=True)
            cost(model(x[client, rows]), y[client, rows]).backward()
            optimizer.step()
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": workload.samples}),
    }
    return Message(content=RecordDict(content), reply_to=message)


def train(workload: Workload, rounds: int, device: str, clock: Clock) -> nn.Module:
    server_app, client_app = ServerApp(), ClientApp()
    model, name = module(workload), workload.name

    @client_app.train()
    def _(message: Message, context: Any) -> Message:
        from peers.by_flower import fit as imported  # so that what is kept is kept in ray's process

        return imported(message, int(context.node_config["partition-id"]), name, device)

    @server_app.main()
    def _(grid: Any, context: Any) -> None:
        strategy = FedAvg(
            fraction_train=workload.drawn / workload.clients,
            fraction_evaluate=0.0,
            min_available_nodes=workload.clients,
        )
        arrays = ArrayRecord(model.state_dict())
        result = strategy.start(grid, arrays, rounds, evaluate_fn=lambda number, arrays: clock.tick())
        model.load_state_dict(result.arrays.to_torch_state_dict())

    cores = len(os.sched_getaffinity(0))
    gpus = {"num_gpus": 1 / cores} if device == "cuda" else {}
    resources = {"init_args": {"num_cpus": cores}, "client_resources": {"num_cpus": 1, **gpus}}
    run_simulation(server_app, client_app, workload.clients, backend_config=resources)
    return model


def main() -> None:
    asked = arguments(__doc__).parse_args()
    workload = WORKLOADS[asked.workload]
    clock = Clock(waiter(asked.device))
    model = train(workload, asked.warm_up + asked.rounds, asked.device, clock)
    found = accuracy(model, samples(workload))
    report("Flower simulation", clock, asked, found, versions("flwr", "ray", "torch"))


if __name__ == "__main__":
    main()
