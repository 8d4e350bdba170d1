"""Virtual time: the event queue, work in flight, and who is there for how long."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import federation_of, task_and_data
from sartor.algorithms.asynchronous.aging import local_training
from sartor.algorithms.references.separate import local_training as train_own
from sartor.client.local import Client
from sartor.errors import DataError, SartorError
from sartor.federation import Federation, Reply
from sartor.federation.clock import (
    Always,
    Conditions,
    Constant,
    Durations,
    EventQueue,
    Job,
    LogNormal,
    Modelled,
    Presence,
    Shifts,
    Sometimes,
    Stragglers,
    World,
)
from sartor.federation.exchange import NobodyAnswered
from sartor.runs.experiment import load

ENGINES = ["loop", "stacked"]
EVERYONE = np.arange(6)


def world(clients: int = 6, seed: int = 0) -> World:
    return World(seed, [f"client {number}" for number in range(clients)], np.arange(1, clients + 1) * 10, 400)


def job(client: int, finish: float, started: float = 0.0) -> Job:
    return Job(client, 0, 0, started, finish, None)


# The queue -------------------------------------------------------------------------------------------------


def test_jobs_arrive_by_finish_and_then_by_client_and_time_stands_at_the_arrival() -> None:
    queue = EventQueue()
    for client, finish in ((4, 2.0), (1, 3.0), (3, 2.0), (0, 1.5)):
        queue.start(job(client, finish))
    assert [entry.client for entry in queue] == [0, 1, 3, 4]
    assert [(queue.arrive().client, queue.now) for _ in range(4)] == [(0, 1.5), (3, 2.0), (4, 2.0), (1, 3.0)]
    assert queue.next() is None
    with pytest.raises(SartorError, match="no work is in flight"):
        queue.arrive()


def test_a_cancelled_client_can_start_again_with_the_same_finish() -> None:
    queue = EventQueue()
    first, second = job(2, 5.0), job(2, 5.0)
    queue.start(first)
    assert queue.cancel(2) is first
    queue.start(second)
    assert queue.arrive() is second
    assert len(queue) == 0
    with pytest.raises(SartorError, match="client 2 is not at work"):
        queue.cancel(2)


@pytest.mark.parametrize("finish", [0.5, math.inf, math.nan])
def test_work_ends_neither_in_the_past_nor_never(finish: float) -> None:
    queue = EventQueue()
    queue.wait_until(1.0)
    with pytest.raises(SartorError, match="cannot end"):
        queue.start(job(0, finish))
    queue.start(job(0, 1.0))
    with pytest.raises(SartorError, match="already at work"):
        queue.start(job(0, 2.0))


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 7), st.sampled_from([0.0, 0.25, 1.0, 1.0, 2.5])),
        st.tuples(st.just("arrive"), st.just(0), st.just(0.0)),
        st.tuples(st.just("cancel"), st.integers(0, 7), st.just(0.0)),
        st.tuples(st.just("wait"), st.just(0), st.sampled_from([-1.0, 0.5, 3.0])),
    ),
    max_size=60,
)


@given(ACTIONS)
@settings(max_examples=200)
def test_nothing_is_lost_or_comes_twice_and_time_does_not_run_backwards(
    actions: list[tuple[str, int, float]],
) -> None:
    queue = EventQueue()
    started: list[Job] = []
    left: list[Job] = []
    arrived: list[Job] = []
    for action, client, amount in actions:
        before = queue.now
        if action == "start" and client not in queue:
            started.append(job(client, queue.now + amount, queue.now))
            queue.start(started[-1])
        elif action == "arrive" and len(queue):
            due = min((entry.finish, entry.client) for entry in queue)
            arrived.append(queue.arrive())
            left.append(arrived[-1])
            assert (arrived[-1].finish, arrived[-1].client) == due
            assert queue.now == max(before, arrived[-1].finish)
        elif action == "cancel" and client in queue:
            left.append(queue.cancel(client))
        elif action == "wait":
            queue.wait_until(queue.now + amount)
        assert queue.now >= before
    while len(queue):  # what is in flight comes out in the end
        left.append(queue.arrive())
    assert len(left) == len(started)
    assert {id(entry) for entry in left} == {id(entry) for entry in started}


# Work in flight --------------------------------------------------------------------------------------------


def federation(engine: str = "loop", local: dict[str, Any] | None = None, **conditions: Any) -> Federation:
    task, data = task_and_data()
    own = {"batch": 8, **(local or {})}
    return federation_of(engine, task, data, local=own, conditions=Conditions(**conditions))


def identify(client: Client, hyper: Any, w: Tensor) -> Reply:
    """Who answers, and what it was sent."""
    return Reply(number=client.number, w=w)


class Given:
    """Durations from a table: round by round, one per client."""

    def __init__(self, *rounds: list[float]) -> None:
        self.rounds = rounds

    def durations(self, world: World, round: int, numbers: np.ndarray) -> np.ndarray:
        """Of this round."""
        return np.array(self.rounds[min(round, len(self.rounds)) - 1])[numbers]


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from([0.5, 1.0, 1.5, 3.0, 7.0]), min_size=6, max_size=6),
            st.sets(st.integers(0, 5)),  # who is drawn
            st.sets(st.integers(0, 5)),  # whose work is called off
            st.sets(st.integers(0, 5)),  # whose answer gets lost
            st.sampled_from([(None, 1.0), (1, None), (2, 2.0), (None, None)]),
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=60)
def test_every_job_is_used_lost_or_called_off_exactly_once(rounds: list[Any]) -> None:
    task, data = task_and_data()
    lost_in = [entry[3] for entry in rounds]
    made = federation_of(
        "loop",
        task,
        data,
        conditions=Conditions(delay=Given(*(entry[0] for entry in rounds))),
        answers=lambda round, numbers: np.array([n not in lost_in[round - 1] for n in numbers]),
    )
    w = torch.zeros(1, dtype=torch.float64)
    started: list[tuple[int, float]] = []
    ended: list[tuple[int, float]] = []
    for round, (_, drawn, called_off, _, (count, within)) in enumerate(rounds, 1):
        made.round = round
        before, busy = made.now, set(made.running.tolist())
        new = made.dispatch(identify, sorted(drawn), {"w": w + round})
        assert set(new.tolist()) == drawn - busy
        started += [(client, before) for client in new.tolist()]
        try:
            replies = made.collect(count, within)
            assert replies["number"].tolist() == replies.clients.tolist()
            # what a client was sent is what it was sent when it started
            assert replies["w"].flatten().tolist() == (round - replies.ages).tolist()
            assert torch.equal(replies.given["w"], replies["w"])
            assert count is None or len(replies) <= count
        except NobodyAnswered:
            pass
        assert made.now >= before
        assert within is None or made.now <= before + within
        made.cancel(sorted(called_off & set(made.running.tolist())))
        for kind in ("arrivals", "lost_jobs", "cancelled_jobs"):
            ended += [(entry[0], entry[1]) for entry in made.notes.get(kind, [])]
        for client, start, finish, *_ in made.notes.get("arrivals", []):
            assert start < finish <= made.now, client
    ended += [(entry.client, entry.started) for entry in made.queue]
    assert sorted(ended) == sorted(started)


def test_time_passes_while_nobody_is_there(tmp_path: Path) -> None:
    file = tmp_path / "presence.csv"
    rows = [f"client {number},2.5,100" for number in range(6)]
    file.write_text("\n".join(["client,start,end", *rows]), encoding="utf-8")
    made = federation(availability=Presence(str(file)))
    w = made.task.initial()
    answered = []
    for round in range(1, 6):
        made.round = round
        try:
            made.dispatch(identify, EVERYONE, {"w": w})
            answered.append(len(made.collect(within=1.0)))
        except NobodyAnswered:
            answered.append(0)
    assert answered == [0, 0, 0, 6, 6]
    synchronous = federation(availability=Presence(str(file)))
    for round in range(1, 4):
        synchronous.round = round
        with pytest.raises(NobodyAnswered):
            synchronous.map(identify, EVERYONE, {"w": w})
    synchronous.round = 4
    assert len(synchronous.map(identify, EVERYONE, {"w": w})) == 6


def test_concurrency_bounds_who_is_at_work_and_draws_among_all() -> None:
    made = federation(delay=Stragglers(stragglers=3, longest=2))
    w = made.task.initial()
    often = np.zeros(6)
    for round in range(1, 41):
        made.round = round
        often[made.dispatch(identify, EVERYONE, {"w": w}, concurrency=2)] += 1
        assert len(made.running) == 2
        with suppress(NobodyAnswered):
            made.collect(within=1.0)
    assert (often >= 3).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_jobs_of_different_versions_trained_together_equal_jobs_trained_alone(engine: str) -> None:
    made = federation(engine, delay=Given([3.0, 1.0, 3.0, 1.0, 3.0, 1.0], [2.0] * 6))
    w = made.task.initial()
    made.round = 1
    made.dispatch(local_training, EVERYONE, {"w": w})
    first = made.collect(within=1.0)
    made.round = 2
    made.dispatch(local_training, EVERYONE, {"w": 2 * w})
    assert [entry.result is None for entry in made.queue] == [False, True, False, True, False, True]
    for entry in made.queue:
        entry.result = None  # as if none had been trained ahead: all six, of two versions, in one batch
    second = made.collect(within=3.0)
    assert sorted(second.clients.tolist()) == list(range(6))
    for replies, start, round, client in [
        *((first, w, 1, client) for client in (1, 3, 5)),
        *((second, w, 1, client) for client in (0, 2, 4)),
        *((second, 2 * w, 2, client) for client in (1, 3, 5)),
    ]:
        alone = federation(engine)
        alone.round = round
        expected = alone.map(local_training, [client], {"w": start})["delta"][0]
        found = replies["delta"][replies.clients.tolist().index(client)]
        assert float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


def test_a_client_that_starts_again_in_a_round_sees_other_batches_at_the_same_rate() -> None:
    made = federation(local={"batch": 4, "steps": 1, "lr_decay": 0.5})
    w = made.task.initial()
    made.round = 3
    changes = []
    for _ in range(2):
        made.dispatch(local_training, [3], {"w": w})
        replies = made.collect()
        changes.append(replies["delta"][0])
        assert float(replies["work"][0]) == pytest.approx(0.1 * 0.5**2)
    assert not torch.equal(*changes)


@pytest.mark.parametrize("engine", ENGINES)
def test_work_in_flight_is_saved_and_continues_to_the_bit(engine: str) -> None:
    def rounds(made: Federation, first: int, last: int, w: Tensor) -> Tensor:
        for round in range(first, last + 1):
            made.round = round
            made.dispatch(local_training, EVERYONE, {"w": w})
            try:
                replies = made.collect(within=1.0)
                w = w + replies.mean("delta")
            except NobodyAnswered:
                pass
        return w

    delay, dropout = LogNormal(median=1.0, between=0.8, within=0.5), 0.2
    whole = federation(engine, delay=delay, dropout=dropout)
    start = whole.task.initial()
    expected = rounds(whole, 1, 6, start)
    begun = federation(engine, delay=delay, dropout=dropout)
    w = rounds(begun, 1, 3, start)
    assert len(begun.running) > 0
    saved = begun.snapshot()
    assert any(entry["computed"] for entry in saved["plain"]["jobs"])
    saved["plain"] = json.loads(json.dumps(saved["plain"]))
    saved = {name: value.clone() if isinstance(value, Tensor) else value for name, value in saved.items()}
    rounds(begun, 4, 5, w)  # what happens afterwards changes nothing that was saved
    continued = federation(engine, delay=delay, dropout=dropout)
    continued.restore(saved)
    found = rounds(continued, 4, 6, w)
    assert torch.equal(found, expected)
    assert continued.now == whole.now
    assert continued.updates == whole.updates
    assert vars(continued.traffic) == vars(whole.traffic)
    assert continued.running.tolist() == whole.running.tolist()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_lost_answer_leaves_client_and_server_as_they_were(asynchronous: bool) -> None:
    made = federation(dropout=1.0)
    w = made.task.initial()
    made.declare(w_i=w)
    made.round = 1
    if asynchronous:
        made.dispatch(train_own, EVERYONE)
        with pytest.raises(NobodyAnswered):
            made.collect()
    else:
        with pytest.raises(NobodyAnswered):
            made.map(train_own, EVERYONE)
    assert torch.equal(made.states["w_i"], w.expand(6, -1))
    assert made.notes["lost"] == 6
    assert (made.updates, made.answered, made.traffic.up) == (0, 0, 0)
    assert len(made.running) == 0


def spoil(client: Client, hyper: Any, w: Tensor, kind: Tensor, w_i: Tensor) -> Reply:
    """A reply that is what ``kind`` says: 0 fine, 1 not a number, 2 infinite, 3 large, 4 of another shape."""
    bad = torch.stack([kind * 0, kind / 0 * 0, 1 / (kind * 0), kind * 1e3, kind * 0])[kind.long()]
    return Reply(w=(w + bad)[: 1 if int(kind) == 4 else 2]).keep(w_i=w)


KINDS = {1: "is not finite", 2: "is not finite", 3: "norm", 4: r"has shape \[1\], others have \[2\]"}


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_bad_replies_are_left_out_or_stop_the_run(kind: int, asynchronous: bool) -> None:
    def ask(on_bad_reply: str) -> tuple[Federation, Any]:
        task, data = task_and_data()
        conditions = Conditions(on_bad_reply=on_bad_reply, largest_norm=50.0)
        made = federation_of("loop", task, data, conditions=conditions, method="mine")
        made.declare(w_i=torch.zeros(2, dtype=torch.float64))
        made.round = 7
        given = {"w": torch.ones(2, dtype=torch.float64)}
        each = {"kind": torch.tensor([0.0, 0.0, kind, 0.0, 0.0, 0.0], dtype=torch.float64)}
        if not asynchronous:
            return made, made.map(spoil, EVERYONE, given, each)
        made.dispatch(spoil, EVERYONE, given, each)
        return made, made.collect()

    with pytest.raises(
        SartorError, match=f"mine, round 7, client 'client 2': 'w' of its reply.*{KINDS[kind]}"
    ):
        ask("stop")
    made, replies = ask("drop")
    assert replies.clients.tolist() == [0, 1, 3, 4, 5]
    assert bool(torch.isfinite(replies["w"]).all())
    assert made.states["w_i"].sum(dim=1).tolist() == [2, 2, 0, 2, 2, 2]
    assert (made.notes["bad"], made.updates, made.answered) == (1, 5, 5)


def test_answers_of_two_functions_come_piece_by_piece() -> None:
    made = federation(delay=Given([2.0, 1.0, 2.0, 1.0, 1.0, 1.0], [1.0] * 6))
    w = made.task.initial()
    made.round = 1
    made.dispatch(local_training, EVERYONE, {"w": w})
    made.collect(within=1.0)
    made.round = 2
    made.dispatch(identify, EVERYONE, {"w": w})
    pieces = made.arrivals(within=1.0)
    assert [(sorted(piece.values), piece.clients.tolist()) for piece in pieces] == [
        (["delta", "work"], [0]),
        (["number", "w"], [1]),
        (["delta", "work"], [2]),
        (["number", "w"], [3, 4, 5]),
    ]
    made.round = 3
    made.dispatch(identify, [0], {"w": w})
    made.dispatch(local_training, [1], {"w": w})
    with pytest.raises(SartorError, match="different client functions"):
        made.collect()


# Who is there, and for how long ----------------------------------------------------------------------------


def test_everyone_is_there_or_some_at_the_rate_asked_for() -> None:
    many = world(4000)
    numbers = np.arange(4000)
    assert Always().there(many, 1, 0.0, numbers).all()
    drawn = [Sometimes(0.3).there(many, round, 0.0, numbers) for round in (1, 2)]
    for here in drawn:
        assert abs(here.mean() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 4000)
    assert abs((drawn[0] & drawn[1]).mean() - 0.09) < 0.02  # each round anew
    some = np.array([7, 3, 3999])
    assert (Sometimes(0.3).there(many, 1, 0.0, some) == drawn[0][some]).all()
    assert (Sometimes(0.3).there(world(4000, seed=1), 1, 0.0, numbers) != drawn[0]).any()


def test_shifts_repeat_and_each_client_is_there_for_its_part() -> None:
    numbers = np.arange(50)
    here = np.array([Shifts(10, 4).there(world(50), round, 0.0, numbers) for round in range(20)])
    assert (here[:10] == here[10:]).all()
    assert (here[:10].sum(axis=0) == 4).all()
    assert ((here[:10] != np.roll(here[:10], 1, axis=0)).sum(axis=0) == 2).all()  # in one piece
    assert len({tuple(column) for column in here.T}) > 5  # with phases of their own


def test_stragglers_miss_their_period_and_take_part() -> None:
    delay = Stragglers(stragglers=5, longest=3)
    everything = world(10)
    periods = delay.periods(everything)
    assert sorted(periods.values()) == [1, 1, 2, 2, 3]
    made = delay.durations(everything, 4, np.arange(10))
    assert [made[client] - 1 for client in range(10)] == [periods.get(client, 0) for client in range(10)]
    assert delay.periods(world(10, seed=3)) != periods
    assert Stragglers(stragglers=99, longest=2).periods(everything).keys() == set(range(10))

    task, data = task_and_data()
    made_of = federation_of("loop", task, data, conditions=Conditions(delay=Stragglers(3, 3)))
    late = Stragglers(3, 3).periods(made_of._world)
    seen: dict[int, list[int]] = {client: [] for client in range(6)}
    for round in range(1, 25):
        made_of.round = round
        made_of.dispatch(identify, EVERYONE, {"w": task.initial()})
        for client in made_of.collect(within=1.0).clients:
            seen[client].append(round)
    for client, rounds in seen.items():
        period = late.get(client, 0)
        assert rounds == list(range(1 + period, 25, period + 1))


def test_lognormal_durations_have_the_median_and_the_deviations_asked_for() -> None:
    many, numbers = world(4000), np.arange(4000)
    delay = LogNormal(median=3.0, between=0.6, within=0.2)
    first, second = (np.log(delay.durations(many, round, numbers) / 3.0) for round in (1, 2))
    assert abs(first.mean()) < 0.05
    assert abs(first.std() - math.hypot(0.6, 0.2)) < 0.03
    assert abs((first - second).std() - 0.2 * math.sqrt(2)) < 0.02  # a client's own factor stays
    assert (delay.durations(many, 1, numbers[5:9]) == delay.durations(many, 1, numbers)[5:9]).all()


def test_modelled_durations_follow_work_and_size() -> None:
    plain = Modelled(speed=20.0, bandwidth=100.0, between=0.0)
    expected = np.arange(1, 7) * 10 / 20.0 + 2 * 400 / 100.0
    assert plain.durations(world(), 1, EVERYONE) == pytest.approx(expected)
    assert Constant(2.5).durations(world(), 1, EVERYONE).tolist() == [2.5] * 6
    spread = Modelled(speed=20.0, bandwidth=100.0, between=1.0).durations(world(), 1, EVERYONE)
    assert len(set((spread / expected).round(6))) == 6


def test_traces_are_read_by_client_and_round(tmp_path: Path) -> None:
    file = tmp_path / "delay.csv"
    file.write_text("client,duration,note\nclient 1,2.0,x\nclient 0,1.5,\nclient 1,4.0,\n", encoding="utf-8")
    delay = Durations(str(file))
    found = [delay.durations(world(), round, np.array([1, 0])).tolist() for round in (0, 1, 2)]
    assert found == [[2.0, 1.5], [4.0, 1.5], [2.0, 1.5]]
    with pytest.raises(DataError, match="no duration of client 'client 4'"):
        delay.durations(world(), 1, EVERYONE[4:])
    presence = tmp_path / "presence.csv"
    presence.write_text("client,start,end\nclient 1,0,2\nclient 1,5,6\n", encoding="utf-8")
    here = [Presence(str(presence)).there(world(), 1, now, np.array([0, 1])).tolist() for now in (1, 2, 5, 9)]
    assert here == [[True, True], [True, False], [True, True], [True, False]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("client,time\na,1\n", "has no column 'duration'"),
        ("", "has no column 'client'"),
        ("client,duration\nclient 0,1\nclient 1,soon\n", "line 3: could not convert string to float: 'soon'"),
        ("client,duration\nclient 0\n", "line 2: could not convert"),
        ("client,duration\n" + "".join(f"client {n},-1\n" for n in range(6)), "must be above 0 and finite"),
        ("client,duration\n" + "".join(f"client {n},inf\n" for n in range(6)), "must be above 0 and finite"),
        ("client,duration\n" + "".join(f"client {n},nan\n" for n in range(6)), "must be above 0 and finite"),
    ],
)
def test_a_trace_that_cannot_be_used_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "trace.csv"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message) as error:
        Durations(str(file)).durations(world(), 1, EVERYONE)
    assert str(file) in str(error.value)


def test_a_trace_needs_a_readable_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"availability\.file: name the CSV file"):
        Presence("").there(world(), 1, 0.0, EVERYONE)
    binary = tmp_path / "trace.csv"
    binary.write_bytes(b"client,duration\n\xff\xfe\n")
    with pytest.raises(DataError, match="utf-8"):
        Durations(str(binary)).durations(world(), 1, EVERYONE)
    with pytest.raises(DataError, match="null"):
        Durations("a\0b").durations(world(), 1, EVERYONE)


def test_conditions_are_chosen_by_name() -> None:
    experiment = load(
        None, ["delay.name=periodic", "delay.stragglers=3", "availability.name=random", "replies.dropout=0.1"]
    )
    assert experiment.delay.settings == Stragglers(stragglers=3)
    assert experiment.availability.settings == Sometimes()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_dropouts_come_at_their_rate_and_anew_in_every_round(asynchronous: bool) -> None:
    made = federation(dropout=0.4)
    who = []
    for round in range(1, 101):
        made.round = round
        with suppress(NobodyAnswered):
            if asynchronous:
                made.dispatch(identify, EVERYONE, {"w": torch.zeros(1)})
                replies = made.collect()
            else:
                replies = made.map(identify, EVERYONE, {"w": torch.zeros(1)})
            who.append(tuple(replies.clients.tolist()))
    assert abs(sum(map(len, who)) / 600 - 0.6) < 0.08
    assert len(set(who)) > 20
