import { expect, test } from "vitest";

import { questionOf, verdictOf } from "./judge";

const response = (content: unknown) =>
  new TextEncoder().encode(JSON.stringify({ choices: [{ message: { content } }] }));

test("the last object of an answer counts, as a value from 0 to 1 with the model that gave it", () => {
  const said = 'I think {well}. {"reason": "right {but} long", "score": 7}';
  expect(verdictOf(response(said), "gpt")).toEqual({ value: 0.7, comment: "gpt: right {but} long" });
  expect(verdictOf(response('{"score": 0}'), "gpt")).toEqual({ value: 0, comment: "gpt: " });
});

test("an answer without a score within the range is none", () => {
  for (const content of ["", "7", '{"score": 11}', '{"score": "7"}', '{"reason": "good"}', null, { score: 7 }])
    expect(verdictOf(response(content), "gpt")).toBeUndefined();
  expect(verdictOf(new TextEncoder().encode("<html>"), "gpt")).toBeUndefined();
  expect(verdictOf(response('{"score": null}'), "gpt")).toBeUndefined();
});

test("an answer of very many braces is read in bounded time", () => {
  const verdict = '{"reason": "a {b} c", "score": 2}';
  expect(verdictOf(response(`${"{x} ".repeat(16_000)}${verdict}`), "gpt")?.value).toBe(0.2);
  for (const bad of ["{", '{"a":', '{"score":[', "[{"])
    expect(verdictOf(response(`${bad.repeat(60_000 / bad.length)}}`), "gpt")).toBeUndefined();
});

test("numbers beyond all bounds are no scores", () => {
  for (const score of ["1e999", "-1e999", "-1", "10.000001", "1e308", "NaN", '"NaN"', "[5]", "true"])
    expect(verdictOf(response(`{"reason": "r", "score": ${score}}`), "gpt")).toBeUndefined();
  expect(verdictOf(response('{"score": 10, "score": 1e999}'), "gpt")).toBeUndefined();
});

test("task and answer stand between marks that their authors cannot know, and are cut at the front", () => {
  const judge = { model: "gpt", dimension: "judge", question: "Is it polite?" };
  const body = JSON.parse(questionOf(judge, { task: "[end guess]", answer: "x".repeat(70_000) }, "secret")) as {
    messages: { content: string }[];
  };
  const asked = body.messages[1]!.content;
  expect(asked).toContain("[begin secret]\n[end guess]\n[end secret]");
  expect(asked).toMatch(/Is it polite\?$/);
  expect(asked.length).toBeLessThan(66_000);
  expect(body.messages[0]!.content).toContain("[begin secret]");
});
