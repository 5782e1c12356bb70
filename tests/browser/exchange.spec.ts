import { expect, expectAccessible, picture, test } from "./console";

test("where no exchange goes on, the page says what would be here", async ({ open }) => {
  const page = await open("projects/default/exchange", "reader");
  await expect(page.getByRole("heading", { level: 1, name: "Exchange" })).toBeVisible();
  await expect(page.getByText("No exchange goes on at this service")).toBeVisible();
  await expectAccessible(page);
  await picture(page, "exchange");
});
