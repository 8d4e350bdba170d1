"""What attackers cost, and what rules in place of means save: Fashion-MNIST, 100 clients, three seeds.

    python measurements/robustness.py --workers 16               # what is missing of the results
    python measurements/robustness.py --studies methods --attacks sign-flip --workers 4
    python measurements/robustness.py --table          # tables of what is there, docs/robustness.svg

Clients have 200 images each, classes drawn by Dirichlet 0.5, and 50 to test on. Everybody takes part in every
round. ``rules`` is FedAvg with each rule, against each attack by 10 to 40 % of the clients; ``methods`` are
four methods without a rule and with the one that the documentation recommends, against 30 %; ``diversity`` is
each test of ``similarity`` alone. A method's learning rate is the one of three with the best accuracy
on validation data without any attack, in a run with a seed of its own.

What is measured is the mean accuracy of the honest clients on their own test data (personal models where the
method has them). Beside it stands that of the same clients where nobody attacks, and where attackers stay
away: ``absent`` is no attack, attackers send what the honest ones do on average. ``results/robustness.jsonl``
is written after each run, and what is in it is not run again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pictures import panels, save
from torch import Tensor
from workers import measured

import sartor
from sartor.errors import SartorError
from sartor.federation.attacks import Attack, register_attack
from sartor.runs.record import environment
from sartor.studies.results import Results

COMMAND = "python measurements/robustness.py --workers 16"
FILE = Path(__file__).parent.parent / "results" / "robustness.jsonl"
SEEDS, SEARCH_SEED = (0, 1, 2), 100
RATES = (0.03, 0.1, 0.3)
SETTING: dict[str, Any] = {
    "rounds": 60,
    "data": {"name": "fashion-mnist", "clients": 100},
    "partition": {"name": "dirichlet", "by": "client", "alpha": 0.5, "train": 200, "test": 50},
    "model": {"name": "mlp", "hidden": 64},
    "local": {"epochs": 1, "batch": 20},
    "evaluate": {"every": 0, "personal_pooled": "no", "personal_models": "no"},
    "replies": {"on_bad_reply": "drop"},
}
SMALL: dict[str, Any] = {
    "rounds": 15,
    "data": {"name": "digits", "clients": 10},
    "partition": {"name": "dirichlet", "alpha": 0.5},
}
"""In place of the above with ``--small``, to try the script."""
METHODS = ("fedavg", "scaffold", "spfl", "diversifed")
RULES: dict[str, dict[str, Any]] = {
    "mean": {},
    "median": {},
    "trimmed-mean": {"share": 0.4},
    "geometric-median": {},
    "multi-krum": {"share": 0.4},
    "bulyan": {"share": 0.2},
    "centred-clipping": {},
    "norm-filter": {},
    "similarity": {},
}
TESTS = ("cosine", "distance", "copies")
ATTACKS: dict[str, dict[str, Any]] = {
    "absent": {},
    "sign-flip": {},
    "scaling": {},
    "gaussian": {},
    "label-flip": {},
    "little-is-enough": {},
    "inner-product": {},
    "mimic": {},
    "backdoor": {},
}
SHARES = (0.1, 0.2, 0.3, 0.4)
Runs = dict[str, dict[str, Any]]
RECOMMENDED = "similarity"
DRAWN = ("mean", "median", "geometric-median", "multi-krum", "bulyan", "centred-clipping", "similarity")


@register_attack("absent")
@dataclass(frozen=True)
class Absent(Attack):
    """What the honest send on average: as if attackers stayed away."""

    def collude(self, keys: Tensor, values: Tensor, honest: Tensor) -> Tensor:
        """Their mean."""
        return honest.mean(dim=0).expand_as(values) if len(honest) else values


@dataclass(frozen=True)
class Cell:
    """One run."""

    method: str
    rule: str
    attack: str
    share: float
    seed: int

    @property
    def key(self) -> str:
        """What it is called in the results."""
        return f"{self.method} {self.rule} {self.attack} {self.share:g} {self.seed}"

    @staticmethod
    def of(key: str) -> Cell:
        """The run that is called so."""
        method, rule, attack, share, seed = key.split()
        return Cell(method, rule, attack, float(share), int(seed))

    def experiment(self, small: bool) -> dict[str, Any]:
        """Its settings but for the learning rate."""
        name, _, test = self.rule.partition(":")
        rule = {"name": name, **RULES[name], **({"by": [test]} if test else {})}
        given = {**SETTING, **(SMALL if small else {}), "aggregate": rule}
        if self.share:
            given["attack"] = {"name": self.attack, "share": self.share, **ATTACKS[self.attack]}
        return given


def cells(studies: list[str], attacks: list[str]) -> Iterator[Cell]:
    """The runs of some studies, those without attackers first."""
    rules = [*RULES] if "rules" in studies else []
    rules += [f"similarity:{test}" for test in TESTS] if "diversity" in studies else []
    for seed in SEEDS:
        for rule in rules:
            yield Cell("fedavg", rule, "none", 0.0, seed)
        for method in METHODS if "methods" in studies else ():
            for rule in ("mean", RECOMMENDED):
                yield Cell(method, rule, "none", 0.0, seed)
        for attack in attacks:
            for rule in rules:
                for share in SHARES:
                    yield Cell("fedavg", rule, attack, share, seed)
            for method in METHODS if "methods" in studies else ():
                for rule in ("mean", RECOMMENDED):
                    yield Cell(method, rule, attack, 0.3, seed)


def measure(cell: Cell, rates: dict[str, float], small: bool, device: str) -> dict[str, Any]:
    """Honest clients' accuracy, every client's where nobody attacks, and how often a trigger succeeds."""
    began = time.perf_counter()
    try:
        result = sartor.run(
            cell.method,
            seed=cell.seed,
            hyper={"lr": rates[cell.method]},
            store=False,
            device=device,
            experiment=cell.experiment(small),
        )
    except SartorError as error:
        return {"failed": str(error)}
    last = result.summary["last"]
    name = "personal_local" if last["personal_local"] else "shared_local"
    found: dict[str, Any] = {"failed": None, "seconds": round(time.perf_counter() - began, 1)}
    if not cell.share:
        each = result.clients[f"{name}_accuracy"]
        found["clients"] = dict(zip(result.clients["client"], each, strict=True))
        return found
    found |= {"accuracy": last[name]["benign"]["accuracy"], "success": last[name].get("attack_success")}
    return found | {"attackers": result.summary["attack"]["attackers"]}


def validation(method_rate: tuple[str, float], small: bool, device: str) -> float:
    """A method's accuracy on validation data with a rate, where nobody attacks."""
    method, rate = method_rate
    given = Cell(method, "mean", "none", 0.0, SEARCH_SEED).experiment(small)
    given = {**given, "data": {**given["data"], "validation": 0.2}}
    result = sartor.run(
        method, seed=SEARCH_SEED, hyper={"lr": rate}, store=False, device=device, experiment=given
    )
    best = result.summary["best_by_validation"]
    accuracy: float = (best["personal_local"] or best["shared_local"])["accuracy"]
    return accuracy


