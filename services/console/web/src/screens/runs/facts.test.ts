import { create } from "@bufbuild/protobuf";
import { expect, test } from "vitest";

import { TrainingRunSchema, TrainingRunState } from "../../api/gen/fulmen/algorithm/v1/training_run_pb";
import { differences, runOfRecord } from "./facts";

const run = (settings: unknown, inputs: Record<string, string> = {}) =>
  create(TrainingRunSchema, { algorithm: "grpo", settingsJson: JSON.stringify(settings), inputs });

test("settings that differ are told by their path, and those that are the same are not", () => {
  const first = run({ steps: 4, engine: { kind: "embedded", slots: 2 } }, { agent: "resources/a/versions/1" });
  const second = run({ steps: 4, engine: { kind: "vllm" } }, { agent: "resources/a/versions/2" });
  expect(differences([first, second])).toEqual([
    { name: "engine.kind", values: ['"embedded"', '"vllm"'] },
    { name: "engine.slots", values: ["2", undefined] },
    { name: "input agent", values: ["resources/a/versions/1", "resources/a/versions/2"] },
  ]);
  expect(differences([first, first])).toEqual([]);
});

test("a run is read from what its owner left at the store", () => {
  const record = {
    name: "projects/default/trainingRuns/a",
    display_name: "A",
    algorithm: "grpo",
    settings_json: "{}",
    policy: { name: "tiny", origin: "newest", source: "" },
    inputs: {},
    create_time: "2026-03-14T10:15:00Z",
    state: "SUCCEEDED",
    step: 4,
    step_count: 4,
    results: { reward_mean: 0.5 },
    tags: ["paper"],
  };
  const found = runOfRecord(new TextEncoder().encode(JSON.stringify(record)));
  expect(found?.state).toBe(TrainingRunState.SUCCEEDED);
  expect(found?.policy?.name).toBe("tiny");
  expect(found?.createTime?.seconds).toBe(1773483300n);
  expect(found?.tags).toEqual(["paper"]);
  expect(runOfRecord(new Uint8Array([1, 2]))).toBeUndefined();
});
