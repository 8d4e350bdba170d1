"""Milliseconds per round of FedAvg: an expert's sequential PyTorch loop, the loop engine and the stacked
engine, side by side.

    python bench/engines.py [--device cuda] [--repeats 5] [--only cnn] [--tf32] [--ways] [--json FILE]
    python bench/engines.py --engine-only --method fedpac     # another method's rounds, on the stacked engine

The expert's loop is what one would write by hand for one workload: a module, its optimizer, the data on the
device already. Every figure is the best of the repeats, which are interleaved so that a busy machine slows
all of them alike. Where clients are drawn, rounds differ in how many samples they have: there the time is
that of as many samples as a round has on average. Beside it stand the first round, all that comes before a
steady pace (tracing, compiling kernels, capturing), and how long an engine takes for its first 100 rounds
on CUDA, or 10 on a CPU. Where clients are unlike and drawn, equal ones take turns with them, and a line below
the table says what a sample costs beside theirs: by the best of the repeats, and in the median turn. On a CPU
the same cohorts come again in every repeat.

Workloads on MNIST and Fashion-MNIST read them from the folder that SARTOR_DATA names; where they are not
there, random images stand in for them, and the table says so. Dirichlet's law then deals out other shares.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from expert import expert_loop
from models import OWN
from sartor.algorithms import registered
from sartor.client.settings import Local
from sartor.data.clients import ClientData, Split
from sartor.data.sources import SOURCES, Origin, data_folder
from sartor.engines import choose_engine, make_federation
from sartor.model.networks import MODELS, make_task, seeded
from sartor.model.task import Task
from sartor.runs.experiment import from_mapping
from sartor.runs.setup import set_up

LR = 0.05
WARM_UP = {"cpu": 2, "cuda": 3}
"""Rounds before measuring of what has nothing to trace or capture."""
DEALT = 3
"""The seed by which data sets are dealt out: the longest of 20 clients then takes 577 batches of 10."""
EQUAL = "stacked, equal clients"
"""What takes turns with unlike clients."""
HUNDRED = {"cpu": 10, "cuda": 100}
"""First rounds of an engine that traces and captures, whose time is told."""
AGAIN = {"cpu": 50, "cuda": None}
"""After how many rounds the same cohorts come again; None: never, as a device may capture what does."""


class Workload(NamedTuple):
    name: str
    model: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    batch: int
    lanes: int = 0
    cohort: int = 0
    """How many clients are drawn each round; 0: all."""
    large: bool = False
    """Whether it is for a GPU alone."""
    source: str = ""
    """The data set it is about, if that is at hand."""
    alpha: float = 0.0
    """Of Dirichlet's law, by which that is dealt out; 0: alike."""
    beside: str = ""
    """The workload whose equal clients are the measure of these."""

    @property
    def drawn(self) -> int:
        """How many clients take part in a round."""
        return self.cohort or len(self.sizes)

    @property
    def samples(self) -> float:
        """How many samples a round has on average."""
        return sum(self.sizes) / len(self.sizes) * self.drawn


def unlike(clients: int, alpha: float, total: int) -> tuple[int, ...]:
    """How many samples clients have where each of ten classes is dealt to them by Dirichlet's law."""
    shares = np.random.default_rng(0).dirichlet([alpha] * clients, 10).mean(0)
    return tuple(np.maximum(1, (shares * total).astype(int)).tolist())


