import { create } from "@bufbuild/protobuf";
import { expect, test } from "vitest";

import { AlgorithmSchema } from "../../api/gen/fulmen/algorithm/v1/algorithm_pb";
import { byPlace, draftOf, EMPTY, runOf } from "./draft";

test("a run is made of what was written, and words need no quotes", () => {
  const run = runOf(
    {
      ...EMPTY,
      algorithm: "grpo",
      settings: { steps: "4", loss: "gspo", kl: '{"kind": "loss"}', seed: " " },
      inputs: { agent: "resources/agent.x/versions/1", prompt: "" },
      policy: "tiny",
      origin: "base",
      source: "hf:a/b",
    },
    "default",
  );
  expect(JSON.parse(run.settingsJson)).toEqual({ steps: 4, loss: "gspo", kl: { kind: "loss" } });
  expect(run.inputs).toEqual({ agent: "resources/agent.x/versions/1" });
  expect(run.policy?.initial).toEqual({ case: "base", value: "hf:a/b" });
  expect(run.project).toBe("projects/default");
});

test("a run is written down again without the settings at their defaults", () => {
  const algorithm = create(AlgorithmSchema, {
    name: "grpo",
    settings: [
      { name: "steps", defaultJson: "100" },
      { name: "seed", defaultJson: "0" },
    ],
  });
  const run = runOf({ ...EMPTY, algorithm: "grpo", settings: { steps: "4", seed: "0" }, policy: "tiny" }, "default");
  expect(draftOf(run, algorithm).settings).toEqual({ steps: "4" });
  expect(runOf(draftOf(run, algorithm), "default").policy?.name).toBe("tiny");
});

test("problems stand where they are about", () => {
  const found = byPlace(["settings.steps: must be at least 1", "policy.path: is no folder", "name: is taken", "odd"]);
  expect(found.get("settings.steps")).toEqual(["must be at least 1"]);
  expect(found.get("policy")).toEqual(["is no folder"]);
  expect(found.get("")).toEqual(["Name is taken.", "Odd."]);
});
