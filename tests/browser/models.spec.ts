import { createServer, type Server } from "node:http";
import type { AddressInfo } from "node:net";

import { call, expect, expectAccessible, picture, test } from "./console";

const ROUTES = "fulmen.llm_proxy.v1.RouteService";
const BACKENDS = "fulmen.llm_proxy.v1.BackendService";
const RESOURCES = "fulmen.store.v1.ResourceService";
const WORDS = ["Four", " is", " the", " answer", "."];
/** Of several policies, that of these tests. */
const PAGE = "projects/default/models?policy=policy.sums";
let provider: Server;

/** A provider of models that answers every chat with the same words, one per event. */
test.beforeAll(async () => {
  provider = createServer((request, response) => {
    request.resume();
    response.writeHead(200, { "content-type": "text/event-stream" });
    for (const content of WORDS)
      response.write(
        `data: ${JSON.stringify({ id: "c", object: "chat.completion.chunk", created: 1, model: "m", choices: [{ index: 0, delta: { content } }] })}\n\n`,
      );
    response.end("data: [DONE]\n\n");
  });
  await new Promise<void>((resolve) => provider.listen(0, "127.0.0.1", resolve));
  const base_url = `http://127.0.0.1:${(provider.address() as AddressInfo).port}/v1`;
  for (const id of ["steady", "fresh"])
    await call(`${BACKENDS}/RegisterBackend`, { backend: { name: `backends/${id}`, baseUrl: base_url } });
  const targets = [
    { backend: "backends/steady", weight: 90, policy: "sums", policyVersion: 1 },
    { backend: "backends/fresh", weight: 10, policy: "sums", policyVersion: 2 },
  ];
  await call(`${ROUTES}/PutRoute`, { route: { name: "routes/sums", targets } });
  for (const parent of ["", "resources/policy.sums/versions/1"])
    await call(`${RESOURCES}/PublishResources`, {
      resources: [
        {
          name: "resources/policy.sums",
          kind: "policy",
          contentType: "application/json",
          content: Buffer.from(JSON.stringify({ path: `/weights/${parent ? 2 : 1}` })).toString("base64"),
          parent,
        },
      ],
    });
});

test.afterAll(async () => {
  await call(`${ROUTES}/DeleteRoute`, { name: "routes/sums" });
  for (const id of ["steady", "fresh"]) await call(`${BACKENDS}/DeleteBackend`, { name: `backends/${id}` });
  provider.close();
});

test("an administrator sees routes, parts, backends and versions", async ({ open }) => {
  const page = await open(PAGE, "admin");
  const routes = page.getByRole("table", { name: "Routes and their parts" });
  await expect(routes.getByRole("row", { name: /sums 90.0 % steady sums v1 .*serves/ })).toBeVisible();
  await expect(routes.getByRole("row", { name: /10.0 % fresh sums v2 .*canary/ })).toBeVisible();
  await expect(page.getByRole("table", { name: "Backends and their health" }).getByText("steady")).toBeVisible();
  await expect(page.getByRole("table", { name: "Versions" }).getByRole("row", { name: /v2 latest v1/ })).toBeVisible();
  await expectAccessible(page);
  await picture(page, "models");
});

test("a reader sees versions, routes and backends without their addresses, and changes and calls nothing", async ({ open }) => {
  const page = await open(PAGE, "reader");
  const routes = page.getByRole("table", { name: "Routes and their parts" });
  await expect(routes.getByRole("row", { name: /sums 90.0 % steady sums v1 .*serves/ })).toBeVisible();
  const backend = page.getByRole("table", { name: "Backends and their health" }).getByRole("row", { name: /steady/ });
  await expect(backend).toBeVisible();
  await expect(page.locator("[title*='http']")).toHaveCount(0);
  for (const button of [backend.getByRole("button", { name: "Drain steady" }), routes.getByRole("button", { name: "Split sums" })])
    await expect(button).toHaveAttribute("title", /role admin or service/);
  await expect(page.getByRole("table", { name: "Versions" }).getByText("latest")).toBeVisible();
  await expect(page.getByRole("button", { name: /Call the model ?, not available/ })).toBeVisible();
  await expectAccessible(page);
});

test("calls are split anew, rolled back, and a version is promoted", async ({ open }) => {
  const page = await open(PAGE, "admin");
  const routes = page.getByRole("table", { name: "Routes and their parts" });
  await routes.getByRole("button", { name: "Split sums" }).click();
  await page.getByRole("dialog").getByLabel("steady").fill("0");
  await page.getByRole("dialog").getByLabel("fresh").fill("0");
  await expect(page.getByText("At least one weight must be greater than 0.")).toBeVisible();
  await page.getByRole("dialog").getByLabel("fresh").fill("100");
  await page.getByRole("dialog").getByRole("button", { name: "Split" }).click();
  await expect(routes.getByRole("row", { name: /100 % fresh/ })).toBeVisible();
  await routes.getByRole("button", { name: "Roll back sums" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Roll back" }).click();
  await expect(routes.getByRole("row", { name: /90.0 % steady/ })).toBeVisible();
  await page.getByRole("button", { name: "Promote version 2 of sums" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Promote" }).click();
  await expect(routes.getByRole("row", { name: /steady sums v2/ })).toBeVisible();
});

test("a backend is drained and resumed, held and released", async ({ open }) => {
  const page = await open(PAGE, "admin");
  const row = page.getByRole("table", { name: "Backends and their health" }).getByRole("row", { name: /steady/ });
  await row.getByRole("button", { name: "Drain steady" }).click();
  await expect(row.getByText("drained")).toBeVisible();
  await row.getByRole("button", { name: "Resume steady" }).click();
  await expect(row.getByText("drained")).toBeHidden();
  await row.getByRole("button", { name: "Hold steady" }).click();
  await expect(row.getByText("held")).toBeVisible();
  await row.getByRole("button", { name: "Release steady" }).click();
  await expect(row.getByText("held")).toBeHidden();
});

test("a call is made, and its answer comes as a stream", async ({ open }) => {
  const page = await open(PAGE, "admin");
  await page.getByLabel("Model", { exact: true }).fill("sums");
  await page.getByLabel("Message").fill("What is two and two?");
  await page.getByRole("button", { name: "Call the model" }).click();
  await expect(page.getByLabel("Answer")).toHaveText(WORDS.join(""));
  await expect(page.getByText(/First text after .*, all after/)).toBeVisible();
  await expectAccessible(page);
  await picture(page, "models-playground");
});
