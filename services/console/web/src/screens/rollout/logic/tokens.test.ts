import { create } from "@bufbuild/protobuf";
import { expect, test } from "vitest";

import { ModelCallRecordSchema } from "../../../api/gen/fulmen/type/v1/model_call_pb";
import { advantageOf } from "./advantage";
import { checkCommand, quoted } from "../../../words/command";
import { cellsOf, surprise, tokensOf, training } from "./tokens";

const packed = (numbers: number[], set: "setInt32" | "setFloat32") => {
  const view = new DataView(new ArrayBuffer(numbers.length * 4));
  numbers.forEach((each, at) => view[set](at * 4, each, true));
  return new Uint8Array(view.buffer);
};

function call(parts: (string | number[])[], changes: object = {}) {
  const texts = parts.map((each) =>
    typeof each === "string" ? new TextEncoder().encode(each) : Uint8Array.from(each),
  );
  return create(ModelCallRecordSchema, {
    policy: "p",
    usable: true,
    completionTokenIds: packed(
      parts.map((_, at) => at + 100),
      "setInt32",
    ),
    completionLogprobs: packed(
      parts.map((_, at) => -at),
      "setFloat32",
    ),
    completionTokenText: Uint8Array.from(texts.flatMap((each) => [...each])),
    completionTokenSizes: texts.map(({ length }) => length),
    policyVersions: [
      { version: 3n, start: 0, end: 1 },
      { version: 4n, start: 1, end: parts.length },
    ],
    ...changes,
  });
}

test("tokens have ids, probabilities and versions", () => {
  expect(tokensOf(call(["a", "b"]))).toEqual([
    { id: 100, logprob: -0, version: 3 },
    { id: 101, logprob: -1, version: 4 },
  ]);
});

test("tokens that are parts of one character are shown together", () => {
  const cells = cellsOf(call(["a", [0xf0, 0x9f], [0x98], [0x80], "b"]));
  expect(cells.map(({ text, tokens, at }) => [text, tokens.length, at])).toEqual([
    ["a", 1, 0],
    ["😀", 3, 1],
    ["b", 1, 4],
  ]);
});

test("bytes that are no text are shown as bytes, and join nothing that follows", () => {
  const cells = cellsOf(call([[0xff], "ok", [0xc3], "x"]));
  expect(cells.map(({ text }) => text)).toEqual(["⟨FF⟩", "ok", "⟨C3⟩x"]);
  expect(cellsOf(call(["a", [0xe2, 0x82]])).map(({ text }) => text)).toEqual(["a", "⟨E2⟩⟨82⟩"]);
});

test("hidden characters of tokens are seen", () => {
  expect(cellsOf(call(["\u202e", "\u0000"])).map(({ text }) => text)).toEqual(["⟨202E⟩", "␀"]);
});

test("without recorded texts, tokens are shown by their ids", () => {
  const textless = call(["a", "b"], { completionTokenSizes: [], completionTokenText: new Uint8Array() });
  expect(cellsOf(textless).map(({ text }) => text)).toEqual(["⟨100⟩", "⟨101⟩"]);
  expect(cellsOf(call([]))).toEqual([]);
});

test("a broken record shows what can be read", () => {
  const broken = call(["a"], {
    completionTokenIds: new Uint8Array(7),
    completionLogprobs: new Uint8Array(3),
    policyVersions: [{ version: 9n, start: -5, end: 999 }],
  });
  expect(tokensOf(broken)).toEqual([{ id: 0, logprob: undefined, version: 9 }]);
});

test("steps of surprise", () => {
  expect([1, 0.9, 0.6, 0.2, 0.05, 0.001].map((p) => surprise(Math.log(p) + 1e-9))).toEqual([0, 0, 1, 2, 3, 4]);
});

test("what is trained on is said, and why not", () => {
  expect(training(call(["a"]), true).isTrained).toBe(true);
  expect(training(call(["a"]), false).why).toContain("this mode");
  expect(training(call(["a"], { usable: false, unusableReason: "incomplete" }), true).why).toContain("incomplete");
  expect(training(call(["a"], { policy: "" }), true).isTrained).toBe(false);
});

test("an advantage is a reward minus the mean of its group", () => {
  expect(advantageOf(1, [1, 0, 0, 1, undefined])).toEqual({ value: 0.5, mean: 0.5, spread: 0.5, count: 4 });
  expect(advantageOf(1, [1])).toBeUndefined();
  expect(advantageOf(undefined, [1, 0])).toBeUndefined();
});

test("commands are quoted for shells", () => {
  expect(quoted("a b'c$(x)")).toBe(`'a b'\\''c$(x)'`);
  expect(quoted("")).toBe("''");
  expect(checkCommand('{"q": 1}').command).toBe(`fulmen agent check train.toml --input '{"q": 1}'`);
  expect(checkCommand("x\u001b[31m").isCut).toBe(true);
  expect(checkCommand("x".repeat(1_000_000)).command.length).toBeLessThan(100);
});