def honest_without(runs: Runs, cell: Cell, rule: str) -> float | None:
    """The accuracy of a run's honest clients in the run of the same seed where nobody attacks."""
    found, plain = runs[cell.key], runs.get(f"{cell.method} {rule} none 0 {cell.seed}")
    if plain is None or plain["failed"] is not None:
        return None
    bad = set(found["attackers"])
    values = [value for name, value in plain["clients"].items() if name not in bad and value is not None]
    return statistics.mean(values)


def summary(runs: Runs, method: str, rule: str, attack: str, share: float) -> str:
    """Honest clients' accuracy over the seeds and what it is less than without attackers or a rule."""
    found, lost, success = [], [], []
    for seed in SEEDS:
        cell = Cell(method, rule, attack, share, seed)
        run = runs.get(cell.key)
        if run is None:
            return "·"
        if run["failed"] is not None:
            return "failed"
        found.append(100 * run["accuracy"])
        before = honest_without(runs, cell, "mean")
        lost += [] if before is None else [100 * (before - run["accuracy"])]
        success += [] if run["success"] is None else [100 * run["success"]]
    text = f"{statistics.mean(found):.1f}"
    text += f" ({-statistics.mean(lost):+.1f})" if lost else ""
    return text + (f", {statistics.mean(success):.0f} %" if success else "")


