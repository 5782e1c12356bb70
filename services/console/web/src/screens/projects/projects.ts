// Projects: what their limits say, and changes of them.

import { clone, create } from "@bufbuild/protobuf";

import {
  BudgetPeriod,
  ModelLimitsSchema,
  type SpendBudget,
  SpendBudgetSchema,
} from "../../api/gen/fulmen/store/v1/model_limits_pb";
import { type Project, ProjectSchema } from "../../api/gen/fulmen/store/v1/project_service_pb";
import { dollars } from "../../words/format";

const DAY_S = 86_400;

/** What a person changes of a project; an empty text means no limit. */
export interface Limits {
  weight: string;
  maxRunning: string;
  maxQueued: string;
  retentionDays: string;
  budgetDollars: string;
  budgetPeriod: string;
}

export const PERIODS: Record<string, { text: string; value: BudgetPeriod }> = {
  total: { text: "in all", value: BudgetPeriod.UNSPECIFIED },
  day: { text: "a day", value: BudgetPeriod.DAY },
  month: { text: "a month", value: BudgetPeriod.MONTH },
};

/** The budget of the project itself; those of runs, keys and agents are others. */
export function ownBudget(project: Project): SpendBudget | undefined {
  return project.modelLimits?.budgets.find(({ subject }) => subject === "project");
}

/** `$1.20 of $5.00 a day` */
export function budgetWords(project: Project): string {
  const budget = ownBudget(project);
  if (!budget) return "";
  const period = Object.values(PERIODS).find(({ value }) => value === budget.period)?.text ?? "";
  return `${dollars(Number(budget.spentMicros) / 1e6)} of ${dollars(Number(budget.limitMicros) / 1e6)} ${period}`;
}

export function limitsOf(project: Project): Limits {
  const budget = ownBudget(project);
  const period = Object.entries(PERIODS).find(([, { value }]) => value === budget?.period)?.[0];
  return {
    weight: project.weight ? String(project.weight) : "",
    maxRunning: project.maxRunning ? String(project.maxRunning) : "",
    maxQueued: project.maxQueued ? String(project.maxQueued) : "",
    retentionDays: project.retention ? String(Number(project.retention.seconds) / DAY_S) : "",
    budgetDollars: budget ? String(Number(budget.limitMicros) / 1e6) : "",
    budgetPeriod: period ?? "month",
  };
}

/** Returns a project with other limits; whatever else it has stays. Throws the fields that are no numbers. */
export function withLimits(project: Project, limits: Limits): Project {
  const wrong = Object.entries(limits).filter(
    ([name, text]) => name !== "budgetPeriod" && text.trim() && !(Number(text) > 0),
  );
  if (wrong.length) throw new RangeError(wrong.map(([name]) => name).join(", "));
  const number = (text: string) => Number(text || 0);
  const changed = clone(ProjectSchema, project);
  changed.weight = number(limits.weight);
  changed.maxRunning = number(limits.maxRunning);
  changed.maxQueued = number(limits.maxQueued);
  delete changed.retention;
  if (limits.retentionDays.trim()) {
    changed.retention = {
      $typeName: "google.protobuf.Duration",
      seconds: BigInt(Math.round(number(limits.retentionDays) * DAY_S)),
      nanos: 0,
    };
  }
  const others = project.modelLimits?.budgets.filter(({ subject }) => subject !== "project") ?? [];
  const own = {
    subject: "project",
    limitMicros: BigInt(Math.round(number(limits.budgetDollars) * 1e6)),
    period: PERIODS[limits.budgetPeriod]!.value,
  };
  if (own.limitMicros || changed.modelLimits) {
    changed.modelLimits ??= create(ModelLimitsSchema);
    changed.modelLimits.budgets = [...others, ...(own.limitMicros ? [create(SpendBudgetSchema, own)] : [])];
  }
  return changed;
}

const NAMES: Record<string, string> = {
  weight: "Weight",
  maxRunning: "Running at most",
  maxQueued: "Queued at most",
  retentionDays: "Kept for",
  budgetDollars: "Budget",
};

/** Names the fields of a `RangeError` of `withLimits`. */
export function fieldNames(error: RangeError): string {
  return error.message
    .split(", ")
    .map((name) => NAMES[name] ?? name)
    .join(", ");
}
