"""Can a client gain from clients that are unlike it? The first experiment of DiversiFed, on digits.

Five clients hold two classes each, none in common, and few samples. Client i trains on its loss plus
λ Σ_j ‖w_i − w_j‖² over the others (equation 1): λ > 0 pulls all models together, λ < 0 pushes them apart,
λ = 0 is training alone. The picture shows the mean accuracy of the clients on their own test data for each λ.

    python measurements/diversity.py --out diversity.png
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sartor
from sartor import Algorithm, Call, Client, Reply, personal, register, setting
from sartor.algorithms import Hyper
from sartor.data.sources import load_source

STRENGTHS = [-0.2, -0.15, -0.1, -0.05, 0.0, 0.05, 0.1, 0.15, 0.2]


@dataclass(frozen=True)
class DiversityHyper(Hyper):
    lam: float = setting(0.0, "pull towards all other models; negative: push", symbol="λ")


@dataclass(frozen=True)
class Models:
    models: Tensor


def local_training(
    client: Client, hyper: DiversityHyper, others: Tensor, count: Tensor, w_i: Tensor
) -> Reply:
    def direction(w: Tensor, batch: Any) -> Tensor:
        return client.grad(w, batch) + 2 * hyper.lam * (count * w - others)  # of λ Σ_j ‖w − w_j‖²

    w = client.descend(w_i, direction, lr=hyper.lr)
    return Reply(w=w).keep(w_i=w)


@personal
def own_model(client: Client, hyper: DiversityHyper, w_i: Tensor) -> Reply:
    return Reply(w=w_i)


@register
class Diversity(Algorithm[DiversityHyper, Models]):
    """Every client is pulled to, or pushed from, the models of all others with one strength λ."""

    name = "diversity"
    family = "personal"
    paper = "DiversiFed, equation 1"
    server_keeps = "the last model of every client"
    client_keeps = "w_i"
    traffic = "1 / 1"

    def start(self, federation: Any) -> Models:
        w = federation.initial()
        federation.declare(w_i=w)
        return Models(w.expand(federation.clients, -1).clone())

    def round(self, server: Models, federation: Any, cohort: np.ndarray) -> Models:
        others = server.models.sum(dim=0) - server.models[cohort]
        count = torch.full((len(cohort),), len(server.models) - 1.0)
        replies = federation.map(local_training, cohort, each={"others": others, "count": count})
        return Models(server.models.index_copy(0, torch.from_numpy(replies.clients), replies["w"]))

    def shared(self, server: Models) -> None:
        return None

    def personalize(self, server: Models, cohort: np.ndarray) -> Call:
        return Call(own_model)

    def observe(self, server: Models) -> dict[str, Any]:
        clients = len(server.models)
        return {"distance": torch.cdist(server.models, server.models).sum() / (clients * (clients - 1))}


def clients_of(seed: int, samples: int) -> dict[str, Any]:
    """Five clients, each with two classes of its own and so many training samples of each; the rest tests."""
    source = load_source("digits")
    x, y = torch.cat([source.train_x, source.test_x]), torch.cat([source.train_y, source.test_y])
    generator = np.random.default_rng(seed)
    clients = {}
    for pair in generator.permutation(10).reshape(5, 2):
        of_class = [generator.permutation(np.flatnonzero(y.numpy() == label)) for label in pair]
        train, test = (
            np.concatenate(rows)
            for rows in ([rows[:samples] for rows in of_class], [rows[samples:] for rows in of_class])
        )
        name = f"digits {pair[0]} and {pair[1]}"
        clients[name] = {"train": (x[train], y[train]), "test": (x[test], y[test])}
    return clients


def measure(lam: float, seed: int, rounds: int, samples: int) -> tuple[float, float]:
    """The clients' mean accuracy on their own test data, and the mean distance of their models."""
    result = sartor.run(
        "diversity",
        data=clients_of(seed, samples),
        model="mlp",
        rounds=rounds,
        seed=seed,
        hyper={"lam": lam, "lr": 0.001},
        local={"epochs": 5, "batch": 0, "optimizer": "adam"},
        evaluate={"every": 0, "personal_pooled": "no"},
        engine="loop",  # so few clients: tracing would take longer than training
        store=False,
    )
    return result.summary["accuracy"]["personal_local"], float(result.rounds[-1]["observed"]["distance"])


def draw(accuracy: np.ndarray, path: str) -> None:
    """Mean and deviation over the seeds for each λ; the line is training alone."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    percent = 100 * accuracy
    axes.errorbar(STRENGTHS, percent.mean(axis=1), percent.std(axis=1), marker="o", capsize=3)
    axes.axhline(percent[STRENGTHS.index(0.0)].mean(), color="black", linewidth=1, label="λ = 0: alone")
    axes.set_xlabel("λ (negative: pushed apart, positive: pulled together)")
    axes.set_ylabel("mean accuracy of the clients (%)")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--seeds", type=int, default=3, help="repetitions, each with other classes and samples"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--samples", type=int, default=4, help="training samples of each class")
    parser.add_argument("--out", default="diversity.png", help="the picture")
    options = parser.parse_args()
    print("    λ  accuracy  deviation  distance")
    accuracy = np.zeros((len(STRENGTHS), options.seeds))
    for place, lam in enumerate(STRENGTHS):
        measured = [measure(lam, seed, options.rounds, options.samples) for seed in range(options.seeds)]
        accuracy[place], distance = zip(*measured, strict=True)
        mean, deviation = 100 * accuracy[place].mean(), 100 * accuracy[place].std()
        print(f"{lam:+5.2f}  {mean:8.2f}  {deviation:9.2f}  {np.mean(distance):8.3f}", flush=True)
    draw(accuracy, options.out)
    print(f"drawn: {options.out}")


if __name__ == "__main__":
    main()
