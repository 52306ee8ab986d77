"""Sliced log-probs: the numbers of the whole softmax, without its tensor."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhfd.workers import logprobs
from rlhfd.workers.logprobs import token_scores

TOKENS, HIDDEN, VOCABULARY = 23, 8, 100


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return hidden, head, targets


def whole(hidden, head, targets, temperature):
    log_softmax = torch.log_softmax(hidden.float() @ head.T / temperature, -1)
    return log_softmax.gather(1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)


@pytest.fixture(params=[1, 7, 1000])
def rows(request, monkeypatch):
    monkeypatch.setitem(logprobs.SLICE_ELEMENTS, "cpu", request.param * VOCABULARY)
    return request.param


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_those_of_the_whole_softmax(rows, temperature):
    hidden, head, targets = inputs()
    scores = token_scores(hidden, head, targets, temperature)
    logps, entropy = whole(hidden, head, targets, temperature)
    torch.testing.assert_close(scores.logps, logps)
    torch.testing.assert_close(scores.entropy, entropy)
    upstream = torch.linspace(-1, 2, TOKENS)
    ours = torch.autograd.grad(scores.logps, (hidden, head), upstream)
    theirs = torch.autograd.grad(logps, (hidden, head), upstream)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_a_frozen_head_gets_no_gradient():
    hidden, head, targets = inputs()
    head.requires_grad_(requires_grad=False)
    token_scores(hidden, head, targets, 1.0).logps.sum().backward()
    assert hidden.grad is not None
    assert head.grad is None


def test_it_computes_in_float32_inside_autocast_too():
    hidden, head, targets = inputs(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = token_scores(hidden, head, targets, 1.0)
    assert scores.logps.dtype == torch.float32
    torch.testing.assert_close(scores.logps, whole(hidden, head, targets, 1.0)[0])


class Widest(TorchDispatchMode):
    """The most elements of any tensor that an operation gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_the_whole_logits_never_exist_forward_or_backward(monkeypatch):
    monkeypatch.setitem(logprobs.SLICE_ELEMENTS, "cpu", 4 * VOCABULARY)
    hidden, head, targets = inputs()
    with Widest() as widest:
        token_scores(hidden, head, targets, 1.0).logps.sum().backward()
    assert widest.elements <= max(4 * VOCABULARY, VOCABULARY * HIDDEN)
    assert widest.elements < TOKENS * VOCABULARY
    with Widest() as naive:
        whole(hidden, head, targets, 1.0)
    assert naive.elements == TOKENS * VOCABULARY  # the measure sees what it must see


def test_no_token_at_all_is_no_error():
    hidden, head, _ = inputs()
    scores = token_scores(hidden[:0], head, torch.zeros(0, dtype=torch.long), 1.0)
    assert scores.logps.shape == scores.entropy.shape == (0,)
