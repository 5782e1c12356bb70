// Makes the pictures of docs/console.md: trains examples/arithmetic on a stack of its own, and photographs the console.
//
//   node tools/console_pictures.mjs                 (five minutes; needs chromium)
//   node tools/console_pictures.mjs run rollouts    some of them
//
// FULMEN_BROWSER_STACK, a line as tests/support/browser_stack.py prints it, names a stack that has trained already. `home` and
// `queue` show a running training: start one there first.

import { execFile, spawn } from "node:child_process";
import { mkdir } from "node:fs/promises";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

import { chromium } from "@playwright/test";

const ROOT = fileURLToPath(new URL("..", import.meta.url));
const PYTHON = `${ROOT}.venv/bin/python`;
const FOLDER = `${ROOT}docs/images/console`;
const WHILE_IT_TRAINS_MS = 45_000;

const wanted = process.argv.slice(2);
const isWanted = (name) => !wanted.length || wanted.includes(name);
const known = process.env.FULMEN_BROWSER_STACK && JSON.parse(process.env.FULMEN_BROWSER_STACK);

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function stack() {
  const process = spawn(PYTHON, ["-m", "tests.support.browser_stack"], { cwd: ROOT, stdio: ["pipe", "pipe", "inherit"] });
  for await (const line of createInterface({ input: process.stdout })) {
    if (line.startsWith("{")) return { ...JSON.parse(line), stop: () => process.stdin.end() };
  }
  throw new Error("The stack ended before it was ready.");
}

async function call({ url, tokens }, rpc, request) {
  const answer = await fetch(`${url}/${rpc}`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${tokens.admin}` },
    body: JSON.stringify(request),
  });
  return answer.json();
}

const running = known ? { ...known, stop: () => {} } : await stack();
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-dev-shm-usage"],
});
try {
  await mkdir(FOLDER, { recursive: true });
  const page = await browser.newPage({ viewport: { width: 1440, height: 900 }, colorScheme: "light" });
  await page.request.post(`${running.url}/session`, { data: { token: running.tokens.client } });
  const photograph = async (name, path, prepare = async () => {}) => {
    if (!isWanted(name)) return;
    await page.goto(`${running.url}/${path}`);
    await page.getByRole("heading", { level: 1 }).waitFor();
    await pause(4_000);
    await prepare();
    await page.screenshot({ path: `${FOLDER}/${name}.png` });
  };

  const train = ["-m", "fulmen_cli", "train", "examples/arithmetic/train.toml", "--state-dir", running.folder];
  const training = known ? undefined : promisify(execFile)(PYTHON, train, { cwd: ROOT, maxBuffer: 1 << 26 });
  if (training) await pause(WHILE_IT_TRAINS_MS);
  if (training || wanted.length) {
    await photograph("home", "projects/default", () => pause(20_000));
    await photograph("queue", "projects/default/queue", () => pause(10_000));
  }
  await training;

  const { trainingRuns } = await call(running, "fulmen.algorithm.v1.TrainingRunService/ListTrainingRuns", {});
  const run = trainingRuns.find(({ algorithm }) => algorithm === "grpo");
  await photograph("run", run.name);
  await photograph("runs", "projects/default/trainingRuns");
  await photograph("rollouts", "projects/default/rollouts");
  const { rollouts } = await call(running, "fulmen.store.v1.RolloutService/ListRollouts", {
    trainingRun: run.name,
    filter: 'reward = 1 AND mode = TRAIN',
    pageSize: 1,
  });
  await photograph("rollout", rollouts[0].name);
} finally {
  await browser.close();
  running.stop();
}
