"""Teacher forcing: log-probabilities as plain transformers gives them, divergences by hand."""

from __future__ import annotations

import math

import pytest
import torch

from sidequest_langchain.config import CacheConfig
from sidequest_langchain.engine.engine import Engine
from sidequest_langchain.evaluation.forcing import Recording, divergence, teacher_forced
from tests.engine.driving import ask, ids, model_of, run
from tests.support.tok import byte_tokenizer


@pytest.fixture
def engine():
    made = Engine(model_of("llama"), byte_tokenizer(), config=CacheConfig(prefill_chunk=16))
    yield made
    made.close()


class TestTeacherForced:
    @pytest.mark.parametrize("n_from", [1, 40, 69])
    def test_is_what_a_plain_forward_gives(self, engine, n_from):
        text = ids(70)
        found = teacher_forced(engine, text, n_from)

        with torch.no_grad():
            logits = model_of("llama")(input_ids=torch.tensor([text])).logits[0]
        wanted = torch.log_softmax(logits.float(), -1)[n_from - 1 : -1]
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)

    def test_an_end_of_turn_token_is_a_token(self, engine):
        end = next(iter(engine.eos_ids))

        assert len(teacher_forced(engine, [*ids(10), end, *ids(5)], 8)) == 8

    @pytest.mark.parametrize("n_from", [0, 10])
    def test_nothing_to_force_is_refused(self, engine, n_from):
        with pytest.raises(ValueError, match=r"from 1 to 9 for 10 ids, found"):
            teacher_forced(engine, ids(10), n_from)


class TestRecording:
    def test_without_tokens_it_changes_nothing(self, engine):
        free, recording = run(engine, ask(ids(30), 12)), Recording()
        recorded = run(engine, ask(ids(30), 12, constraint=recording))

        assert recorded.token_ids == free.token_ids
        assert tuple(recording.token_ids[: len(free.token_ids)]) == free.token_ids
        assert len(recording.log_probs()) == len(recording.token_ids)

    def test_what_is_forced_is_answered(self, engine):
        forced = ids(9, seed=3)
        recording = Recording(forced)
        result = run(engine, ask(ids(30), 50, constraint=recording))

        assert list(result.token_ids) == forced
        assert recording.token_ids == forced


class TestDivergence:
    P = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]])
    Q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]])

    def test_of_the_same_is_nothing(self):
        found = divergence(self.P.log(), self.P.log(), [0, 1])

        assert (found.kl, found.kl_max, found.top1) == (0.0, 0.0, 1.0)
        assert found.nll == found.nll_full

    def test_by_hand(self):
        found = divergence(self.P.log(), self.Q.log(), [0, 2])
        kls = [
            sum(p * math.log(p / q) for p, q in zip(a, b, strict=True))
            for a, b in zip(self.P.tolist(), self.Q.tolist(), strict=True)
        ]

        assert found.n_tokens == 2
        assert found.kl == pytest.approx(sum(kls) / 2, rel=1e-5)
        assert found.kl_max == pytest.approx(max(kls), rel=1e-5)
        assert found.top1 == 0.5
        assert found.nll == pytest.approx(-(math.log(0.5) + math.log(0.5)) / 2)
        assert found.nll_full == pytest.approx(-(math.log(0.7) + math.log(0.3)) / 2)

    def test_of_other_tokens_is_refused(self):
        with pytest.raises(ValueError, match="2 and 1 steps were given for 2 tokens"):
            divergence(self.P.log(), self.Q[:1].log(), [0, 2])
