// Prompts, on a real search whose critic and editor are scripted.

import { readFile, readdir } from "node:fs/promises";
import { createServer, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

import { call, expect, expectAccessible, picture, test } from "./console";
import { LIMIT_MS, runs, train } from "./training";

const TASKS = fileURLToPath(new URL("../../examples/prompt_tuning/tasks", import.meta.url));
const KINDS = "Name one of: delivery, payment, complaint.";
const ALONE = "Answer with that word alone.";
let endpoint: Server;

/** Answers as the worker, which does what its prompt says, as the critic, or as the editor. */
function answer(model: string, text: string, kinds: Map<string, string>): string {
  if (model === "worker") {
    const kind = [...kinds].find(([message]) => text.includes(message))?.[1] ?? "";
    if (!text.includes(KINDS)) return "It is a message of a customer.";
    return text.includes(ALONE) ? kind : `I would call it a ${kind}.`;
  }
  const template = text.split("<template>\n")[1]?.split("\n</template>")[0] ?? "";
  const criticism = text.split("<criticism>\n")[1]?.split("\n</criticism>")[0];
  if (criticism) return `<prompt>\n${criticism} ${template}\n</prompt>`;
  return template.includes(KINDS) ? ALONE : KINDS;
}

async function search(): Promise<any> {
  return (await runs()).find(({ algorithm, promptVersion }) => algorithm === "apo" && promptVersion);
}

test.beforeAll(async () => {
  test.setTimeout(LIMIT_MS);
  if (await search()) return;
  const kinds = new Map<string, string>();
  for (const file of await readdir(TASKS))
    for (const line of (await readFile(join(TASKS, file), "utf8")).split("\n").filter(Boolean)) {
      const task = JSON.parse(line);
      kinds.set(task.input.message, task.kind);
    }
  endpoint = createServer(async (request, response) => {
    let body = "";
    for await (const chunk of request) body += chunk;
    const { model, messages } = JSON.parse(body);
    const message = { role: "assistant", content: answer(model, messages.at(-1).content, kinds) };
    response.setHeader("content-type", "application/json");
    response.end(
      JSON.stringify({
        ...{ id: "c", object: "chat.completion", created: 1, model },
        choices: [{ index: 0, message, finish_reason: "stop" }],
        usage: { prompt_tokens: 10, completion_tokens: 5, total_tokens: 15 },
      }),
    );
  });
  await new Promise<void>((resolve) => endpoint.listen(0, "127.0.0.1", resolve));
  const { port } = endpoint.address() as AddressInfo;
  const backend = { name: "backends/scripted", baseUrl: `http://127.0.0.1:${port}/v1` };
  await call("fulmen.llm_proxy.v1.BackendService/RegisterBackend", { backend });
  for (const model of ["worker", "critic"]) {
    const route = { name: `routes/${model}`, targets: [{ backend: backend.name, weight: 100 }] };
    await call("fulmen.llm_proxy.v1.RouteService/PutRoute", { route });
  }
  await train("prompt_tuning", async () => {});
});

test.afterAll(() => void endpoint?.close());

test("a reader sees the tree of prompts with scores, critiques and what changed", async ({ open }) => {
  const found = await search();
  const page = await open("projects/default/prompts", "reader");
  await page
    .getByRole("table", { name: "Searches for a prompt" })
    .locator(`a[href="${found.name}/prompts"]`)
    .click();
  const tree = page.getByRole("table", { name: "Tree of candidates" });
  await expect(tree.getByText("✓best")).toBeVisible();
  await expect(tree.getByRole("row")).not.toHaveCount(2);
  await expect(page.getByText("What the critic said about")).toBeVisible();
  await expect(page.locator("ins").first()).toBeVisible();
  await expect(page.getByRole("button", { name: /Promote\s*, not available: Your token is read-only/ })).toBeVisible();
  await expectAccessible(page);
  await picture(page, "prompts");
  await tree.getByRole("button", { name: "c0" }).click();
  await expect(page.getByText("The first prompt", { exact: true })).toBeVisible();
  expect(page.url()).toContain("candidate=c0");
});

test("someone promotes a candidate: the alias of the prompt points to its text", async ({ open }) => {
  const found = await search();
  const page = await open(`${found.name}/prompts?candidate=c1`);
  await expect(page.getByRole("heading", { name: "Candidate c1" })).toBeVisible();
  const text = await page.getByRole("region", { name: "Candidate c1" }).locator("pre").last().textContent();
  await page.getByRole("button", { name: "Promote", exact: true }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Promote" }).click();
  await expect(page.getByText(/c1 is the prompt/)).toBeVisible();
  const [name] = found.inputs.prompt.split("/versions/");
  const { resources } = await call("fulmen.store.v1.ResourceService/GetResources", {
    project: "projects/default",
    names: [`${name}/aliases/best`],
  });
  const promoted = Buffer.from(resources[0].content, "base64").toString();
  for (const word of promoted.split(/\s+/)) expect(text).toContain(word);
});
