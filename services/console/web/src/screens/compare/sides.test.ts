import { expect, test } from "vitest";

import { isAsked, requested, sideOf, versionsOf } from "./sides";

test("a side is a run, a beginning of group ids, or a filter", () => {
  const query = new URLSearchParams({
    "a.run": "r1",
    "a.what": "validation/3/",
    "b.what": "mode = TEST AND reward > 0",
  });
  expect(requested(sideOf(query, "a"), "default")).toEqual({
    trainingRun: "projects/default/trainingRuns/r1",
    filter: "",
    groupIdPrefix: "validation/3/",
  });
  expect(requested(sideOf(query, "b"), "default")).toEqual({
    trainingRun: "",
    filter: "mode = TEST AND reward > 0",
    groupIdPrefix: "",
  });
  expect(requested({ run: "", what: 'resource_versions.prompt="resources/p/versions/1"' }, "x").groupIdPrefix).toBe("");
  expect(isAsked({ run: "", what: " " })).toBe(false);
});

test("validated versions are found in group ids, in order", () => {
  const ids = ["validation/10/0", "validation/2/1", "train/4", "validation/2/0", "branch-1/validation/3/0"];
  expect(versionsOf(ids)).toEqual(["validation/2/", "branch-1/validation/3/", "validation/10/"]);
});
