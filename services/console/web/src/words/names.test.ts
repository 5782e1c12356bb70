import { expect, test } from "vitest";

import { FailureKind } from "../api/gen/fulmen/store/v1/failure_pb";
import { actionName, actionOf, failureName, metricName } from "./names";

test.each([
  ["loss", "loss"],
  ["grad_norm", "gradient norm, before clipping"],
  ["groups_no_variance", "groups with equal rewards"],
  ["spent_generation_wait_seconds", "time spent, generation wait, seconds"],
  ["role_solver_reward_mean", "role solver reward, mean"],
  ["rollouts_per_second", "rollouts per second"],
  ["my_own_figure", "my own figure"],
])("the metric %s is called %s", (metric, name) => expect(metricName(metric)).toBe(name));

test.each([
  ["ProjectService/IssueToken", "Issue token"],
  ["RolloutService/PauseQueue", "Pause queue"],
  ["RunnerService/Drain", "Drain runner"],
  ["RunnerRegistryService/DrainRunner", "Drain runner"],
  ["RouteService/PutRoute", "Set route"],
  ["TrainingRunService/CancelTrainingRun", "Cancel training run"],
])("the action %s is called %s", (action, name) => expect(actionName(action)).toBe(name));

test.each([
  ["issue token", "IssueToken"],
  ["  Pause  queue ", "PauseQueue"],
  ["set route", "PutRoute"],
  ["IssueToken", "IssueToken"],
  ["ProjectService/IssueToken", "ProjectService/IssueToken"],
  ["", ""],
])("who types %j looks for %j", (typed, action) => expect(actionOf(typed)).toBe(action));

test("failures have plain names", () => {
  expect(failureName(FailureKind.LEASE_LOST)).toBe("lease expired");
  expect(failureName(FailureKind.AGENT_ERROR)).toBe("agent error");
});
