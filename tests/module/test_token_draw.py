"""Drawing one token per row, and noting log-probs step by step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rlstab.module.token_draw import LogprobRecorder, TokenDraw, drawn_tokens


def test_tokens_come_with_their_probabilities() -> None:
    torch.manual_seed(0)
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    draws = drawn_tokens(probabilities.log().expand(40_000, 5))
    shares = torch.bincount(draws.flatten(), minlength=5) / 40_000
    assert shares[1] == 0
    # Four standard deviations of a share of 0.5 over 40,000 draws.
    assert (shares - probabilities).abs().max() < 0.01


def test_a_token_of_probability_zero_is_never_drawn_not_even_at_the_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]])
    for edge, token in ((0.0, 1), (1.0, 2)):
        monkeypatch.setattr(torch, "rand_like", lambda tensor, _edge=edge: torch.full_like(tensor, _edge))
        assert drawn_tokens(scores).tolist() == [[token]]


def test_a_very_rare_token_keeps_its_share_of_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.tensor([[0.0, math.log(1e-12), 0.0]])
    monkeypatch.setattr(torch, "rand_like", lambda tensor: torch.full_like(tensor, 0.5))
    assert drawn_tokens(scores).tolist() == [[1]]


def test_scores_that_are_not_numbers_give_a_token_within_the_vocabulary() -> None:
    assert 0 <= int(drawn_tokens(torch.full((1, 4), math.nan))) < 4


def test_the_drawn_token_is_the_only_choice_left() -> None:
    torch.manual_seed(0)
    scores = TokenDraw()(torch.zeros(3, 1, dtype=torch.long), torch.randn(3, 6))
    assert scores.isinf().sum(dim=1).tolist() == [1, 1, 1]
    assert scores.argmax(dim=1).tolist() == scores.isinf().int().argmax(dim=1).tolist()


class _Fixed(nn.Module):
    def forward(self, logits: torch.Tensor) -> Any:
        return SimpleNamespace(logits=logits)


def test_a_recorder_reports_each_tokens_log_prob_at_the_given_temperature() -> None:
    model, recorder = _Fixed(), LogprobRecorder(temperature=0.5)
    steps = torch.randn(3, 2, 1, 7, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[1, 2, 3], [6, 5, 4]])
    with recorder.attached(model):
        for step in range(3):
            model(steps[step])
            processed = torch.full((2, 7), -math.inf)  # whatever penalties left: the recorder does not look at it
            assert recorder(tokens[:, :step] if step else tokens[:, :1], processed) is processed
    expected = (steps.squeeze(2).transpose(0, 1) / 0.5).log_softmax(-1).gather(2, tokens.unsqueeze(2)).squeeze(2)
    assert torch.allclose(recorder.logprobs(tokens), expected, atol=1e-6)
    assert not model._forward_hooks
