"""FedJAX's own federated averaging, with the network of ``by_jax.py``.

PYTHONPATH=bench python -m peers.by_fedjax mlp
"""

from __future__ import annotations

import fedjax
import jax
import numpy as np
from fedjax.algorithms import fed_avg

from peers.by_jax import Weights, accuracy, loss_of, start
from peers.workload import WORKLOADS, Clock, Samples, Workload, arguments, report, samples, versions


def train(workload: Workload, data: Samples, rounds: int, clock: Clock) -> Weights:
    x, loss = np.moveaxis(data.x, 2, 4), loss_of(workload)
    clients = {b"%03d" % number: {"x": x[number], "y": data.y[number]} for number in range(workload.clients)}
    algorithm = fed_avg.federated_averaging(
        lambda weights, batch, key: jax.grad(loss)(weights, batch["x"], batch["y"]),
        fedjax.optimizers.sgd(workload.lr),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=workload.batch, num_epochs=workload.epochs),
    )
    federated = fedjax.InMemoryFederatedData(clients)
    sampler = fedjax.client_samplers.UniformGetClientSampler(federated, workload.drawn, seed=0)
    state = algorithm.init(start(workload))
    clock.tick()
    for _ in range(rounds):
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        clock.tick()
    return state.params


def main() -> None:
    asked = arguments(__doc__).parse_args()
    jax.config.update("jax_platforms", asked.device)
    workload = WORKLOADS[asked.workload]
    clock, data = Clock(), samples(workload)
    weights = train(workload, data, asked.warm_up + asked.rounds, clock)
    report("FedJAX", clock, asked, accuracy(workload, weights, data), versions("fedjax", "jax"))


if __name__ == "__main__":
    main()
