import { execFileSync } from "node:child_process";
import { fileURLToPath } from "node:url";

import type { Page } from "@playwright/test";

import { call, expect, expectAccessible, picture, stack, test } from "./console";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));
const STORE = "fulmen.store.v1";
let made: { run: string; large: string; hostile: string };
let trained: string;

test.beforeAll(async () => {
  test.setTimeout(300_000);
  const python = process.env.PYTHON ?? `${ROOT}.venv/bin/python`;
  const given = process.env.FULMEN_BROWSER_ROLLOUTS;
  made = JSON.parse(
    given ??
      execFileSync(python, ["-m", "tests.support.browser_rollouts", stack().folder], { cwd: ROOT, encoding: "utf8" }),
  );
  const { rollouts } = await call(`${STORE}.RolloutService/ListRollouts`, {
    project: "projects/default",
    filter: 'mode = TRAIN AND state = SUCCEEDED AND completion_token_count > 0 AND input:"Where is order"',
    orderBy: "reward desc",
    pageSize: 1,
  });
  trained = rollouts[0].name;
});

const tab = (page: Page, name: string) => page.getByRole("tab", { name });

test("a reader sees what was said, and every sampled token with its probability, version, mask and advantage", async ({
  open,
}) => {
  const page = await open(trained, "reader");
  await expect(page.getByRole("heading", { level: 1, name: /Rollout/ })).toBeVisible();
  await expect(page.getByText("Where is order").first()).toBeVisible();
  const strip = page.getByRole("group", { name: /Sampled tokens/ }).first();
  await strip.focus();
  await page.keyboard.press("ArrowRight");
  const said = page.getByText(/token 1 of \d+ · id \d+ · probability [\d.]+ %/);
  await expect(said).toBeVisible();
  await expect(said).toContainText(/version \d+ · trained on · advantage/);
  await page.keyboard.press("End");
  await expect(page.getByText(/token (\d+) of \1 ·/)).toBeVisible();
  await expect(page.getByRole("button", { name: /Run again/ })).toHaveAttribute("title", "Your token is read-only.");
  await expectAccessible(page);
  await picture(page, "rollout-conversation");
});

test("spans stand in a tree beside their times, with the keyboard alone", async ({ open }) => {
  const page = await open(`${trained}?view=waterfall`, "reader");
  const tree = page.getByRole("tree", { name: "Spans" });
  await tree.focus();
  const items = page.getByRole("treeitem");
  const before = await items.count();
  await page.keyboard.press("Home");
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  await expect(page.getByRole("region", { name: "Span", exact: true })).toBeVisible();
  await expectAccessible(page);
  await picture(page, "rollout-spans");
  await page.getByRole("button", { name: "Close", exact: true }).click();
  await page.getByLabel("Find a span by its name").fill("nothing is called this");
  await expect(page.getByText("0 found")).toBeVisible();
  await page.getByLabel("Find a span by its name").fill("");
  await expect(items).toHaveCount(before);
  await tab(page, "Spans").focus();
  await page.keyboard.press("ArrowRight");
  await expect(page.getByRole("img", { name: /Flame view/ })).toBeVisible();
  await expectAccessible(page);
  await picture(page, "rollout-flame");
});

test("input, result, rewards and what was printed are there", async ({ open }) => {
  const page = await open(`${trained}?view=contents`, "reader");
  await expect(page.getByRole("region", { name: "Input" })).toContainText("question");
  await expect(page.getByRole("region", { name: "Result" })).toContainText("reward");
  await expectAccessible(page);
  await picture(page, "rollout-contents");
  await tab(page, "Printed").click();
  await expectAccessible(page);
});

test("someone who may act runs a rollout again with another input, and follows the new one live", async ({ open }) => {
  const page = await open(trained, "client");
  await page.getByRole("button", { name: /Run again/ }).click();
  const dialog = page.getByRole("dialog", { name: "Run again" });
  const input = dialog.getByRole("textbox");
  await expect(input).toHaveValue(/question/);
  await expectAccessible(page);
  await picture(page, "rollout-again");
  await input.fill("{");
  await expect(dialog.getByText("The input is not JSON")).toBeVisible();
  await expect(dialog.getByRole("button", { name: "Run", exact: true })).toBeDisabled();
  await input.fill(JSON.stringify({ id: "7", input: { question: "Where is order 7?" }, answer: "shipped" }));
  await dialog.getByRole("button", { name: "Run", exact: true }).click();
  await expect(page).not.toHaveURL(new RegExp(trained));
  await expect(page.getByText("test", { exact: true })).toBeVisible();
  // What comes is shown as it comes: nothing is loaded anew.
  await expect(page.getByText("Where is order 7?")).toBeVisible();
  await expect(page.getByText("not trained on: rollouts of this mode are not trained on").first()).toBeVisible();
  await expect(page.getByText("succeeded").first()).toBeVisible();
});

