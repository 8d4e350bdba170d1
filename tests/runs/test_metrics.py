"""Scores from confusion matrices agree with scikit-learn's; the spread with its definitions."""

import numpy as np
import pytest
import sklearn.metrics as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from sartor.runs.metrics import accuracy, confusion, f1, precision, recall, scores, spread

labels = st.integers(2, 6).flatmap(
    lambda classes: st.tuples(
        st.just(classes),
        st.lists(
            st.tuples(st.integers(0, classes - 1), st.integers(0, classes - 1)), min_size=1, max_size=40
        ),
    )
)


@given(labels)
@settings(max_examples=80)
def test_scores_equal_scikit_learn(drawn):
    classes, pairs = drawn
    truth, predicted = zip(*pairs, strict=True)
    matrix = confusion(truth, predicted, classes)
    assert np.array_equal(matrix, reference.confusion_matrix(truth, predicted, labels=range(classes)))
    expected = {"accuracy": reference.accuracy_score(truth, predicted)}
    for average in ("macro", "micro"):
        for name in ("precision", "recall", "f1"):
            score = getattr(reference, f"{name}_score")
            expected[f"{average}_{name}"] = score(truth, predicted, average=average, zero_division=0)
    found = scores(matrix)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-12)


@given(st.integers(1, 5), st.integers(2, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_a_stack_scores_each_matrix_alone(clients, classes, seed):
    stack = np.random.default_rng(seed).integers(0, 9, (clients, classes, classes))
    stack[:, 0, 0] += 1
    for score in (accuracy, precision, recall, f1):
        assert np.allclose(score(stack), [score(matrix) for matrix in stack], rtol=0, atol=1e-15)


def test_pooled_accuracy_is_the_sample_weighted_mean_and_pooled_f1_is_not_the_mean():
    stack = np.array([[[5, 0], [0, 5]], [[0, 4], [0, 0]]])
    weights = stack.sum((1, 2))
    assert accuracy(stack.sum(0)) == pytest.approx(spread(accuracy(stack), weights).weighted_mean)
    assert f1(stack.sum(0)) != pytest.approx(f1(stack).mean())


def test_a_matrix_without_samples_has_no_score():
    assert np.isnan(accuracy(np.zeros((3, 3))))
    assert np.isnan(f1(np.zeros((3, 3))))
    assert np.isnan(recall(np.zeros((3, 3)), "micro"))


def test_labels_outside_the_classes_are_refused():
    with pytest.raises(ValueError, match=r"0\.\.1"):
        confusion([0, 2], [0, 1], 2)
    with pytest.raises(ValueError, match="equally long"):
        confusion([0, 1], [0], 2)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_spread_follows_its_definitions(values, random):
    weights = [random.randint(1, 50) for _ in values]
    found = spread(values, weights)
    mean = sum(values) / len(values)
    assert found.mean == pytest.approx(mean)
    assert found.weighted_mean == pytest.approx(np.average(values, weights=weights))
    assert found.deviation == pytest.approx(
        (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
    )
    lowest = sorted(values)[: max(1, len(values) // 10)]
    assert found.worst_decile == pytest.approx(sum(lowest) / len(lowest))
    assert (found.minimum, found.maximum) == (min(values), max(values))
    shuffled = list(zip(values, weights, strict=True))
    random.shuffle(shuffled)
    again = spread(*zip(*shuffled, strict=True))
    assert again.weighted_mean == pytest.approx(found.weighted_mean)


@pytest.mark.parametrize(
    ("values", "weights"), [([], None), ([0.5], [0.0]), ([0.5, 0.6], [1.0]), ([0.5, 0.6], [2.0, -1.0])]
)
def test_spread_refuses_what_has_no_mean(values, weights):
    with pytest.raises(ValueError, match=r"weight"):
        spread(values, weights)