RAGGED = (10, 40, 120, 250, 330, 332, 410, 800, 1400, 2565)
WORKLOADS = (
    Workload("softmax", "softmax", (576,), (150,) * 80, 10),
    Workload("mlp", "mlp", (1, 28, 28), (300,) * 40, 100),
    Workload("cnn", "cnn", (3, 32, 32), (500,) * 10, 32),
    Workload("lenet", "lenet", (3, 32, 32), (500,) * 40, 100),
    Workload("lenet, 20 × 200", "lenet", (3, 32, 32), (200,) * 20, 20, large=True),
    # Ragged clients keep three lanes busy; what equal clients do with as many lanes is their measure.
    Workload("ragged", "cnn", (3, 32, 32), RAGGED, 32),
    Workload("cnn, 3 lanes", "cnn", (3, 32, 32), (500,) * 10, 32, lanes=3, large=True),
    # Ten of a hundred clients each round; equal ones are the measure of those that are not.
    Workload(
        "sampled mlp",
        "mlp",
        (1, 28, 28),
        unlike(100, 0.3, 60_000),
        32,
        cohort=10,
        beside="sampled mlp, equal",
    ),
    Workload("sampled mlp, equal", "mlp", (1, 28, 28), (600,) * 100, 32, cohort=10),
    Workload(
        "sampled cnn",
        "cnn",
        (1, 28, 28),
        unlike(100, 0.3, 60_000),
        32,
        cohort=10,
        large=True,
        source="mnist",
        alpha=0.3,
        beside="sampled cnn, equal",
    ),
    Workload(
        "sampled cnn, equal", "cnn", (1, 28, 28), (600,) * 100, 32, cohort=10, large=True, source="mnist"
    ),
    Workload(
        "long epochs",
        "unpadded cnn",
        (1, 28, 28),
        unlike(20, 0.1, 60_000),
        10,
        large=True,
        source="fashion-mnist",
        alpha=0.1,
    ),
    Workload("long epochs, padded", "cnn", (1, 28, 28), unlike(20, 0.1, 35_000), 10, large=True),
    Workload("own cnn", "own cnn", (1, 28, 28), (600,) * 100, 32, cohort=20, source="mnist"),
    # What cannot be stacked: a GPU captures each client's steps.
    Workload(
        "cnn of signs", "cnn of signs", (1, 28, 28), (600,) * 100, 32, cohort=20, large=True, source="mnist"
    ),
    Workload("resnet18-gn", "resnet18-gn", (3, 32, 32), (500,) * 10, 32, large=True),
    Workload("resnet18-bn", "resnet18-bn", (3, 32, 32), (500,) * 10, 32, large=True),
    Workload("vit", "vit", (3, 32, 32), (500,) * 10, 32, large=True),
)


def module_of(workload: Workload) -> nn.Module:
    if workload.model in OWN:
        return seeded(lambda: OWN[workload.model](workload.shape, 10), 0)
    return seeded(lambda: MODELS[workload.model]().build(workload.shape, 10), 0)


def task_of(workload: Workload) -> Task:
    if workload.model in OWN:
        return Task(module_of(workload), classes=10)
    return make_task(workload.model, MODELS[workload.model](), workload.shape, 10, 0)


def cohorts(workload: Workload, device: str) -> Iterator[np.ndarray]:
    """Who takes part, round by round: the same for all that are measured."""
    rng, clients = np.random.default_rng(1), len(workload.sizes)
    if workload.drawn == clients:
        yield from itertools.repeat(np.arange(clients))
    drawn = (np.sort(rng.choice(clients, workload.drawn, replace=False)) for _ in itertools.count())
    yield from drawn if AGAIN[device] is None else itertools.cycle(itertools.islice(drawn, AGAIN[device]))


def at_hand(source: str) -> bool:
    """Whether a data set's files lie in the folder for data; nothing is downloaded."""
    origin = SOURCES.get(source)
    folder = data_folder()
    return isinstance(origin, Origin) and all(origin.find(folder, file) for file in origin.files)


def make_data(workload: Workload) -> ClientData:
    if at_hand(workload.source):
        law = {"name": "dirichlet", "alpha": workload.alpha} if workload.alpha else {"name": "iid"}
        settings = {"name": workload.source, "clients": len(workload.sizes)}
        experiment = {"algorithm": "fedavg", "seed": DEALT, "data": settings, "partition": law}
        return set_up(from_mapping(experiment)).data
    generator = torch.Generator().manual_seed(0)
    total = sum(workload.sizes)
    x = torch.randn(total, *workload.shape, generator=generator)
    y = torch.randint(0, 10, (total,), generator=generator)
    count = np.asarray(workload.sizes)
    split = Split(x, y, np.concatenate([[0], np.cumsum(count)[:-1]]), count)
    names = tuple(f"client {number}" for number in range(len(count)))
    return ClientData(names, split, split, None, x[:10], y[:10], 10, "random", workload.name)


