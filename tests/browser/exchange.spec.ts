// Exchange: nothing, and two ranks of a real training that sum their gradients over the algorithm service.

import { readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";

import { call, expect, expectAccessible, picture, stack, test } from "./console";
import { LIMIT_MS, runs, train } from "./training";

const POLICY = "summed";

/** A training that goes on until it is cancelled. */
const config = (target: string) => `
name = "${POLICY}"
[policy]
name = "${POLICY}"
build = "make_model.py:build"
[agent]
python = "agent.py:solve"
grader = "grader.py:grade"
[data]
train = "tasks/train.jsonl"
demonstrations = "tasks/demonstrations.jsonl"
[[stage]]
algorithm = "sft"
steps = 100000
report_every = 1
parallel = { kind = "ddp", ranks = 2 }
exchange = { codec = "qsgd", check_every = 1, link = { kind = "grpc", targets = ["${target}"] } }
`;

test("where no exchange goes on, the page says what would be here", async ({ open }) => {
  const page = await open("projects/default/exchange", "reader");
  await expect(page.getByRole("heading", { level: 1, name: "Exchange" })).toBeVisible();
  await expect(page.getByText("No active gradient exchange")).toBeVisible();
  await expectAccessible(page);
  await picture(page, "exchange");
});

test("two ranks that sum over the service are seen doing it: members, rounds, bytes, and figures by step", async ({ open }) => {
  test.setTimeout(LIMIT_MS);
  const { targets } = JSON.parse(await readFile(join(stack().folder, "stack.json"), "utf8"));
  // Ends when the run is cancelled, which the command tells as a failure.
  const training = train("arithmetic", (folder) => writeFile(join(folder, "train.toml"), config(targets.algorithm))).catch(
    () => undefined,
  );
  try {
    const page = await open("projects/default/exchange", "reader");
    const row = page.getByRole("table", { name: "Exchanges" }).getByRole("row").nth(1);
    await expect(row.getByText("qsgd")).toBeVisible({ timeout: LIMIT_MS });
    const members = page.getByRole("table", { name: "Members" });
    await expect(members.getByText("in step").nth(1)).toBeVisible();
    await expect(members.getByRole("row")).toHaveCount(3);
    const round = async () => Number((await members.getByRole("row").nth(1).getByRole("cell").nth(1).innerText()).replace(/\D/g, ""));
    const before = await round();
    await expect.poll(round, { timeout: 60_000 }).toBeGreaterThan(before);
    const shard = page.getByRole("table", { name: "Shards of the exchange" }).getByRole("row").nth(1);
    await expect(shard.getByText(/B$/)).toHaveCount(2);
    for (const title of ["Ratio", "Cosine to the exact gradient", "Time of the exchange"])
      await expect(page.getByRole("img", { name: new RegExp(`^${title}\\.`) })).toBeVisible();
    await expect(page.getByText("No decisions were made")).toBeVisible();
    await expectAccessible(page);
    await picture(page, "exchange-live");
    await cancelled();
    await expect(page.getByText("No active gradient exchange")).toBeVisible({ timeout: 60_000 });
  } finally {
    await cancelled();
    await training;
  }
});

/** Cancels the runs of the policy that are under way. */
async function cancelled(): Promise<void> {
  for (const { name, policy, state } of await runs())
    if (policy?.name === POLICY && !/SUCCEEDED|FAILED|CANCELLED/.test(state))
      await call("fulmen.algorithm.v1.TrainingRunService/CancelTrainingRun", { name });
}
