// The last minutes of a number that is polled.

const MINUTES = 10;

export class Trail {
  values = $state.raw<number[]>([]);

  constructor(read: () => number | undefined, everyMs: number) {
    const limit = (MINUTES * 60_000) / everyMs;
    const timer = () => {
      const value = read();
      if (value !== undefined) this.values = [...this.values, value].slice(-limit);
    };
    $effect(() => {
      const running = setInterval(timer, everyMs);
      return () => clearInterval(running);
    });
  }
}
