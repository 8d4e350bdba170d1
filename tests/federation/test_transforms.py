"""Transforms around ``map``: what they do, that engines agree, what is kept and counted; sums that fold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import sartor
from helpers import federation_of, play, task_and_data
from sartor.algorithms import make, registered
from sartor.client.local import Client
from sartor.errors import SartorError, SettingError
from sartor.federation import Reply
from sartor.federation.clock import Conditions
from sartor.federation.transforms import TRANSFORMS, Chain, Transform, register_transform
from sartor.runs.experiment import fingerprint, from_mapping, load, to_mapping, to_toml
from sartor.runs.run import tensors_of
from sartor.settings import setting
from sartor.transforms.norms import Clip, Scale

COHORTS = [[0, 2, 3, 5], [1, 2, 4], [0, 1, 2, 3, 4, 5]]
ENGINES = ("loop", "stacked")


@dataclass(frozen=True)
class Carry(Transform):
    """Every other number, and what was left out is added the next time: error feedback with parts."""

    parts = ("values", "places")

    def init(self, like: Tensor) -> dict[str, Tensor]:
        return {"left": torch.zeros_like(like)}

    def apply(self, key: Any, value: Tensor, state: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        whole = (value + state["left"]).flatten()
        places = torch.topk(whole.abs(), (len(whole) + 1) // 2).indices
        left = whole.index_fill(0, places, 0.0).view(value.shape)
        return {"values": whole[places], "places": places.to(torch.int32)}, {"left": left}

    def receive(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        zeros = torch.zeros_like(like).flatten()
        return zeros.index_put((parts["places"].long(),), parts["values"]).view(like.shape)


@dataclass(frozen=True)
class Noise(Transform):
    """Normal numbers are added."""

    deviation: float = setting(0.1, "their deviation", low=0)

    def apply(self, key: Any, value: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        drawn = sartor.random.normal(key, value.numel(), value.device).to(value.dtype)
        return value + self.deviation * drawn.view(value.shape), state


@pytest.fixture
def named() -> Iterator[None]:
    """The transforms of this file, by name."""
    for name, cls in (("carry", Carry), ("jitter", Noise)):
        register_transform(name)(cls)
    yield
    for name in ("carry", "jitter"):
        TRANSFORMS.remove(name)


def run(engine: str, name: str, *transforms: Transform, **settings: Any) -> tuple[Any, Any]:
    task, data = task_and_data()
    settings.setdefault("buffers", registered()[name].buffers)
    federation = federation_of(engine, task, data, local={"batch": 8}, transforms=transforms, **settings)
    algorithm = make(registered()[name], lr=0.05)
    federation.hyper = algorithm.hyper
    return play(algorithm, federation, COHORTS), federation


def test_clip_scales_down_to_the_norm_and_leaves_the_rest_alone() -> None:
    value = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert Clip(norm=1.0).apply(0, value, {})[0].tolist() == pytest.approx([0.6, 0.8])
    assert torch.equal(Clip(norm=5.0).apply(0, value, {})[0], value)
    assert torch.equal(Clip().apply(0, torch.zeros(2), {})[0], torch.zeros(2))


def test_a_clip_that_never_binds_changes_nothing_to_the_bit() -> None:
    for engine in ENGINES:
        plain, _ = run(engine, "fedavg")
        clipped, _ = run(engine, "fedavg", Clip(norm=1e9))
        assert torch.equal(plain.w, clipped.w)


def test_scaling_the_way_up_scales_the_servers_step() -> None:
    """FedAvg's first step from w is scaled by exactly what its change was; other quantities are left."""
    task, data = task_and_data()
    steps = []
    for factor in (1.0, 0.25):
        federation = federation_of("loop", task, data, transforms=(Scale(factor=factor, of=("delta",)),))
        server = play(make(registered()["fedavg"], lr=0.05), federation, COHORTS[:1])
        steps.append(server.w - task.initial())
    assert torch.equal(steps[0] * 0.25, steps[1]) or torch.allclose(steps[0] * 0.25, steps[1], rtol=1e-14)
    scaled, _ = run("loop", "scaffold", Scale(factor=0.0, of=("control",)))
    assert not scaled.c.any()  # nothing of the control variates arrived,
    assert not torch.equal(scaled.w, task.initial())  # and all of the changes


