import { call, expect, expectAccessible, picture, stack, test } from "./console";

const PROJECTS = "fulmen.store.v1.ProjectService";

/** Counts usage of model calls as a proxy does. */
async function use(project: string, model: string, calls: number, costMicros: number): Promise<void> {
  // The gateway does not forward it: services report usage over gRPC.
  const { execFileSync } = await import("node:child_process");
  const script = `
import asyncio, sys
from pathlib import Path
from fulmen_cli.local.record import StackFolder
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import usage_service_pb2 as pb
from fulmen.store.v1.usage_service_pb2_grpc import UsageServiceStub
async def main():
    folder, token, project, model, calls, cost = sys.argv[1:]
    target = StackFolder(Path(folder)).read().targets["store"]
    usage = pb.Usage(request_count=int(calls), prompt_token_count=1200 * int(calls), completion_token_count=90 * int(calls), cost_micros=int(cost))
    delta = pb.UsageDelta(project=project, model=model, backend="backends/one", usage=usage)
    async with open_channel(target, token=token) as channel:
        await UsageServiceStub(channel).SyncUsage(pb.SyncUsageRequest(instance_id=f"{project.split('/')[1]}-{model}", sequence=1, usage=[delta]))
asyncio.run(main())
`;
  const { tokens, folder } = stack();
  execFileSync(process.env.PYTHON ?? ".venv/bin/python", ["-c", script, folder, tokens.admin, project, model, String(calls), String(costMicros)]);
}

test("usage is shown in time by group, as the address says", async ({ open }) => {
  await use("projects/default", "large", 40, 2_500_000);
  await use("projects/default", "small", 400, 400_000);
  const page = await open("projects/default/usage", "reader");
  const table = page.getByRole("table", { name: "Usage by group" });
  await expect(table.getByRole("row").nth(1)).toContainText("large");
  await expect(table.getByRole("row").nth(1)).toContainText("$2.50");
  await expect(page.getByRole("img", { name: /Cost per day/ })).toBeVisible();
  await expectAccessible(page);
  await picture(page, "usage");
  await page.getByLabel("Over").selectOption("2d");
  await page.getByLabel("Chart").selectOption("calls");
  await expect(page.getByRole("img", { name: /Calls per hour/ })).toBeVisible();
  await expect(page).toHaveURL(/over=2d&what=calls/);
  await page.getByLabel("By", { exact: true }).selectOption("run");
  await expect(page.getByText("No model calls in this time.")).toBeVisible();
  await page.getByLabel("By", { exact: true }).selectOption("project");
  await expect(table.getByRole("link", { name: "default" })).toBeVisible();
});

test("an admin creates a project, limits it and deletes it", async ({ open }) => {
  // The name of a deleted project is never used again.
  const name = `team-${Date.now()}`;
  const page = await open("projects", "admin");
  await page.getByRole("button", { name: "Create a project" }).click();
  await page.getByLabel("Name").fill(name);
  await page.getByLabel("Running at most").fill("many");
  await page.getByRole("button", { name: "Create", exact: true }).click();
  await expect(page.getByRole("alert")).toContainText("Running at most");
  await page.getByLabel("Running at most").fill("12");
  await page.getByLabel("Budget").fill("5");
  await page.getByLabel("dollars").selectOption("day");
  await expectAccessible(page);
  await picture(page, "project-limits");
  await page.getByRole("button", { name: "Create", exact: true }).click();
  const row = page.getByRole("row", { name });
  await expect(row).toContainText("$0.00 of $5.00 a day");
  await expectAccessible(page);
  await picture(page, "projects");
  await row.getByRole("button", { name: `Limits of ${name}` }).click();
  await expect(page.getByLabel("Running at most")).toHaveValue("12");
  await page.getByLabel("Running at most").fill("");
  await page.keyboard.press("Enter");
  await expect(row).not.toContainText("12");
  await row.getByRole("button", { name: `Delete ${name}` }).click();
  await page.getByRole("button", { name: "Delete permanently" }).click();
  await expect(row).toBeHidden();
});

