"""A run that ends early, for a reason of your own: every client is served well enough.

    python examples/early_stop.py

An observer is told of every evaluation and may stop the run. Where a single metric is enough, no code is
needed: `sartor run fedavg stop.patience=5`, or `stop.metric=shared_local.accuracy stop.target=0.95`.
"""

import sartor


class EveryoneServed(sartor.Observer):
    """Stops when the worst tenth of the clients has this accuracy on its own test data."""

    def __init__(self, wanted):
        self.wanted = wanted

    def evaluation(self, run, cells):
        worst = cells["shared_local"]["accuracy_spread"]["worst_decile"]
        print(f"round {run.round}: worst tenth {worst:.2f}")
        if worst >= self.wanted:
            run.stop(f"the worst tenth has {worst:.2f}")


result = sartor.run("fedavg", clients=10, rounds=50, observers=[EveryoneServed(0.8)])
print(f"{result.summary['rounds']} rounds; stopped: {result.summary['stopped']}")
