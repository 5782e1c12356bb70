import { defineConfig } from "@playwright/test";

export default defineConfig({
  testDir: ".",
  testMatch: "**/*.spec.ts",
  globalSetup: "./stack.ts",
  outputDir: "../../build/browser",
  // Deadlines for what hangs, not for what is slow: they leave room for much other work on the machine.
  timeout: 180_000,
  expect: { timeout: 30_000 },
  workers: 1,
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
