"""Receipts add up, read as plain facts, and their file is no condition of the cache's work."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from sidequest_langchain.policy.receipts import ActReceipt, ReceiptLog, runs_of
from sidequest_langchain.policy.returning import CostModel

ACT = ActReceipt(
    verb="evict",
    outcome="done",
    policy="h2o",
    reason="cold",
    segment_id=3,
    path="a",
    n_rows=4,
    bits=None,
    freed_bytes=2048,
    mass=0.25,
    kl=0.01,
    is_forced=False,
    exact=False,
    step=7,
    runs=((5, 6), (9, 10)),
    text="naïve … 日本",
)


@pytest.mark.parametrize(
    ("positions", "runs"),
    [
        ([], ()),
        ([4], ((4, 4),)),
        ([0, 1, 2], ((0, 2),)),
        ([1, 3, 4, 9], ((1, 1), (3, 4), (9, 9))),
    ],
)
def test_runs(positions, runs):
    assert runs_of(positions) == runs


def test_sums(tmp_path):
    log = ReceiptLog(tmp_path / "log", n_kept=2)
    told = []
    log.observers.append(told.append)
    acts = [
        ACT,
        replace(ACT, verb="compress", n_rows=64, bits=8, mass=0.5, kl=None, freed_bytes=100),
        replace(ACT, verb="archive", n_rows=3, is_forced=True, kl=0.3),
        replace(ACT, verb="restore", n_rows=2, freed_bytes=-700, mass=0.0),
        replace(ACT, outcome="refused", n_rows=1000, mass=1.0, kl=9.0),
        replace(ACT, outcome="observed", n_rows=1000),
        replace(ACT, outcome="failed", n_rows=1000),
        replace(ACT, verb="hide", n_rows=5, freed_bytes=0),
    ]
    log.add(acts[:3])
    log.add([])
    log.add(acts[3:])
    total = log.summary()
    assert total.n_acts == 5
    assert (total.n_rows_evicted, total.n_rows_compressed) == (9, 64)
    assert (total.n_rows_archived, total.n_rows_restored) == (3, 2)
    assert total.freed_bytes == 2048 + 100 + 2048 - 700
    assert (total.most_kl, total.n_refused, total.n_forced) == (0.3, 1, 1)
    assert total.mass == pytest.approx(1.0), "of one cycle's acts together"
    assert list(log.receipts()) == acts[-2:]
    assert told == acts
    lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        json.loads(json.dumps(act.to_json())) for act in acts
    ]
    assert "naïve … 日本" in lines[0]


def test_a_file_that_cannot_be_written(tmp_path, caplog):
    log = ReceiptLog(tmp_path / "no" / "log")
    with caplog.at_level(logging.WARNING):
        log.add([ACT])
        log.add([ACT])
    assert caplog.text.count("no longer written") == 1
    assert log.summary().n_acts == 2


def test_an_observer_that_fails(caplog):
    log, told = ReceiptLog(), []

    def failing(receipt):
        raise KeyError(receipt.verb)

    log.observers += [failing, told.append]
    log.add([ACT])
    assert told == [ACT]
    assert "observer" in caplog.text


def test_costs_are_what_was_measured():
    costs = CostModel()
    costs.restored(1000, 1.0)
    costs.prefilled(10, 1.0)
    assert costs.is_restore_cheaper(900, 10)
    assert not costs.is_restore_cheaper(1100, 10)
    costs.restored(11_000, 1.0)
    assert costs.bytes_a_second == pytest.approx(0.7 * 1000 + 0.3 * 11_000)
    costs.prefilled(1000, 0.0)
    assert costs.tokens_a_second > 10
