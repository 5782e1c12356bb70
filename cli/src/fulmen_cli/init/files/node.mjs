// Answers a customer's question about an order, without any package. It reads the task from standard input and the model's
// address from its environment, and prints its answer.
import { readFileSync } from "node:fs";

const read = (name) => readFileSync(new URL(name, import.meta.url), "utf8");
const ORDERS = JSON.parse(read("orders.json"));
const MODEL = "assistant";
const MAX_TURNS = 4;
const TOOLS = [
  {
    type: "function",
    function: {
      name: "find_order",
      description: "Returns the state of an order.",
      parameters: { type: "object", properties: { order: { type: "integer" } }, required: ["order"] },
    },
  },
];

// Returns the system prompt.
function prompt() {
  return read("prompt.md").trim();
}

// Returns the state of an order; the model may have written any arguments.
function findOrder(written) {
  try {
    return ORDERS[JSON.parse(written).order] ?? "unknown";
  } catch {
    return "unknown";
  }
}

// Returns the model's next message.
async function ask(messages) {
  const response = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${process.env.OPENAI_API_KEY}` },
    body: JSON.stringify({ model: MODEL, messages, tools: TOOLS }),
  });
  if (!response.ok) throw new Error(`the model API answered ${response.status}: ${await response.text()}`);
  return (await response.json()).choices[0].message;
}

// Returns the model's answer to the task's question, as text.
async function solve(task) {
  const messages = [
    { role: "system", content: prompt() },
    { role: "user", content: task.input.question },
  ];
  for (let turn = 0; turn < MAX_TURNS; turn++) {
    const { content, tool_calls: calls } = await ask(messages);
    if (!calls?.length) return content ?? "";
    messages.push({ role: "assistant", content: content ?? "", tool_calls: calls });
    for (const call of calls) {
      messages.push({ role: "tool", tool_call_id: call.id, content: findOrder(call.function.arguments) });
    }
  }
  return "";
}

console.log(await solve(JSON.parse(readFileSync(0, "utf8"))));
