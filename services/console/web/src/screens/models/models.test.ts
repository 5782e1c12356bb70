import { create } from "@bufbuild/protobuf";
import { expect, test } from "vitest";

import { BackendHealthSchema, BackendSchema } from "../../api/gen/fulmen/llm_proxy/v1/backend_pb";
import { RouteSchema } from "../../api/gen/fulmen/llm_proxy/v1/route_pb";
import { ResourceVersionSchema } from "../../api/gen/fulmen/store/v1/resource_pb";
import { cacheOf, changedRoutes, deltaOf, errorOf, isHeld, lineageOf, modelOf, readWeights, splitsOf } from "./models";

const route = (...weights: number[]) =>
  create(RouteSchema, {
    name: "routes/m",
    targets: weights.map((weight, index) => ({ backend: `backends/${index}`, weight })),
  });
const bytes = (text: string) => new TextEncoder().encode(text);

test("a small part beside a large one is a canary", () => {
  const splits = splitsOf(route(5, 95));
  expect(splits.map(({ target, share, isCanary }) => [target.backend, share, isCanary])).toEqual([
    ["backends/1", 0.95, false],
    ["backends/0", 0.05, true],
  ]);
  expect(splitsOf(route(50, 50)).some(({ isCanary }) => isCanary)).toBe(false);
  expect(splitsOf(route(0))[0]?.share).toBe(1); // the only target gets all
  expect(modelOf(route(1))).toBe("m");
});

test("typed weights are whole numbers, and some are above zero", () => {
  expect(readWeights({ a: "90", b: " 10 " })).toEqual({ weights: { a: 90, b: 10 } });
  const wrong: Record<string, string>[] = [{ a: "-1" }, { a: "1.5" }, { a: "" }, { a: "10001" }, { a: "0", b: "0" }];
  for (const bad of wrong) expect(readWeights(bad)).toHaveProperty("problem");
});

test("routes follow their watch", () => {
  const known = changedRoutes(new Map(), [{ routes: [route(1)], removed: [] }]);
  expect(known.size).toBe(1);
  expect(changedRoutes(known, [{ routes: [], removed: ["routes/m"] }]).size).toBe(0);
});

test("a hold ends by itself, and an unknown cache is unknown", () => {
  const held = create(BackendSchema, { holdUntilTime: { seconds: 100n, nanos: 0 } });
  expect([isHeld(held, new Date(99_000)), isHeld(held, new Date(101_000))]).toEqual([true, false]);
  expect(isHeld(create(BackendSchema), new Date())).toBe(false);
  expect(cacheOf(create(BackendHealthSchema, { engineCacheUsage: -1 }))).toBeUndefined();
  expect(cacheOf(create(BackendHealthSchema, { engineCacheUsage: 0.4 }))).toBe(0.4);
});

test("a lineage goes back as far as versions are listed, and no circle holds it up", () => {
  const version = (number: number, parent = 0) =>
    create(ResourceVersionSchema, {
      name: `resources/p/versions/${number}`,
      parent: parent ? `resources/p/versions/${parent}` : "",
    });
  expect(lineageOf([version(4, 2), version(3, 2), version(2, 1), version(1)]).map(({ depth }) => depth)).toEqual([
    2, 2, 1, 0,
  ]);
  expect(lineageOf([version(2, 1), version(1, 2)]).map(({ depth }) => depth)).toEqual([1, 1]);
});

test("text comes out of events, and errors say what the service said", () => {
  expect(deltaOf(bytes('{"choices":[{"delta":{"content":"hi"}}]}'))).toBe("hi");
  expect(deltaOf(bytes("[DONE]"))).toBe("");
  expect(deltaOf(bytes('{"choices":[]}'))).toBe("");
  expect(errorOf(bytes('{"error":{"message":"no such model"}}'), 404)).toBe("no such model");
  expect(errorOf(bytes("<html>"), 502)).toContain("502");
});