def tables(runs: Runs) -> str:
    """All that was measured."""
    lines = []
    rules = [*RULES, *(f"similarity:{test}" for test in TESTS)]
    for share in SHARES:
        lines += [f"FedAvg, {share:.0%} attackers", "", "| rule | " + " | ".join(ATTACKS) + " |"]
        lines.append("| --- " * (len(ATTACKS) + 1) + "|")
        for rule in rules:
            row = [summary(runs, "fedavg", rule, attack, share) for attack in ATTACKS]
            lines.append(f"| {rule} | " + " | ".join(row) + " |")
        lines.append("")
    lines += ["30 % attackers", "", "| method | rule | " + " | ".join(ATTACKS) + " |"]
    lines.append("| --- " * (len(ATTACKS) + 2) + "|")
    for method in METHODS:
        for rule in ("mean", RECOMMENDED):
            row = [summary(runs, method, rule, attack, 0.3) for attack in ATTACKS]
            lines.append(f"| {method} | {rule} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def draw(runs: Runs) -> None:
    """FedAvg's honest clients over the share of attackers: a panel for each attack, a line for each rule."""
    figure, both = panels(2, 4, (11, 5.5))
    shown = [attack for attack in ATTACKS if attack != "absent"]
    for axes, attack in zip(both, shown, strict=True):
        for rule in DRAWN:
            means = [nobody(runs, rule)]
            for share in SHARES:
                found = [runs[Cell("fedavg", rule, attack, share, seed).key] for seed in SEEDS]
                means.append(100 * statistics.mean(run["accuracy"] for run in found))
            axes.plot([0, *(100 * share for share in SHARES)], means, "o-", markersize=3, label=rule)
        axes.set_title(attack, fontsize=11)
        axes.set_ylim(60, 87)
    for axes in both[4:]:
        axes.set_xlabel("attackers, %")
    for axes in both[::4]:
        axes.set_ylabel("honest clients, %")
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    save(figure, "robustness")


def nobody(runs: Runs, rule: str) -> float:
    """FedAvg's accuracy with a rule where nobody attacks, in percent."""
    found = [runs[Cell("fedavg", rule, "none", 0.0, seed).key] for seed in SEEDS]
    return 100 * statistics.mean(
        statistics.mean(value for value in run["clients"].values() if value is not None) for run in found
    )


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    studies = ("rules", "methods", "diversity")
    parser.add_argument("--studies", nargs="*", choices=studies, default=[*studies], metavar="NAME")
    parser.add_argument("--attacks", nargs="*", choices=[*ATTACKS], default=[*ATTACKS], metavar="NAME")
    parser.add_argument("--workers", type=int, default=1, help="runs at once")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--small", action="store_true", help="digits, 10 clients, 15 rounds")
    parser.add_argument("--json", type=Path, default=FILE, help="the file")
    parser.add_argument("--table", action="store_true", help="print and draw what is there")
    arguments = parser.parse_args()
    results = Results(arguments.json)
    if arguments.table:
        draw(results.numbers)
        print(tables(results.numbers))
        return
    results.about |= {"command": COMMAND, "seeds": list(SEEDS), "environment": environment(arguments.device)}
    done = {key for key, run in results.numbers.items() if run["failed"] is None}
    wanted = list(dict.fromkeys(cells(arguments.studies, arguments.attacks)))
    wanted = [cell for cell in wanted if cell.key not in done]
    same = {"small": arguments.small, "device": arguments.device}
    rates = results.about.setdefault("rates", {})
    searched = [
        (method, rate) for method in {cell.method for cell in wanted} - rates.keys() for rate in RATES
    ]
    scores = dict(measured(partial(validation, **same), searched, arguments.workers))
    for method, _ in searched:
        rates[method] = max(RATES, key=lambda rate: scores[method, rate])
    results.write()
    runs = measured(partial(measure, rates=rates, **same), wanted, arguments.workers)
    for number, (cell, found) in enumerate(runs, 1):
        experiment = {
            **cell.experiment(arguments.small),
            "seed": cell.seed,
            "hyper": {"lr": rates[cell.method]},
        }
        results.add(cell.key, found, method=cell.method, experiment=experiment)
        told = found["failed"] or found.get("accuracy", "nobody attacks")
        print(f"{number} of {len(wanted)}: {cell.key}: {told}", flush=True)


if __name__ == "__main__":
    main()
