// One clock for all relative times: that of the services. Their times are shown, and the browser's own clock may be off.

import { offsetAfter } from "./offset";

class Clock {
  /** The time of the services, changed every second. */
  now = $state.raw(new Date());
  #offsetMs = 0;

  constructor() {
    setInterval(() => document.visibilityState === "visible" && (this.now = this.read()), 1_000);
  }

  /** The time of the services, for what does not follow it. */
  read(): Date {
    return new Date(Date.now() + this.#offsetMs);
  }

  /** Learns from the header `Date` of an answer, with the browser's time when it asked. */
  hear(date: string | null, askedMs: number): void {
    const offset = offsetAfter(this.#offsetMs, Date.parse(date ?? ""), askedMs, Date.now());
    if (offset === this.#offsetMs) return;
    this.#offsetMs = offset;
    this.now = this.read();
  }
}

export const clock = new Clock();
