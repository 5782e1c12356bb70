import { create } from "@bufbuild/protobuf";
import { timestampFromDate } from "@bufbuild/protobuf/wkt";
import { expect, test } from "vitest";

import { GetUsageSeriesResponseSchema, UsagePeriod } from "../../api/gen/fulmen/store/v1/usage_service_pb";
import { groupName, groupsOf, METRICS, periodName, periodsOf, valuesOf } from "./usage";

const at = (text: string) => timestampFromDate(new Date(text));
const answer = create(GetUsageSeriesResponseSchema, {
  startTime: at("2026-03-14T00:00:00Z"),
  endTime: at("2026-03-17T00:00:00Z"),
  series: [
    {
      name: "projects/default/trainingRuns/demo",
      points: [{ startTime: at("2026-03-15T00:00:00Z"), usage: { costMicros: 1_500_000n, requestCount: 3n } }],
    },
    { name: "", points: [] },
  ],
  others: { points: [] },
  otherCount: 1234,
});

test("a period without a call counts nothing", () => {
  const periods = periodsOf(answer, UsagePeriod.DAY);
  expect(periods.map((start) => periodName(start, UsagePeriod.DAY))).toEqual(["14 Mar", "15 Mar", "16 Mar"]);
  expect(valuesOf(answer.series[0]!, periods, METRICS.cost!.of)).toEqual([0, 1.5, 0]);
  expect(valuesOf(answer.series[1]!, periods, METRICS.calls!.of)).toEqual([0, 0, 0]);
});

test("hours carry their time", () => {
  expect(periodsOf(answer, UsagePeriod.HOUR)).toHaveLength(72);
  expect(periodName(Date.UTC(2026, 2, 14, 9) / 1000, UsagePeriod.HOUR)).toBe("14 Mar 09:00");
});

test("groups have short names, and those behind the last place are counted", () => {
  expect(groupsOf(answer).map((series) => groupName(answer, series, "(no run)"))).toEqual([
    "demo",
    "(no run)",
    "1,234 others",
  ]);
});
