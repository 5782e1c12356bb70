import { create } from "@bufbuild/protobuf";
import { expect, test } from "vitest";

import { ModelCallRecordSchema } from "../../../api/gen/fulmen/type/v1/model_call_pb";
import { Conversations } from "./chat";
import { answerOf, messagesOf, toolsOf } from "./messages";

const bytes = (value: unknown) => new TextEncoder().encode(JSON.stringify(value));
const call = (request: unknown, response: unknown, changes: object = {}) => ({
  id: "1",
  choice: 0,
  record: create(ModelCallRecordSchema, { requestJson: bytes(request), responseJson: bytes(response), ...changes }),
});
const said = (role: string, content: unknown, more: object = {}) => ({ role, content, ...more });
const answer = (content: string, more: object = {}) => ({ choices: [{ index: 0, message: { content, ...more } }] });
const words = (messages: ReturnType<typeof messagesOf>) =>
  messages.map(
    ({ role, parts }) =>
      `${role}: ${parts.map(({ kind, text, name }) => [kind, name, text].filter(Boolean).join(" ")).join("; ")}`,
  );

test("a call shows what is new, and folds what earlier ones have shown", () => {
  const conversations = new Conversations();
  const first = [said("system", "be brief"), said("user", "2+2?")];
  const one = conversations.add(call({ messages: first }, answer("4")));
  expect(words(one.fresh)).toEqual(["system: text be brief", "user: text 2+2?"]);
  const two = conversations.add(
    call({ messages: [...first, said("assistant", "4"), said("user", "sure?")] }, answer("yes")),
  );
  expect(words(two.earlier)).toHaveLength(3);
  expect(words(two.fresh)).toEqual(["user: text sure?"]);
  expect(words([two.answer!])).toEqual(["assistant: text yes"]);
});

test("conversations of two agents are told apart", () => {
  const conversations = new Conversations();
  const request = { messages: [said("user", "hi")] };
  conversations.add(call(request, answer("a"), { agentName: "one" }));
  expect(conversations.add(call(request, answer("b"), { agentName: "two" })).earlier).toEqual([]);
});

test("calls of tools and their results, in the words of every API", () => {
  const chat = messagesOf({
    messages: [
      said("assistant", null, { tool_calls: [{ function: { name: "add", arguments: '{"a":1}' } }] }),
      said("tool", "2"),
    ],
  });
  const anthropic = messagesOf({
    system: [{ type: "text", text: "s" }],
    messages: [
      said("assistant", [
        { type: "thinking", thinking: "hm" },
        { type: "tool_use", name: "add", input: { a: 1 } },
      ]),
      said("user", [
        { type: "tool_result", content: [{ type: "text", text: "2" }] },
        { type: "text", text: "go on" },
      ]),
    ],
  });
  const responses = messagesOf({
    instructions: "s",
    input: [
      { type: "function_call", name: "add", arguments: '{"a":1}' },
      { type: "function_call_output", output: "2" },
    ],
  });
  expect(words(chat)).toEqual(['assistant: call add {"a":1}', "tool: result 2"]);
  expect(words(anthropic)).toEqual([
    "system: text s",
    'assistant: thought hm; call add {"a":1}',
    "tool: result 2",
    "user: text go on",
  ]);
  expect(words(responses)).toEqual(["system: text s", 'assistant: call add {"a":1}', "tool: result 2"]);
});

test("images are named, and never shown or fetched", () => {
  const [inline, remote] = messagesOf({
    messages: [
      said("user", [{ type: "image_url", image_url: { url: `data:image/svg+xml,${"x".repeat(5000)}` } }]),
      said("user", [{ type: "image_url", image_url: { url: "https://tracker.example/x.png" } }]),
    ],
  });
  expect(inline!.parts[0]).toEqual({ kind: "media", name: "image_url", text: "image/svg+xml, 5,019 characters" });
  expect(remote!.parts[0]!.text).toBe("https://tracker.example/x.png");
});

test.each([
  undefined,
  null,
  7,
  "x",
  [],
  {},
  { messages: 7 },
  { messages: [7, null, { role: 7, content: { a: 1 } }] },
  { input: 7 },
])("the strange request %j is read", (request) => {
  expect(Array.isArray(messagesOf(request))).toBe(true);
  expect(toolsOf(request)).toEqual([]);
  expect(answerOf(request, 0)).toBeUndefined();
});

test("texts that were not kept are said to be missing", () => {
  const turn = new Conversations().add({ id: "1", choice: 0, record: create(ModelCallRecordSchema, {}) });
  expect(turn.isTextless).toBe(true);
});

test("a long conversation of 300 calls is read in time", () => {
  const conversations = new Conversations();
  const messages: object[] = [];
  let fresh = 0;
  for (let n = 0; n < 300; n++) {
    messages.push(said("user", `question ${n} ${"x".repeat(500)}`));
    fresh += conversations.add(call({ messages }, answer(`answer ${n}`))).fresh.length;
    messages.push(said("assistant", `answer ${n}`));
  }
  expect(fresh).toBe(300);
});
