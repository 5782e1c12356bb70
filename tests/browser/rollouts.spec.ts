import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { text } from "node:stream/consumers";
import { fileURLToPath } from "node:url";

import type { Locator, Page } from "@playwright/test";

import { call, expect, expectAccessible, picture, stack, test } from "./console";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));
const PROJECT = "projects/default";
const SERVICE = "fulmen.store.v1.RolloutService";
const HOSTILE = `<img src=x onerror="window.pwned=1"><script>window.pwned=1</script> \u202egnp.exe \u0007 {{1}} `;
const WORDS = "Refund the order of the customer, and say when the parcel will arrive.";

const json = (value: unknown) => Buffer.from(JSON.stringify(value)).toString("base64");

/** Creates rollouts; returns their names. */
async function create(rollouts: object[]): Promise<string[]> {
  const answer = await call(`${SERVICE}/BatchCreateRollouts`, {
    rollouts: rollouts.map((each) => ({ project: PROJECT, ...each })),
  });
  return answer.rollouts.map(({ name }: { name: string }) => name);
}

async function countOf(filter: string): Promise<number> {
  const answer = await call(`${SERVICE}/CountRollouts`, {
    project: PROJECT,
    filter,
  });
  return Number(answer.count ?? 0);
}

/** Removes what other tests left. */
async function removeAll(): Promise<void> {
  await expect
    .poll(
      async () => {
        const states = ["QUEUED", "RUNNING", "RETRY_WAIT"].map((each) => `ROLLOUT_STATE_${each}`);
        const { rollouts = [] } = await call(`${SERVICE}/ListRollouts`, {
          project: PROJECT,
          states,
          pageSize: 1000,
        });
        const names = rollouts.map(({ name }: { name: string }) => name);
        if (names.length) await call(`${SERVICE}/CancelRollouts`, { names });
        return names.length;
      },
      { timeout: 50_000 },
    )
    .toBe(0);
  let pageToken = "";
  do {
    const answer = await call(`${SERVICE}/DeleteRollouts`, { project: PROJECT, filter: "*", pageToken });
    pageToken = answer.nextPageToken ?? "";
  } while (pageToken);
}

test.beforeAll(async () => {
  await removeAll();
  const python = process.env.PYTHON ?? `${ROOT}.venv/bin/python`;
  const published = execFileSync(python, ["-m", "tests.support.browser_agent", stack().folder], { cwd: ROOT });
  const agent = published.toString().trim();
  const team = Array.from({ length: 8 }, (_, index) => ({
    agent,
    groupId: "team/1",
    groupSize: 8,
    taskType: "refund",
    metadata: { customer: index % 2 ? "acme" : "zen" },
    input: json({
      question: WORDS,
      answer: `The refund is ${index * 10} euros${index > 5 ? ", and the parcel arrives on Monday" : ""}.`,
      reward: index / 8,
    }),
  }));
  const failing = Array.from({ length: 3 }, (_, index) => ({
    agent,
    taskType: "lookup",
    input: json({
      question: `Look up the invoice ${index}`,
      fail: "no invoice\u202e of this number",
    }),
    policy: { maxAttempts: 1 },
  }));
  const hostile = {
    agent,
    metadata: { [`<b>key</b>`]: HOSTILE },
    input: json({
      question: HOSTILE,
      answer: HOSTILE + "x".repeat(40_000),
      reward: -1.5,
    }),
  };
  // No runner has this label.
  const waiting = Array.from({ length: 5 }, (_, index) => ({
    requiredLabels: { gpu: "none" },
    metadata: { customer: "later" },
    input: json({ question: `Wait ${index}` }),
  }));
  await create([...team, ...failing, hostile, ...waiting]);
  await expect
    .poll(() => countOf("state = SUCCEEDED OR state = FAILED"), {
      timeout: 50_000,
    })
    .toBe(12);
});

test("rollouts are listed with their figures, and facets filter them", async ({ open }) => {
  const page = await open(`${PROJECT}/rollouts`);
  const table = page.getByRole("table", { name: "Rollouts" });
  await expect(table.getByRole("row")).toHaveCount(18);
  await expect(page.getByRole("status").filter({ hasText: "17 loaded, all." })).toBeVisible();
  const facets = page.getByRole("complementary", { name: /Values/ });
  await expect(facets.getByRole("button", { name: /succeeded 9/ })).toBeVisible();
  await expect(facets.getByRole("button", { name: /customer=acme 4/ })).toBeVisible();
  await expectAccessible(page);
  await picture(page, "rollouts");
  await facets.getByRole("button", { name: /failed 3/ }).click();
  await expect(table.getByRole("row")).toHaveCount(4);
  await expect(table.getByText("ValueError: no invoice of this number").first()).toBeVisible();
  expect(new URL(page.url()).searchParams.get("filter")).toBe("state = FAILED");
  await facets.getByRole("button", { name: /failed 3/ }).click();
  await expect(table.getByRole("row")).toHaveCount(18);
});

