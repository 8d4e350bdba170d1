"""What a node answers, what it keeps, and what it refuses; the form of messages."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import HereGrid, experiment_of, nodes_of, part_of
from hypothesis import given
from hypothesis import strategies as st
from test_engines import plain, vectors
from torch import Tensor, nn

from owned import forgetful
from sartor import extensions
from sartor.data.clients import prepare
from sartor.data.moments import Moments
from sartor.engines.stacked.engine import StackedEngine
from sartor.errors import DataError, SartorError, SettingError
from sartor.extensions import import_code, read_code
from sartor.model.task import Task
from sartor.remote.addresses import split_address
from sartor.remote.admission import Admission
from sartor.remote.join import loader
from sartor.remote.journal import MOST_FILES, Journal, rows_of
from sartor.remote.keys import check_issued, check_pair, make_keys, read_key, read_public_keys
from sartor.remote.messages import DTYPES, BadMessage, Parts, decode, encode, spec_of, version
from sartor.remote.node import Node
from sartor.remote.requests import Failed, Requests
from sartor.remote.serve import Service
from sartor.runs.experiment import from_mapping, to_mapping
from sartor.runs.record import hash_of

__all__ = ["forgetful"]

# Messages --------------------------------------------------------------------------------------------------


@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4),
    dtypes=st.lists(st.sampled_from(sorted(DTYPES)), min_size=4, max_size=4),
)
def test_what_is_encoded_is_decoded(shapes: list[list[int]], dtypes: list[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    values = {
        str(place): (10 * torch.rand(shape, generator=generator)).to(DTYPES[dtype])
        for place, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    expected = {"all": {name: spec_of(value) for name, value in values.items()}}
    header, groups = decode(encode({"round": 3}, {"all": values, "none": {}}), expected)
    assert header["round"] == 3
    found = groups.get("all", {})
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)


def laid_out(dtype: str) -> dict[str, Tensor]:
    """Tensors as client functions and servers may have them, however they lie in memory."""
    whole = torch.arange(24).to(DTYPES[dtype]).view(4, 6)
    one = torch.ones((), dtype=DTYPES[dtype])
    return {
        "whole": whole,
        "itself": whole,
        "view": whole.view(-1),
        "part": whole[1:3],
        "transposed": whole.t(),
        "strided": whole[::2, ::3],
        "cut": whole[:, 1:1],
        "none": whole[:0],
        "number": one,
        "spread": one.expand(4, 3),
        "single": one.expand(1),
        "single of many": one.expand(1, 1, 1),
        **({"learnt": whole.clone().requires_grad_().t()} if whole.is_floating_point() else {}),
    }


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_tensors_travel_and_are_kept_however_they_lie(dtype: str, tmp_path: Path) -> None:
    values = laid_out(dtype)
    _, groups = decode(encode({}, {"all": values}))
    journal, numbers = Journal(tmp_path), torch.arange(4)
    kept = {name: value for name, value in values.items() if value.dim() and len(value) == len(numbers)}
    assert len(kept) == 4
    journal.stage(1, rows_of(numbers, kept))
    settled = Journal(tmp_path).settle(1, [1, 3])
    for name, value in values.items():
        assert groups["all"][name].dtype == value.dtype
        assert torch.equal(groups["all"][name], value), name
        if name in kept:
            assert settled[name][0].tolist() == [1, 3]
            assert torch.equal(settled[name][1], value[[1, 3]]), name
    assert hash_of(values) == hash_of({name: value.detach().clone() for name, value in values.items()})


def test_a_tensor_that_cannot_travel_is_named() -> None:
    with pytest.raises(SartorError, match="tensors of complex64 cannot travel; those of float16, "):
        encode({}, {"all": {"w": torch.zeros(2, dtype=torch.complex64)}})


def tampered(**header: Any) -> Parts:
    parts = encode({}, {"sent": {"w": torch.zeros(3)}})
    return {**parts, "header": json.dumps({**json.loads(parts["header"]), **header}).encode()}


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ({}, "malformed"),
        ({"header": b"\xff\xfe"}, "malformed"),
        ({"header": b"[1]"}, "malformed"),
        ({"header": b'{"tensors": NaN}'}, "malformed"),
        ({"header": b"[" * 100_000}, "malformed"),
        ({"header": b" " * (17 << 20)}, "oversized"),
        (tampered(tensors={}), "malformed"),
        (tampered(tensors={"sent": [["w", "float32", [10**12]]]}), "malformed"),
        (tampered(tensors={"sent": [["w", "float32", [-3]]]}), "malformed"),
        (tampered(tensors={"sent": [["w", "float32", [True, 3]]]}), "malformed"),
        (tampered(tensors={"sent": [["w", "object", [3]]]}), "malformed"),
        (tampered(tensors={"sent": [["w", "float32", [2]]]}), "malformed"),
        (tampered(tensors={"sent": "w"}), "malformed"),
        ({**tampered(tensors={"sent": [["w", "float32", [0, 2**47, 2**47]]]}), "sent": b""}, "malformed"),
        ({"header": json.dumps({"tensors": {"s\n" * 99: [1]}}).encode(), "s\n" * 99: b""}, "malformed"),
        (tampered(tensors={"sent": [["v\n" * 999, "float32", [3]]]}), "misshapen"),
        (tampered(tensors={"sent": [["w", "int32", [3]]]}), "misshapen"),
        (tampered(tensors={"sent": [["w", "float32", [3, 1]]]}), "misshapen"),
        (tampered(tensors={"sent": [["v", "float32", [3]]]}), "misshapen"),
    ],
)
def test_messages_that_are_not_what_is_expected_are_refused(parts: Parts, kind: str) -> None:
    with pytest.raises(BadMessage) as refused:
        decode(parts, {"sent": {"w": ("float32", (3,))}})
    assert refused.value.kind == kind
    assert len(str(refused.value)) < 200
    assert str(refused.value).isprintable()


# States ----------------------------------------------------------------------------------------------------


def rows(*pairs: tuple[int, float]) -> dict[str, tuple[Tensor, Tensor]]:
    numbers, values = zip(*pairs, strict=True)
    return {"c": (torch.tensor(numbers), torch.tensor(values))}


def kept(journal: Journal) -> dict[int, float]:
    if "c" not in journal.states():
        return {}
    numbers, values = journal.states()["c"]
    return dict(zip(numbers.tolist(), values.tolist(), strict=True))


@pytest.mark.parametrize("stored", [False, True])
def test_a_state_counts_when_it_was_used(tmp_path: Path, stored: bool) -> None:
    journal = Journal(tmp_path if stored else None)

    def again() -> Journal:
        return Journal(tmp_path) if stored else journal

    journal.stage(1, rows((4, 1.0), (7, 2.0)))
    assert kept(again()) == {}
    assert journal.settle(1, [4, 7])["c"][1].tolist() == [1.0, 2.0]
    journal.stage(2, rows((4, 3.0), (7, 4.0)))
    assert kept(again()) == {4: 1.0, 7: 2.0}
    assert journal.settle(2, [7])["c"][0].tolist() == [7]
    journal.stage(3, rows((4, 5.0)))
    assert journal.settle(3, []) == {}
    assert journal.settle(2, [4, 7]) == {}  # it is settled
    assert journal.settle(9, [4]) == {}  # it was never staged
    assert kept(again()) == {4: 1.0, 7: 4.0}


def test_a_journal_knows_what_it_has(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for exchange in range(1, 2 * MOST_FILES + 2, 2):
        journal.stage(exchange, rows((4, 1.0)))
        assert not journal.has(exchange)
        journal.settle(exchange, [4])
        assert journal.has(exchange)
        assert not journal.has(exchange + 1)
    journal.stage(99, rows((4, 2.0)))
    journal.settle(99, [4])
    journal.merge(98)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert [exchange for exchange in (1, 32, 33, 35, 99) if Journal(tmp_path).has(exchange)] == [
        1,
        32,
        33,
        99,
    ]


def test_states_go_back_to_an_exchange(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for exchange in range(1, 6):
        journal.stage(exchange, rows((exchange % 2, float(exchange))))
        journal.settle(exchange, [exchange % 2])
    journal.stage(6, rows((0, 6.0)))
    journal = Journal(tmp_path)
    journal.go_back(4)
    assert kept(journal) == {0: 4.0, 1: 3.0}
    journal.go_back(4, without=[3])  # which was in flight at the checkpoint
    assert kept(Journal(tmp_path)) == {0: 4.0, 1: 1.0}
    assert journal.settle(6, [0]) == {}


def test_what_was_kept_and_used_stays_when_a_node_is_told_twice(tmp_path: Path) -> None:
    """A server takes up exchange 2 and uses it, tells the node so and is killed: the next process, which
    continues from a checkpoint after exchange 2 that says so, tells it again.
    """
    for counts in (True, False):
        journal = Journal(tmp_path / str(counts))
        for exchange in (1, 2, 3):
            journal.stage(exchange, rows((0, float(exchange))))
        journal.settle(1, [0])
        told = [2] if counts else []
        journal.go_back(1, without=[2], keep=[2], counted=told)
        journal.settle(2, [0])
        journal.go_back(1, without=[2], keep=[2], counted=told)
        assert kept(journal) == {0: 2.0 if counts else 1.0}
        assert journal.settle(3, [0]) == {}


def test_old_exchanges_are_merged_and_can_be_gone_back_to(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for exchange in range(1, 101):
        journal.stage(exchange, rows((exchange % 3, float(exchange))))
        journal.settle(exchange, [exchange % 3])
        journal.merge(exchange - 10)
    assert len(list(tmp_path.iterdir())) <= MOST_FILES + 11
    assert kept(Journal(tmp_path)) == {0: 99.0, 1: 100.0, 2: 98.0}
    journal.go_back(90)
    assert kept(Journal(tmp_path)) == {0: 90.0, 1: 88.0, 2: 89.0}
    with pytest.raises(SartorError, match="later time than the checkpoint"):
        journal.go_back(5)


def test_a_crash_while_files_are_merged_loses_nothing(tmp_path: Path) -> None:
    """A file of merged states is there, and those it was made of are not removed yet."""
    journal = Journal(tmp_path)
    for exchange in (1, 2):
        journal.stage(exchange, rows((0, float(exchange))))
        journal.settle(exchange, [0])
    journal._write(2, "base", journal.states())
    (tmp_path / ".unfinished-1-000000000003.staged.safetensors").write_bytes(b"half")
    assert kept(Journal(tmp_path)) == {0: 2.0}
    assert {path.name for path in tmp_path.iterdir()} == {
        "000000000001.used.safetensors",
        "000000000002.base.safetensors",
    }


@pytest.mark.parametrize("place", ["numbers", "rows", "end"])
def test_states_that_are_damaged_are_found(tmp_path: Path, place: str) -> None:
    journal = Journal(tmp_path)
    journal.stage(1, rows((3, 0.5), (300, 1.5)))
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    value = {"numbers": np.int64(300).tobytes(), "rows": np.float32(1.5).tobytes()}
    if place == "end":
        del content[-1:]
    else:
        assert content.count(value[place]) == 1
        content[content.index(value[place])] ^= 1
    path.write_bytes(content)
    message = "cannot be read" if place == "end" else "are damaged: 'c' has another checksum"
    with pytest.raises(DataError, match=f"client states {message}"):
        Journal(tmp_path).settle(1, [3])


# Requests --------------------------------------------------------------------------------------------------


def asked(node: Node, kind: str, groups: Any = None, **header: Any) -> dict[str, Any]:
    header = {"nonce": "n", "version": version(), "run": "r", "settled": [], "floor": 0, **header}
    return decode(node.handle(encode({"kind": kind, **header}, groups)))[0]


HERE = {"clients": 6, "numbers": [1, 4], "classes": 4, "labels": None}
"""Which clients of a run a node has."""


def opened(folder: Path | None = None, sends_personal: bool = False) -> Node:
    """A node with clients 1 and 4 of six."""
    node = nodes_of(vectors(), plain(), [[1, 4]], folder, sends_personal)[1]
    told = asked(node, "hello", experiment=to_mapping(experiment_of("fedavg")))
    assert told["names"] == ["client 1", "client 4"]
    assert told["counts"]["train"] == [17, 7]
    settings = {
        "clients": 6,
        "numbers": [1, 4],
        "classes": 4,
        "labels": None,
        "at": 0,
        "without": [],
        "keep": [],
        "kept": [],
    }
    assert "error" not in asked(node, "open", **settings)
    return node


CALL = {
    "exchange": 1,
    "function": "sartor.algorithms.references.fedavg:local_training",
    "algorithm": "fedavg",
    "hyper": {"lr": 0.1},
    "round": 1,
    "numbers": [1],
    "rounds": [1],
    "keeps": True,
}


def test_a_node_answers_with_what_its_clients_send() -> None:
    node, w = opened(), plain().initial()
    header, groups = decode(
        node.handle(
            encode(
                {
                    "kind": "call",
                    "nonce": "n",
                    "version": version(),
                    "run": "r",
                    "settled": [],
                    "floor": 0,
                    **CALL,
                },
                {"shared": {"w": w}},
            )
        )
    )
    assert header["nonce"] == "n"
    assert [value.shape[0] for value in groups["sent"].values()] == [1]
    assert not any(torch.equal(value[0], w) for value in groups["sent"].values())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"version": "0.0.1"}, "the server has sartor 0.0.1, this node .*; install the same version"),
        ({"function": "os:system"}, "no such client function"),
        ({"function": "sartor.runs.execute:execute"}, "no such client function"),
        ({"function": "sartor.files:write"}, "no such client function"),
        ({"function": "sartor.remote.node:Node"}, "no such client function"),
        (
            {"function": "sartor.algorithms.references.fedavg:local_training.__globals__"},
            "no such client function",
        ),
        ({"function": "evaluation_of/sartor.runs.evaluation:shared_model"}, "no such client function"),
        ({"algorithm": "nothing"}, "'nothing': not installed at this node"),
        ({"hyper": {"lr": -1.0}}, "hyper.lr: must be at least 0"),
        ({"hyper": {"rl": 1.0}}, "hyper.rl: unknown key"),
        ({"numbers": [0]}, "asks clients that are not at this node"),
        ({"numbers": [6]}, "clients that are not at this node"),
        ({"numbers": [-1]}, "clients that are not at this node"),
        ({"numbers": []}, "no such clients"),
        ({"rounds": []}, "its rounds are not one for each client"),
        ({"numbers": "all"}, "numbers is 'all'"),
        ({"kind": "eval"}, "no such request: 'eval'"),
        ({"run": "other"}, "started anew"),
        (
            {"function": "model_of/sartor.algorithms.references.fedavg:fine_tuning"},
            "personal models .* stay at this node",
        ),
        (
            {"function": "sartor.algorithms.references.fedavg:fine_tuning"},
            "personal models .* stay at this node",
        ),
        (
            {"function": "sartor.algorithms.references.separate:own_model"},
            "personal models .* stay at this node",
        ),
        ({"function": "sartor.federation.federation:own_buffers"}, "personal models .* stay at this node"),
        (
            {"function": "sartor.algorithms.mixing.ditto:local_training"},
            "no client function of fedavg, which runs here",
        ),
        (
            {"function": "evaluation_of/test/confusion/sartor.algorithms.references.separate:own_model"},
            "no client function of fedavg, which runs here",
        ),
    ],
)
def test_a_node_refuses_what_it_should_not_do(wrong: dict[str, Any], message: str) -> None:
    node = opened()
    kind = wrong.pop("kind", "call")
    reply = asked(node, kind, {"shared": {"w": plain().initial()}}, **{**CALL, **wrong})
    assert re.search(message, reply["error"]), reply


def test_what_is_counted_may_be_sent_and_what_it_is_counted_with_may_not() -> None:
    node, shared = opened(), {"shared": {"w": plain().initial()}}
    function = "sartor.algorithms.references.fedavg:fine_tuning"
    hyper = {"hyper": {"lr": 0.1}, "algorithm": "fedupdate", "keeps": False}
    told = asked(
        node, "call", shared, **{**CALL, **hyper, "function": f"evaluation_of/test/confusion/{function}"}
    )
    assert sorted(name for name, *_ in told["tensors"]["sent"]) == ["test.confusion", "test.loss", "test.n"]
    assert "error" in asked(node, "call", shared, **{**CALL, **hyper, "function": f"model_of/{function}"})
    node = opened(sends_personal=True)
    told = asked(node, "call", shared, **{**CALL, **hyper, "function": f"model_of/{function}"})
    assert [name for name, *_ in told["tensors"]["sent"]] == ["w"]


@pytest.mark.parametrize("allowed", [False, True])
def test_a_node_takes_part_where_personal_models_are_asked_for_only_if_it_may(allowed: bool) -> None:
    node = nodes_of(vectors(), plain(), [[1, 4]], sends_personal=allowed)[1]
    experiment = to_mapping(experiment_of("separate", evaluate={"personal_models": "yes"}))
    told = asked(node, "hello", experiment=experiment)
    assert ("error" in told) is not allowed
    assert ("--allow-personal-models" in node.refusal) is not allowed


def test_what_is_kept_in_a_run_is_for_its_method_alone(tmp_path: Path) -> None:
    """A server cannot have the states of one method sent by a function of another."""
    node = opened(tmp_path)
    where = {
        "clients": 6,
        "numbers": [1, 4],
        "classes": 4,
        "labels": None,
        "at": 0,
        "without": [],
        "keep": [],
        "kept": [],
    }
    for again in (node, nodes_of(vectors(), plain(), [[1, 4]], tmp_path)[1]):
        asked(again, "hello", experiment=to_mapping(experiment_of("diversifed")))
        told = asked(again, "open", **where)
        assert "its states are those of fedavg, which diversifed may not see" in told["error"]
        assert "error" not in asked(again, "open", **where, run="other")
        asked(again, "hello", experiment=to_mapping(experiment_of("fedavg", rounds=7)))
        assert "error" not in asked(again, "open", **where)


def test_a_node_that_was_not_told_of_the_run_says_so() -> None:
    node = nodes_of(vectors(), plain(), [[1, 4]])[1]
    reply = asked(node, "call", {"shared": {"w": plain().initial()}}, **CALL)
    assert reply["closed"] is True
    assert reply["nonce"] == "n"


# Normalising without seeing all samples --------------------------------------------------------------------


def test_moments_of_parts_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, 4, 4, generator=generator) * 5 + 100
    whole = Moments.of(x)
    parts = [Moments.of(part) for part in (x[:7], x[7:8], x[8:8], x[8:])]
    total = parts[0] + parts[1] + parts[2] + parts[3]
    assert total.number == whole.number == 50 * 16
    assert torch.allclose(total.mean, whole.mean, rtol=1e-14)
    assert torch.allclose(total.squares, whole.squares, rtol=1e-12)
    assert torch.allclose(
        whole.squares / whole.number, x.double().var(dim=(0, 2, 3), correction=0), rtol=1e-12
    )


def test_parts_are_normalised_as_the_whole() -> None:
    data = vectors(torch.float32)
    halves = [part_of(data, [0, 1, 2]), part_of(data, [3, 4, 5])]
    moments = Moments.of(halves[0].train.x) + Moments.of(halves[1].train.x)
    whole = prepare(data, normalise=True)
    for half, rows in zip(halves, (slice(0, 55), slice(55, None)), strict=True):
        found = prepare(half, normalise=True, like={"x": moments}).train.x
        assert torch.allclose(found, whole.train.x[rows], rtol=1e-6, atol=1e-7)


# A node's own data, and its keys ---------------------------------------------------------------------------


def test_a_node_reads_a_file_a_folder_or_a_table(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(10, 3)), np.arange(10) % 2
    np.savez(tmp_path / "north.npz", x=x, y=y)
    (tmp_path / "table.csv").write_text(
        "who,a,label\n" + "".join(f"w{i % 2},{i},{i % 2}\n" for i in range(20))
    )
    experiment = from_mapping({})
    assert loader(tmp_path / "north.npz", None, None, None)(experiment).names == ("north",)
    assert loader(tmp_path / "north.npz", "pole", None, None)(experiment).names == ("pole",)
    assert loader(tmp_path, None, None, None)(experiment).names == ("north",)
    assert loader(tmp_path / "table.csv", None, "who", "label")(experiment).names == ("w0", "w1")
    with pytest.raises(SettingError, match="needs --client-column and --label-column"):
        loader(tmp_path / "table.csv", None, None, None)(experiment)
    with pytest.raises(DataError, match="no such file"):
        loader(tmp_path / "south.npz", None, None, None)


def test_keys_are_made_once_and_are_for_their_owner_alone(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    made = make_keys(tmp_path / "keys", ["127.0.0.1", "fl.example.org"], ["north", "south"])
    assert {path.name for path in made} == {p.name for p in (tmp_path / "keys").iterdir()}
    for name in ("server.key", "north.key", "south.key"):
        assert (tmp_path / "keys" / name).stat().st_mode & 0o077 == 0
    assert len(read_public_keys(tmp_path / "keys" / "nodes.pub")) == 2
    assert read_key(tmp_path / "keys" / "north.key").curve.name == "secp384r1"
    with pytest.raises(SettingError, match="exists already"):
        make_keys(tmp_path / "keys", ["127.0.0.1"], ["west"])
    with pytest.raises(DataError, match="no private key"):
        read_key(tmp_path / "keys" / "ca.crt")
    with pytest.raises(DataError, match="entry 1 is no public key"):
        read_public_keys(tmp_path / "keys" / "ca.crt")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "travel readable"),
        ({"certificate": Path("a"), "key": Path("b")}, "anybody who reaches the port could join"),
        ({"nodes": Path("a")}, "travel readable"),
        ({"certificate": Path("a")}, "belong together"),
    ],
)
def test_other_machines_are_not_served_in_the_open(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        Service("0.0.0.0", 8000, **settings)
    assert Service("0.0.0.0", 8000, insecure=True).port == 8000
    assert Service("127.0.0.1", 8000).port == Service("::1", 8000).port


@pytest.mark.parametrize("address", ["", "8000", "host", "host:", ":8000", "host:99999", "host:x"])
def test_an_address_has_a_host_and_a_port(address: str) -> None:
    with pytest.raises(SettingError, match="expected an address"):
        split_address(address)
    assert split_address("[::1]:80") == ("::1", 80)


@pytest.mark.parametrize(
    ("side", "missing"),
    [
        ("flower", "flwr.app"),
        ("flower", "flwr.server.superlink.linkstate"),
        ("flower_link", "flwr.app"),
        ("flower_link", "flwr.supernode.fleet_http_client"),
    ],
)
def test_a_flower_that_does_not_fit_is_named(
    monkeypatch: pytest.MonkeyPatch, side: str, missing: str
) -> None:
    """Where it is not installed, and where a version has not what is used of it."""
    for module in (f"sartor.remote.{side}", "sartor.remote.flower_content"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SartorError, match=r"need Flower, flwr>=.*; install it with `pip install 'sartor"):
        importlib.import_module(f"sartor.remote.{side}")


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        make_keys(tmp_path / name, ["localhost"], ["one"])
    check_issued(tmp_path / "ours" / "server.crt", tmp_path / "ours" / "ca.crt")
    with pytest.raises(SettingError, match=r"was not issued by .*nodes would refuse the server"):
        check_issued(tmp_path / "ours" / "server.crt", tmp_path / "theirs" / "ca.crt")
    with pytest.raises(SettingError, match=r"server\.key: no certificate in PEM form"):
        check_issued(tmp_path / "ours" / "server.key", tmp_path / "ours" / "ca.crt")
    with pytest.raises(SettingError, match="cannot be read"):
        check_issued(tmp_path / "none.crt", tmp_path / "ours" / "ca.crt")


def test_a_key_that_is_not_the_certificates_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    make_keys(tmp_path, ["localhost"], ["one"])
    certificate, key = tmp_path / "server.crt", tmp_path / "server.key"
    check_pair(certificate, key)
    with pytest.raises(SettingError, match=r"one\.key: is not the key of .*server\.crt"):
        check_pair(certificate, tmp_path / "one.key")
    with pytest.raises(SettingError, match=r"none\.key: cannot be read: No such file"):
        check_pair(certificate, tmp_path / "none.key")
    hidden = BestAvailableEncryption(b"a word")
    locked = load_pem_private_key(key.read_bytes(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, hidden
    )
    (tmp_path / "locked.key").write_bytes(locked)
    check_pair(certificate, tmp_path / "locked.key")  # whoever starts the server is asked for the word


@pytest.mark.parametrize("host", ["", "fl.example.org:8000", "https://fl.example.org", "a,b", "a b", "ø.no"])
def test_a_certificate_is_for_names_and_addresses(host: str, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    with pytest.raises(SettingError, match="--host: expected a name or an address"):
        make_keys(tmp_path / "keys", ["127.0.0.1", host], ["one"])
    assert not (tmp_path / "keys").exists()


def test_a_server_may_have_a_long_name(tmp_path: Path) -> None:
    x509 = pytest.importorskip("cryptography.x509")
    host = ".".join(["federation"] * 12)
    make_keys(tmp_path, [host, "*.example.org", "::1"], ["one"])
    made = x509.load_pem_x509_certificate((tmp_path / "server.crt").read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [host, "*.example.org"]
    check_issued(tmp_path / "server.crt", tmp_path / "ca.crt")


# Settings --------------------------------------------------------------------------------------------------


def test_a_node_goes_by_all_of_the_experiments_engine_settings() -> None:
    """Chosen values, each other than its default; the device is the node's own."""
    data = vectors(torch.float32)
    node = nodes_of(data, Task(nn.Linear(5, 4), classes=4), [[1, 4]])[1]
    engine = {
        "name": "stacked",
        "precision": "full",
        "chunk": 1,
        "lanes": 3,
        "states": "disk",
    }
    experiment = experiment_of("scaffold", engine=engine, evaluate={"batch": 7})
    asked(node, "hello", experiment=to_mapping(experiment))
    where = {
        "clients": 6,
        "numbers": [1, 4],
        "classes": 4,
        "labels": None,
        "at": 0,
        "without": [],
        "keep": [],
        "kept": [],
    }
    assert "error" not in asked(node, "open", **where)
    assert node._hosted is not None
    made, states = node._hosted.engine, node._hosted.states
    assert isinstance(made, StackedEngine)
    found = made.settings
    assert (found.precision, found.chunk, found.lanes) == ("full", 1, 3)
    assert (states.where, found.evaluation_batch, found.method) == ("disk", 7, "scaffold")
    assert made.names == ("client 1", "client 4")  # nothing here is as wide as the federation
    assert states.clients == 2


