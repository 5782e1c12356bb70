"""The process of trainers: its numbers are those of a plain loop, and trainers that share a base do not affect each other."""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from fulmen_algorithm.loops.calls import Close, Draw, Open, Opened, Pass, Sampled, Step, Stepped, WriteState
from fulmen_algorithm.loops.worker import LoopWorker, base_bytes
from fulmen_algorithm.training.primitives_settings import AdamStep, PassResult
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import LoraSettings

EPSILON = 1e-5
"""With a much smaller one, Adam makes a whole step of a gradient that is nothing but rounding."""
ADAM = AdamStep(learning_rate=1e-2, beta1=0.9, beta2=0.95, epsilon=EPSILON, weight_decay=0.1, max_grad_norm=1.0)
LORA = LoraSettings(rank=4, dropout=0.1).model_dump_json().encode()


class Trainer:
    """A trainer of a worker in this process."""

    def __init__(
        self, worker: LoopWorker, name: str, model: Path, *, seed: int = 0, state: str = "", lora: bytes = b""
    ):
        self.worker, self.name = worker, name
        self.opened = self.ask(Open(trainer=name, model=str(model), lora=lora, seed=seed, state=state), Opened)

    def ask(self, call: Any, kind: Any = None) -> Any:
        answer = self.worker.answer(msgspec.msgpack.encode(call))
        if answer.error:
            raise RuntimeError(answer.error + answer.text)
        return msgspec.msgpack.decode(answer.result, type=kind) if kind else None

    def backward(self, rows: list[Row], loss: bytes = b"", weights: list[list[float]] | None = None) -> PassResult:
        given = weights or [[float(trains) for trains in row.loss_mask] for row in rows]
        call = Pass(trainer=self.name, rows=rows, weights=given, loss=loss, temperature=1.0, forward_only=False)
        return self.ask(call, PassResult)

    def step(self, **changes: float) -> Stepped:
        return self.ask(Step(trainer=self.name, step=replace(ADAM, **changes)), Stepped)

    def weights(self) -> dict[str, torch.Tensor]:
        model = self.worker._trainers[self.name].policy.model
        return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    def draw(self, **changes: Any) -> Sampled:
        given = {"prompt_ids": [1, 2, 3], "messages": b"", "count": 2, "max_tokens": 5, "temperature": 1.0}
        return self.ask(Draw(trainer=self.name, **{**given, "top_p": 1.0, "seed": 3, **changes}), Sampled)


@pytest.fixture
def worker() -> LoopWorker:
    return LoopWorker(argparse.Namespace(device="cpu", threads=1))


def plain_logprobs(model: Any, row: Row) -> torch.Tensor:
    ids = torch.tensor([row.token_ids])
    return model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)


def plain_adam(model: Any) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=EPSILON)


def test_a_supervised_loop_equals_a_plain_one(worker: LoopWorker, model_dir: Path, rows: list[Row]) -> None:
    trainer = Trainer(worker, "t", model_dir)
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    optimizer, chance = plain_adam(plain), random.Random(1)

    for _ in range(4):
        weights = [[chance.uniform(0.5, 2.0) if trains else 0.0 for trains in row.loss_mask] for row in rows]
        mass = sum(map(sum, weights))
        result = trainer.backward(rows, weights=weights)
        stepped = trainer.step(divisor=mass)

        terms = [(plain_logprobs(plain, row) * torch.tensor(w[1:])).sum() for row, w in zip(rows, weights, strict=True)]
        loss = -torch.stack(terms).sum()
        (loss / mass).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert result.loss_sum == pytest.approx(loss.item(), rel=1e-5)
        assert result.weight_sum == pytest.approx(mass)
        assert stepped.grad_norm == pytest.approx(float(norm), rel=1e-4)

    for name, weight in trainer.weights().items():
        torch.testing.assert_close(weight, plain.get_parameter(name).detach(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "term"),
    [
        ("reinforce", lambda pi, mu, a: -a * pi),
        ("importance", lambda pi, mu, a: -(pi - mu).exp() * a),
        ("clip", lambda pi, mu, a: -torch.minimum((pi - mu).exp() * a, (pi - mu).exp().clamp(0.8, 1.28) * a)),
    ],
)
def test_the_gradient_of_a_policy_loss_is_that_of_its_formula(
    worker: LoopWorker, model_dir: Path, rows: list[Row], kind: str, term: Any
) -> None:
    trainer = Trainer(worker, "t", model_dir)
    result = trainer.backward(rows, loss=b'{"kind": "%s"}' % kind.encode())

    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    parts = []
    for row in rows:
        mu, a = torch.tensor(row.old_logprobs[1:]), torch.tensor(row.advantages[1:])
        parts.append((term(plain_logprobs(plain, row), mu, a) * torch.tensor(row.loss_mask[1:])).sum())
    loss = torch.stack(parts).sum()
    loss.backward()

    assert result.loss_sum == pytest.approx(loss.item(), abs=1e-4)
    for name, parameter in worker._trainers["t"].policy.model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, atol=2e-5, rtol=1e-4)


