// What browser tests share: signed-in pages, calls by JSON, and the checks that every screen passes.

import { once } from "node:events";
import { connect } from "node:net";

import { test as base, expect, type Page } from "@playwright/test";
import axe from "axe-core";

import { LIMIT_MS, start } from "./stack";

export { expect };

export type Role = "admin" | "client" | "reader";

interface Stack {
  url: string;
  tokens: Record<Role, string>;
  /** State directory of the stack, for `fulmen --state-dir`. */
  folder: string;
  /** Port at which services are killed and started. */
  control: number;
}

export const stack = (): Stack => JSON.parse(process.env.FULMEN_BROWSER_STACK ?? "{}") as Stack;

/** Calls an rpc as JSON, by default as an administrator: `call("fulmen.store.v1.RolloutService/GetQueueStats", {})`. */
export async function call(rpc: string, request: unknown, role: Role = "admin"): Promise<any> {
  const { url, tokens } = stack();
  const answer = await fetch(`${url}/${rpc}`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${tokens[role]}` },
    body: JSON.stringify(request),
  });
  const body = await answer.json();
  if (!answer.ok) throw new Error(`${rpc}: ${JSON.stringify(body)}`);
  return body;
}

/** Kills or starts a service of the stack: `order("kill store")`. */
export async function order(line: string): Promise<void> {
  const socket = connect(stack().control, "127.0.0.1");
  socket.write(`${line}\n`);
  const [answer] = (await once(socket, "data")) as [Buffer];
  socket.destroy();
  expect(String(answer)).toBe("done\n");
}

/** Opens a path in a page where someone is signed in. */
export type Open = (path: string, role?: Role) => Promise<Page>;

export const test = base.extend<{ open: Open; errors: string[] }, { services: void }>({
  // Each lane of playwright.config.ts has its own stack: what its tests do to services and runs, the other lane never sees.
  services: [
    async ({}, use) => {
      const stop = await start();
      await use();
      await stop();
    },
    { scope: "worker", auto: true, timeout: 2 * LIMIT_MS },
  ],
  // Errors and refusals of the content security policy in any page fail the test; calls that fail do not.
  errors: async ({ page }, use) => {
    const errors: string[] = [];
    page.on("pageerror", (error) => errors.push(String(error)));
    page.on("console", (message) => {
      if (message.type() === "error" && !/Failed to load resource/.test(message.text())) errors.push(message.text());
    });
    await use(errors);
    expect(errors).toEqual([]);
  },
  open: async ({ page, errors: _ }, use) => {
    await use(async (path, role = "client") => {
      const { url, tokens } = stack();
      const answer = await page.request.post(`${url}/session`, { data: { token: tokens[role] } });
      expect(answer.ok()).toBe(true);
      await page.goto(`${url}/${path}`);
      return page;
    });
  },
});

const RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
/** Rules that look at colours: the others find the same in light and dark. */
const OF_COLOURS = ["color-contrast", "link-in-text-block"];

/** Checks that a page has no violation of WCAG 2.2 AA, light and dark. */
export async function expectAccessible(page: Page): Promise<void> {
  if (!(await page.evaluate(() => "axe" in globalThis))) await page.evaluate(axe.source);
  for (const colorScheme of ["light", "dark"] as const) {
    await page.emulateMedia({ colorScheme, reducedMotion: "reduce" });
    const runOnly = colorScheme === "light" ? { type: "tag", values: RULES } : { type: "rule", values: OF_COLOURS };
    // Of what passes, nothing is described, which costs as much as the rules.
    const options = { runOnly, resultTypes: ["violations"], selectors: false } as axe.RunOptions;
    const violations = await page.evaluate(async (given) => {
      const { run } = (globalThis as unknown as { axe: typeof axe }).axe;
      // What a page draws anew for the other colours is there in the next frame.
      await new Promise(requestAnimationFrame);
      return (await run(document, given)).violations;
    }, options);
    const found = violations.map(({ id, nodes }) => `${colorScheme}: ${id}: ${nodes.map((each) => each.html).join(" ")}`);
    expect(found).toEqual([]);
  }
  await page.emulateMedia({ colorScheme: null, reducedMotion: null });
}

/** Saves a picture of a page as `build/screens/NAME.png`, to be looked at, if SCREENS=1 is set. */
export async function picture(page: Page, name: string): Promise<void> {
  if (process.env.SCREENS) await page.screenshot({ path: `build/screens/${name}.png`, fullPage: true });
}
