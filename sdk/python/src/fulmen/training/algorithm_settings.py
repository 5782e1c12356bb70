"""Settings of the built-in algorithms. Made by tools/algorithm_classes.py of those of the algorithm service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class RunSettings(TypedDict, total=False):
    """Settings of all runs.

    Attributes:
        steps: Steps of the run.
        seed: Random seed of the run: order of tasks, shuffling, building of the model.
        checkpoint_every: Steps between checkpoints; the last step always has one.
        engine: Engine that serves the policy, such as `{kind = "embedded"}`.
    """

    steps: int
    seed: int
    checkpoint_every: int
    engine: Mapping[str, Any]


class AlgorithmSettings(RunSettings, total=False):
    """Settings of an algorithm that trains weights.

    Attributes:
        learning_rate: Peak learning rate; `"auto"` chooses it by the size of the model (`training.defaults`).
        optimizer: `{kind = "adamw"}`, `{kind = "muon"}` or `{kind = "sgd"}` with its settings; SGD needs a higher learning rate.
        weight_decay: Decoupled weight decay; not for SGD.
        schedule: `constant`, `linear` or `cosine`, after the warm-up; the latter two end at 0 with the run.
        warmup_steps: Optimiser steps of linear warm-up; at most those of the run.
        max_grad_norm: Maximum global norm of the gradients, to which larger ones are scaled down.
        explosion_factor: Ratio of an optimiser step's gradient norm to the median of the last 64 above which the step
            is skipped and counted; `"none"` for no limit.
        collapse: Reaction to a collapsing reward: `{kind = "notice"}` to say so, `{kind = "rollback", max_rollbacks = 2}`
            to resume from the best checkpoint, or `{kind = "none"}`.
        token_budget: Maximum number of positions of a micro-batch; affects memory, not the result.
        parallel: Processes that train: `{kind = "none"}` for the service's own, `{kind = "ddp", ranks = 2}` for ranks
            with all weights, `{kind = "fsdp2", ranks = 2}` for ranks with a part of them, `{kind = "fsdp2", ranks = 4,
            shard = 2}` for two copies in two parts each; `cluster` names other machines.
        exchange: Exchange of gradients between ranks of `ddp`, or between copies of `fsdp2`, such as
            `{codec = "dgc", ratio = 100}`; null for uncompressed gradients.
        precision: `fp32` or `bf16`, of the forward and backward passes; `auto` is bf16 on GPUs and fp32 on CPUs.
        gradient_checkpointing: Recomputes the activations of each layer in the backward pass instead of storing them.
        passes: How passes are computed, such as `{attention = "flash_attention_2", compile = true}`.
        write_behind: Trains on while a version is published and a checkpoint is written, from a copy in memory; in the service's
            own process, and versions only by algorithms that train on rollouts of older ones.
        weights: Format of published versions: `{kind = "full"}` or `{kind = "delta"}` with its settings.
        lora: Low-rank adapters that are trained instead of all weights; null for all weights.
    """

    learning_rate: float | None
    optimizer: Mapping[str, Any]
    weight_decay: float
    schedule: str
    warmup_steps: int
    max_grad_norm: float
    explosion_factor: float | None
    collapse: Mapping[str, Any]
    token_budget: int
    parallel: Mapping[str, Any]
    exchange: Mapping[str, Any] | None
    precision: str
    gradient_checkpointing: bool
    passes: Mapping[str, Any]
    write_behind: bool
    weights: Mapping[str, Any]
    lora: Mapping[str, Any] | None


class SamplingSettings(AlgorithmSettings, total=False):
    """Settings in addition to those of every algorithm.

    Attributes:
        prompts_per_step: B, groups per training step.
        temperature: Sampling temperature of training rollouts.
        max_tokens: Maximum length of the answer to one model call, in tokens; `"auto"` chooses it by the size of the
            model: 64 up to 1 million parameters, 1024 from 500 million on, and at most half of its longest sequence.
        validate_every: Steps between validations, in addition to one at the start and one at the end.
        failure_reward: Reward of a failed rollout in a validation; choose at most the worst
            reward, so that failures do not raise the mean.
        rollout_timeout_s: Limit of one attempt, in seconds.
        rollout_attempts: Maximum number of attempts of one rollout; failures of the agent are not retried.
        rollout_restart_lost: Whether an attempt after a lost one samples everything anew; otherwise it continues where that one was.
    """

    prompts_per_step: int
    temperature: float
    max_tokens: int | None
    validate_every: int
    failure_reward: float
    rollout_timeout_s: float
    rollout_attempts: int
    rollout_restart_lost: bool


class PolicyGradientSettings(SamplingSettings, total=False):
    """Settings in addition to those of sampling. The defaults were tested on models of 0.5 to 5 M parameters.

    Attributes:
        epochs: Passes over the rows of a step.
        minibatches: Optimiser steps per pass.
        loss: Loss per token: `clip`, `gspo`, `cispo`, `sapo`, `dppo`, `clip_cov`, `kl_cov`, `reinforce` or
            `importance`.
        correction: Off-policy correction of rows sampled by an older policy: `none`, `token`, `sequence`,
            `sequence_mask`, `geometric`, `icepop` or `decoupled`.
        kl: KL penalty against the initial weights: `none`, `loss` or `reward`.
        entropy: Bonus for the entropy of the policy: `none`, `bonus` with a constant coefficient, or `target`, which
            adapts it.
        aggregation: Weights of tokens: `token_mean`, `per_rollout_mean`, `sequence_mean_token_mean`,
            `sequence_mean_token_sum_norm` or `prompt_mean`. `"auto"` chooses by the first rollouts: `per_rollout_mean`
            if they make several model calls, so that long failures do not count more than short successes, else
            `token_mean`.
        proximal: Policy in the denominator of the ratio: `recomputed`, the trained one at the start of the batch, or
            `sampler`.
        advantage: Advantage estimator: `group`, `rloo`, `reinforce_pp`, `opo`, `maxrl`, `gae` with a critic, or
            `none` with a teacher.
        teacher: Adds to the advantage of each token how much likelier a teacher finds it: `none`, `model`, served
            behind the LLM proxy, or `self`, the policy's own weights with a hint.
        rewards: Dimensions of the reward, their weights and normalisation.
        overlong: Penalty for length, such as `{max_tokens = 512, buffer_tokens = 64}`; `"none"` for none. Rollouts
            that `mask_truncated` leaves out are not penalised.
        critic: Critic for `gae`.
        credit: One advantage per rollout (`rollout`) or per step (`step_return`, `step_groups`).
        roles: Agents of a rollout that train, and their baselines.
        mask_truncated: Leaves out rollouts whose answer reached the token limit, instead of scoring them as they are.
    """

    epochs: int
    minibatches: int
    loss: Mapping[str, Any]
    correction: Mapping[str, Any]
    kl: Mapping[str, Any]
    entropy: Mapping[str, Any]
    aggregation: Mapping[str, Any] | None
    proximal: str
    advantage: Mapping[str, Any]
    teacher: Mapping[str, Any]
    critic: Mapping[str, Any]
    rewards: Mapping[str, Any]
    overlong: Mapping[str, Any] | None
    credit: Mapping[str, Any]
    roles: Mapping[str, Any]
    mask_truncated: bool


class GrpoSettings(PolicyGradientSettings, total=False):
    """Settings of `grpo`, in addition to the common ones.

    Attributes:
        group_size: Rollouts per task.
        max_staleness: eta, maximum staleness of a rollout, in steps; 0 is fully synchronous.
        refill_limit: Maximum share of additional groups that replace groups without variance: a step examines at most
            prompts_per_step * (1 + refill_limit) groups, and trains on those with variance.
        engine_mismatch: Limits of the difference between the probabilities of engine and trainer.
        on_no_signal: Reaction if rewards do not differ within any group of the first ten steps: `stop` fails the run,
            `notice` says so. `"auto"` is `stop` on a local stack, and otherwise what the operator has set.
        curriculum: Order of the tasks: `none`, each once per epoch, or `difficulty`, which skips solved tasks and tries
            those that are nearly solved more often.
        opponents: Opponents of the policy in self-play: `none`, or `past`, which serves past versions as the model
            `<policy>-past`.
        reward_model: Reward model whose score adds to the reward of each training rollout, such as
            `{model = "judge@3", coefficient = 1.0}`; null for none. Validation is by agent and grader alone.
    """

    group_size: int
    max_staleness: int
    refill_limit: float
    engine_mismatch: Mapping[str, Any]
    on_no_signal: str | None
    curriculum: Mapping[str, Any]
    opponents: Mapping[str, Any]
    reward_model: Mapping[str, Any] | None


class DistillSettings(GrpoSettings, total=False):
    """Settings of `distill` (arXiv:2306.13649): a teacher scores each token that the policy samples, and no reward is
    needed.

    Attributes:
        teacher: `model`, served behind the LLM proxy, or `self`, the policy's own weights with a hint.
        advantage: `none`: the teacher's signal alone. With another estimator the rewards train, too.
        group_size: Rollouts per task; they are not compared.
    """


class EvaluateSettings(RunSettings, total=False):
    """Settings of `evaluate`.

    Attributes:
        steps: Always 1.
        samples: n, rollouts per task.
        pass_at: The k of each pass@k, at most `samples`.
        success_reward: Minimum reward with which a rollout passes.
        failure_reward: Reward of a rollout that the agent failed, in the mean reward; choose at most the worst reward,
            so that failures do not raise the mean.
        temperature: Sampling temperature of the run's policy; calls to other models are not changed.
        max_tokens: Maximum length of an answer of the run's policy, in tokens; null for the agent's own limit.
        confidence: Confidence level of the intervals.
        resamples: Number of bootstrap resamples.
        rollout_timeout_s: Limit of one attempt, in seconds.
        rollout_attempts: Maximum number of attempts of one rollout; failures of the agent are not retried.
        rollout_restart_lost: Whether an attempt after a lost one samples everything anew; otherwise it continues where that one was.
    """

    samples: int
    pass_at: Sequence[int]
    success_reward: float
    failure_reward: float
    temperature: float
    max_tokens: int | None
    confidence: float
    resamples: int
    rollout_timeout_s: float
    rollout_attempts: int
    rollout_restart_lost: bool


class EpochSettings(AlgorithmSettings, total=False):
    """Settings in addition to those of every algorithm.

    Attributes:
        steps: Steps of the run; 0 to set `epochs` instead.
        epochs: Passes over the data, may be fractional; rounded up to whole steps.
        batch_size: Examples per step; each epoch is a new permutation by the seed.
        report_every: Steps between two reports of metrics.
    """

    epochs: float | None
    batch_size: int
    report_every: int


class AnswerSettings(EpochSettings, total=False):
    """Settings in addition to those of every algorithm on data.

    Attributes:
        held_out: Share of the prompts that are not trained on; they measure `validation_accuracy`.
    """

    held_out: float


class PairSettings(AnswerSettings, total=False):
    """Settings in addition to those of every algorithm on answers.

    Attributes:
        pairs_per_group: Maximum number of pairs of a group of stored rollouts: the best and the worst, the second best
            and the second worst, and so on.
        min_gap: Minimum difference between the rewards of a pair of stored rollouts.
    """

    pairs_per_group: int
    min_gap: float


class DpoSettings(PairSettings, total=False):
    """Settings of `dpo`, in addition to those of every algorithm on pairs.

    Attributes:
        loss: Loss of a pair: `{kind = "sigmoid", beta = 0.1}` or `{kind = "ipo", beta = 0.1}`.
    """

    loss: Mapping[str, Any]


class KtoSettings(AnswerSettings, total=False):
    """Settings of `kto`, in addition to those of every algorithm on answers.

    Attributes:
        threshold: Reward from which on a stored rollout is desirable.
        beta: Strength of the tie to the reference policy.
        desirable_weight: Weight of desirable answers; the paper balances it and the other so that weight times number is
            about the same for both.
        undesirable_weight: Weight of undesirable answers.
    """

    threshold: float
    beta: float
    desirable_weight: float
    undesirable_weight: float


class RewardModelSettings(PairSettings, total=False):
    """Settings of `reward_model`, in addition to those of every algorithm on pairs.

    Attributes:
        margin: Factor of the difference of the rewards of a pair by which its scores are to differ; 0 for none. The rewards
            of a pair of `preferences` are 1 and 0.
        centring: Coefficient of the squared sum of the scores of a pair, which keeps their mean near 0; 0 for none.
    """

    margin: float
    centring: float


class SearchSettings(RunSettings, total=False):
    """Settings of every search for a prompt.

    Attributes:
        good_reward: Reward from which on a rollout is not shown to the model that improves the prompt.
        budget: Limits of the search.
        target_reward: Mean reward of the best prompt on training tasks at which the search ends; null for none.
        failure_reward: Reward of a rollout that the agent failed.
        max_prompt_chars: Maximum length of a prompt, in characters.
        temperature: Sampling temperature of the run's policy; calls to other models are not changed.
        max_tokens: Maximum length of an answer of the run's policy, in tokens; null for the agent's own limit.
        rollout_timeout_s: Limit of one attempt, in seconds.
        rollout_attempts: Maximum number of attempts of one rollout; failures of the agent are not retried.
        rollout_restart_lost: Whether an attempt after a lost one samples everything anew; otherwise it continues where that one was.
    """

    good_reward: float
    budget: Mapping[str, Any]
    target_reward: float | None
    failure_reward: float
    max_prompt_chars: int
    temperature: float
    max_tokens: int | None
    rollout_timeout_s: float
    rollout_attempts: int
    rollout_restart_lost: bool


class ApoSettings(SearchSettings, total=False):
    """Settings of `apo`, in addition to those of every search for a prompt.

    Attributes:
        steps: Rounds of the search.
        critic: Model that criticises a prompt, such as `{model = "gpt-x"}`.
        editor: Model that rewrites it; null for the critic.
        beam_width: Number of prompts kept after a round.
        branch_factor: Edits per prompt and round.
        paraphrases: Paraphrases of each edit that become candidates, as in the paper; each costs a call and rollouts.
        concurrency: Edits requested at a time; a killed process loses at most as many answers.
        gradient_tasks: Training tasks on which a prompt is run to find its weaknesses.
        gradient_examples: Number of these shown in one criticism.
        selection: Selection of the beam: `{kind = "halving", tasks = 8}` or `{kind = "ucb", pulls = 32}`.
        patience: Rounds with the same best prompt after which the search ends; 0 for no limit.
    """

    critic: Mapping[str, Any]
    editor: Mapping[str, Any] | None
    beam_width: int
    branch_factor: int
    paraphrases: int
    concurrency: int
    gradient_tasks: int
    gradient_examples: int
    selection: Mapping[str, Any]
    patience: int


class GepaSettings(SearchSettings, total=False):
    """Settings of `gepa`, in addition to those of every search for a prompt.

    Attributes:
        steps: Proposals: each is one call of the reflector, and at most one new candidate.
        reflector: Model that reads traces and writes a better prompt, such as `{model = "gpt-x"}`.
        pareto_tasks: Training tasks on which every accepted prompt is measured.
        minibatch_tasks: Training tasks on which a proposal must be better than the prompt that it is made of.
        merge_every: Steps from one merge of two prompts of the front to the next; 0 for none.
    """

    reflector: Mapping[str, Any]
    pareto_tasks: int
    minibatch_tasks: int
    merge_every: int


class RejectionSettings(SamplingSettings, total=False):
    """Settings of `rejection`, in addition to those of sampling.

    Attributes:
        group_size: n, rollouts per task.
        keep: Rollouts that are imitated: `{kind = "best", count = 1}` or `{kind = "threshold", min_reward = 1.0}`.
        epochs: Passes over the rows of a step.
        minibatches: Optimiser steps per pass.
        mask_truncated: Leaves out rollouts whose answer reached the token limit: an answer without its end is no example.
    """

    group_size: int
    keep: Mapping[str, Any]
    epochs: int
    minibatches: int
    mask_truncated: bool


class ReplaySettings(PolicyGradientSettings, total=False):
    """Settings of `replay`: the common ones; `temperature` is that of the stored rollouts.

    Attributes:
        collapse: None, because the rewards are those of stored rollouts, whatever the policy has become.
    """


class ServeSettings(RunSettings, total=False):
    """Settings of `serve`.

    Attributes:
        steps: Always 1.
        hours: Time from the start of the run for which the version is served, also across restarts of the service.
    """

    hours: float


class SftSettings(EpochSettings, total=False):
    """Settings of `sft`, in addition to those of every algorithm on data.

    Attributes:
        min_reward: Minimum reward of the other run's rollouts.
        max_per_task: Maximum number of rollouts of one group, best first.
    """

    min_reward: float
    max_per_task: int


class DrGrpoSettings(GrpoSettings, total=False):
    """Settings of `dr_grpo` (arXiv:2503.20783): no division by the standard deviation or the length."""


class DapoSettings(GrpoSettings, total=False):
    """Settings of `dapo` (arXiv:2503.14476): clip-higher, dynamic sampling, token mean and a penalty for length.

    Attributes:
        overlong: Penalty for length: L_max is `max_tokens`, and the penalty grows over its last fifth, as in the paper.
            It counts the tokens of a rollout; set its `max_tokens` if a rollout makes several calls. `"none"` for no
            penalty.
    """


class GspoSettings(GrpoSettings, total=False):
    """Settings of `gspo` (arXiv:2507.18071): the clipped ratio is that of the whole sequence.

    The bounds are narrow, because the mean over a sequence changes little; larger learning rates need wider ones.
    """


class CispoSettings(GrpoSettings, total=False):
    """Settings of `cispo` (arXiv:2506.13585): bounds the weight of a token and keeps its gradient."""


class RlooSettings(GrpoSettings, total=False):
    """Settings of `rloo` (arXiv:2402.14740): leave-one-out baseline with the gradient of REINFORCE.

    The gradient is correct only for one optimiser step per batch.
    """


class ReinforcePpSettings(GrpoSettings, total=False):
    """Settings of `reinforce_pp` (arXiv:2501.03262): token returns, whitened over the batch, under the clipped loss.

    Attributes:
        group_size: Rollouts per task; 1 by default, because rollouts of a group are not compared. The baseline `group`
            needs at least 2.
    """


class PpoSettings(GrpoSettings, total=False):
    """Settings of `ppo` (arXiv:1707.06347): advantages by GAE with a learned critic.

    Attributes:
        group_size: Rollouts per task; 1 by default, because the critic provides the baseline.
    """
