import { call, expect, expectAccessible, picture, test } from "./console";

const PROJECT = "projects/default";
const RESOURCES = "fulmen.store.v1.ResourceService";
const ROLLOUTS = "fulmen.store.v1.RolloutService";
const ANNOTATIONS = "fulmen.store.v1.AnnotationService";
// A serialized fulmen.runner.v1.AgentSpec: a command that gives itself a reward of 0.5 and prints "The answer is 42."
const AGENT =
  "GngKAnNoCgItYwpuY2F0ID4gL2Rldi9udWxsOyBlY2hvICd7eyJkaW1lbnNpb24iOiJyZXdhcmQiLCJ2YWx1ZSI6MC41fX0nID4+ICIkRlVMTUVOX1JFV0FSRFNfRklMRSI7IGVjaG8gVGhlIGFuc3dlciBpcyA0Mi4=";

const encoded = (value: unknown) => Buffer.from(typeof value === "string" ? value : JSON.stringify(value)).toString("base64");

/** Publishes a version of a data set. */
async function publish(name: string, lines: unknown[]): Promise<void> {
  const content = encoded(lines.map((line) => JSON.stringify(line)).join("\n") + "\n");
  const resource = { name: `resources/${name}`, project: PROJECT, kind: "dataset", contentType: "application/jsonl", content };
  await call(`${RESOURCES}/PublishResources`, { resources: [resource] });
}

/** Runs rollouts of an agent and returns their names once they have succeeded. */
async function succeeded(batch: string, count: number): Promise<string[]> {
  const agent = {
    name: "resources/agent.label",
    project: PROJECT,
    kind: "agent",
    contentType: "application/x-protobuf; messageType=fulmen.runner.v1.AgentSpec",
    content: AGENT,
  };
  const published = await call(`${RESOURCES}/PublishResources`, { resources: [agent] });
  const rollouts = Array.from({ length: count }, (_, number) => ({
    project: PROJECT,
    agent: published.resources[0].name,
    mode: "ROLLOUT_MODE_TEST",
    input: encoded({ input: `Question ${number + 1}: what is 6 × 7?` }),
    metadata: { batch },
  }));
  const created = await call(`${ROLLOUTS}/BatchCreateRollouts`, { rollouts });
  const names: string[] = created.rollouts.map((each: { name: string }) => each.name);
  await expect
    .poll(
      async () => {
        const listed = await call(`${ROLLOUTS}/ListRollouts`, {
          project: PROJECT,
          filter: `metadata.batch = ${batch} AND state = SUCCEEDED`,
        });
        return (listed.rollouts ?? []).length;
      },
      { timeout: 45_000 },
    )
    .toBe(count);
  return names;
}

async function scoresOf(dimension: string): Promise<{ rollout: string; value?: number; comment?: string; author: string }[]> {
  return (await call(`${ANNOTATIONS}/ListAnnotations`, { project: PROJECT, dimension })).annotations ?? [];
}

test("data sets are listed with their versions, and read line by line", async ({ open }) => {
  await publish("dataset.calc.train_tasks", [{ input: "old" }]);
  await publish(
    "dataset.calc.train_tasks",
    Array.from({ length: 450 }, (_, number) => ({ input: `${number}+1=`, answer: number + 1 })),
  );
  await publish("dataset.calc.demonstrations", [
    { messages: [{ role: "user", content: "2+3=" }, { role: "assistant", content: "The sum is 5." }] },
  ]);
  const page = await open(`${PROJECT}/data`, "reader");
  const sets = page.getByRole("table", { name: "Data sets" });
  await expect(sets.getByRole("row", { name: /dataset\.calc\.train_tasks/ })).toContainText("train tasks");
  await expectAccessible(page);
  await picture(page, "data");
  await sets.getByRole("link", { name: "dataset.calc.train_tasks" }).click();
  await expect(page.getByText("200 lines so far")).toBeVisible();
  await page.getByRole("button", { name: "Show more" }).click();
  await expect(page.getByText(/400 lines so far|450 lines/)).toBeVisible();
  await expectAccessible(page);
  await picture(page, "data-set");
  await page.getByRole("button", { name: "0+1=", exact: true }).click();
  const dialog = page.getByRole("dialog", { name: "Line 1" });
  await expect(dialog).toContainText('"answer": 1');
  await expectAccessible(page);
  await page.keyboard.press("Escape");
  await expect(dialog).toBeHidden();
  await page.getByRole("button", { name: "1", exact: true }).click();
  await expect(page.getByText("1 line", { exact: true })).toBeVisible();
  await expect(page).toHaveURL(/version=1/);
  await page.goto(page.url().replace("train_tasks?version=1", "demonstrations"));
  await page.getByRole("button", { name: "The sum is 5." }).click();
  await expect(page.getByRole("dialog")).toContainText("assistant");
});

