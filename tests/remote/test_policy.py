"""What a node agrees to: a request outside its policy gets nothing, and both sides know why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sartor.data.clients import ClientData, from_clients
from sartor.errors import SartorError, SettingError
from sartor.federation.transforms import plain_shapes, shapes_of
from sartor.remote.audit import Audit
from sartor.remote.messages import decode, encode, version
from sartor.remote.node import Node
from sartor.remote.policy import Policy, Refused, Requirement, node_policy, policy_of, read_policy
from sartor.runs.experiment import from_mapping, to_mapping
from sartor.transforms.norms import Clip, Scale
from sartor.transforms.quantised import Int8
from sartor.transforms.sparse import TopK

SAMPLES = 10
SOFTMAX: dict[str, Any] = {
    "rounds": 1,
    "model": {"name": "softmax"},
    "data": {"clients": 1, "normalise": False},
    "engine": {"name": "loop"},
    "evaluate": {"every": 0},
}
CALL: dict[str, Any] = {
    "exchange": 1,
    "function": "sartor.algorithms.references.fedavg:local_training",
    "algorithm": "fedavg",
    "hyper": {"lr": 0.1},
    "round": 1,
    "numbers": [0],
    "rounds": [1],
    "keeps": True,
}
HERE = {"clients": 1, "numbers": [0], "classes": 3, "labels": None, "at": 0}
HERE |= {"without": [], "keep": [], "kept": []}
CLIP = Requirement("clip", most={"norm": 1.0})


def data(experiment: Any = None) -> ClientData:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(SAMPLES, 4)).astype(np.float32)
    split = {"train": (x, np.arange(SAMPLES) % 3), "test": (x[:2], np.arange(2))}
    return from_clients({"oslo": split})


class Server:
    """Whoever asks a node."""

    def __init__(self, policy: Policy, folder: Path | None = None) -> None:
        self.audit = Audit(folder)
        self.node = Node(data, folder and folder / "runs", policy=policy, audit=self.audit)

    def ask(self, kind: str, groups: Any = None, **header: Any) -> tuple[dict[str, Any], Any]:
        header = {"kind": kind, "nonce": "n", "version": version(), "settled": [], "floor": 0, **header}
        return decode(self.node.handle(encode({"run": "r", **header}, groups)))

    def greet(self, **settings: Any) -> str:
        """What a node says to an experiment; nothing where it takes part."""
        experiment = to_mapping(from_mapping({**SOFTMAX, **settings}))
        told, groups = self.ask("hello", experiment=experiment)
        if "error" in told:
            assert not groups
            assert set(told) == {"error", "nonce", "tensors"}
            return str(told["error"])
        assert "error" not in self.ask("open", **HERE)[0]
        return ""

    def call(self, w: torch.Tensor, **header: Any) -> tuple[str, dict[str, torch.Tensor]]:
        told, groups = self.ask("call", {"shared": {"w": w}}, **{**CALL, **header})
        return str(told.get("error", "")), groups.get("sent", {})


def recovered(sent: dict[str, torch.Tensor], lr: float) -> torch.Tensor:
    """The sample behind one step on one sample of a softmax: the weights' gradient over the bias's."""
    gradient = -sent["delta"][0] / lr
    weights, bias = gradient[:12].view(3, 4), gradient[12:]
    row = int(bias.abs().argmax())
    return weights[row] / bias[row]


ONE = {"local": {"batch": 1, "steps": 1}}


def test_one_step_on_one_sample_gives_the_sample_away_unless_the_node_disagrees() -> None:
    w = torch.zeros(15)
    server = Server(Policy())
    assert server.greet(**ONE) == ""
    error, sent = server.call(w)
    assert error == ""
    distance = (torch.from_numpy(np.asarray(data().train.x)) - recovered(sent, 0.1)).abs().amax(dim=1)
    assert distance.min() < 1e-4  # this is why there are policies
    careful = Server(Policy(least_batch=4))
    assert (
        "outside this node's policy: client oslo: a step is taken on 1 samples, at least 4"
        in careful.greet(**ONE)
    )
    assert careful.node.refusal
    assert "error" in careful.ask("open", **HERE)[0]
    assert careful.call(w)[1] == {}
    assert [entry for entry in ("answered", "introduced") if entry in str(careful.audit.last)] == []


@pytest.mark.parametrize(
    ("policy", "settings", "word"),
    [
        (Policy(methods=("fedprox",)), {}, "the method fedavg; it agrees to fedprox (methods)"),
        (Policy(least_batch=11), {}, "a step is taken on 10 samples, at least 11"),
        (Policy(least_batch=5), {"local": {"batch": 4}}, "a step is taken on 4 samples, at least 5"),
        (Policy(least_steps=4), {"local": {"batch": 4}}, "a reply is made of 3 steps, at least 4"),
        (Policy(least_steps=3), {"local": {"batch": 0, "epochs": 2}}, "a reply is made of 2 steps"),
        (Policy(least_steps=3), {"local": {"batch": 0, "epochs": [2, 9]}}, "a reply is made of 2 steps"),
        (Policy(least_steps=2), {"local": {"batch": 0, "epochs": 5, "partial": 0.1}}, "is made of 1 steps"),
        (Policy(least_samples=9), {"local": {"batch": 4, "steps": 2}}, "a reply is made of 8 samples"),
        (Policy(least_samples=11), {"local": {"batch": 0}}, "a reply is made of 10 samples"),
        (Policy(), {"evaluate": {"personal_models": "yes"}}, "the server asks for personal models"),
        (Policy(moments=False), {"data": {"clients": 1}}, "the mean and spread of features"),
        (Policy(require=(CLIP,)), {}, "clip wanted, none there (require)"),
        (
            Policy(require=(CLIP,)),
            {"transforms": [{"name": "clip", "norm": 2}]},
            "norm must be at most 1, it is 2",
        ),
        (Policy(require=(CLIP,)), {"transforms": [{"name": "clip", "place": "server"}]}, "clip wanted, none"),
        (
            Policy(require=(CLIP,)),
            {"transforms": [{"name": "clip", "of": ["a"]}]},
            "for all quantities, it is for a",
        ),
        (
            Policy(require=(CLIP,)),
            {"transforms": [{"name": "clip"}, {"name": "scale", "factor": 1e9}]},
            "clip is required there",
        ),
    ],
)
def test_an_experiment_outside_the_policy_is_refused_with_the_reason(
    policy: Policy, settings: dict[str, Any], word: str
) -> None:
    server = Server(policy)
    assert word in server.greet(**settings)
    assert word in server.node.refusal
    assert server.audit.last is not None
    assert server.audit.last.event == "refused"
    assert word in server.audit.last.words


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        (Policy(methods=("fedavg", "fedprox")), {}),
        (Policy(least_batch=4, least_steps=3, least_samples=10), {"local": {"batch": 4}}),
        (Policy(least_samples=8), {"local": {"batch": 4, "steps": 2}}),
        (Policy(personal_models=True), {"evaluate": {"personal_models": "yes"}}),
        (Policy(require=(CLIP,)), {"transforms": [{"name": "scale"}, {"name": "clip", "norm": 0.5}]}),
        (
            Policy(require=(Requirement("scale", least={"factor": 2}),)),
            {"transforms": [{"name": "scale", "factor": 2}]},
        ),
    ],
)
def test_an_experiment_within_the_policy_is_answered(policy: Policy, settings: dict[str, Any]) -> None:
    assert Server(policy).greet(**settings) == ""


def test_requirements_stand_in_their_order() -> None:
    policy = Policy(require=(Requirement("scale"), Requirement("clip")))
    experiment = from_mapping(SOFTMAX)
    policy.check_experiment(replace(experiment, transforms=(Clip(), Scale(), Clip())))
    for wrong in ((Clip(), Scale()), (Clip(),), (Scale(), Clip(place="down"))):
        with pytest.raises(Refused, match="not those it requires"):
            policy.check_experiment(replace(experiment, transforms=wrong))


def test_what_compresses_comes_after_what_is_required() -> None:
    """A clip of what was made smaller already bounds nothing."""
    policy, experiment = Policy(require=(Requirement("clip"),)), from_mapping(SOFTMAX)
    policy.check_experiment(replace(experiment, transforms=(Scale(), Clip(), TopK(), Int8())))
    Policy(require=(Requirement("int8"),)).check_experiment(replace(experiment, transforms=(Clip(), Int8())))
    for wrong, reason in (
        ((Int8(), Clip()), "int8 comes before them, which sends parts"),
        ((Clip(), TopK(), Scale()), "topk comes before them"),
        ((TopK(),), "clip wanted, none there"),
    ):
        with pytest.raises(Refused, match=reason):
            policy.check_experiment(replace(experiment, transforms=wrong))


# -- calls ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "header", "word"),
    [
        (Policy(functions=("shared_model",)), {}, "the client function sartor.algorithms.references.fedavg"),
        (Policy(quantities=("loss",)), {}, "local_training sends delta; loss may leave (quantities)"),
        (
            Policy(),
            {"function": "model_of/sartor.runs.evaluation:shared_model", "keeps": False},
            "it sends personal models",
        ),
    ],
)
def test_a_call_outside_the_policy_is_refused_and_leaves_no_trace(
    policy: Policy, header: dict[str, Any], word: str, tmp_path: Path
) -> None:
    server = Server(policy, tmp_path)
    assert server.greet() == ""
    error, sent = server.call(torch.zeros(15), **header)
    assert word in error
    assert sent == {}
    assert server.audit.last is not None
    assert word in server.audit.last.words
    assert not list((tmp_path / "runs").rglob("*.staged.*"))


@pytest.mark.parametrize("function", ["local_training", CALL["function"]])
def test_a_function_and_its_quantities_may_be_named(function: str) -> None:
    server = Server(Policy(functions=(function,), quantities=("delta",)))
    assert server.greet() == ""
    assert list(server.call(torch.zeros(15))[1]) == ["delta"]


@pytest.mark.parametrize("names", [("loss", "confusion", "n"), ("test.loss", "test.confusion", "test.n")])
def test_what_is_counted_in_an_evaluation_may_be_named(names: tuple[str, ...]) -> None:
    name = "evaluation_of/test/confusion/sartor.runs.evaluation:shared_model"
    evaluation: dict[str, Any] = {"function": name, "keeps": False}
    server = Server(Policy(quantities=("delta", *names)))
    assert server.greet() == ""
    assert set(server.call(torch.zeros(15), **evaluation)[1]) == {"test.loss", "test.confusion", "test.n"}
    server = Server(Policy(quantities=("delta", *names[:2])))
    assert server.greet() == ""
    error, sent = server.call(torch.zeros(15), **evaluation)
    assert "sends test.n; delta, " in error
    assert sent == {}


def test_transforms_cannot_be_asked_past(tmp_path: Path) -> None:
    """A server whose experiment clips asks for the same function as for an evaluation, which nobody clips."""
    w = torch.full((15,), 3.0)
    for policy in (Policy(require=(CLIP,)), Policy()):
        server = Server(policy)
        assert server.greet(transforms=[{"name": "clip", "norm": 0.001}]) == ""
        error, sent = server.call(w, keeps=False)
        assert "transforms" in error
        assert sent == {}
        told = {"shapes": plain_shapes(shapes_of({"w": w}, {})), "states": []}
        groups = {"shared": {"w": w, "transform__turn": torch.tensor(0)}}
        _, answer = server.ask("call", groups, **{**CALL, "transformed": told})
        assert float(answer["sent"]["delta"].norm()) <= 0.001 * 1.001


def test_the_number_of_answers_is_bounded_over_all_runs_and_processes(tmp_path: Path) -> None:
    policy = Policy(most_exchanges=3)
    for process in range(2):
        server = Server(policy, tmp_path)
        assert server.greet() == ""
        for exchange in range(2):
            error, sent = server.call(torch.zeros(15), exchange=exchange)
            refused = process == 1 and exchange == 1
            assert ("3 requests were answered already, which is the most" in error) is refused
            assert bool(sent) is not refused


def test_a_node_that_recalls_a_run_asks_its_policy_again(tmp_path: Path) -> None:
    """Where every message has a process of its own, what is recalled is not agreed to by that."""
    server = Server(Policy(), tmp_path)
    assert server.greet(**ONE) == ""
    for policy, word in ((Policy(), ""), (Policy(least_batch=4), "the node was started anew")):
        later = Server(policy, tmp_path)
        later.node.recall()
        assert later.call(torch.zeros(15))[0] == word
    path = tmp_path / "runs" / "opened.json"
    path.write_bytes(path.read_bytes().replace(b'"batch": 1', b'"batch": 3'))
    damaged = Server(Policy(), tmp_path)
    damaged.node.recall()
    assert damaged.call(torch.zeros(15))[0] == "the node was started anew"
    refused = Server(Policy(least_batch=4), tmp_path / "other")
    assert refused.greet(**ONE) != ""
    assert not (tmp_path / "other" / "runs" / "opened.json").exists()


def test_what_cannot_be_logged_is_not_sent(tmp_path: Path) -> None:
    server = Server(Policy(), tmp_path)
    assert server.greet() == ""
    (tmp_path / "audit.jsonl").unlink()
    (tmp_path / "audit.jsonl").mkdir()
    error, sent = server.call(torch.zeros(15))
    assert "audit.jsonl: cannot be written" in error
    assert sent == {}


# -- files ---------------------------------------------------------------------------------------------


POLICY = """
methods = ["fedavg"]
least_batch = 8
personal_models = false

