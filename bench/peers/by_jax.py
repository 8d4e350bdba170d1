"""JAX by hand: a whole round is one compiled function, over clients by ``vmap`` or ``lax.map``.

    PYTHONPATH=bench python -m peers.by_jax mlp --over vmap

Who takes part and in which order samples come is drawn in it too. Images are kept with channels last, which
XLA computes quicker on a CPU; pooling is a maximum over a reshaped array, whose gradient is cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peers.workload import WORKLOADS, Clock, Samples, Workload, arguments, initial, report, samples, versions

Weights = list[Any]
LAYOUT = ("NHWC", "HWIO", "NHWC")


def start(workload: Workload) -> Weights:
    """The workload's first weights in this network's layout."""
    weights = initial(workload)
    for number, values in enumerate(weights):
        if values.ndim == 4:
            weights[number] = values.transpose(2, 3, 1, 0)  # height, width, in, out
        elif values.shape == (512, 3136):  # after pooling: channels last
            weights[number] = values.reshape(512, 64, 7, 7).transpose(2, 3, 1, 0).reshape(3136, 512)
        elif values.ndim == 2:
            weights[number] = values.T
    return [jnp.asarray(values) for values in weights]


def mlp(weights: Weights, x: jax.Array) -> jax.Array:
    first, first_bias, last, last_bias = weights
    return jax.nn.relu(x.reshape(len(x), -1) @ first + first_bias) @ last + last_bias


def cnn(weights: Weights, x: jax.Array) -> jax.Array:
    for kernel, bias in (weights[:2], weights[2:4]):
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=LAYOUT)
        n, height, width, channels = x.shape
        x = jax.nn.relu(x + bias).reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))
    return mlp(weights[4:], x)


NETWORKS = {"mlp": mlp, "cnn": cnn}


def loss_of(workload: Workload) -> Callable[..., jax.Array]:
    network = NETWORKS[workload.model]

    def loss(weights: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(network(weights, x))
        return -jnp.take_along_axis(logits, y[:, None], 1).mean()

    return loss


def make_round(workload: Workload, over: str) -> Callable[..., Weights]:
    loss = loss_of(workload)

    def client(weights: Weights, key: jax.Array, x: jax.Array, y: jax.Array) -> Weights:
        keys = jax.random.split(key, workload.epochs)
        order = jax.vmap(partial(jax.random.permutation, x=workload.samples))(keys)

        def step(weights: Weights, rows: jax.Array) -> tuple[Weights, None]:
            slopes = jax.grad(loss)(weights, x[rows], y[rows])
            return [w - workload.lr * slope for w, slope in zip(weights, slopes, strict=True)], None

        return jax.lax.scan(step, weights, order.reshape(workload.steps, workload.batch))[0]

    def one_round(weights: Weights, key: jax.Array, x: jax.Array, y: jax.Array) -> Weights:
        who, *keys = jax.random.split(key, 1 + workload.drawn)
        if workload.drawn < workload.clients:
            drawn = jax.random.permutation(who, workload.clients)[: workload.drawn]
            x, y = x[drawn], y[drawn]
        if over == "vmap":
            replies = jax.vmap(client, (None, 0, 0, 0))(weights, jnp.stack(keys), x, y)
        else:
            replies = jax.lax.map(lambda mine: client(weights, *mine), (jnp.stack(keys), x, y))
        return [reply.mean(0) for reply in replies]

    return jax.jit(one_round, donate_argnums=0)


def train(workload: Workload, data: Samples, rounds: int, over: str, clock: Clock) -> Weights:
    x, y = jnp.asarray(np.moveaxis(data.x, 2, 4)), jnp.asarray(data.y)
    weights, one_round, key = start(workload), make_round(workload, over), jax.random.key(0)
    clock.tick()
    for number in range(rounds):
        weights = jax.block_until_ready(one_round(weights, jax.random.fold_in(key, number), x, y))
        clock.tick()
    return weights


def accuracy(workload: Workload, weights: Weights, data: Samples) -> float:
    network, x = jax.jit(NETWORKS[workload.model]), np.moveaxis(data.x_test, 1, 3)
    said = [network(weights, part).argmax(1) for part in np.split(x, 5)]
    return float(np.mean(np.concatenate(said) == data.y_test))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--over", default="vmap", choices=("vmap", "map"))
    asked = parser.parse_args()
    jax.config.update("jax_platforms", asked.device)
    workload = WORKLOADS[asked.workload]
    clock, data = Clock(), samples(workload)
    weights = train(workload, data, asked.warm_up + asked.rounds, asked.over, clock)
    report(f"JAX, jit({asked.over}(scan))", clock, asked, accuracy(workload, weights, data), versions("jax"))


if __name__ == "__main__":
    main()
