// One clock for all relative times.

class Clock {
  now = $state.raw(new Date());

  constructor() {
    setInterval(() => document.visibilityState === "visible" && (this.now = new Date()), 1_000);
  }
}

export const clock = new Clock();
