// Asks a model one question, without any SDK. An agent in any language works like this: it reads the task from standard
// input and the model API's address from its environment, and prints its answer as the last line.
import { readFileSync } from "node:fs";

const task = JSON.parse(readFileSync(0, "utf8"));
const response = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
  method: "POST",
  headers: { "content-type": "application/json", authorization: `Bearer ${process.env.OPENAI_API_KEY}` },
  body: JSON.stringify({
    model: process.env.MODEL ?? "arithmetic",
    messages: [{ role: "user", content: task.input.question }],
    max_tokens: 16,
  }),
});
if (!response.ok) {
  console.error(`the model API answered ${response.status}: ${await response.text()}`);
  process.exit(1);
}
const completion = await response.json();
console.log(completion.choices[0].message.content);
