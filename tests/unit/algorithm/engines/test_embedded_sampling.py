# ruff: noqa: N806 (tensor names end with their shape)
import numpy as np
import pytest
import torch

from fulmen_algorithm.engines.embedded.protocol import Sampling
from fulmen_algorithm.engines.embedded.sampling import PerRequestSampler

DRAWS = 20_000


def sampler(*samplings: Sampling) -> PerRequestSampler:
    shared = torch.Generator().manual_seed(0)
    return PerRequestSampler(samplings, shared=shared, version=lambda: 5, device=torch.device("cpu"))


def sampling(temperature: float = 1.0, top_p: float = 1.0, seed: int | None = None) -> Sampling:
    return Sampling(temperature=temperature, top_p=top_p, max_tokens=1, stop=(), seed=seed)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.8)])
def test_draws_follow_the_distribution_that_is_recorded(temperature, top_p):
    logits_V = np.array([2.0, 1.0, 0.0, -1.0, 0.5])
    exact_V = np.exp(logits_V / temperature)
    exact_V /= exact_V.sum()
    if top_p < 1:
        kept = np.argsort(-exact_V)[: int(np.searchsorted(np.cumsum(np.sort(exact_V)[::-1]), top_p)) + 1]
        exact_V = np.array([p if i in kept else 0.0 for i, p in enumerate(exact_V)])
        exact_V /= exact_V.sum()
    draw = sampler(*[sampling(temperature, top_p)] * DRAWS)
    scores_BV = draw(torch.zeros(DRAWS, 1, dtype=torch.int64), torch.tensor(logits_V).repeat(DRAWS, 1))
    recorded_V = draw.logprobs_BV[0].exp().numpy()
    np.testing.assert_allclose(recorded_V, exact_V, atol=1e-6)
    counts_V = np.bincount(scores_BV.argmax(-1).numpy(), minlength=5)
    # Six standard deviations of a binomial share: the seed is fixed, so this either holds for ever or never.
    spread_V = 6 * np.sqrt(exact_V * (1 - exact_V) / DRAWS)
    assert np.all(np.abs(counts_V / DRAWS - exact_V) <= spread_V + 1e-9)


def test_a_greedy_row_records_the_plain_distribution_and_draws_its_mode():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    draw = sampler(sampling(0.0, seed=4))
    assert draw(torch.zeros(1, 1, dtype=torch.int64), logits).argmax().item() == 1
    assert torch.allclose(draw.logprobs_BV, logits.log_softmax(-1))
    assert draw.version_used == 5


def test_a_seeded_row_draws_the_same_in_any_batch():
    logits_V = torch.zeros(1000)
    alone, crowd = sampler(sampling(seed=3)), sampler(sampling(), sampling(seed=3), sampling(seed=4))
    ids = torch.zeros(3, 1, dtype=torch.int64)
    for _ in range(5):
        expected = alone(ids[:1], logits_V[None]).argmax(-1)
        drawn = crowd(ids, logits_V.repeat(3, 1)).argmax(-1)
        assert drawn[1] == expected
        assert drawn[2] != expected
