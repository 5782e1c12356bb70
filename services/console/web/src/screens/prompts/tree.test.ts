import { create } from "@bufbuild/protobuf";
import { expect, test } from "vitest";

import { PromptCandidateSchema } from "../../api/gen/fulmen/algorithm/v1/prompt_search_pb";
import { bestOf, changes, treeOf } from "./tree";

const candidate = (id: string, parent: string, validation?: number) =>
  create(PromptCandidateSchema, { id, parent, validation });

test("each candidate stands below the one that it is an edit of", () => {
  const found = treeOf([candidate("c0", ""), candidate("c1", "c0"), candidate("c2", "c0"), candidate("c3", "c1")]);
  expect(found.map(({ candidate: { id }, depth }) => [id, depth])).toEqual([
    ["c0", 0],
    ["c1", 1],
    ["c3", 2],
    ["c2", 1],
  ]);
  expect(treeOf([candidate("c5", "not loaded")])).toHaveLength(1);
});

test("the best is the one that validates best, before that the head of the beam", () => {
  expect(bestOf([candidate("c0", "", 0.2), candidate("c1", "c0", 0.8), candidate("c2", "c0")], ["c2"])?.id).toBe("c1");
  expect(bestOf([candidate("c0", ""), candidate("c1", "c0")], ["c1"])?.id).toBe("c1");
});

test("an edit is told by its words", () => {
  expect(changes("Answer the question.", "Answer the question with a number.")).toEqual([
    { kind: "same", text: "Answer the " },
    { kind: "removed", text: "question." },
    { kind: "added", text: "question with a number." },
  ]);
  expect(changes("a", "a")).toEqual([{ kind: "same", text: "a" }]);
  const long = Array.from({ length: 4_000 }, (_, index) => `${index} word\n`).join("");
  expect(changes(long, `${long}more`).some(({ kind }) => kind === "same")).toBe(true);
});