def test_scaling_the_way_down_is_what_clients_start_from() -> None:
    task, data = task_and_data()

    def told(client: Client, hyper: Any, w: Tensor, row: Tensor) -> Reply:
        return Reply(w=w, row=row)

    for engine in ENGINES:
        federation = federation_of(engine, task, data, transforms=(Scale(place="down", factor=2.0),))
        w, rows = torch.ones(3, dtype=torch.float64), torch.arange(6.0, dtype=torch.float64)[:, None]
        replies = federation.map(told, range(6), {"w": w}, {"row": rows})
        assert torch.equal(replies["w"], torch.full((6, 3), 2.0, dtype=torch.float64))
        assert torch.equal(replies["row"], 2 * rows)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto", "ma-fsvrg", "spfl", "fedasync", "fedbuff"])
def test_engines_agree_with_transforms_at_all_places(name: str) -> None:
    transforms = (
        Scale(place="down", factor=1.01),
        Clip(norm=0.5),
        Noise(deviation=1e-3),
        Carry(),
        Clip(place="server", norm=0.4),
    )
    loop, one = run("loop", name, *transforms)
    stacked, other = run("stacked", name, *transforms)
    chunked, _ = run("stacked", name, *transforms, chunk=2)
    for found in (stacked, chunked):
        for key, value in tensors_of(loop):
            torch.testing.assert_close(dict(tensors_of(found))[key], value, rtol=1e-9, atol=1e-11)
    assert (one.traffic.down, one.traffic.up) == (other.traffic.down, other.traffic.up)
    plain, _ = run("loop", name)
    assert any(not torch.equal(value, dict(tensors_of(loop))[key]) for key, value in tensors_of(plain))


def test_a_method_that_sends_nothing_is_left_as_it_is() -> None:
    for engine in ENGINES:
        _, plain = run(engine, "separate")
        _, changed = run(engine, "separate", Clip(norm=0.1), Carry(), Clip(place="server", norm=0.1))
        assert torch.equal(plain.states["w_i"], changed.states["w_i"])


def test_clipping_at_the_client_and_at_the_server_is_the_same() -> None:
    for engine in ENGINES:
        up, _ = run(engine, "fedavg", Clip(norm=0.01))
        server, _ = run(engine, "fedavg", Clip(place="server", norm=0.01))
        torch.testing.assert_close(up.w, server.w, rtol=1e-12, atol=0)


