// An agent on the vendor's own Node package, pointed at the proxy; prints what it saw as one JSON document.
import OpenAI, { AzureOpenAI } from "openai";

const { PROXY_URL, PROXY_KEY, VENDOR_MODEL, CHAT_MODEL, CAPTURED_MODEL } = process.env;
const agent = new OpenAI({ baseURL: PROXY_URL, apiKey: PROXY_KEY, maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
const tools = ["add", "multiply"].map((name) => ({ type: "function", function: { name, parameters: { type: "object" } } }));
const flatTools = tools.map(({ function: { name, parameters } }) => ({ type: "function", name, parameters, strict: false }));

async function chat(model) {
  const whole = await agent.chat.completions.create({ model, messages });
  let streamed = "";
  for await (const chunk of await agent.chat.completions.create({ model, messages, stream: true })) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
  }
  return [whole.choices[0].message.content, streamed];
}

async function toolCalls() {
  const stream = agent.chat.completions.stream({ model: VENDOR_MODEL, messages, tools });
  const { message } = (await stream.finalChatCompletion()).choices[0];
  return message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
}

async function responses(model) {
  const whole = await agent.responses.create({ model, input: "hello" });
  const stream = agent.responses.stream({ model, input: "hello", tools: flatTools });
  const types = [];
  for await (const event of stream) types.push(event.type);
  const { output } = await stream.finalResponse();
  return { text: whole.output_text, last: types.at(-1), calls: output.map((item) => [item.name, JSON.parse(item.arguments)]) };
}

async function failure(call) {
  try {
    await call();
  } catch (error) {
    return { name: error.constructor.name, status: error.status, code: error.code, retryAfter: error.headers?.get("retry-after") };
  }
  return null;
}

async function streamFailure() {
  const stream = await agent.chat.completions.create({ model: VENDOR_MODEL, messages, stream: true });
  return failure(async () => {
    for await (const _ of stream);
  });
}

const steps = {
  chat: () => chat(VENDOR_MODEL),
  captured: () => chat(CAPTURED_MODEL),
  toolCalls,
  responses: () => responses(VENDOR_MODEL),
  translated: () => responses(CHAT_MODEL),
  completion: async () => (await agent.completions.create({ model: VENDOR_MODEL, prompt: "one" })).choices[0].text,
  embedding: async () => (await agent.embeddings.create({ model: VENDOR_MODEL, input: "a" })).data[0].embedding,
  models: async () => (await agent.models.list()).data.map((model) => model.id),
  model: async () => (await agent.models.retrieve(CHAT_MODEL)).id,
  azure: async () => {
    const azure = new AzureOpenAI({ endpoint: PROXY_URL.replace("/v1", ""), apiKey: PROXY_KEY, apiVersion: "2026-05-01", deployment: VENDOR_MODEL });
    return (await azure.chat.completions.create({ model: "unread", messages })).choices[0].message.content;
  },
  unknownModel: () => failure(() => agent.chat.completions.create({ model: "gone", messages })),
  badRequest: () => failure(() => agent.responses.create({ model: CHAT_MODEL, input: "x", tools: [{ type: "web_search" }] })),
};

const failing = {
  refused: () => failure(() => agent.chat.completions.create({ model: VENDOR_MODEL, messages })),
  broken: streamFailure,
};

const report = {};
for (const [name, step] of Object.entries(process.argv[2] === "failing" ? failing : steps)) report[name] = await step();
console.log(JSON.stringify(report));
