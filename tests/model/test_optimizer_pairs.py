"""Pairs of functions that step: pure, the same under vmap, one after the other in a chain."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sartor.model.optimizers import Memory, Optimizer, adagrad, adam, chain, decay, momentum, scale, yogi

PAIRS: dict[str, Callable[[], Optimizer]] = {
    "nothing": chain,
    "scale": lambda: scale(0.3),
    "decay": lambda: decay(0.05),
    "momentum": lambda: momentum(0.9),
    "nesterov": lambda: momentum(0.9, nesterov=True, unit=0.2),
    "adagrad": lambda: adagrad(0.5, 1e-3, start=0.1),
    "adam": lambda: adam(0.9, 0.99, 1e-8, corrected=True),
    "adam, inside": lambda: adam(0.9, 0.99, 1e-3, inside=True, rate=0.1),
    "yogi": lambda: yogi(0.9, 0.99, 1e-3),
    "chain": lambda: chain(decay(0.05), adam(0.9, 0.999, 1e-8, corrected=True), scale(0.1)),
}


def run(pair: Optimizer, w: Tensor, gradients: Tensor) -> tuple[Tensor, Memory]:
    """The model after steps against these gradients, and what is remembered."""
    memory = pair.init(w)
    for g in gradients.unbind(-2):
        step, memory = pair.update(g, memory, w)
        w = w - step
    return w, memory


@pytest.mark.parametrize("name", PAIRS)
def test_many_at_once_are_one_by_one(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    w, gradients = torch.randn(5, 7, generator=generator), torch.randn(5, 4, 7, generator=generator)
    together, memory = torch.func.vmap(lambda w, g: run(PAIRS[name](), w, g))(w, gradients)
    for place in range(5):
        alone, own = run(PAIRS[name](), w[place], gradients[place])
        assert torch.allclose(together[place], alone, rtol=1e-6, atol=1e-7)
        assert memory.keys() == own.keys()


@pytest.mark.parametrize("name", PAIRS)
def test_nothing_that_is_given_changes(name: str) -> None:
    pair, g, w = PAIRS[name](), torch.tensor([0.3, -2.0]), torch.tensor([1.0, 4.0])
    _, memory = pair.update(g, pair.init(w), w)
    copies = {key: value.clone() for key, value in memory.items()}
    _, after = pair.update(g, memory, w)
    assert after.keys() == memory.keys() == pair.init(w).keys()
    assert g.tolist() == torch.tensor([0.3, -2.0]).tolist()
    assert w.tolist() == [1.0, 4.0]
    assert all(torch.equal(memory[key], copy) for key, copy in copies.items())


def test_a_chain_is_one_after_the_other() -> None:
    w, g = torch.tensor([2.0]), torch.tensor([1.0])
    assert run(chain(decay(0.5), scale(3.0)), w, g[None])[0].tolist() == [2.0 - 3.0 * (1.0 + 0.5 * 2.0)]
    assert run(chain(scale(3.0), decay(0.5)), w, g[None])[0].tolist() == [2.0 - (3.0 * 1.0 + 0.5 * 2.0)]
    assert run(chain(), w, g[None])[0].tolist() == [1.0]


def test_two_of_a_chain_cannot_share_what_they_remember() -> None:
    with pytest.raises(AssertionError, match=r"two optimizers of a chain remember \['m'\]"):
        chain(momentum(0.9), scale(2.0), momentum(0.5)).init(torch.zeros(2))


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}])
def test_adam_with_corrected_biases_is_pytorchs(settings: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(2)
    start, gradients = (torch.randn(*shape, generator=generator).double() for shape in ((3,), (9, 3)))
    parameter = torch.nn.Parameter(start.clone())
    theirs = torch.optim.Adam([parameter], lr=0.1, betas=(0.8, 0.95), eps=1e-6, **settings)  # type: ignore[arg-type]
    for g in gradients:
        parameter.grad = g.clone()
        theirs.step()
    parts = [decay(settings["weight_decay"])] if settings else []
    ours, _ = run(chain(*parts, adam(0.8, 0.95, 1e-6, corrected=True), scale(0.1)), start, gradients)
    assert torch.allclose(ours, parameter.detach(), rtol=1e-12, atol=1e-14)
    rated, _ = run(chain(*parts, adam(0.8, 0.95, 1e-6, corrected=True, rate=0.1)), start, gradients)
    assert torch.allclose(ours, rated, rtol=1e-12, atol=1e-14)
