"""What is said of mistakes in a method of one's own, and that none of them passes for something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sartor
from helpers import federation_of, task_and_data
from sartor import random
from sartor.algorithms import Algorithm, Hyper, Server
from sartor.algorithms.base import registered
from sartor.client.local import Client
from sartor.errors import SartorError, SettingError
from sartor.federation import Call, Federation, Reply
from sartor.transforms import TRANSFORMS

ENGINES = ["loop", "stacked"]
DATA = {name: (torch.randn(9, 5), torch.arange(9) % 3) for name in ("a", "b")}


def change(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(delta=client.descend(w, lr=hyper.lr) - w)


class Plain(Algorithm[Hyper, Server]):
    """FedAvg, for others to be wrong in one place."""

    name, family, paper = "plain", "global", "a test"
    server_keeps, client_keeps, traffic = "w", "nothing", "1 / 1"

    def round(self, server: Any, federation: Federation, cohort: Any) -> Any:
        replies = federation.map(change, cohort, {"w": server.w})
        return replace(server, w=server.w + replies.mean("delta"))


def run(monkeypatch: pytest.MonkeyPatch, rounds: int = 1, **wrong: Any) -> sartor.Result:
    """A run of the method with these in place of its own."""
    kind = type("Wrong", (Plain,), wrong)
    monkeypatch.setitem(registered()._known, "plain", kind)
    return sartor.run("plain", data=DATA, model=nn.Linear(5, 3), rounds=rounds, store=False, engine="loop")


# The server's side -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sloppy(Hyper):
    steps: int = 1e3  # type: ignore[assignment]


def test_a_default_that_could_not_be_given_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's folder could not be read any more, by nothing."""
    with pytest.raises(SettingError, match=r"the default of Sloppy.steps: expected a whole number, got 1000"):
        run(monkeypatch, Hyper=Sloppy)


def nothing(self: Any, *arguments: Any) -> None:
    return None


def a_tensor(self: Any, server: Any, *arguments: Any) -> Tensor:
    w: Tensor = server.w
    return w


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"round": nothing}, r"plain: round\(\) returned NoneType, and not the server's next Server"),
        ({"round": a_tensor}, r"plain: round\(\) returned Tensor, and not the server's next Server"),
        ({"start": nothing}, r"plain: start\(\) returned nothing, and not the server's state"),
        ({"personalize": a_tensor}, r"plain: personalize\(\) returned Tensor; it returns a Call"),
        ({"ready": nothing}, r"plain: its server's state has no w; define shared\(server\)"),
    ],
)
def test_another_type_than_is_wanted_is_said(
    wrong: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SartorError, match=message):
        run(monkeypatch, **wrong)


