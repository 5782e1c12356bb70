// An agent on the vendor's own Node package, pointed at the proxy; prints what it saw as one JSON document.
import Anthropic from "@anthropic-ai/sdk";

const { PROXY_URL, PROXY_KEY, VENDOR_MODEL, CAPTURED_MODEL } = process.env;
const agent = new Anthropic({ baseURL: PROXY_URL, apiKey: PROXY_KEY, maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
const tools = ["calculate", "look_up"].map((name) => ({ name, input_schema: { type: "object" } }));
const max_tokens = 64;

async function talk(model) {
  const whole = await agent.messages.create({ model, max_tokens, messages });
  const pieces = [];
  const stream = agent.messages.stream({ model, max_tokens, messages }).on("text", (text) => pieces.push(text));
  const last = await stream.finalMessage();
  return { whole: whole.content[0].text, streamed: pieces.join(""), pieces: pieces.length, stop: last.stop_reason };
}

async function callTools(model) {
  const first = await agent.messages.stream({ model, max_tokens, messages, tools }).finalMessage();
  const calls = first.content.filter((block) => block.type === "tool_use");
  const results = calls.map(({ id }) => ({ type: "tool_result", tool_use_id: id, content: "4" }));
  const turns = [...messages, { role: "assistant", content: first.content }, { role: "user", content: results }];
  const last = await agent.messages.create({ model, max_tokens, messages: turns, tools });
  return { calls: calls.map(({ name, input }) => [name, input.input]), stop: first.stop_reason, last: last.content[0].text };
}

async function failure(call) {
  try {
    await call();
  } catch (error) {
    const { name } = error.constructor;
    return { name, status: error.status ?? null, type: error.type ?? null, retryAfter: error.headers?.get("retry-after") ?? null };
  }
  throw new Error("the call did not fail");
}

const ask = (fields) => agent.messages.create({ model: VENDOR_MODEL, max_tokens, messages, ...fields });
const seen =
  process.argv[2] === "failing"
    ? {
        refused: await failure(() => ask({})),
        broken: await failure(() => agent.messages.stream({ model: VENDOR_MODEL, max_tokens, messages }).finalMessage()),
        brokenEngine: await failure(() => agent.messages.stream({ model: CAPTURED_MODEL, max_tokens, messages }).finalMessage()),
      }
    : {
        vendor: await talk(VENDOR_MODEL),
        captured: await talk(CAPTURED_MODEL),
        vendorTools: await callTools(VENDOR_MODEL),
        capturedTools: await callTools(CAPTURED_MODEL),
        counted: (await agent.messages.countTokens({ model: VENDOR_MODEL, messages })).input_tokens > 0,
        notCounted: await failure(() => agent.messages.countTokens({ model: CAPTURED_MODEL, messages })),
        unknownModel: await failure(() => ask({ model: "unknown" })),
        badRequest: await failure(() => ask({ model: CAPTURED_MODEL, messages: "hello" })),
      };
console.log(JSON.stringify(seen));
