"""int8 on real data: a small version of benchmarks/int8_accuracy.py, one model that is trained for a few epochs."""

from __future__ import annotations

import pytest
import torch
from benchmarks import int8_accuracy as study


@pytest.fixture(scope="module")
def model():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # for sequences this short, as quick as two
    yield study.trained(2, epochs=6, activation="relu")
    torch.set_num_threads(before)


def test_int8_names_the_same_classes(model):
    began = study.logits(model)
    right = study.right(began)
    assert right > 300  # of 370
    rows = [*study.after_training(model, began), *study.by_training("QAT", model, began, study.Tuning(1, 1e-5), 0)]
    assert {row.name: row.flips <= 3 for row in rows} == {row.name: True for row in rows}
    assert max(row.error for row in rows) < 0.02
    assert rows[2].own_flips == 0
    assert rows[2].own_error < 0.005


def test_equalization_and_training_win_back_what_outliers_cost(model):
    spiked = study.with_outliers(model, 2)
    began = study.logits(spiked)
    right = study.right(began)
    assert abs(right - study.right(study.logits(model))) <= 1  # the same function
    _, static = study.after_training(spiked, began)
    lost = right - static.right
    assert lost > 50
    for row in study.after_training(spiked, began, even=True):
        assert row.flips <= 3
        assert row.right >= right - 0.1 * lost
    trained, _ = study.by_training("QAT", spiked, began, study.Tuning(4, 1e-3), 2)
    assert trained.right >= right - 0.3 * lost


@pytest.mark.slow
def test_the_table_of_the_docs_holds():
    right, rows = study.ordinary(study.trained(0), 0)
    assert right >= 364
    assert all(row.flips <= 3 for row in rows)
    right, rows = study.outliers(study.trained(0, activation="relu"), 0)
    found = {row.name: row for row in rows}
    lost = right - found["static"].right
    assert lost > 30
    for name in ("QAT", "equalized, dynamic", "equalized, static", "equalized, QAT"):
        assert found[name].right >= right - 0.1 * lost
    assert "\n".join(study.table("with outliers", [(right, rows)])).count("\n| ") == 1 + len(rows)
