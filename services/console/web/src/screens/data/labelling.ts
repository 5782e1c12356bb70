// Labelling: one rollout after another, each score at once in the store, and back again.

import type { Annotation } from "../../api/gen/fulmen/store/v1/annotation_service_pb";

/** What the store does for labelling. */
export interface Scores {
  create(rollout: string, value: number, comment: string): Promise<Annotation>;
  update(name: string, value: number, comment: string): Promise<Annotation>;
  delete(name: string): Promise<void>;
}

/** What was there before a score was given. */
interface Step {
  rollout: string;
  before: Annotation | undefined;
}

/** A page of rollouts by name, and the token of the next one; empty on the last. */
export interface Page {
  rollouts: string[];
  next: string;
}

/** The rollouts to score, which of them is looked at, and what they were given. Further pages are read as they are reached. */
export class Labelling {
  place = 0;
  /** False while there are more rollouts than were read. */
  isWhole = false;
  readonly rollouts: string[] = [];
  readonly given = new Map<string, Annotation>();
  readonly #steps: Step[] = [];
  #next = "";

  constructor(
    private readonly page: (token: string) => Promise<Page>,
    known: Annotation[],
    private readonly scores: Scores,
  ) {
    for (const each of known) this.given.set(each.rollout, each);
  }

  /** Reads rollouts until there is one without a score, and goes to it; to the first one if all have one. */
  async begin(): Promise<this> {
    let first = -1;
    do {
      await this.#more();
      first = this.rollouts.findIndex((rollout) => !this.given.has(rollout));
    } while (first < 0 && !this.isWhole);
    this.place = Math.max(0, first);
    return this;
  }

  /** Reads on until there are more rollouts, or all were read. A page may be empty although others follow. */
  async #more(): Promise<void> {
    const before = this.rollouts.length;
    while (!this.isWhole && this.rollouts.length === before) {
      const { rollouts, next } = await this.page(this.#next);
      this.rollouts.push(...rollouts);
      this.#next = next;
      this.isWhole = !next;
    }
  }

  get current(): string | undefined {
    return this.rollouts[this.place];
  }

  get doneCount(): number {
    return this.rollouts.filter((rollout) => this.given.has(rollout)).length;
  }

  get canUndo(): boolean {
    return this.#steps.length > 0;
  }

  /** Goes on or back by one. */
  async move(by: number): Promise<void> {
    if (this.place + by >= this.rollouts.length) await this.#more();
    this.place = Math.max(0, Math.min(this.rollouts.length - 1, this.place + by));
  }

  /** Scores the rollout that is looked at, and goes on to the next. */
  async give(value: number, comment: string): Promise<void> {
    const rollout = this.current;
    if (!rollout) return;
    const before = this.given.get(rollout);
    const after = before
      ? await this.scores.update(before.name, value, comment)
      : await this.scores.create(rollout, value, comment);
    this.given.set(rollout, after);
    this.#steps.push({ rollout, before });
    if (this.current === rollout) await this.move(1);
  }

  /** Takes the last score back, and goes to its rollout. */
  async undo(): Promise<void> {
    const step = this.#steps.at(-1);
    if (!step) return;
    const now = this.given.get(step.rollout);
    if (now && step.before)
      this.given.set(step.rollout, await this.scores.update(now.name, step.before.value, step.before.comment));
    else if (now) {
      await this.scores.delete(now.name);
      this.given.delete(step.rollout);
    }
    this.#steps.pop();
    this.place = this.rollouts.indexOf(step.rollout);
  }
}

/** What a key means: a score from 1 to 5, or a command. */
export function keyOf(
  event: Pick<KeyboardEvent, "key" | "ctrlKey" | "metaKey" | "altKey">,
): number | string | undefined {
  if (event.ctrlKey || event.metaKey || event.altKey) return undefined;
  if (/^[1-5]$/.test(event.key)) return Number(event.key);
  const commands: Record<string, string> = { n: "next", p: "previous", u: "undo", c: "comment" };
  return commands[event.key.toLowerCase()];
}