def test_what_is_learnt_outside_the_servers_state_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that is resumed would begin it anew; what the first round makes once and for all may be kept."""

    def counting(self: Any, server: Any, federation: Federation, cohort: Any) -> Any:
        self.count, self.scale = getattr(self, "count", 0) + 1, getattr(self, "scale", 2.0)
        return Plain.round(self, server, federation, cohort)

    run(monkeypatch, rounds=3, round=counting)
    (told,) = (record.getMessage() for record in caplog.records if "no checkpoint holds" in record.message)
    assert told.startswith("plain: round() changes self.count, which no checkpoint holds")
    assert "scale" not in told


# Client functions ------------------------------------------------------------------------------------------


def asked(engine: str, function: Callable[..., Any], shared: Any = None, **states: Any) -> Federation:
    task, data = task_and_data()
    federation = federation_of(engine, task, data, local={"batch": 8})
    federation.declare(**states)
    federation.round = 1
    federation.map(function, [0, 1, 2, 3], {"w": federation.initial()} if shared is None else shared)
    return federation


def text(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(w=w, why="because")


def longer(client: Client, hyper: Any, w: Tensor, c: Tensor) -> Reply:
    return Reply(w=w).keep(c=torch.cat([c, c[:1]]))


def one_number(client: Client, hyper: Any, w: Tensor, c: Tensor) -> Reply:
    return Reply(w=w).keep(c=0.5)


def a_half(client: Client, hyper: Any, w: Tensor, count: Tensor) -> Reply:
    return Reply(w=w).keep(count=count + 0.5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("function", "states", "message"),
    [
        (text, {}, "text: 'why' of its reply: a str makes no tensor"),
        (
            longer,
            {"c": torch.zeros(4)},
            r"keeps 'c' as float32 of shape \[5\], which was declared as",
        ),
        # Rows of one number each, of as many clients as the state is long, would fit it the wrong way round.
        (one_number, {"c": torch.zeros(4)}, r"keeps 'c' as float64 of shape \[\], which was declared as"),
        (a_half, {"count": torch.tensor(0)}, r"keeps 'count' as float\d\d of shape \[\], which was .* int64"),
    ],
)
def test_what_has_another_form_than_it_must_have_is_refused(
    engine: str, function: Callable[..., Any], states: dict[str, Any], message: str
) -> None:
    with pytest.raises(SartorError, match=message):
        asked(engine, function, **states)


def keeps_twice(client: Client, hyper: Any, w: Tensor, c: Tensor, count: Tensor) -> Reply:
    return Reply(w=w).keep(c=c + 1).keep(count=count + 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_kept_in_two_steps_is_all_kept(engine: str) -> None:
    """A state may begin as a number."""
    federation = asked(engine, keeps_twice, c=torch.zeros(2), count=0.0)
    assert federation.states["c"][:4].tolist() == [[1.0, 1.0]] * 4
    assert federation.states["count"][:4].tolist() == [1.0] * 4


def some_keep(client: Client, hyper: Any, w: Tensor, c: Tensor) -> Reply:
    reply = Reply(w=w)
    return reply.keep(c=c + 1) if client.n > 10 else reply


def some_send(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(w=w, more=w) if client.n > 10 else Reply(w=w)


@pytest.mark.parametrize("cohort", [[0, 1, 2, 3], [1, 0, 2, 3]])
@pytest.mark.parametrize(("function", "states"), [(some_keep, {"c": torch.zeros(4)}), (some_send, {})])
def test_no_client_sends_or_keeps_what_others_do_not(
    cohort: list[int], function: Callable[..., Any], states: dict[str, Any]
) -> None:
    """Whichever comes first: else what others keep would be lost, or made up."""
    task, data = task_and_data()
    federation = federation_of("loop", task, data, workers=1)
    federation.declare(**states)
    with pytest.raises(SartorError, match="sends and keeps the same names at every client"):
        federation.map(function, cohort, {"w": federation.initial()})


def noised(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(w=w + torch.randn_like(w))


def keyed(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(w=w + random.normal(client.stream("noise"), w.numel(), w.device).to(w.dtype))


@pytest.mark.parametrize("otherwise", ["error", "loop"])
def test_draws_that_do_not_follow_from_the_seed_are_told_once(
    otherwise: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where a function that cannot be stacked is run on the loop engine instead."""
    task, data = task_and_data()
    engine = "loop" if otherwise == "error" else "stacked"
    federation = federation_of(engine, task, data, otherwise=otherwise)
    for function in (keyed, noised, noised):
        federation.map(function, [0, 1], {"w": federation.initial()})
    told = [each.getMessage() for each in caplog.records if "equal seeds" in each.getMessage()]
    assert [message.split()[0] for message in told] == ["noised"]


@sartor.changes(w="start")
def elsewhere(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(w=client.descend(w, lr=hyper.lr))


def test_where_a_model_began_is_sent() -> None:
    task, data = task_and_data()
    federation = federation_of("loop", task, data, transforms=(TRANSFORMS["int8"](),))
    with pytest.raises(SartorError, match=r"elsewhere: changes\(\) says that 'w' begins at 'start'"):
        federation.map(elsewhere, [0, 1], {"w": federation.initial()})


@sartor.personal
def nameless(client: Client, hyper: Any, w: Tensor) -> Reply:
    return Reply(model=w)


def test_a_clients_own_model_is_replied_as_w(monkeypatch: pytest.MonkeyPatch) -> None:
    def personalize(self: Any, server: Server, cohort: Any) -> Call:
        return Call(nameless, {"w": server.w})

    with pytest.raises(SartorError, match="nameless: gives no model; a client's own is replied as w"):
        run(monkeypatch, personalize=personalize)


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        (torch.zeros(3), "map: shared is a Tensor; give names"),
        ({"w": None}, "map: a NoneType makes no tensor"),
    ],
)
def test_what_cannot_be_sent_is_said(shared: Any, message: str) -> None:
    with pytest.raises(SartorError, match=message):
        asked("loop", change, shared)