[[require]]
name = "clip"
most = { norm = 1.0 }
"""


def test_a_policy_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(POLICY)
    assert read_policy(tmp_path / "policy.toml") == Policy(("fedavg",), least_batch=8, require=(CLIP,))
    assert node_policy(None, True) == Policy(personal_models=True)
    assert node_policy(tmp_path / "policy.toml", False).least_batch == 8
    with pytest.raises(SettingError, match="the policy says whether personal models may leave"):
        node_policy(tmp_path / "policy.toml", True)
    assert policy_of({}) == Policy()
    with pytest.raises(SettingError, match=r"none\.toml: no such policy file"):
        read_policy(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("least_bach = 1", r"policy\.least_bach: unknown key; did you mean policy\.least_batch\?"),
        ("least_batch = -1", r"policy\.least_batch: must be at least 0, got -1"),
        ("least_batch = true", r"policy\.least_batch: expected a whole number"),
        ("methods = ['fedavgg']", r"policy\.methods = 'fedavgg': unknown name; did you mean fedavg\?"),
        ("require = 3", r"policy\.require: expected a list of tables, got 3; write \[\[require\]\]"),
        ("[[require]]\nname = 'clap'", r"policy\.require\.name = 'clap': unknown name; did you mean clip"),
        ("[[require]]\nmost = {norn = 1}", r"policy\.require\.clip\.norn: unknown key; did you mean .*norm"),
        ("[[require]]\nmost = {norm = 'a'}", r"policy\.require\[0\]\.most: expected a table"),
        ("[[require]]\nplace = 'up'", r"policy\.require\[0\]\.place: unknown key"),
        ("a = ", "not a TOML"),
    ],
)
def test_a_policy_with_a_mistake_is_refused(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(SartorError, match=word) as told:
        read_policy(tmp_path / "policy.toml")
    assert str(told.value).startswith(str(tmp_path / "policy.toml"))
