// Runs, Run, Compare and New run, on a real training of the arithmetic example.

import { readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";

import { call, expect, expectAccessible, picture, stack, test } from "./console";
import { LIMIT_MS, runs, train } from "./training";

const STAGES = `
name = "arithmetic"
[policy]
name = "arithmetic"
build = "make_model.py:build"
[agent]
python = "agent.py:solve"
grader = "grader.py:grade"
[data]
train = "tasks/train.jsonl"
validation = "tasks/validation.jsonl"
demonstrations = "tasks/demonstrations.jsonl"
[[stage]]
algorithm = "sft"
steps = 60
learning_rate = 3e-3
[[stage]]
algorithm = "grpo"
steps = 8
prompts_per_step = 8
group_size = 4
minibatches = 1
max_tokens = 4
validate_every = 4
checkpoint_every = 2
engine_mismatch = { every = 1 }
`;

/** Runs of the arithmetic example, of these tests alone. */
async function stages(algorithm: string): Promise<any[]> {
  return (await runs()).filter((run) => run.policy?.name === "arithmetic" && run.algorithm === algorithm);
}

/** The run that learned from rewards. */
async function trained(): Promise<any> {
  return (await stages("grpo")).find(({ step, stepCount }) => step === stepCount);
}

test.beforeAll(async () => {
  test.setTimeout(LIMIT_MS);
  if (await trained()) return;
  await train("arithmetic", async (folder) => {
    await writeFile(join(folder, "train.toml"), STAGES);
    const validation = join(folder, "tasks/validation.jsonl");
    await writeFile(validation, (await readFile(validation, "utf8")).split("\n").slice(0, 30).join("\n"));
  });
});

test("a reader sees all runs, and those that are selected over one axis with what differs", async ({ open }) => {
  const page = await open("projects/default/trainingRuns", "reader");
  const table = page.getByRole("table", { name: "Runs" });
  await expect(table.getByText("succeeded").first()).toBeVisible();
  await expect(page.getByRole("button", { name: /New run\s*, not available/ })).toBeVisible();
  for (const run of await runs()) await expect(table.getByRole("link", { name: run.displayName || run.name.split("/").pop() })).toBeVisible();
  const [reinforced, imitated] = [await trained(), (await stages("sft"))[0]];
  for (const { name } of [reinforced, imitated]) await table.getByLabel(`Select ${name.split("/").pop()}`).check();
  await expect(page.getByRole("region", { name: "2 runs over one axis" })).toBeVisible();
  await expect(page.getByRole("img", { name: /^loss\./ })).toBeVisible();
  await expect(page.getByRole("table", { name: "Settings that differ" }).getByText("algorithm")).toBeVisible();
  await page.getByRole("combobox", { name: "Over" }).selectOption("tokens");
  expect(page.url()).toContain("axis=tokens");
  await expect(page.getByRole("img", { name: /^loss\./ })).toBeVisible();
  await page.getByRole("combobox", { name: "Over" }).selectOption("step");
  await expectAccessible(page);
  await picture(page, "runs");
  await page.getByLabel("Find").fill("no such run");
  await expect(page.getByText("No run matches.")).toBeVisible();
});

test("a reader sees what a run measured, and may change nothing", async ({ open }) => {
  const { name } = await trained();
  const page = await open(name, "reader");
  for (const title of ["Reward", "Validation", "Loss", "Entropy", "Staleness", "Engine mismatch", "Tokens of a rollout"])
    await expect(page.getByRole("img", { name: new RegExp(`^${title}\\.`) })).toBeVisible();
  await expect(page.getByRole("img", { name: /Groups of the last \d+ steps: .* trained on, .* equal rewards/ })).toBeVisible();
  await page.getByLabel("Also").selectOption({ label: "tokens trained on" });
  await expect(page.getByRole("img", { name: /^tokens trained on\./ })).toBeVisible();
  await expect(page.getByRole("img", { name: /Rewards of the last \d+ steps/ })).toBeVisible();
  await expect(page.getByRole("region", { name: "Where the time went" }).getByText("training")).toBeVisible();
  await expect(page.getByRole("table", { name: "All notices" })).toBeVisible();
  await expect(page.getByRole("table", { name: "Best rollouts, by reward" }).getByRole("link").first()).toBeVisible();
  await expect(page.getByRole("table", { name: "Checkpoints" })).toContainText("policy.arithmetic v");
  await expect(page.getByRole("button", { name: /Roll back\s*, not available: Your token is read-only/ }).first()).toBeVisible();
  await expect(page.getByRole("button", { name: /Name and tags\s*, not available/ })).toBeVisible();
  await page.getByRole("button", { name: "Report" }).click();
  await expect(page.getByRole("dialog")).toContainText("# Training run");
  await page.keyboard.press("Escape");
  await expectAccessible(page);
  await picture(page, "run");
});

test("someone names a run, and rolls it back: it goes on before their eyes", async ({ open }) => {
  const { name } = await trained();
  const page = await open(name);
  await page.getByRole("button", { name: "Name and tags" }).click();
  await page.getByLabel("Name", { exact: true }).fill("The long one");
  await page.getByLabel(/Tags/).fill("paper best");
  await page.getByRole("button", { name: "Save" }).click();
  await expect(page.getByRole("heading", { level: 1, name: "The long one" })).toBeVisible();
  await expect(page.getByText("best paper")).toBeVisible();
  const older = page.getByRole("table", { name: "Checkpoints" }).getByRole("row").nth(2);
  await older.getByRole("button", { name: "Roll back" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Roll back" }).click();
  await expect(page.getByText("Rolled back to checkpoint").first()).toBeVisible({ timeout: 30_000 });
  await expect(page.getByText("8 of 8")).toBeVisible({ timeout: 60_000 });
  await expect(page.locator("dl").getByText("succeeded")).toBeVisible({ timeout: 30_000 });
});

test("an administrator promotes the version of a checkpoint, and its routes serve it", async ({ open }) => {
  const { name } = await trained();
  const ROUTES = "fulmen.llm_proxy.v1.RouteService";
  const served = async () =>
    (await call(`${ROUTES}/GetRoute`, { name: "routes/arithmetic" })).route.targets.map((each: any) => Number(each.policyVersion));
  const page = await open(name, "admin");
  const rows = page.getByRole("table", { name: "Checkpoints" }).getByRole("row");
  const before = await served();
  const older = rows.filter({ has: page.getByRole("button", { name: "Promote" }) }).last();
  const version = Number((await older.innerText()).match(/policy\.arithmetic v(\d+)/)![1]);
  expect(before).not.toContain(version);
  await older.getByRole("button", { name: "Promote" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Promote" }).click();
  await expect(page.getByText(`policy.arithmetic v${version} is promoted.`)).toBeVisible();
  expect(new Set(await served())).toEqual(new Set([version]));
  await page.goto(`${stack().url}/projects/default/models`);
  const routes = page.getByRole("table", { name: "Routes and their parts" });
  await expect(routes.getByRole("row", { name: new RegExp(`arithmetic .* arithmetic v${version} `) })).toBeVisible();
  await call(`${ROUTES}/PromoteVersion`, { policy: "arithmetic", policyVersion: String(Math.max(...before)) });
});

test("two versions are compared at the same tasks", async ({ open }) => {
  const { name } = await trained();
  const id = name.split("/").pop();
  const page = await open("projects/default/compare", "reader");
  await expect(page.getByText("Choose both sides")).toBeVisible();
  await expectAccessible(page);
  for (const side of ["Baseline", "Candidate"])
    await page.getByRole("group", { name: side }).getByLabel("Run").selectOption(id);
  const told = await page.getByText(/^Validated: /).first().textContent();
  const versions = told!.replace("Validated:", "").trim().split(/\s+/);
  await page.getByRole("group", { name: "Baseline" }).getByLabel("Rollouts").fill(versions[0]!);
  await page.getByRole("group", { name: "Candidate" }).getByLabel("Rollouts").fill(versions.at(-1)!);
  await page.keyboard.press("Tab");
  await expect(page.getByText("paired bootstrap over tasks")).toBeVisible();
  await expect(page.getByRole("table", { name: "Tasks" }).getByRole("row")).toHaveCount(31);
  await expect(page.getByRole("img", { name: /Difference .* with 95 %/ })).toBeVisible();
  await expectAccessible(page);
  await picture(page, "compare");
  await page.reload();
  await expect(page.getByText("paired bootstrap over tasks")).toBeVisible();
});

test("a run is checked as it is written, created, and cancelled", async ({ open }) => {
  const { name } = await trained();
  const page = await open(`projects/default/newRun?from=${name.split("/").pop()}`);
  const steps = page.getByLabel("steps", { exact: true });
  await expect(steps).toHaveValue("8");
  await expect(page.getByText("✓Valid.")).toBeVisible();
  await steps.fill("-1");
  await expect(page.getByText("✕Not valid yet.")).toBeVisible();
  await expect(steps).toHaveAttribute("aria-invalid", "true");
  await expect(page.getByRole("button", { name: /Create\s*, not available/ })).toBeVisible();
  await expectAccessible(page);
  await picture(page, "new-run");
  await steps.fill("500");
  await page.getByLabel("Name", { exact: true }).fill("Once more");
  await expect(page.getByText("✓Valid.")).toBeVisible();
  await page.getByRole("button", { name: "Create" }).click();
  await expect(page.getByRole("heading", { level: 1, name: "Once more" })).toBeVisible();
  await page.getByRole("button", { name: "Pause", exact: true }).click();
  await expect(page.locator("dl").getByText("paused")).toBeVisible({ timeout: 30_000 });
  await page.getByRole("button", { name: "Resume", exact: true }).click();
  await page.getByRole("button", { name: "Cancel", exact: true }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Cancel the run" }).click();
  await expect(page.locator("dl").getByText("cancelled")).toBeVisible({ timeout: 30_000 });
});

test("a run whose service does not answer opens from the store, and says so", async ({ open }) => {
  const { name } = await trained();
  const page = await open("projects/default", "reader");
  await page.route("**/fulmen.algorithm.v1.*/**", (route) => route.abort());
  await page.getByRole("link", { name: "Runs", exact: true }).click();
  await expect(page.getByText("The algorithm service does not answer")).toBeVisible();
  await page.locator(`table a[href="${name}"]`).click();
  await expect(page.getByText("The algorithm service of this run does not answer")).toBeVisible();
  await expect(page.getByRole("img", { name: /^Reward\./ })).toBeVisible();
  await expect(page.getByRole("table", { name: "All notices" })).toContainText("info");
  await expect(page.locator("dl").getByText("8 of 8")).toBeVisible();
});
