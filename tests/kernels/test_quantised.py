"""Codes of few bits by a kernel are those of the single operations, and so are the numbers that arrive.

The kernels' own tests run on CUDA, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_convolution import DEVICE, draw, kernels
from torch import Tensor

from sartor.federation.transforms import Transform
from sartor.transforms import quantised
from sartor.transforms.quantised import QSGD, Int4, Int8, Sign

CASES: dict[str, Transform] = {
    "qsgd, 2 bits": QSGD(levels=1),
    "qsgd": QSGD(),
    "qsgd, 16 bits": QSGD(levels=1000),
    "int8": Int8(block=64),
    "int4": Int4(block=100),
    "sign": Sign(feedback=False),
}
KINDS = {"single": torch.float32, "double": torch.float64}


def passed(transform: Transform, x: Tensor, keys: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What clients send, and what arrives, mapped over all of them."""

    def one(key: Tensor, row: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        parts, _ = transform.apply(key, row, {})
        return parts, transform.receive(parts, row)

    found: tuple[dict[str, Tensor], Tensor] = torch.vmap(one)(keys, x)
    return found


@kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_gives_the_same_to_the_bit(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(3, 2, 1111, dtype=KINDS[kind])
    x[1, 0, :200] = 0  # two blocks without a number
    keys = torch.tensor([5, -(1 << 60), 1 << 62])
    expected = passed(CASES[name], x, keys)
    monkeypatch.setattr(quantised, "by_kernel", lambda x: True)
    found = passed(CASES[name], x.to(DEVICE), keys.to(DEVICE))
    for part, value in expected[0].items():
        theirs = found[0][part].cpu()
        assert theirs.dtype == value.dtype
        if part == "scale":  # which each device adds up in its order
            torch.testing.assert_close(theirs, value, rtol=1e-6, atol=0)
        else:
            assert theirs.shape == value.shape
            assert (theirs != value).float().mean() < (1e-3 if DEVICE == "cuda" else 1e-9)
    torch.testing.assert_close(found[1].cpu(), expected[1], rtol=1e-6, atol=1e-2 if DEVICE == "cuda" else 0)


@kernels
@pytest.mark.parametrize("name", ["int8", "sign"])
def test_of_what_is_no_number_nothing_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(1, 300, dtype=torch.float32)
    x[0, 7], x[0, 130] = torch.nan, torch.inf
    keys, answers = torch.tensor([5]), []
    for kernel in (False, True):
        monkeypatch.setattr(quantised, "by_kernel", lambda x, kernel=kernel: kernel)
        device: Any = DEVICE if kernel else "cpu"
        answers.append(passed(CASES[name], x.to(device), keys.to(device))[1].cpu())
    assert torch.equal(answers[0].isfinite(), answers[1].isfinite())
    assert not answers[0].isfinite().all()