def with_data(workload: Workload) -> tuple[Workload, ClientData]:
    """A workload with the sizes that its data have, and these."""
    data = make_data(workload)
    return workload._replace(sizes=tuple(data.train.count.tolist())), data


def expert_round(workload: Workload, data: ClientData, device: str) -> Callable[[], None]:
    """FedAvg by hand."""
    train = data.train.to(device)
    clients = list(zip(train.start.tolist(), train.count.tolist(), strict=True))
    model = module_of(workload).to(device)
    return expert_loop(
        model, train.x, train.y, clients, cohorts(workload, device), lr=LR, batch=workload.batch
    )


def engine_round(
    workload: Workload, data: ClientData, device: str, engine: str, method: str = "fedavg", **settings: Any
) -> Callable[[], None]:
    """A method's own round on one of the engines."""
    task, kind = task_of(workload), registered()[method]
    hyper = kind.Hyper(lr=LR)
    federation = make_federation(
        engine, task, data, local=Local(batch=workload.batch), hyper=hyper, device=device, **settings
    )
    algorithm, drawn = kind(hyper), cohorts(workload, device)
    state = {"server": algorithm.start(federation)}

    def one_round() -> None:
        state["server"] = algorithm.round(state["server"], federation, next(drawn))
        federation.round += 1

    return one_round


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Rounds:
    """Rounds of a workload, and how many samples those are that were played."""

    def __init__(self, workload: Workload, one_round: Callable[[], None], device: str) -> None:
        self._one_round, self._device = one_round, device
        self._cohorts, self._sizes = cohorts(workload, device), np.asarray(workload.sizes)
        self._samples = workload.samples

    def seconds(self, rounds: int) -> tuple[float, int]:
        """How long the next rounds take, and how many samples they have."""
        wait(self._device)
        begin = time.perf_counter()
        for _ in range(rounds):
            self._one_round()
        wait(self._device)
        took = time.perf_counter() - begin
        return took, sum(int(self._sizes[next(self._cohorts)].sum()) for _ in range(rounds))

    def milliseconds(self, rounds: int) -> float:
        """Of a round with as many samples as rounds have on average, by the next rounds."""
        took, samples = self.seconds(rounds)
        return took / samples * self._samples * 1e3


