"""A method of your own: FedAvg whose server trusts a client the more, the less its model has moved.

    python examples/own_method.py

A client function is for one client and says what is sent; `round` is the server's side. It runs on every
engine as it is. From the command line: `sartor run calm --import examples/own_method.py`.
"""

from dataclasses import dataclass, replace

import sartor
from sartor.algorithms import Algorithm, Hyper, Server, register


@dataclass(frozen=True)
class CalmHyper(Hyper):
    calm: float = sartor.setting(1.0, "how much less a client counts that has moved far; 0 is FedAvg", low=0)


def train(client, hyper, w):
    delta = client.descend(w, lr=hyper.lr) - w
    return sartor.Reply(delta=delta, moved=delta.norm())


@register
class Calm(Algorithm[CalmHyper, Server]):
    """FedAvg with weights that fall with the distance a client has moved."""

    name, family, paper = "calm", "global", "an example"
    server_keeps, client_keeps, traffic = "w", "nothing", "1 / 1"

    def round(self, server, federation, cohort):
        replies = federation.map(train, cohort, shared={"w": server.w})
        weights = replies.weights * (1 + replies["moved"]) ** -self.hyper.calm
        return replace(server, w=server.w + replies.mean("delta", weights))


if __name__ == "__main__":
    print(sartor.run("calm", clients=10, rounds=10, hyper={"calm": 0.5}).summary["accuracy"])
