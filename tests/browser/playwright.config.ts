import { defineConfig } from "@playwright/test";

/** Files whose tests need a training, or are one. */
const TRAINED = /\/(exchange|prompts|rollout|runs)\.spec\.ts$/;

export default defineConfig({
  testDir: ".",
  testMatch: "**/*.spec.ts",
  outputDir: "../../build/browser",
  // Deadlines for what hangs, not for what is slow: they leave room for much other work on the machine.
  timeout: 180_000,
  expect: { timeout: 30_000 },
  // Two lanes side by side, each one test after another on a stack of its own: the files that train take as long as all others.
  // A stack that is given is for one at a time.
  workers: process.env.FULMEN_BROWSER_STACK ? 1 : 2,
  projects: [
    { name: "trained", testMatch: TRAINED, workers: 1 },
    { name: "untrained", testIgnore: TRAINED, workers: 1 },
  ],
  forbidOnly: true,
  reporter: [["list"]],
  use: {
    viewport: { width: 1440, height: 900 },
    // Without a picture of every frame and a copy of every page, which cost as much as the tests themselves.
    trace: { mode: "retain-on-failure", screenshots: false, snapshots: false },
    // Debian's Chromium; Playwright downloads none.
    launchOptions: {
      executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
      args: ["--no-sandbox", "--disable-dev-shm-usage"],
    },
  },
});
