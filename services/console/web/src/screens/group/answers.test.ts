import { expect, test } from "vitest";

import { membersFilter, textOf } from "./answers";

test("the members of a group are looked for around the time of one of them", () => {
  const address = { project: "projects/a", run: "", group: 'a "b"', near: "01a22190-b392-7e2e-8c94-a165866c1fdc" };
  expect(membersFilter(address)).toMatch(
    /^group_id = "a \\"b\\"" AND NOT training_run:\* AND create_time > "20\S+Z" AND create_time < "20\S+Z"$/,
  );
  expect(membersFilter({ ...address, run: "projects/a/trainingRuns/r", near: "x" })).toBe('group_id = "a \\"b\\""');
});

test("answers are shown as text, JSON with line breaks", () => {
  const bytes = (text: string) => new TextEncoder().encode(text);
  expect(textOf(bytes('"four"'))).toBe("four");
  expect(textOf(bytes('{"a":1}'))).toBe('{\n  "a": 1\n}');
  expect(textOf(bytes("not {json"))).toBe("not {json");
  expect(textOf(new Uint8Array([0xff]))).toBe("\ufffd");
});
