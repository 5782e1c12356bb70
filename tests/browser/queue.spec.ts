import { call, expect, expectAccessible, picture, test } from "./console";

const ROLLOUTS = "fulmen.store.v1.RolloutService";
const RUNNERS = "fulmen.store.v1.RunnerRegistryService";

/** Creates rollouts that no runner of the stack can take. */
async function waiting(count: number, labels: Record<string, string>) {
  const rollouts = Array.from({ length: count }, () => ({
    project: "projects/default",
    mode: "ROLLOUT_MODE_TEST",
    taskType: "sums",
    requiredLabels: labels,
  }));
  return call(`${ROLLOUTS}/BatchCreateRollouts`, { rollouts });
}

test.afterEach(async () => {
  await call(`${ROLLOUTS}/ResumeQueue`, { project: "projects/default" });
  const { rollouts } = await call(`${ROLLOUTS}/ListRollouts`, { states: ["ROLLOUT_STATE_QUEUED"], pageSize: 1000 });
  const names = (rollouts ?? []).map(({ name }: { name: string }) => name);
  if (names.length) await call(`${ROLLOUTS}/CancelRollouts`, { names });
});

test("a reader sees what waits, for whom nobody is there, and may change nothing", async ({ open }) => {
  await waiting(3, { gpu: "h200" });
  const page = await open("projects/default/queue", "reader");
  await expect(page.getByRole("heading", { level: 1, name: "Queue and fleet" })).toBeVisible();
  const backlog = page.getByRole("table", { name: "Rollouts by labels" });
  await expect(backlog.getByRole("row", { name: /gpu=h200 3 0 .*none: they wait/ })).toBeVisible();
  await expect(page.getByRole("table", { name: "Shares and quotas" }).getByRole("row", { name: /default/ })).toBeVisible();
  await expect(page.getByRole("table", { name: "Connected runners" }).getByRole("row")).toHaveCount(2);
  await expect(page.getByRole("button", { name: /Pause the queue ?, not available/ })).toBeVisible();
  await expect(page.getByRole("button", { name: /^Drain / })).toBeDisabled();
  // What the runner told before the page was opened is there with it.
  await expect(page.getByRole("img", { name: /^Slots of .* on average of the last two hours/ }).locator("rect").first()).toBeVisible();
  await expectAccessible(page);
  await picture(page, "queue");
  await page.emulateMedia({ colorScheme: "dark" });
  await picture(page, "queue-dark");
});

test("what changes is on the page without a reload", async ({ open }) => {
  const page = await open("projects/default/queue", "reader");
  const queued = page.locator("dl div", { hasText: "Queued" }).locator("dd");
  await expect(queued).toHaveText("0");
  await waiting(2, { zone: "nowhere" });
  await expect(queued).toHaveText("2");
  await expect(page.getByRole("table", { name: "Rollouts by labels" }).getByText("zone=nowhere")).toBeVisible();
});

test("someone who may act pauses the queue with a reason, and resumes it, by the keyboard", async ({ open }) => {
  const page = await open("projects/default/queue", "client");
  await page.getByRole("button", { name: "Pause the queue" }).press("Enter");
  await page.getByLabel("Reason").fill("a new price list");
  await expectAccessible(page);
  await page.keyboard.press("Enter");
  await expect(page.getByText("a new price list").first()).toBeVisible();
  const { queues } = await call("fulmen.store.v1.QueueService/ListQueues", {});
  expect(queues[0].pauseReason).toBe("a new price list");
  await page.getByRole("button", { name: "Resume" }).press("Enter");
  await expect(page.getByRole("button", { name: "Pause the queue" })).toBeVisible();
});

test("an administrator orders slots, and the runner has them", async ({ open }) => {
  const page = await open("projects/default/queue", "admin");
  const runners = page.getByRole("table", { name: "Connected runners" });
  await runners.getByRole("button", { name: /^Slots of/ }).click();
  const dialog = page.getByRole("dialog");
  await dialog.getByRole("checkbox").uncheck();
  await dialog.getByLabel("Slots", { exact: true }).fill("7");
  await expectAccessible(page);
  await dialog.getByRole("button", { name: "Order" }).click();
  await expect(runners.getByText("0 of 7")).toBeVisible();
  const { runners: found } = await call(`${RUNNERS}/ListRunners`, {});
  expect(found[0].order.slots.slotCount).toBe(7);
});

test("a drain is asked for, and nothing happens if it is not confirmed", async ({ open }) => {
  const page = await open("projects/default/queue", "admin");
  await page.getByRole("button", { name: /^Drain / }).click();
  await expect(page.getByRole("dialog")).toContainText("cannot be undone");
  await page.keyboard.press("Escape");
  await expect(page.getByRole("dialog")).toBeHidden();
  const { runners } = await call(`${RUNNERS}/ListRunners`, {});
  expect(runners[0].order?.drain).toBeUndefined();
});

test("dead letters are counted by failure, and run again", async ({ open }) => {
  const past = new Date(Date.now() + 1_500).toISOString();
  await call(`${ROLLOUTS}/BatchCreateRollouts`, {
    rollouts: [{ project: "projects/default", mode: "ROLLOUT_MODE_TEST", deadlineTime: past, requiredLabels: { gpu: "none" } }],
  });
  const page = await open("projects/default/queue", "client");
  const dead = page.getByRole("table", { name: "Dead letters by failure" }).getByRole("row", { name: /timeout/ });
  await expect(dead).toBeVisible({ timeout: 30_000 });
  await dead.getByRole("button", { name: /^Run again/ }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Run again" }).click();
  await expect(page.getByText("Dead rollouts wait again")).toBeVisible();
});