test("a filter is written with the keyboard alone, and its mistakes are named", async ({ open }) => {
  const page = await open(`${PROJECT}/rollouts`);
  const field = page.getByRole("combobox", { name: "Filter" });
  await field.click();
  await field.pressSequentially("metadata.cus");
  await expect(page.getByRole("option", { name: "metadata.customer" })).toBeVisible();
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  await field.pressSequentially("= ac");
  await expectAccessible(page);
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  await page.keyboard.press("Enter");
  await expect(page.getByRole("table", { name: "Rollouts" }).getByRole("row")).toHaveCount(5);
  await expect(field).toHaveValue('metadata.customer = "acme"');
  await field.fill("reward < much");
  await page.keyboard.press("Enter");
  await expect(page.getByRole("alert")).toContainText("at character 10");
  await page.getByRole("button", { name: "Clear" }).click();
  await expect(page.getByRole("table", { name: "Rollouts" }).getByRole("row")).toHaveCount(18);
});

test("texts of tasks and answers are searched, and an address says which and how sorted", async ({ open }) => {
  const filter = encodeURIComponent('input:"REFUND" AND output:Monday');
  const page = await open(`${PROJECT}/rollouts?filter=${filter}&sort=-reward`, "reader");
  const rewards = page.getByRole("table", { name: "Rollouts" }).getByRole("row").locator("td:nth-child(3)");
  await expect(rewards).toHaveText(["0.875", "0.750"]);
  await page.getByRole("button", { name: "Reward" }).click();
  await expect(rewards).toHaveText(["0.750", "0.875"]);
  expect(new URL(page.url()).searchParams.get("sort")).toBe("reward");
  await expect(page.getByRole("columnheader", { name: "Reward" })).toHaveAttribute("aria-sort", "ascending");
});

test("hostile texts are shown as text", async ({ open }) => {
  const page = await open(`${PROJECT}/rollouts?filter=${encodeURIComponent("reward < 0")}`);
  await expect(page.getByRole("table", { name: "Rollouts" }).getByText("<script>window.pwned=1").first()).toBeVisible();
  await expect(page.getByRole("complementary").getByText("<b>key</b>=").first()).toBeVisible();
  expect(await page.evaluate(() => "pwned" in window)).toBe(false);
  for (const text of await page.getByRole("table", { name: "Rollouts" }).getByRole("row").allInnerTexts())
    expect(text).not.toMatch(/[\u202e\u0007]/);
});

test("a rollout that is created or changes is seen at once", async ({ open }) => {
  const page = await open(`${PROJECT}/rollouts`);
  await expect(page.getByRole("status").filter({ hasText: /live$/ })).toBeVisible();
  const [name] = await create([
    {
      requiredLabels: { gpu: "none" },
      input: json({ question: "Seen at once" }),
    },
  ]);
  const row = page.getByRole("row").filter({ hasText: "Seen at once" });
  await expect(row).toContainText("queued");
  await call(`${SERVICE}/CancelRollouts`, { names: [name] });
  await expect(row).toContainText("cancelled");
  await call(`${SERVICE}/DeleteRollouts`, { names: [name] });
});

test("a reader sees why it may not act, and exports", async ({ open }) => {
  const page = await open(`${PROJECT}/rollouts?filter=${encodeURIComponent("state = FAILED")}`, "reader");
  for (const name of ["Retry", "Cancel", "Delete"])
    await expect(
      page.getByRole("button", {
        name: new RegExp(`^${name}… ?, not available: Your token is read-only`),
      }),
    ).toBeVisible();
  await page.getByRole("button", { name: "Export…" }).click();
  const saved = page.waitForEvent("download");
  await page.getByRole("button", { name: "Export 3" }).click();
  const lines = readFileSync(await (await saved).path(), "utf8")
    .trim()
    .split("\n");
  expect(lines.map((line) => JSON.parse(line).state)).toEqual(Array(3).fill("ROLLOUT_STATE_FAILED"));
  await expect(page.getByText("Exported 3 rollouts.")).toBeVisible();
});

