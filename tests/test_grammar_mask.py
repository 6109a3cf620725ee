"""The benchmark of grammars runs, on a small model and little work."""

from __future__ import annotations

import json

import pytest

from benchmarks import grammar_mask
from sidequest_langchain.engine import scheduler


@pytest.mark.real
@pytest.mark.usefixtures("real_smollm")
def test_a_smoke_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model smollm2-135m --trunk-tokens 16 --new-tokens 4 --call-tokens 24 --rounds 1"
    n_forced = scheduler.N_FORCED
    assert grammar_mask.main(words.split()) == 0
    assert n_forced == scheduler.N_FORCED
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(document["share"]["share"]) == set(grammar_mask.GRAMMARS)
    assert document["share"]["share_max"] > 0
    passes = {name: each["passes"] for name, each in document["forcing"].items()}
    assert passes["together"] < passes["one by one"] / 2
    cases = document["libraries"]["llguidance"]["cases"]
    assert set(cases.values()) == {"right", "refuses"}, "a schema came out wrong"
    refused = {name for name, what in cases.items() if what == "refuses"}
    assert refused == {"uniqueItems", "not", "oneOf", "lookahead"}
