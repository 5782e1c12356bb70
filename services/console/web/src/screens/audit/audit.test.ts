import { expect, test } from "vitest";

import { requestWords, sinceDays } from "./audit";

test("a request is told by the fields that name its object", () => {
  expect(requestWords('{"project":"projects/a","names":["r/1","r/2","r/3"],"reason":"","empty":[],"one":["x"]}')).toBe(
    "project projects/a, names r/1 + 2 more, one x",
  );
  expect(requestWords('{"resources.kind":["route"],"role":"TOKEN_ROLE_READER","ttl_s":"60","name":"ANN"}')).toBe(
    "kind route, role reader, ttl s 60, name ANN",
  );
  expect(requestWords("{}")).toBe("");
  expect(requestWords("")).toBe("");
  expect(requestWords("broken")).toBe("broken");
});

test("no number of days means all time", () => {
  const now = new Date("2026-03-14T00:00:00Z");
  expect(sinceDays("7", now)).toEqual(new Date("2026-03-07T00:00:00Z"));
  expect(sinceDays("", now)).toBeUndefined();
});
