import { expect, test } from "vitest";

import { rescoreCommand } from "./command";

test("the command that rescores takes the filter as one word, and none that a terminal would obey", () => {
  const begin = "fulmen rollout rescore --grader grader.py:grade --name scores.mine";
  expect(rescoreCommand("")).toBe(begin);
  expect(rescoreCommand('reward < 1 AND input:"it\'s"')).toBe(`${begin} --filter 'reward < 1 AND input:"it'\\''s"'`);
  expect(rescoreCommand("a\u001b[31m")).toBe(`${begin} --filter FILTER`);
});
