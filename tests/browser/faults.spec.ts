// What breaks while someone looks: connections, services, rights; and many tabs at once.

import { call, expect, order, stack, test } from "./console";

const ROLLOUTS = "fulmen.store.v1.RolloutService";
const LIST = "projects/default/rollouts";

/** Creates a rollout that no runner takes; returns its name. */
async function created(text: string, project = "projects/default"): Promise<string> {
  const rollout = {
    project,
    input: Buffer.from(JSON.stringify({ question: text })).toString("base64"),
    requiredLabels: { fault: "never" },
  };
  const { rollouts } = await call(`${ROLLOUTS}/BatchCreateRollouts`, { rollouts: [rollout] });
  return rollouts[0].name;
}

test("a connection that is cut heals, and what happened meanwhile is shown", async ({ open }) => {
  const page = await open(LIST);
  await expect(page.getByRole("status").filter({ hasText: "live" }).first()).toBeVisible();
  await page.context().setOffline(true);
  const text = `meanwhile ${Math.random()}`;
  await created(text);
  await page.context().setOffline(false);
  await expect(page.getByText(text).first()).toBeVisible({ timeout: 60_000 });
});

for (const [hours, text] of [
  [1, "an hour fast"],
  [-1, "an hour slow"],
] as const)
  test(`a browser's clock that is ${text} changes no relative time`, async ({ open, page: opened }) => {
    await opened.addInitScript((aheadMs) => {
      const Real = Date;
      globalThis.Date = class extends Real {
        constructor(...given: unknown[]) {
          super(...((given.length ? given : [Real.now() + aheadMs]) as [number]));
        }
        static override now = () => Real.now() + aheadMs;
      } as DateConstructor;
    }, hours * 3_600_000);
    const text = `just made ${Math.random()}`;
    await created(text);
    const page = await open(LIST);
    const off = await page.evaluate(() => Date.now());
    expect(Math.abs(off - Date.now() - hours * 3_600_000)).toBeLessThan(60_000);
    const row = page.getByRole("row").filter({ hasText: text });
    await expect(row.locator("time").first()).toHaveText(/^(just now|\d+ s ago|[1-9] min ago)$/);
    await expect(page.locator("time").filter({ hasText: /^in / })).toHaveCount(0);
    // What is made while someone looks is no older, either.
    const later = `made later ${Math.random()}`;
    await created(later);
    await expect(page.getByRole("row").filter({ hasText: later }).locator("time").first()).toHaveText(/^(just now|\d+ s ago|[1-9] min ago)$/);
  });

test("what is made after the list was read and before its stream begins is shown", async ({ page, open }) => {
  let release = () => {};
  const held = new Promise<void>((resolve) => (release = resolve));
  await page.route("**/WatchRolloutChanges", async (route) => {
    await held;
    await route.continue();
  });
  await open(LIST);
  await expect(page.getByRole("table", { name: "Rollouts" })).toBeVisible();
  const text = `in between ${Math.random()}`;
  await created(text);
  release();
  await expect(page.getByText(text).first()).toBeVisible();
});

test("a store that is killed is named, and the pages heal when it is back", async ({ open }) => {
  const page = await open("projects/default");
  const services = page.getByRole("region", { name: "Services" });
  await expect(services.getByText("ready")).toHaveCount(3);
  await order("kill store");
  await expect(services.getByText("does not answer")).toBeVisible({ timeout: 30_000 });
  // In words for people; what operators need is folded below, and can be copied.
  const alert = page.getByRole("alert").first();
  await expect(alert).toContainText("The store does not answer. The page tries again every few seconds.");
  await expect(alert.getByText("code: UNAVAILABLE")).toBeHidden();
  await alert.getByText("Details", { exact: true }).click();
  await expect(alert.getByText("code: UNAVAILABLE")).toContainText("rpc: fulmen.store.v1.");
  await expect(alert.getByRole("button", { name: "Copy the details" })).toBeVisible();
  await order("start store");
  await expect(services.getByText("ready")).toHaveCount(3, { timeout: 60_000 });
  await expect(page.getByRole("alert")).toHaveCount(0, { timeout: 60_000 });
  await page.getByRole("link", { name: "Rollouts", exact: true }).click();
  const text = `afterwards ${Math.random()}`;
  await created(text);
  await expect(page.getByText(text).first()).toBeVisible({ timeout: 60_000 });
});

test("who is signed in with a token that is revoked is asked to sign in again", async ({ page, errors: _ }) => {
  const { url } = stack();
  const request = { project: "projects/default", role: "TOKEN_ROLE_READER", subject: "Bob" };
  const { token, tokenId } = await call("fulmen.store.v1.ProjectService/IssueToken", request);
  await page.request.post(`${url}/session`, { data: { token } });
  await page.goto(`${url}/projects/default`);
  await expect(page.getByRole("heading", { level: 1, name: "default" })).toBeVisible();
  await call("fulmen.store.v1.ProjectService/RevokeToken", { tokenId });
  await expect(page.getByRole("heading", { name: "Sign in to Fulmen" })).toBeVisible({ timeout: 60_000 });
  await expect(page.getByText("Your session has ended. Sign in again.")).toBeVisible();
});

test("a link to another project's rollout says no more than one to none", async ({ open }) => {
  const project = `projects/other-${Date.now()}`;
  await call("fulmen.store.v1.ProjectService/CreateProject", { project: { name: project } });
  const name = await created("secret of others", project);
  const page = await open(name, "reader");
  await expect(page.getByRole("alert").first()).toBeVisible();
  await expect(page.getByText("secret of others")).toHaveCount(0);
});

test("a dozen tabs of one browser all work: four stream, the others take turns", async ({ open }) => {
  const first = await open(LIST);
  const tabs = [first];
  for (let count = 1; count < 12; count++) tabs.push(await first.context().newPage());
  await Promise.all(tabs.slice(1).map((tab) => tab.goto(`${stack().url}/${LIST}`)));
  for (const tab of tabs) await expect(tab.getByRole("heading", { level: 1, name: "Rollouts" })).toBeVisible();
  const last = tabs.at(-1)!;
  await last.getByRole("link", { name: "Queue and fleet" }).click();
  await expect(last.getByRole("heading", { level: 1, name: "Queue and fleet" })).toBeVisible();
  await expect(last.getByText("Queued", { exact: true }).first()).toBeVisible();
  for (const tab of tabs.slice(1)) await tab.close();
});