test("rollouts are scored one after another with the keyboard alone, and taken back", async ({ open }) => {
  const names = await succeeded("keys", 3);
  const page = await open(`${PROJECT}/label?dimension=keys&filter=${encodeURIComponent("metadata.batch = keys")}`);
  const region = page.getByRole("region", { name: "Rollout to score" });
  const status = region.locator("header").getByRole("status");
  // The keyboard works at once: nothing has to be clicked.
  await expect(region).toBeFocused();
  await expect(region.getByText("The answer is 42.")).toBeVisible();
  await expect(region.getByText("what is 6 × 7?")).toBeVisible();
  await expect(status).toHaveText("1 of 3, 0 scored by you");
  await page.keyboard.press("4");
  await expect(status).toHaveText("2 of 3, 1 scored by you");
  await page.keyboard.press("c");
  await page.keyboard.type("too short, 12 words");
  await page.keyboard.press("Escape");
  await expect(region).toBeFocused();
  await page.keyboard.press("2");
  await expect(status).toHaveText("3 of 3, 2 scored by you");
  await expect(page.getByLabel("Comment, saved with the score")).toHaveValue("");
  await page.keyboard.press("5");
  await expect(status).toHaveText("3 of 3, 3 scored by you; you gave this one 5");
  await expectAccessible(page);
  await picture(page, "label");
  const given = await scoresOf("keys");
  expect(given.map(({ value }) => value).sort()).toEqual([2, 4, 5]);
  expect(new Set(given.map(({ rollout }) => rollout))).toEqual(new Set(names));
  expect(new Set(given.map(({ author }) => author))).toEqual(new Set(["Ann (client)"]));
  expect(given.find(({ value }) => value === 2)?.comment).toBe("too short, 12 words");
  await page.keyboard.press("u");
  await expect(status).toHaveText("3 of 3, 2 scored by you");
  await page.keyboard.press("p");
  await expect(status).toHaveText("2 of 3, 2 scored by you; you gave this one 2");
  await expect(page.getByLabel("Comment, saved with the score")).toHaveValue("too short, 12 words");
  await page.keyboard.press("1");
  await page.keyboard.press("n");
  await expect(status).toHaveText("3 of 3, 2 scored by you");
  await expect.poll(async () => (await scoresOf("keys")).map(({ value }) => value).sort()).toEqual([1, 4]);
  // What was scored is known the next time, and work goes on with the first that was not.
  await page.reload();
  await expect(status).toHaveText("3 of 3, 2 scored by you");
});

test("a reader sees rollouts and scores, and may give none", async ({ open }) => {
  await succeeded("seen", 1);
  const page = await open(`${PROJECT}/label?dimension=seen&filter=${encodeURIComponent("metadata.batch = seen")}`, "reader");
  const region = page.getByRole("region", { name: "Rollout to score" });
  await expect(region.getByText("The answer is 42.")).toBeVisible();
  await expect(region.getByRole("button", { name: /^4 ?, not available/ })).toHaveAttribute("aria-disabled", "true");
  await page.keyboard.press("4");
  await region.getByRole("button", { name: /^4/ }).click({ force: true });
  await expectAccessible(page);
  expect(await scoresOf("seen")).toEqual([]);
});

test("the agreement of two authors is shown, by what the values mean", async ({ open }) => {
  const names = await succeeded("agreed", 3);
  for (const [role, values] of [["client", [1, 2, 5]], ["admin", [1, 3, 5]]] as const)
    for (const [place, value] of values.entries())
      await call(`${ANNOTATIONS}/CreateAnnotation`, { annotation: { rollout: names[place], dimension: "agreed", value } }, role);
  const page = await open(`${PROJECT}/data?dimension=agreed`, "reader");
  const pairs = page.getByRole("table", { name: "Pairs of authors" });
  await expect(pairs.getByRole("row").nth(1)).toContainText("66.7 %");
  await expect(page.getByText("Krippendorff's alpha")).toBeVisible();
  const kappa = await pairs.getByRole("row").nth(1).getByRole("cell").last().textContent();
  await page.getByLabel("Values are").selectOption("nominal");
  await expect(pairs.getByRole("row").nth(1).getByRole("cell").last()).not.toHaveText(kappa ?? "");
  await expectAccessible(page);
  await picture(page, "agreement");
  await page.getByRole("link", { name: "Score rollouts" }).click();
  await expect(page.getByRole("heading", { name: "Score rollouts" })).toBeVisible();
  await expect(page.getByLabel("Dimension")).toHaveValue("agreed");
});

test("a filter that nothing matches says so", async ({ open }) => {
  const page = await open(`${PROJECT}/label?filter=${encodeURIComponent("metadata.batch = nothing")}`);
  await expect(page.getByText("No rollout to score.")).toBeVisible();
  await page.getByLabel("Rollouts").fill("state = ");
  await page.keyboard.press("Enter");
  await expect(page.getByRole("alert")).toBeVisible();
  await expectAccessible(page);
});
