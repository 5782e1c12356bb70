import { expect, test } from "vitest";

import { complete, joined, quoted, requires, toggled } from "./query";

const values = { agent: ["resources/agent.a/versions/1"], metadata: ["customer=acme", "customer=zen", "a b=c"] };

function options(text: string): string[] {
  return complete(text, text.length, values).options;
}

test("a filter begins with a field, and goes on with an operator, a value and a joint", () => {
  expect(options("st")).toContain("state");
  expect(options("state ")).toEqual(["=", "!=", ":*"]);
  expect(options("reward ")).toEqual(["=", "!=", "<", "<=", ">", ">=", ":*"]);
  expect(options("state = ")).toContain("FAILED");
  expect(options("state = FAI")).toEqual(["FAILED"]);
  expect(options("state = FAILED ")).toEqual(["AND", "OR"]);
  expect(options("state = FAILED AND rew")).toEqual(["reward", "resource_versions."].slice(0, 1));
  expect(options("(state=")).toContain("QUEUED");
  expect(options("(reward:*) ")).toEqual(["AND", "OR"]);
});

test("values of the list are offered, and the keys of its maps", () => {
  expect(options("agent = ")).toEqual(['"resources/agent.a/versions/1"']);
  expect(options("metadata.c")).toEqual(["metadata.customer"]);
  expect(options("metadata.customer = ")).toEqual(['"acme"', '"zen"']);
  expect(options("metadata.customer = z")).toEqual(['"zen"']);
  expect(options('metadata."')).toContain('metadata."a b"');
});

test("what is chosen replaces the word at the cursor", () => {
  const text = "state = FA AND x";
  expect(complete(text, 10, values)).toEqual({ from: 8, to: 10, options: ["FAILED"] });
  expect(complete(text, 9, values)).toMatchObject({ from: 8, to: 10 });
});

test("a text that is searched follows its colon", () => {
  expect(options("input")).toEqual([]);
  expect(options("input ")).toEqual([":"]);
  expect(options("input:re")).toEqual([]);
  expect(options('input:"refund" ')).toEqual(["AND", "OR"]);
});

test("a facet is added to a filter and taken out of it", () => {
  const term = "state = FAILED";
  expect(toggled("", term)).toBe(term);
  expect(toggled("reward > 1", term)).toBe("reward > 1 AND state = FAILED");
  for (const filter of [term, `${term} AND a = 1`, `a = 1 AND ${term}`, `a = 1 AND ${term} AND b = 2`]) {
    expect(requires(filter, term)).toBe(true);
    expect(requires(toggled(filter, term), term)).toBe(false);
    expect(toggled(toggled(filter, term), term)).toBe(
      joined(filter.replace(/^state = FAILED( AND )?|( AND )?state = FAILED/, ""), term),
    );
  }
  expect(requires("a = 1 OR state = FAILED", term)).toBe(false);
  expect(requires("state = FAILED OR a = 1", term)).toBe(false);
});

test("quotes and backslashes of a value are escaped", () => {
  expect(quoted('a "b" \\')).toBe('"a \\"b\\" \\\\"');
});
