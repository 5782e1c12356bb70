// The one place for plain names of what services name for programs: metrics, actions, kinds of failure. Pages show the plain name, and
// the technical one, which documentation and filters use, on hover.

import { FailureKind } from "../api/gen/fulmen/store/v1/failure_pb";
import { enumWord } from "./format";

/** Metrics whose words do not say it; see docs/metrics.md. */
const METRICS: Record<string, string> = {
  abs_logprob_delta: "sampler against trainer, difference of log-probabilities",
  capped_share: "tokens with a capped weight, share",
  clipped_share: "clipped tokens, share",
  effective_sample_share: "effective samples, share",
  engine_mismatch_kl: "engine against trainer, KL divergence",
  engine_mismatch_logprob_max: "engine against trainer, largest difference of log-probabilities",
  engine_mismatch_logprob_mean: "engine against trainer, mean difference of log-probabilities",
  entropy_estimate: "entropy, nats per token",
  eta_seconds: "time left, seconds",
  grad_norm: "gradient norm, before clipping",
  groups: "groups, all",
  groups_no_variance: "groups with equal rewards",
  groups_too_few_usable: "groups with too few answers that succeeded",
  groups_too_stale: "groups that were too old",
  groups_trained: "groups trained on",
  importance_max: "importance weight, largest",
  importance_mean: "importance weight, mean",
  kl_reference: "KL divergence from the reference",
  kl_sampler_trainer: "KL divergence of sampler and trainer",
  masked_share: "tokens not trained on, share",
  reward_mean: "reward, mean",
  reward_std: "reward, standard deviation",
  rollout_tokens_max: "tokens of a rollout, most",
  rollout_tokens_mean: "tokens of a rollout, mean",
  rollouts_masked: "rollouts not trained on",
  rows: "rows trained on",
  rows_stale: "rows that were too old",
  skipped: "skipped optimiser steps",
  staleness_max: "staleness in steps, largest",
  staleness_mean: "staleness in steps, mean",
  tokens: "tokens trained on",
  tokens_forced: "tokens without an alternative",
  tokens_per_second: "tokens sampled per second",
  trained_tokens_per_second: "tokens trained on per second",
  validation_accuracy: "validation, mean reward",
  validation_failed: "validation, failed rollouts",
  validation_loss: "validation, loss",
  validation_pass_at_1: "validation, pass@1",
  value_loss: "loss of the critic",
};

/** Endings that are units or statistics. */
const ENDINGS: [RegExp, string][] = [
  [/^spent_(.+)_seconds$/, "time spent, $1, seconds"],
  [/^(.+)_per_second$/, "$1 per second"],
  [/^(.+)_seconds$/, "$1, seconds"],
  [/^(.+)_bytes$/, "$1, bytes"],
  [/^(.+)_share$/, "$1, share"],
  [/^(.+)_mean$/, "$1, mean"],
  [/^(.+)_max$/, "$1, largest"],
  [/^(.+)_std$/, "$1, standard deviation"],
];

/** `gradient norm, before clipping` of `grad_norm`. */
export function metricName(metric: string): string {
  const known = METRICS[metric];
  if (known) return known;
  const [pattern, words] = ENDINGS.find(([ending]) => ending.test(metric)) ?? [/$/, ""];
  return metric.replace(pattern, words).replaceAll("_", " ");
}

/** Metrics to choose from, in the order of their plain names. */
export function named(metrics: string[]): { value: string; text: string }[] {
  return metrics.map((value) => ({ value, text: metricName(value) })).sort((a, b) => (a.text < b.text ? -1 : 1));
}

/** Actions whose rpc does not say it. */
const ACTIONS: Record<string, string> = {
  "RouteService/ApplyFile": "Apply a file of routes",
  "RunnerService/Drain": "Drain runner",
  "RunnerService/SetSlots": "Set runner slots",
  CommitUpload: "Finish upload of weights",
  CreateRunLease: "Take on training run",
  GetWeights: "Fetch weights",
  JoinEngine: "Connect engine",
  JoinRanks: "Connect ranks",
  PutRoute: "Set route",
  RollbackRoute: "Roll back route",
  RollbackTrainingRun: "Roll back training run",
};

/** `Issue token` of `ProjectService/IssueToken`. */
export function actionName(action: string): string {
  const method = action.slice(action.lastIndexOf("/") + 1);
  const words = method.replace(/(?<=[a-z0-9])(?=[A-Z])/g, " ").toLowerCase();
  return ACTIONS[action] ?? ACTIONS[method] ?? words.charAt(0).toUpperCase() + words.slice(1);
}

/** The action that someone typed, by its plain name or its rpc: `IssueToken` of `issue token`. */
export function actionOf(typed: string): string {
  const text = typed.trim();
  const known = Object.entries(ACTIONS).find(([, name]) => name.toLowerCase() === text.toLowerCase());
  if (known) return known[0];
  return text.includes(" ")
    ? text.replace(/(?:^|\s+)(\S)(\S*)/g, (_, first: string, rest: string) => first.toUpperCase() + rest)
    : text;
}

const FAILURES: Partial<Record<FailureKind, string>> = {
  [FailureKind.LEASE_LOST]: "lease expired",
  [FailureKind.INFRA]: "infrastructure failed",
  [FailureKind.REWARD_MISSING]: "no reward",
  [FailureKind.RELEASED]: "released by the runner",
  [FailureKind.SUPERSEDED]: "another attempt was first",
  [FailureKind.RUNNER_LOST]: "runner died",
};

/** `lease expired` of `FAILURE_KIND_LEASE_LOST`. */
export function failureName(kind: FailureKind): string {
  return FAILURES[kind] ?? enumWord(FailureKind, kind);
}
