// An agent on OpenAI's Node package, which sets up OpenTelemetry itself: it answers with the help of a calculator.
//
// By hand: echo '{"question": "What is 6 times 7, and what is 8 times 9?"}' | node node_agent.cjs
const { readFileSync } = require("node:fs");
const { ROOT_CONTEXT, SpanStatusCode, context, propagation, trace } = require("@opentelemetry/api");
const { OTLPTraceExporter } = require("@opentelemetry/exporter-trace-otlp-grpc");
const { BatchSpanProcessor, NodeTracerProvider } = require("@opentelemetry/sdk-trace-node");
const OpenAI = require("openai");

// The exporter finds its endpoint and headers in OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_HEADERS.
const provider = new NodeTracerProvider({ spanProcessors: [new BatchSpanProcessor(new OTLPTraceExporter())] });
provider.register();
const tracer = trace.getTracer("node-agent");
const client = new OpenAI();
const model = process.env.AGENT_MODEL ?? "gpt-4.1-mini";
const parameters = {
  type: "object",
  properties: { a: { type: "integer" }, b: { type: "integer" } },
  required: ["a", "b"],
};
const tools = [
  { type: "function", function: { name: "calculator", description: "Multiplies two numbers below 100.", parameters } },
];

function calculator({ a, b }) {
  if (Math.max(a, b) >= 100) throw new RangeError("the calculator takes numbers below 100");
  return a * b;
}

// Runs a function in a span; an error ends the span and is thrown again.
function inSpan(name, attributes, run) {
  return tracer.startActiveSpan(name, { attributes }, async (span) => {
    try {
      return await run(span);
    } catch (error) {
      span.recordException(error);
      span.setStatus({ code: SpanStatusCode.ERROR, message: error.message });
      throw error;
    } finally {
      span.end();
    }
  });
}

async function ask(messages) {
  const headers = {};
  propagation.inject(context.active(), headers);
  const completion = await client.chat.completions.create({ model, messages, tools }, { headers });
  return completion.choices[0].message;
}

async function solve(question) {
  const messages = [{ role: "user", content: question }];
  for (;;) {
    const message = await inSpan("ask", {}, () => ask(messages));
    if (!message.tool_calls?.length) return message.content;
    messages.push(message);
    for (const call of message.tool_calls) {
      const input = call.function.arguments;
      const product = await inSpan("calculator", { "input.value": input }, (span) => {
        const result = calculator(JSON.parse(input));
        span.setAttribute("output.value", String(result));
        return result;
      });
      messages.push({ role: "tool", tool_call_id: call.id, content: String(product) });
    }
  }
}

async function main() {
  const { question } = JSON.parse(readFileSync(0, "utf8"));
  const caller = propagation.extract(ROOT_CONTEXT, { traceparent: process.env.TRACEPARENT });
  try {
    console.log(await context.with(caller, () => inSpan("solve", {}, () => solve(question))));
  } finally {
    await provider.shutdown();
  }
}

main().catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