test("a token is issued, shown once, used and revoked", async ({ open }) => {
  const page = await open("projects/default/tokens", "admin");
  await page.getByRole("button", { name: "Issue a token" }).click();
  await page.getByLabel("Holder").fill("Bob from browsers");
  await page.getByLabel("Role").selectOption("reader");
  await expectAccessible(page);
  await page.getByRole("button", { name: "Issue", exact: true }).click();
  const shown = page.getByRole("dialog", { name: "Token of Bob from browsers" });
  const token = (await shown.locator("pre").textContent()) ?? "";
  await expectAccessible(page);
  const ask = () =>
    fetch(`${stack().url}/${PROJECTS}/GetProject`, {
      method: "POST",
      headers: { "content-type": "application/json", authorization: `Bearer ${token}` },
      body: "{}",
    });
  expect((await ask()).status).toBe(200);
  await shown.getByRole("button", { name: "Done" }).click();
  await expect(shown).toBeHidden();
  await expect(page.getByText(token)).toBeHidden();
  const row = page.getByRole("row", { name: /Bob from browsers/ });
  await expect(row).toContainText("valid");
  await expectAccessible(page);
  await picture(page, "tokens");
  await row.getByRole("button", { name: "Revoke the token of Bob from browsers" }).click();
  await expectAccessible(page);
  await page.getByRole("button", { name: "Revoke", exact: true }).click();
  await expect(row).toContainText("revoked");
  await expect.poll(async () => (await ask()).status).toBe(401);
});

test("the audit log tells who did what, and filters by the address", async ({ open }) => {
  await call("fulmen.store.v1.RolloutService/PauseQueue", { project: "projects/default", reason: "audited lunch" }, "client");
  await call("fulmen.store.v1.RolloutService/ResumeQueue", { project: "projects/default" }, "client");
  await call(`${PROJECTS}/RevokeToken`, { tokenId: "x" }, "client").catch(() => undefined);
  const page = await open("projects/default/audit?actor=Ann (client)", "admin");
  const table = page.getByRole("table", { name: "Audit log" });
  await expect(async () => {
    await page.reload();
    await expect(table.getByRole("row", { name: /Revoke token/ }).first()).toContainText("permission denied", { timeout: 2_000 });
  }).toPass();
  await expect(table.getByRole("row", { name: /Pause queue/ }).first()).toContainText("audited lunch");
  await expectAccessible(page);
  await picture(page, "audit");
  await page.getByLabel("Result").selectOption("errors");
  await expect(table.getByRole("row", { name: /Pause queue/ })).toHaveCount(0);
  await expect(page).toHaveURL(/result=errors/);
  await page.getByLabel("Result").selectOption("");
  // By the plain name; by that of the rpc as well, which is there on hover.
  for (const typed of ["resume queue", "RolloutService/ResumeQueue"]) {
    await page.getByLabel("Action").fill(typed);
    await page.keyboard.press("Enter");
    await expect(table.getByText("Resume queue").first()).toHaveAttribute("title", "RolloutService/ResumeQueue");
    await expect(table.getByRole("row", { name: /Pause queue/ })).toHaveCount(0);
  }
  await page.getByLabel("Action").fill("nothing");
  await page.keyboard.press("Enter");
  await expect(page.getByText("No entry matches.")).toBeVisible();
});

test("a reader manages nothing, and is told why", async ({ open }) => {
  let page = await open("projects", "reader");
  await expect(page.getByRole("button", { name: /Create a project ?, not available: Only admins/ })).toBeVisible();
  await expect(page.getByRole("row", { name: /default/ })).toBeVisible();
  await expectAccessible(page);
  for (const [path, title] of [["tokens", "Tokens"], ["audit", "Audit log"]]) {
    page = await open(`projects/default/${path}`, "reader");
    await expect(page.getByRole("heading", { level: 1, name: title })).toBeVisible();
    await expect(page.getByRole("alert")).toContainText("You may not see this. It needs a token whose role is");
    await expectAccessible(page);
  }
});