def test_a_node_compares_code_and_executes_none_that_it_is_told_of(forgetful: None, tmp_path: Path) -> None:
    here, sent = tmp_path / "here" / "mine.py", tmp_path / "sent" / "mine.py"
    for path in (here, sent):
        path.parent.mkdir()
        path.write_text(f"open({str(path) + '.executed'!r}, 'w').close()\n")
    experiment = {**to_mapping(experiment_of("fedavg")), "imports": [str(sent)]}
    experiment["model"] = {"path": f"{sent}:build"}
    wanted = {"mine.py": read_code(str(here)).sha256}
    node = nodes_of(vectors(), plain(), [[1, 4]])[1]
    told = asked(node, "hello", experiment=experiment, code=wanted)["error"]
    assert told.startswith("the server has imported mine.py (SHA-256")
    assert told.endswith("this node has not; join with --import")
    assert node.refusal == told
    import_code(str(here))
    other = asked(node, "hello", experiment=experiment, code={"mine.py": "0" * 64})["error"]
    assert "this node another one (SHA-256 " in other
    assert "error" in asked(node, "hello", experiment=experiment, code=["mine.py"])
    assert asked(node, "hello", experiment=experiment, code=wanted)["code"] == wanted
    assert not Path(f"{sent}.executed").exists()


