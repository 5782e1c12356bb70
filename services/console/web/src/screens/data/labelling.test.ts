import { create } from "@bufbuild/protobuf";
import { expect, test } from "vitest";

import { type Annotation, AnnotationSchema } from "../../api/gen/fulmen/store/v1/annotation_service_pb";
import { keyOf, Labelling, type Scores } from "./labelling";

/** Scores as the store keeps them. */
class Kept implements Scores {
  readonly rows = new Map<string, Annotation>();
  #last = 0;

  async create(rollout: string, value: number, comment: string): Promise<Annotation> {
    return this.#put(`a/${(this.#last += 1)}`, rollout, value, comment);
  }

  async update(name: string, value: number, comment: string): Promise<Annotation> {
    return this.#put(name, this.rows.get(name)!.rollout, value, comment);
  }

  async delete(name: string): Promise<void> {
    this.rows.delete(name);
  }

  get values(): Record<string, number> {
    return Object.fromEntries([...this.rows.values()].map(({ rollout, value }) => [rollout, value]));
  }

  #put(name: string, rollout: string, value: number, comment: string): Annotation {
    const row = create(AnnotationSchema, { name, rollout, value, comment });
    this.rows.set(name, row);
    return row;
  }
}

/** Begins with these pages of rollouts. */
function labelling(scores: Scores, known: Annotation[], ...pages: string[][]): Promise<Labelling> {
  const page = async (token: string) => {
    const number = Number(token);
    return { rollouts: pages[number] ?? [], next: number + 1 < pages.length ? String(number + 1) : "" };
  };
  return new Labelling(page, known, scores).begin();
}

test("each score goes to the store at once, and the next rollout comes", async () => {
  const kept = new Kept();
  const work = await labelling(kept, [], ["r1", "r2", "r3"]);
  await work.give(4, "fine");
  await work.give(2, "");
  expect(kept.values).toEqual({ r1: 4, r2: 2 });
  expect([work.current, work.doneCount]).toEqual(["r3", 2]);
  await work.give(5, "");
  expect([work.current, work.doneCount]).toEqual(["r3", 3]);
});

test("pages are read as they are reached, also past one that is empty", async () => {
  const kept = new Kept();
  const work = await labelling(kept, [], ["r1"], [], ["r2", "r3"]);
  expect([work.rollouts, work.isWhole]).toEqual([["r1"], false]);
  await work.give(4, "");
  expect([work.current, work.isWhole]).toEqual(["r2", true]);
  await work.move(1);
  await work.move(1);
  expect(work.current).toBe("r3");
  await work.undo();
  expect([work.current, kept.values]).toEqual(["r1", {}]);
});

test("the first rollout without a score is looked for on all pages", async () => {
  const kept = new Kept();
  const known = [await kept.create("r1", 1, ""), await kept.create("r2", 2, "")];
  expect((await labelling(kept, known, ["r1"], ["r2"], ["r3"], ["r4"])).current).toBe("r3");
  expect((await labelling(kept, known, ["r1"], ["r2"])).current).toBe("r1");
});

test("undo takes back score by score, also what was there before", async () => {
  const kept = new Kept();
  const known = await kept.create("r1", 1, "old");
  const work = await labelling(kept, [known], ["r1", "r2"]);
  // The first without a score.
  expect(work.current).toBe("r2");
  await work.give(3, "");
  await work.move(-5);
  await work.give(5, "new");
  expect(kept.values).toEqual({ r1: 5, r2: 3 });
  await work.undo();
  expect([kept.values, work.current, work.given.get("r1")?.comment]).toEqual([{ r1: 1, r2: 3 }, "r1", "old"]);
  await work.undo();
  expect([kept.values, work.current, work.canUndo]).toEqual([{ r1: 1 }, "r2", false]);
  await work.undo();
  expect(kept.values).toEqual({ r1: 1 });
});

test("a score that the store refused leaves everything as it was", async () => {
  const kept = new Kept();
  kept.create = () => Promise.reject(new Error("no"));
  const work = await labelling(kept, [], ["r1", "r2"]);
  await expect(work.give(1, "")).rejects.toThrow("no");
  expect([work.current, work.doneCount, work.canUndo]).toEqual(["r1", 0, false]);
});

test("keys are scores and commands, not those of the browser", () => {
  const key = (key: string, more = {}) => keyOf({ key, ctrlKey: false, metaKey: false, altKey: false, ...more });
  expect([key("1"), key("5"), key("6"), key("n"), key("P"), key("u"), key("x")]).toEqual([
    1,
    5,
    undefined,
    "next",
    "previous",
    "undo",
    undefined,
  ]);
  expect(key("1", { ctrlKey: true })).toBeUndefined();
});