test("a file has tasks and answers if they are chosen, and a command rescores all that match", async ({ open }) => {
  const filter = 'task_type = "refund"';
  const page = await open(`${PROJECT}/rollouts?filter=${encodeURIComponent(filter)}`, "reader");
  await page.getByRole("button", { name: "Export…" }).click();
  await page.getByLabel("With tasks and answers").check();
  await expect(page.getByRole("dialog")).toContainText("at most the newest 5,000");
  await expectAccessible(page);
  const saved = page.waitForEvent("download");
  await page.getByRole("button", { name: "Export 8" }).click();
  const lines = readFileSync(await (await saved).path(), "utf8").trim().split("\n").map((line) => JSON.parse(line));
  expect(lines).toHaveLength(8);
  for (const { task, answer, inputStart } of lines) {
    expect(JSON.parse(task).question).toBe(WORDS);
    expect(answer).toContain(JSON.parse(task).answer);
    expect(inputStart).toBeUndefined();
  }
  await page.getByRole("button", { name: "Rescore…" }).click();
  await expect(page.getByRole("dialog")).toContainText("8 succeeded");
  await expect(page.getByRole("dialog")).toContainText(
    `fulmen rollout rescore --grader grader.py:grade --name scores.mine --filter '${filter}'`,
  );
  await expect(page.getByRole("dialog").getByRole("button", { name: /^Score ?, not available/ })).toBeVisible();
  await expectAccessible(page);
});

interface Judged {
  /** Bodies of the calls that are paid for. */
  asked: string[];
  /** Waits until a call may be answered. */
  gate: Promise<void>;
  /** Whether a call is refused for lack of credit. */
  refuses: () => boolean;
}

/** Lends a model `strict` that gives a score of 8. */
async function withJudge({ asked, gate, refuses }: Judged, use: () => Promise<void>): Promise<void> {
  const ROUTES = "fulmen.llm_proxy.v1.RouteService";
  const BACKENDS = "fulmen.llm_proxy.v1.BackendService";
  const provider = createServer((request, response) => {
    void text(request).then(async (body) => {
      const isRefused = refuses();
      if (!isRefused) asked.push(body);
      await gate;
      const content = 'Well. {"reason": "polite", "score": 8}';
      const choices = [{ index: 0, finish_reason: "stop", message: { role: "assistant", content } }];
      response.writeHead(isRefused ? 400 : 200, { "content-type": "application/json" });
      response.end(
        JSON.stringify(
          isRefused
            ? { error: { message: "no more credit", type: "invalid_request_error" } }
            : { id: "c", object: "chat.completion", created: 1, model: "m", choices },
        ),
      );
    });
  });
  await new Promise<void>((resolve) => provider.listen(0, "127.0.0.1", resolve));
  const baseUrl = `http://127.0.0.1:${(provider.address() as AddressInfo).port}/v1`;
  await call(`${BACKENDS}/RegisterBackend`, { backend: { name: "backends/judge", baseUrl } });
  await call(`${ROUTES}/PutRoute`, { route: { name: "routes/strict", targets: [{ backend: "backends/judge", weight: 1 }] } });
  try {
    await use();
  } finally {
    await call(`${ROUTES}/DeleteRoute`, { name: "routes/strict" });
    await call(`${BACKENDS}/DeleteBackend`, { name: "backends/judge" });
    provider.close();
  }
}

/** Begins to score what a filter matches, from a page of rollouts; returns the dialog. */
async function scoring(page: Page, dimension: string): Promise<Locator> {
  await page.getByRole("button", { name: "Rescore…" }).click();
  const dialog = page.getByRole("dialog");
  await dialog.getByLabel("Model").fill("strict");
  await dialog.getByLabel("Dimension").fill(dimension);
  await dialog.getByLabel("Question").fill("Is it polite?");
  await dialog.getByRole("button", { name: "Score", exact: true }).click();
  return dialog;
}

test("a model scores all that match; what it refused is scored later, and nothing twice", async ({ open }) => {
  const asked: string[] = [];
  let refuses = true;
  // After three calls there is no more credit until it is said that there is.
  await withJudge({ asked, gate: Promise.resolve(), refuses: () => refuses && asked.length >= 3 }, async () => {
    const page = await open(`${PROJECT}/rollouts?filter=${encodeURIComponent('task_type = "refund"')}`);
    const dialog = await scoring(page, "polite");
    await expect(dialog.getByRole("alert")).toContainText("no more credit");
    await expect(dialog.getByRole("status")).toContainText("3 scored, of 8, then stopped.");
    refuses = false;
    await dialog.getByRole("button", { name: "Score the rest" }).click();
    await expect(dialog.getByRole("status")).toContainText("5 scored, 3 before, of 8.");
    await expectAccessible(page);
    await picture(page, "rescore");
    expect(asked).toHaveLength(8);
    expect(new Set(asked.map((body) => JSON.parse(body).messages[1].content)).size).toBe(8);
    const { annotations } = await call("fulmen.store.v1.AnnotationService/ListAnnotations", { project: PROJECT, dimension: "polite" });
    expect(annotations.map(({ value, comment, author }: any) => [value, comment, author])).toEqual(
      Array(8).fill([0.8, "strict: polite", "Ann (client)"]),
    );
    await dialog.getByRole("link", { name: /Compare these scores/ }).click();
    await expect(page.getByRole("heading", { level: 1, name: "Data sets and labels" })).toBeVisible();
    await expect(page.getByText("Ann (client)").first()).toBeVisible();
  });
});

