"""One workload, many frameworks: what a round of FedAvg costs in each of them."""
