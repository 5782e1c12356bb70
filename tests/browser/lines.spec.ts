// A real agent whose lines have a megabyte: pages show their ends, and stay as they are.

import { execFileSync } from "node:child_process";
import { fileURLToPath } from "node:url";

import { call, expect, expectAccessible, stack, test } from "./console";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));
const SERVICE = "fulmen.store.v1.RolloutService";
/** More than any view shows of one text, and far less than a line. */
const MOST_CHARACTERS = 200_000;
const FINAL = /SUCCEEDED|FAILED|CANCELLED/;
let name: string;

test.beforeAll(async () => {
  test.setTimeout(180_000);
  const python = process.env.PYTHON ?? `${ROOT}.venv/bin/python`;
  const agent = execFileSync(python, ["-m", "tests.support.browser_agent", stack().folder, "lines"], { cwd: ROOT, encoding: "utf8" });
  const input = Buffer.from(JSON.stringify({ question: "q".repeat(250_000) })).toString("base64");
  const rollout = {
    project: "projects/default", agent: agent.trim(), input, inputContentType: "application/json", mode: "ROLLOUT_MODE_TEST",
  };
  const { rollouts } = await call(`${SERVICE}/BatchCreateRollouts`, { rollouts: [rollout] });
  name = rollouts[0].name;
  const state = async () => (await call(`${SERVICE}/GetRollout`, { name })).rollout.state;
  await expect.poll(state, { timeout: 120_000 }).toMatch(FINAL);
  expect(await state()).toBe("ROLLOUT_STATE_SUCCEEDED");
});

for (const [view, text] of [
  ["conversation", ""],
  ["waterfall", ""],
  ["printed", "eeee"],
  ["contents", "oooo"],
] as const)
  test(`of lines of a megabyte a part is shown, and nothing runs out of the page: ${view}`, async ({ open }) => {
    const page = await open(`${name}?view=${view}`, "reader");
    await expect(page.getByRole("heading", { level: 1, name: /Rollout/ })).toBeVisible();
    if (text) await expect(page.getByRole("main").getByText(text).first()).toBeVisible();
    expect((await page.locator("body").innerText()).length).toBeLessThan(MOST_CHARACTERS);
    expect(await page.evaluate(() => document.documentElement.scrollWidth - innerWidth)).toBeLessThanOrEqual(0);
    await expectAccessible(page);
  });

test("the list shows the beginning of the longest task", async ({ open }) => {
  const page = await open("projects/default/rollouts?filter=mode%20%3D%20TEST", "reader");
  const row = page.getByRole("row").filter({ hasText: "qqqq" }).first();
  await expect(row).toBeVisible();
  expect((await row.innerText()).length).toBeLessThan(2_000);
  expect(await page.evaluate(() => document.documentElement.scrollWidth - innerWidth)).toBeLessThanOrEqual(0);
});