def test_what_is_left_out_is_sent_the_next_time() -> None:
    """The sum of all that arrived and of what is still left is the sum of all that was meant."""
    task, data = task_and_data()
    meant = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)

    def send(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(w=w * (1 + client.number))

    for engine in ENGINES:
        federation = federation_of(engine, task, data, transforms=(Carry(),))
        total = torch.zeros(6, 4, dtype=torch.float64)
        for round in range(1, 4):
            federation.round = round
            replies = federation.map(send, range(6), {"w": meant})
            assert (replies["w"] == 0).sum() == 12  # half of each is left out
            total += replies["w"]
        left = federation.states["send__transform__0__w__left"]
        wanted = 3 * meant * (1 + torch.arange(6, dtype=torch.float64))[:, None]
        torch.testing.assert_close(total + left, wanted, rtol=1e-14, atol=0)


def test_bytes_are_those_of_what_is_sent() -> None:
    task, data = task_and_data()

    def send(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(w=w)

    federation = federation_of("loop", task, data, transforms=(Carry(), Carry(place="down")))
    federation.map(send, range(6), {"w": torch.ones(10, dtype=torch.float64)})
    parts = 5 * 8 + 5 * 4
    assert federation.traffic.up == 6 * parts
    assert federation.traffic.down == 6 * (parts + 8)  # and which exchange of the round it is


def test_noise_differs_by_client_round_and_exchange_and_not_by_engine() -> None:
    task, data = task_and_data()

    def send(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(w=w)

    seen = []
    for engine in ENGINES:
        federation = federation_of(engine, task, data, transforms=(Noise(),), seed=4)
        drawn = []
        for round in (1, 1, 2):
            if federation.round != round:
                federation.round = round
            drawn.append(federation.map(send, range(6), {"w": torch.zeros(5, dtype=torch.float64)})["w"])
        seen.append(torch.stack(drawn))
    assert torch.equal(seen[0], seen[1])
    assert len(seen[0].unique()) == seen[0].numel()


def test_a_bad_reply_is_found_after_it_was_put_together() -> None:
    task, data = task_and_data()

    def send(client: Client, hyper: Any, w: Tensor) -> Reply:
        return Reply(w=torch.where(client.number == 2, w / 0, w))

    conditions = Conditions(on_bad_reply="drop")
    federation = federation_of("loop", task, data, transforms=(Carry(),), conditions=conditions)
    replies = federation.map(send, range(6), {"w": torch.ones(4, dtype=torch.float64)})
    assert replies.clients.tolist() == [0, 1, 3, 4, 5]


# In an experiment ------------------------------------------------------------------------------------------


def test_an_experiment_lists_them_and_is_written_back(named: None, tmp_path: Any) -> None:
    text = "rounds = 2\n[[transforms]]\nname = 'clip'\nnorm = 0.5\n[[transforms]]\nname = 'carry'\n"
    (tmp_path / "e.toml").write_text(text)
    experiment = load(tmp_path / "e.toml")
    assert experiment.transforms == (Clip(norm=0.5), Carry())
    assert from_mapping(to_mapping(experiment)) == experiment
    (tmp_path / "again.toml").write_text(to_toml(experiment))
    assert load(tmp_path / "again.toml") == experiment
    assert fingerprint(experiment) != fingerprint(load(None, ["rounds=2"]))
    given = 'transforms=[{name="clip", norm=0.5}, {name="carry"}]'
    assert load(None, ["rounds=2", given]) == experiment


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"name": "clipp"}], r"transforms\[0\]\.name = 'clipp': unknown name; did you mean clip\?"),
        ([{"norm": 1.0}], r"transforms\[0\]\.name: missing; known: .*clip, .*scale"),
        (
            [{"name": "clip", "nrom": 1}],
            r"transforms\[0\]\.nrom: unknown key; did you mean .*norm",
        ),
        ([{"name": "clip", "norm": 0}], r"transforms\[0\]\.norm: must be above 0"),
        ([{"name": "clip", "place": "middle"}], r"transforms\[0\]\.place: must be one of down, up, server"),
        ({"name": "clip"}, r"transforms: expected a list of tables"),
        ("clip", r"transforms: expected a list of tables"),
    ],
)
def test_what_is_wrong_is_said(given: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        from_mapping({"transforms": given})


@pytest.mark.parametrize(("place", "there"), [("up", "delta"), ("down", "w"), ("server", "delta")])
def test_a_quantity_that_the_method_does_not_have_is_named(place: str, there: str) -> None:
    message = f"transforms: clip is for 'dleta', but what passes there .{place}. is {there}$"
    with pytest.raises(SettingError, match=message):
        run("loop", "fedavg", Clip(place=place, of=("dleta",)))


def test_a_transform_of_ones_own_that_cannot_work_is_refused_when_it_is_registered() -> None:
    class Torn(Transform):
        parts = ("values",)

    with pytest.raises(SartorError, match=r"transform 'torn': it sends parts; define receive\(\)"):
        register_transform("torn")(Torn)
    with pytest.raises(SartorError, match=r"expected a class that extends sartor\.Transform"):
        register_transform("torn")(dict)  # type: ignore[type-var]
    assert "torn" not in TRANSFORMS


def test_parts_have_no_place_at_the_server(named: None) -> None:
    with pytest.raises(SettingError, match="Carry changes what is sent; it has no place at the server"):
        from_mapping({"transforms": [{"name": "carry", "place": "server"}]})


@pytest.mark.parametrize("name", ["ditto", "fedasync"])
def test_a_run_goes_on_as_if_it_had_not_been_stopped(named: None, name: str, tmp_path: Any) -> None:
    """What clients and the server keep for transforms is in the checkpoint, and so is work in flight."""
    transforms = [{"name": "jitter"}, {"name": "carry"}, {"name": "carry", "place": "down"}]
    settings: dict[str, Any] = {
        "data": "digits",
        "clients": 4,
        "seed": 1,
        "local": {"steps": 2},
        "evaluate": {"every": 0},
        "checkpoint": {"every": 1},
        "delay": {"name": "lognormal"},
        "experiment": {"transforms": transforms},
    }
    whole = sartor.run(name, rounds=4, out=tmp_path / "whole", **settings)
    sartor.run(name, rounds=2, out=tmp_path / "half", **settings)
    resumed = sartor.resume(tmp_path / "half", rounds=4)
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]
    assert resumed.summary["bytes_up"] == whole.summary["bytes_up"]


