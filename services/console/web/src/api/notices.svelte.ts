// Short notices of what was done, or could not be.

import { problemOf } from "./problems";

export interface Notice {
  id: number;
  text: string;
  details: string[];
  /** What operators need to know of an error; see `Problem`. */
  technical: string;
  isError: boolean;
}

const SHOWN_MS = 6_000;
const MAX_SHOWN = 4;
let last = 0;

class Notices {
  shown = $state<Notice[]>([]);

  say(text: string, { details = [] as string[], technical = "", isError = false } = {}): void {
    const id = (last += 1);
    this.shown = [...this.shown, { id, text, details, technical, isError }].slice(-MAX_SHOWN);
    // Errors stay until they are dismissed.
    if (!isError) setTimeout(() => this.dismiss(id), SHOWN_MS);
  }

  /** Says why something was not done. */
  fail(error: unknown): void {
    const { message, details, technical } = problemOf(error, "changed");
    this.say(message, { details, technical, isError: true });
  }

  dismiss(id: number): void {
    this.shown = this.shown.filter((each) => each.id !== id);
  }
}

export const notices = new Notices();

/** Does something that changes the system; says that it is done, or why it is not. True if it is. `done` may count what was. */
export async function act(done: string | (() => string), action: () => Promise<unknown>): Promise<boolean> {
  try {
    await action();
    notices.say(typeof done === "string" ? done : done());
    return true;
  } catch (error) {
    notices.fail(error);
    return false;
  }
}