def test_the_server_lets_no_node_in_that_does_not_say_what_it_has_imported(
    forgetful: None, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    path.write_text("value = 1\n")
    code = import_code(str(path))
    experiment = from_mapping({**to_mapping(experiment_of("fedavg")), "imports": [str(path)]})
    grid = HereGrid(nodes_of(vectors(), plain(), [[1, 4]]))
    admission = Admission(Requests(grid, 5.0), experiment)
    assert admission.greet(1).names == ("client 1", "client 4")
    extensions._IMPORTED.clear()
    with pytest.raises(Failed, match=rf"the server has imported mine\.py \(SHA-256 {code.sha256[:12]}\)"):
        admission.greet(1)
    with pytest.raises(Failed, match=r"does not say that it has the same code, mine\.py"):
        admission._introduction(1, {"names": ["a"]}, {})


def test_a_node_reads_what_a_function_of_its_owner_gives(forgetful: None, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import numpy as np\n\ndef load(seed):\n    return {'a': (np.eye(20) + seed, np.arange(20) % 2)}\n"
        "\ndef wrong():\n    return 3\n"
    )
    experiment = from_mapping({"seed": 2, "data": {"validation": 0.25}})
    data = loader(Path(f"{path}:load"), None, None, None)(experiment)
    assert (data.names, float(data.train.x.min())) == (("a",), 2.0)
    assert data.validation is not None
    with pytest.raises(DataError, match="it gives a int"):
        loader(Path(f"{path}:wrong"), None, None, None)(experiment)
    with pytest.raises(SettingError, match=r"none\.py: no such file to import"):
        loader(tmp_path / "none.py:load", None, None, None)