def test_seeds_that_run_together_have_transforms_of_their_own(named: None, tmp_path: Path) -> None:
    """Noise follows from each seed, and what is kept is each seed's."""
    transforms = [{"name": "clip", "norm": 0.5}, {"name": "jitter"}, {"name": "carry"}]
    experiment = {
        "rounds": 3,
        "data": {"clients": 4},
        "local": {"steps": 2},
        "evaluate": {"every": 0},
        "engine": {"name": "stacked"},
        "transforms": transforms,
    }
    settings: dict[str, Any] = {"seeds": [0, 1], "experiment": experiment, "engine": "stacked"}
    shas = []
    for together in ("yes", "no"):
        sartor.compare(["fedavg"], out=tmp_path / together, together=together, references=False, **settings)
        runs = sorted(path.parent for path in (tmp_path / together).rglob("summary.json"))
        assert len(runs) == 2
        shas.append([load_file(run / "models.safetensors")["server.w"] for run in runs])
    for one, other in zip(*shas, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(shas[0][0], shas[0][1], rtol=1e-2)


def test_chains_put_together_what_they_took_apart() -> None:
    chain = Chain((Carry(), Scale(factor=2.0), Carry(of=("w",))))
    values = {"w": torch.randn(8, dtype=torch.float64), "n": torch.tensor(3)}
    sent, states = chain.apply(0, values, chain.initial(values))
    assert set(sent) == {"w__values__values", "w__values__places", "w__places", "n"}
    found = chain.receive(sent, values)
    kept = values["w"].abs() >= values["w"].abs().sort().values[6]
    torch.testing.assert_close(found["w"], torch.where(kept, 2 * values["w"], 0.0))
    assert set(states) == {"transform__0__w__left", "transform__2__w__values__left"}


# Sums that fold --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedper", "mime", "mimelite", "fedadc", "fedyogi"])
def test_folded_sums_are_the_sums(name: str, engine: str) -> None:
    plain, one = run(engine, name)
    folded, other = run(engine, name, fold_bytes=1)
    torch.testing.assert_close(folded.w, plain.w, rtol=1e-11, atol=1e-13)
    assert one.traffic == other.traffic
    assert one.updates == other.updates


def test_chunks_do_not_change_how_sums_are_made() -> None:
    found = [run("stacked", "fedavg", fold_bytes=2000, chunk=chunk)[0].w for chunk in (1, 1)]
    assert torch.equal(*found)
    task, data = task_and_data()
    blocks = []

    def counting(self: Any, work: Any) -> Any:
        blocks.append(len(work.numbers))
        return usual(self, work)

    federation = federation_of("loop", task, data, fold_bytes=3 * task.size * 8)
    usual = type(federation.engine).run
    federation.engine.run = lambda work: counting(federation.engine, work)  # type: ignore[method-assign]
    play(
        make(registered()["fedavg"], lr=0.05),
        federation,
        [
            [
                5,
                4,
                3,
                2,
                1,
                0,
            ]
        ],
    )
    assert blocks == [3, 3]


def test_folding_weighs_those_who_answered() -> None:
    """One reply is bad: the mean is over the others, as without folding; rows cannot be had."""
    task, data = task_and_data()

    def send(client: Client, hyper: Any, w: Tensor) -> Reply:
        bad = torch.where(client.number == 2, torch.nan, 1.0)
        return Reply(w=w * (1 + client.number) * bad, n=client.n)

    means = []
    for fold_bytes in (1, 1 << 28):
        conditions = Conditions(on_bad_reply="drop")
        federation = federation_of("loop", task, data, conditions=conditions, fold_bytes=fold_bytes)
        replies = federation.map(send, [5, 1, 0, 2], {"w": torch.ones(3, dtype=torch.float64)}, fold=["w"])
        means.append(replies.mean("w"))
        assert sorted(replies.clients.tolist()) == [0, 1, 5]
        assert float(replies.sum("w")[0]) == pytest.approx(1 + 2 + 6)
        n = dict(zip(replies.clients.tolist(), replies["n"].tolist(), strict=True))
        wanted = sum(n[number] * (1 + number) for number in n) / sum(n.values())
        assert float(replies.mean("w")[0]) == pytest.approx(wanted)
        if fold_bytes == 1:
            with pytest.raises(SartorError, match=r"'w' was added up as clients answered"):
                replies["w"]
            with pytest.raises(SartorError, match=r"'w' was added up as clients answered"):
                replies.mean("w", torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(means[0], means[1], rtol=1e-14, atol=0)
