import { expect, expectAccessible, picture, stack, test } from "./console";

test("home shows services, queue, runners, runs and failures", async ({ open }) => {
  const page = await open("projects/default");
  await expect(page.getByRole("heading", { level: 1, name: "default" })).toBeVisible();
  for (const name of ["Store", "LLM proxy", "Algorithm service"])
    await expect(page.getByRole("region", { name: "Services" }).getByText(name)).toBeVisible();
  await expect(page.getByText("Queued", { exact: true })).toBeVisible();
  await expect(page.getByText("No active run")).toBeVisible();
  await expectAccessible(page);
  await picture(page, "home");
});

test("someone who is not signed in signs in with a token, and out", async ({ page, errors: _ }) => {
  const { url, tokens } = stack();
  await page.goto(`${url}/projects/default`);
  await expectAccessible(page);
  await page.getByLabel("Token").fill("nonsense");
  await page.getByRole("button", { name: "Sign in" }).click();
  await expect(page.getByRole("alert")).not.toBeEmpty();
  await page.getByLabel("Token").fill(tokens.reader);
  await page.keyboard.press("Enter");
  await expect(page.getByRole("heading", { level: 1, name: "default" })).toBeVisible();
  await page.getByRole("button", { name: "Sign out" }).click();
  await expect(page.getByRole("heading", { name: "Sign in to Fulmen" })).toBeVisible();
});

test("a one-time code signs in once, and is gone from the address", async ({ page, errors: _ }) => {
  const { url, tokens } = stack();
  const issued = await page.request.post(`${url}/session/codes`, {
    headers: { authorization: `Bearer ${tokens.client}` },
  });
  const { code } = (await issued.json()) as { code: string };
  await page.goto(`${url}/projects/default#code=${code}`);
  await expect(page.getByRole("heading", { level: 1, name: "default" })).toBeVisible();
  expect(page.url()).not.toContain(code);
  await page.getByRole("button", { name: "Sign out" }).click();
  await expect(page.getByRole("heading", { name: "Sign in to Fulmen" })).toBeVisible();
  await page.goto("about:blank");
  await page.goto(`${url}/projects/default#code=${code}`);
  await expect(page.getByRole("alert")).toContainText("used");
});

test("the palette opens a page by its name, with the keyboard alone", async ({ open }) => {
  const page = await open("projects/default");
  await page.keyboard.press("Control+k");
  await page.getByRole("combobox", { name: /Page, or the name/ }).fill("home");
  await expectAccessible(page);
  await page.keyboard.press("Enter");
  await expect(page.getByRole("dialog")).toBeHidden();
  expect(page.url()).toMatch(/projects\/default$/);
});

test("an address that names nothing says so", async ({ open }) => {
  const page = await open("no/such/page");
  await expect(page.getByRole("heading", { name: "Not found" })).toBeVisible();
});