test("of two tabs that score the same at the same moment one pays for each score, and the other finds it", async ({ open }) => {
  const asked: string[] = [];
  let answer = () => {};
  const gate = new Promise<void>((resolve) => (answer = resolve));
  await withJudge({ asked, gate, refuses: () => false }, async () => {
    const page = await open(`${PROJECT}/rollouts?filter=${encodeURIComponent("reward < 0")}`);
    const tab = await page.context().newPage();
    await tab.goto(page.url());
    const dialog = await scoring(page, "kind");
    await expect.poll(() => asked.length).toBe(1);
    const other = await scoring(tab, "kind");
    // It waits for the first one, or has asked as well.
    const waiting = () => tab.evaluate(async () => (await navigator.locks.query()).pending?.length ?? 0);
    await expect.poll(async () => asked.length - 1 + (await waiting())).toBe(1);
    answer();
    await expect(dialog.getByRole("status")).toContainText("1 scored, of 1.");
    await expect(other.getByRole("status")).toContainText("0 scored, 1 before, of 1.");
    expect(asked).toHaveLength(1);
  });
});

test("all that match are cancelled, retried and deleted, and the page says how many before", async ({ open }) => {
  const page = await open(`${PROJECT}/rollouts?filter=${encodeURIComponent('metadata.customer = "later"')}`);
  await expect(page.getByRole("table", { name: "Rollouts" }).getByRole("row")).toHaveCount(6);
  await page.getByRole("button", { name: "Cancel…" }).click();
  await expect(page.getByRole("dialog")).toContainText("5 queued or running rollouts are cancelled.");
  await expectAccessible(page);
  await page.getByRole("button", { name: "Cancel 5" }).click();
  await expect(page.getByText("Cancelled 5 rollouts.")).toBeVisible();
  await expect.poll(() => countOf('metadata.customer = "later" AND state = CANCELLED')).toBe(5);
  await expect(page.getByRole("row").filter({ hasText: "cancelled" })).toHaveCount(5);

  await page.getByRole("button", { name: "Delete…" }).click();
  await page.getByRole("button", { name: "Delete 5" }).click();
  await expect(page.getByText("Deleted 5 rollouts.")).toBeVisible();
  await expect(page.getByText("No rollout matches.")).toBeVisible();

  await page.getByRole("combobox", { name: "Filter" }).fill("state = FAILED");
  await page.keyboard.press("Enter");
  await page.getByRole("button", { name: "Retry…" }).click();
  await page.getByRole("button", { name: "Retry 3" }).click();
  await expect(page.getByText("3 failed rollouts are run again.")).toBeVisible();
  await expect.poll(() => countOf('metadata."fulmen.retry_of":*')).toBe(3);
});

test("the answers of a group stand side by side, with what differs", async ({ open }) => {
  const page = await open(`${PROJECT}/rollouts?sort=-reward`, "reader");
  await page.getByRole("table", { name: "Rollouts" }).getByRole("link", { name: "team/1" }).first().click();
  await expect(page.getByRole("heading", { level: 1, name: "Group team/1" })).toBeVisible();
  await expect(page.getByText("8 of 8 rollouts")).toBeVisible();
  const answers = page.getByRole("region", { name: "Answers side by side" });
  await expect(answers.getByRole("listitem")).toHaveCount(8);
  await expect(answers.getByText("+1.528")).toBeVisible();
  const difference = page.getByRole("region", { name: "Difference" });
  await expect(difference.locator("del")).toContainText(["0"]);
  await expect(difference.locator("ins").last()).toContainText("and the parcel arrives on Monday");
  await expectAccessible(page);
  await picture(page, "group");
  await difference.getByLabel("from").selectOption(await difference.getByLabel("to").inputValue());
  await expect(difference.getByText("The two answers are the same.")).toBeVisible();
});
