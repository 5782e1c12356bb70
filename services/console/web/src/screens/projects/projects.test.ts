import { create } from "@bufbuild/protobuf";
import { expect, test } from "vitest";

import { BudgetPeriod } from "../../api/gen/fulmen/store/v1/model_limits_pb";
import { ProjectSchema } from "../../api/gen/fulmen/store/v1/project_service_pb";
import { budgetWords, fieldNames, limitsOf, withLimits } from "./projects";

const project = create(ProjectSchema, {
  name: "projects/a",
  etag: "7",
  weight: 100,
  maxRunning: 50,
  retention: { seconds: 864_000n },
  rules: {},
  modelLimits: {
    attemptTokenBudget: 9n,
    budgets: [
      { subject: "agent/x", limitMicros: 1n },
      { subject: "project", limitMicros: 5_000_000n, spentMicros: 1_200_000n, period: BudgetPeriod.DAY },
    ],
  },
});

test("limits that are read and written back are unchanged", () => {
  const again = withLimits(project, limitsOf(project));
  expect(limitsOf(again)).toEqual(limitsOf(project));
  expect([again.etag, again.modelLimits?.attemptTokenBudget, again.rules?.$typeName]).toEqual([
    "7",
    9n,
    project.rules?.$typeName,
  ]);
  expect(again.modelLimits?.budgets.map(({ subject }) => subject)).toEqual(["agent/x", "project"]);
});

test("an empty field is no limit", () => {
  const none = { weight: "", maxRunning: "", maxQueued: "", retentionDays: "", budgetDollars: "", budgetPeriod: "day" };
  const free = withLimits(project, none);
  expect(limitsOf(free)).toEqual({ ...none, budgetPeriod: "month" });
  expect(free.modelLimits?.budgets.map(({ subject }) => subject)).toEqual(["agent/x"]);
});

test("what is no number is named", () => {
  const limits = { ...limitsOf(project), weight: "many", budgetDollars: "-1" };
  const problem = (() => {
    try {
      withLimits(project, limits);
    } catch (error) {
      return error as RangeError;
    }
  })();
  expect(fieldNames(problem!)).toBe("Weight, Budget");
});

test("a budget is told with what is spent of it", () => {
  expect(budgetWords(project)).toBe("$1.20 of $5.00 a day");
  expect(budgetWords(create(ProjectSchema, {}))).toBe("");
});
