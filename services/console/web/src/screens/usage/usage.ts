// Usage in time: from the periods in which there was a call to lines without gaps.

import type { GetUsageSeriesResponse, Usage, UsageSeries } from "../../api/gen/fulmen/store/v1/usage_service_pb";
import { UsageGrouping, UsagePeriod } from "../../api/gen/fulmen/store/v1/usage_service_pb";
import { compact, count, dollars, shortName } from "../../words/format";

export const GROUPINGS: Record<string, { text: string; value: UsageGrouping; none: string }> = {
  model: { text: "Model", value: UsageGrouping.MODEL, none: "(no model)" },
  backend: { text: "Backend", value: UsageGrouping.BACKEND, none: "(no backend)" },
  run: { text: "Training run", value: UsageGrouping.TRAINING_RUN, none: "(no run)" },
  agent: { text: "Agent", value: UsageGrouping.AGENT, none: "(no agent)" },
  project: { text: "Project", value: UsageGrouping.PROJECT, none: "" },
};

/** Spans of time that can be looked at. */
export const SPANS: Record<string, { text: string; period: UsagePeriod; hours: number }> = {
  "2d": { text: "48 hours", period: UsagePeriod.HOUR, hours: 48 },
  "7d": { text: "7 days, by hour", period: UsagePeriod.HOUR, hours: 168 },
  "30d": { text: "30 days", period: UsagePeriod.DAY, hours: 720 },
  "90d": { text: "90 days", period: UsagePeriod.DAY, hours: 2160 },
  "1y": { text: "1 year", period: UsagePeriod.DAY, hours: 8760 },
};

export const METRICS: Record<
  string,
  { text: string; of: (usage: Usage) => number; format: (value: number) => string }
> = {
  cost: { text: "Cost", of: (usage) => Number(usage.costMicros) / 1e6, format: dollars },
  tokens: { text: "Tokens", of: (usage) => tokensOf(usage), format: compact },
  calls: { text: "Calls", of: (usage) => Number(usage.requestCount), format: count },
};

/** Prompt and sampled tokens. */
export function tokensOf(usage: Usage): number {
  return Number(usage.promptTokenCount) + Number(usage.completionTokenCount);
}

/** Starts of all periods, seconds since 1970. */
export function periodsOf(answer: GetUsageSeriesResponse, period: UsagePeriod): number[] {
  if (!answer.startTime || !answer.endTime) return [];
  const step = period === UsagePeriod.HOUR ? 3600 : 86_400;
  const start = Number(answer.startTime.seconds);
  return Array.from({ length: (Number(answer.endTime.seconds) - start) / step }, (_, place) => start + place * step);
}

/** A value for each period; 0 where there was no call. */
export function valuesOf(series: UsageSeries, periods: number[], of: (usage: Usage) => number): number[] {
  const found = new Map(series.points.map(({ startTime, usage }) => [Number(startTime?.seconds), usage]));
  return periods.map((start) => {
    const usage = found.get(start);
    return usage ? of(usage) : 0;
  });
}

/** All groups, the sum of the others last. */
export function groupsOf(answer: GetUsageSeriesResponse): UsageSeries[] {
  return answer.others ? [...answer.series, answer.others] : answer.series;
}

/** What a group is called. */
export function groupName(answer: GetUsageSeriesResponse, series: UsageSeries, none: string): string {
  if (series === answer.others) return `${count(answer.otherCount)} others`;
  return series.name ? shortName(series.name) : none;
}

/** `14 Mar` or `14 Mar 09:00` of a period's start, in UTC as its bounds are. */
export function periodName(start: number, period: UsagePeriod): string {
  const when = new Date(start * 1000);
  const day = when.toLocaleDateString("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });
  return period === UsagePeriod.HOUR ? `${day} ${when.toISOString().slice(11, 16)}` : day;
}

/** Start of the span that ends now. */
export function startOf(hours: number, now: Date): Date {
  return new Date(now.getTime() - hours * 3_600_000);
}
