"""Conversations: answers stand in the history, the books are read, a replay forces."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from langchain_core.messages import HumanMessage

from sidequest_langchain.evaluation.conversing import converse, record, replay
from sidequest_langchain.evaluation.sample import Ask, Sample

SAMPLE = Sample(
    asks=(
        Ask(messages=(HumanMessage("plan a trip to Rome"),), max_tokens=6),
        Ask(
            messages=(HumanMessage("and to Oslo"),), max_tokens=5, score=lambda text: len(text) / 9
        ),
    )
)


def test_a_conversation(model):
    outcome = converse(model, SAMPLE)

    first = model.invoke(SAMPLE.asks[0].messages, max_tokens=6)
    second = model.invoke([*SAMPLE.asks[0].messages, first, *SAMPLE.asks[1].messages], max_tokens=5)
    assert outcome.answers == (first.text, second.text)
    assert outcome.scores == (len(second.text) / 9,)
    assert outcome.n_tokens == second.usage_metadata["total_tokens"]
    assert outcome.n_tokens - 1 <= outcome.n_rows <= outcome.n_tokens
    assert 0 < outcome.n_bytes <= outcome.peak_bytes


def test_it_leaves_nothing_resident(model):
    converse(model, SAMPLE)

    assert model.kv.usage().n_tokens == 0


def test_the_peak_is_its_own(model):
    long = Ask(messages=(HumanMessage("a long story " * 50),), max_tokens=4)
    before, after = converse(model, Sample(asks=(long,))), converse(model, SAMPLE)

    assert after.peak_bytes < before.peak_bytes / 2


def test_a_record_answers_what_a_conversation_answers(model):
    recorded, plain = record(model, SAMPLE), converse(model, SAMPLE)

    assert recorded.outcome.answers == plain.answers
    assert len(recorded.answers) == 2
    assert recorded.log_probs.shape == (len(recorded.token_ids), model.engine.vocab_size)


def test_a_replay_over_the_same_cache_diverges_in_nothing(model):
    recorded = record(model, SAMPLE)
    again = replay(model, SAMPLE, recorded)

    assert again.answers == recorded.outcome.answers
    assert again.divergence is not None
    assert again.divergence.n_tokens == len(recorded.token_ids)
    assert again.divergence.kl < 1e-6
    assert again.divergence.top1 == 1.0
    assert again.divergence.nll == pytest.approx(again.divergence.nll_full)


def test_a_replay_sees_another_record(model):
    recorded = record(model, SAMPLE)
    other = dataclasses.replace(
        recorded, log_probs=torch.log_softmax(recorded.log_probs.flip(-1) * 0.5, -1)
    )
    found = replay(model, SAMPLE, other).divergence

    assert found is not None
    assert found.kl > 0.01
