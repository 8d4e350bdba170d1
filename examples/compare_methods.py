"""Three methods on the same clients, cohorts and batches, over three seeds.

    python examples/compare_methods.py

FedAvg trains one model for all, Ditto a personal one beside it, and `separate` shares nothing. Run folders
and `comparison.json` lie in `comparison/`; started again, it finds finished runs there.
"""

import sartor

comparison = sartor.compare(
    ["fedavg", "ditto", "separate"],
    data="digits",
    clients=20,
    partition={"name": "dirichlet", "alpha": 0.1},
    local={"epochs": 2},
    rounds=10,
    seeds=3,
    references=False,
    against="fedavg",
    out="comparison",
)

print("accuracy on the clients' own test data, mean of 3 seeds")
for method in comparison.methods:
    print(f"{method.label:10} {method.cells[method.main].mean:.3f}   ({method.main})")
for pair in comparison.pairs:
    low, high = pair.interval
    print(
        f"{pair.first} − {pair.second}: {pair.mean_difference:+.3f}, 95 % between {low:+.3f} and {high:+.3f}"
    )