def forget_peak(device: str) -> None:
    """Start the peak anew, so that it is one engine's and not that of all before it."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):  # only Linux can; elsewhere the peak is the process's so far
            Path("/proc/self/clear_refs").write_text("5")


def peak_megabytes(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def beginning(play: Rounds, rounds: int) -> dict[str, float]:
    """Seconds of the first round and of the first so many."""
    first, _ = play.seconds(1)
    return {"first": first, "rounds": first + play.seconds(rounds - 1)[0]}


def measure(
    workload: Workload, device: str, repeats: int, tf32: bool, ways: bool, slow: bool, method: str
) -> dict[str, Any]:
    workload, data = with_data(workload)
    alone = task_of(workload).why_not_stackable(data.train.x, data.train.y) is not None
    way = "apart" if alone else "together"
    settings: dict[str, Any] = {"lanes": workload.lanes, "way": way, "method": method}
    made = {
        "expert": expert_round(workload, data, device),
        "loop": engine_round(workload, data, device, "loop", method),
        "stacked": engine_round(workload, data, device, "stacked", **settings),
    }
    if not slow:
        del made["expert"], made["loop"]
    if ways:
        made["apart"] = engine_round(workload, data, device, "stacked", **settings | {"way": "apart"})
    if tf32:
        made["tf32"] = engine_round(workload, data, device, "stacked", precision="tf32", **settings)
    runs = {name: Rounds(workload, one_round, device) for name, one_round in made.items()}
    if workload.beside:
        equal, equal_data = with_data(next(each for each in WORKLOADS if each.name == workload.beside))
        runs[EQUAL] = Rounds(equal, engine_round(equal, equal_data, device, "stacked", **settings), device)
    figures: dict[str, list[float]] = {name: [] for name in runs}
    peaks, starts, each = {}, {}, {}
    for name, play in runs.items():
        forget_peak(device)
        slow_one = name in ("expert", "loop")
        first = (WARM_UP if slow_one else HUNDRED)[device]
        starts[name] = beginning(play, first)
        peaks[name] = peak_megabytes(device)
        # For three seconds, where rounds are short or differ: those of an expert are long and alike enough.
        several = not slow_one and (device == "cuda" or bool(workload.cohort))
        each[name] = max(1, min(50, int(3 / starts[name]["rounds"] * first))) if several else 1
    for _ in range(repeats):
        for name, play in runs.items():
            figures[name].append(play.milliseconds(each[name]))
    if workload.beside:  # of a round with as many samples
        scale = workload.samples / equal.samples
        figures[EQUAL] = [scale * value for value in figures[EQUAL]]
    best = {name: min(values) for name, values in figures.items()}
    task = task_of(workload)
    return {
        "workload": workload.name,
        "method": method,
        "data": workload.source if at_hand(workload.source) else "random",
        "most_samples": max(workload.sizes),
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else f"cpu, {torch.get_num_threads()} threads",
        "auto": choose_engine("auto", task, device, data.train.x, data.train.y, "auto"),
        "milliseconds": best,
        "spread": {name: max(values) / min(values) for name, values in figures.items()},
        "ratio": {name: best.get("expert", np.nan) / value for name, value in best.items()},
        "peak_megabytes": peaks,
        "seconds_of_beginning": starts,
        "sample_to_equal": [
            best["stacked"] / best[EQUAL],
            float(np.median(np.divide(figures["stacked"], figures[EQUAL]))),
        ]
        if workload.beside
        else None,
        "samples_per_second": {name: workload.samples / value * 1e3 for name, value in best.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="names of workloads")
    parser.add_argument("--tf32", action="store_true", help="on CUDA: measure products in tf32 too")
    parser.add_argument("--ways", action="store_true", help="measure steps of clients apart too")
    parser.add_argument("--engine-only", action="store_true", help="leave out the expert and the loop engine")
    parser.add_argument("--method", default="fedavg", help="with --engine-only: whose rounds")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    if arguments.method != "fedavg" and not arguments.engine_only:
        parser.error("--method: the expert's loop is FedAvg's; add --engine-only")
    if arguments.method not in registered():
        parser.error(f"--method: {arguments.method!r} is no method; `sartor algorithms` lists them")
    if arguments.tf32 and arguments.device == "cpu":
        parser.error("--tf32: a CPU has none; add --device cuda")
    results = []
    table = Table(title=f"{arguments.method}, milliseconds per round (ratio to the expert's loop)")
    for column in (
        "workload",
        "engine",
        "ms / round",
        "ratio",
        "slowest / best",
        "first round, s",
        "first rounds, s",
        "peak MB",
        "samples / s",
    ):
        table.add_column(column, justify="left" if column in ("workload", "engine") else "right")
    for workload in WORKLOADS:
        if arguments.only and workload.name not in arguments.only:
            continue
        if workload.large and arguments.device == "cpu":
            continue
        result = measure(
            workload,
            arguments.device,
            arguments.repeats,
            arguments.tf32,
            arguments.ways,
            not arguments.engine_only,
            arguments.method,
        )
        results.append(result)
        for name, value in result["milliseconds"].items():
            picked = " (auto)" if name == result["auto"] else ""
            table.add_row(
                f"{workload.name} ({result['data']})",
                name + picked,
                f"{value:.3g}",
                f"{result['ratio'][name]:.3g}",
                f"{result['spread'][name]:.2f}",
                f"{result['seconds_of_beginning'][name]['first']:.2f}",
                f"{result['seconds_of_beginning'][name]['rounds']:.2f}",
                f"{result['peak_megabytes'][name]:.0f}",
                f"{result['samples_per_second'][name]:,.0f}",
            )
    Console(width=130).print(table)
    for result in results:
        if result["sample_to_equal"] is not None:
            best, median = result["sample_to_equal"]
            times = f"{best:.3g} times that of equal clients ({median:.3g} in the median turn)"
            print(f"{result['workload']}: a sample costs {times}")
    print(json.dumps(results))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