def test_two_calls_add_up_to_one(worker: LoopWorker, model_dir: Path, rows: list[Row]) -> None:
    once, twice = Trainer(worker, "once", model_dir), Trainer(worker, "twice", model_dir)
    for _ in range(3):
        whole = once.backward(rows)
        parts = [twice.backward(rows[:4]), twice.backward(rows[4:])]
        assert sum(part.loss_sum for part in parts) == pytest.approx(whole.loss_sum, rel=1e-6)
        once.step(divisor=20.0)
        twice.step(divisor=20.0)
    for name, weight in once.weights().items():
        torch.testing.assert_close(weight, twice.weights()[name], atol=2e-6, rtol=1e-5)


def test_adapters_on_one_base_are_trained_as_if_each_were_alone(model_dir: Path, rows: list[Row]) -> None:
    def trained(names: list[str]) -> dict[str, Any]:
        worker = LoopWorker(argparse.Namespace(device="cpu", threads=1))
        trainers = [Trainer(worker, name, model_dir, seed=len(name), lora=LORA) for name in names]
        losses: dict[str, list[Any]] = {name: [] for name in names}
        for step in range(3):
            for each in trainers:
                half = rows[: 3 + len(each.name)]
                losses[each.name] += [each.backward(half).loss_sum, each.draw(seed=step)]
            for each in trainers:
                losses[each.name].append(each.step().grad_norm)
        return {each.name: (losses[each.name], each.weights()) for each in trainers}

    together = trained(["a", "bb", "ccc"])

    for name, (losses, weights) in together.items():
        alone_losses, alone = trained([name])[name]
        assert losses == alone_losses
        assert all(torch.equal(weight, alone[key]) for key, weight in weights.items())


def test_a_base_is_in_memory_once(worker: LoopWorker, model_dir: Path, rows: list[Row]) -> None:
    first = Trainer(worker, "t0", model_dir, lora=LORA)
    base = base_bytes(worker)[0] - base_bytes(worker)[1]
    trainers = [first, *(Trainer(worker, f"t{n}", model_dir, seed=n, lora=LORA) for n in range(1, 5))]
    for each in trainers:
        each.backward(rows)
        each.step()

    total, adapters = base_bytes(worker)
    assert total == base + adapters
    assert adapters == 5 * sum(weight.nbytes for weight in first.weights().values())

    for each in trainers:
        each.ask(Close(trainer=each.name))
    assert worker._bases == {}


def test_a_saved_trainer_continues_bit_for_bit(
    worker: LoopWorker, model_dir: Path, rows: list[Row], tmp_path: Path
) -> None:
    def rest(trainer: Trainer) -> list[Any]:
        trainer.backward(rows[5:])
        return [trainer.step().grad_norm, trainer.backward(rows).loss_sum, trainer.draw()]

    for lora in (b"", LORA):
        trainer = Trainer(worker, "t", model_dir, lora=lora)
        trainer.backward(rows)
        trainer.step()
        trainer.backward(rows[:5])  # not stepped yet
        folder = tmp_path / f"state-{len(lora)}"
        folder.mkdir()
        trainer.ask(WriteState(trainer="t", folder=str(folder)))
        expected = rest(trainer)
        trainer.ask(Close(trainer="t"))

        assert rest(Trainer(worker, "t", model_dir, lora=lora, state=str(folder))) == expected


def test_a_pass_that_fails_leaves_the_gradient_of_earlier_ones(
    worker: LoopWorker, model_dir: Path, rows: list[Row]
) -> None:
    trainer = Trainer(worker, "t", model_dir)
    trainer.backward(rows[:3])
    model = worker._trainers["t"].policy.model
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    beyond = replace(rows[3], token_ids=(10**6, *rows[3].token_ids[1:]))

    with pytest.raises(RuntimeError):
        trainer.backward([rows[4], beyond])

    assert all(torch.equal(before[name], p.grad) for name, p in model.named_parameters())


def test_a_step_whose_gradient_is_not_finite_changes_nothing(
    worker: LoopWorker, model_dir: Path, rows: list[Row]
) -> None:
    trainer = Trainer(worker, "t", model_dir)
    before = trainer.weights()
    trainer.backward(rows, weights=[[3e38 * trains for trains in row.loss_mask] for row in rows])

    assert trainer.step().skipped
    assert all(torch.equal(before[name], weight) for name, weight in trainer.weights().items())
    trainer.backward(rows)
    assert not trainer.step().skipped


def test_what_is_sampled_has_the_log_probabilities_that_training_computes(worker: LoopWorker, model_dir: Path) -> None:
    trainer = Trainer(worker, "t", model_dir, lora=LORA)
    drawn = trainer.draw(count=3, max_tokens=6)
    assert drawn == trainer.draw(count=3, max_tokens=6)

    for each in drawn.completions:
        ids = (*drawn.prompt_ids, *each.token_ids)
        mask = (False,) * len(drawn.prompt_ids) + (True,) * len(each.token_ids)
        zeros = (0.0,) * len(ids)
        row = Row(
            rollout_id="r",
            token_ids=ids,
            loss_mask=mask,
            old_logprobs=zeros,
            advantages=zeros,
            policy_versions=(0,) * len(ids),
        )
        call = Pass(
            trainer="t", rows=[row], weights=[list(map(float, mask))], loss=b"", temperature=1.0, forward_only=True
        )
        result = trainer.ask(call, PassResult)
        assert result.logprobs[0][len(drawn.prompt_ids) :] == pytest.approx(each.logprobs, abs=1e-5)
    assert all(p.grad is None for p in worker._trainers["t"].policy.model.parameters())