test("the command for the reader's machine is copied", async ({ open }) => {
  const page = await open(trained, "reader");
  await page.context().grantPermissions(["clipboard-read", "clipboard-write"]);
  await page.getByRole("button", { name: "Copy check command" }).click();
  await expect(page.getByText("Copied.")).toBeVisible();
  const copied = await page.evaluate(() => navigator.clipboard.readText());
  expect(copied).toMatch(/^fulmen agent check train.toml --input '\{.*question/);
});

for (const view of ["conversation", "waterfall", "flame", "printed", "contents"])
  test(`hostile texts are shown as texts, and do nothing: ${view}`, async ({ open, page: opened }) => {
    const fetched: string[] = [];
    opened.on("request", (request) => fetched.push(request.url()));
    const page = await open(`${made.hostile}?view=${view}&span=0000000000000002`, "reader");
    await expect(page.getByRole("heading", { level: 1 })).toBeVisible();
    if (view === "conversation") await expect(page.getByText("image/svg+xml").first()).toBeVisible();
    if (view === "waterfall") {
      await expect(page.getByText("caller not recorded").first()).toBeVisible();
      await expect(page.getByRole("region", { name: "Span", exact: true })).toContainText("<script>");
    }
    if (view === "contents") await expect(page.getByRole("region", { name: "Input" })).toContainText("<script>");
    await expectAccessible(page);
    await picture(page, `rollout-hostile-${view}`);
    await expect(page).toHaveTitle(/Fulmen/);
    expect(await page.locator("main img, main script").count()).toBe(0);
    expect(fetched.filter((url) => !url.startsWith(stack().url))).toEqual([]);
  });

test("of ten thousand spans only those in sight are on the page, whatever is scrolled and zoomed", async ({ open }) => {
  const page = await open(`${made.large}?view=printed`, "reader");
  await expect(tab(page, "Spans")).toBeVisible();
  await page.evaluate(() => {
    const tasks: number[] = ((globalThis as any).tasks = []);
    new PerformanceObserver((list) => tasks.push(...list.getEntries().map(({ duration }) => duration))).observe({
      type: "longtask",
    });
  });
  await tab(page, "Spans").click();
  await expect(page.getByText("10,000 spans")).toBeVisible();
  const first = await page.evaluate(() => performance.getEntriesByType("navigation")[0]!.duration);
  expect(await page.getByRole("treeitem").count()).toBeLessThan(120);
  await page.evaluate(() => ((globalThis as any).tasks.length = 0));
  const tree = page.getByRole("tree", { name: "Spans" });
  await tree.hover();
  for (let n = 0; n < 30; n++) await page.mouse.wheel(0, 8_000);
  await tree.focus();
  for (const key of ["End", "+", "+", "PageUp", "-", "0", "Home"]) await page.keyboard.press(key);
  await expect(page.getByRole("treeitem").first()).toContainText("agent");
  const scrolling = await page.evaluate(() => (globalThis as any).tasks as number[]);
  await picture(page, "rollout-large");
  await tab(page, "Flame").click();
  const flame = page.getByRole("img", { name: /Flame view of 10,000 spans/ });
  await flame.focus();
  await page.evaluate(() => ((globalThis as any).tasks.length = 0));
  for (const key of ["+", "+", "ArrowRight", "+", "-", "0"]) await page.keyboard.press(key);
  const zooming = await page.evaluate(() => (globalThis as any).tasks as number[]);
  await picture(page, "rollout-large-flame");
  // Milliseconds, for a person to read: a busy machine has long tasks of its own.
  test.info().annotations.push({ type: "figures", description: JSON.stringify({ first, scrolling, zooming }) });
});

test("a rollout that does not exist says so", async ({ open }) => {
  const page = await open("projects/default/rollouts/0192f0c1-7a6e-7c53-9f3e-0123456789ab", "reader");
  await expect(page.getByRole("alert")).toContainText("does not exist");
});
