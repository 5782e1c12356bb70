// Lines of a content that arrives in parts.

/** Returns bytes of a content from an offset on; none at its end. */
export type Read = (offset: number, signal: AbortSignal) => Promise<Uint8Array>;

/** A line, and its number from 1. */
export interface Line {
  number: number;
  text: string;
}

/** Reads a content line by line, as far as it is looked at. Blank lines are left out. */
export class Lines {
  #offset = 0;
  #rest = new Uint8Array();
  #number = 0;
  #waiting: Line[] = [];
  #isAtEnd = false;
  readonly #decoder = new TextDecoder();

  constructor(private readonly read: Read) {}

  /** Returns the next lines, at most `limit`; fewer at the end. */
  async next(limit: number, signal: AbortSignal): Promise<Line[]> {
    while (this.#waiting.length < limit && !this.#isAtEnd) {
      const part = await this.read(this.#offset, signal);
      this.#offset += part.length;
      this.#isAtEnd = part.length === 0;
      this.#take(part);
    }
    return this.#waiting.splice(0, limit);
  }

  #take(part: Uint8Array): void {
    const bytes = new Uint8Array(this.#rest.length + part.length);
    bytes.set(this.#rest);
    bytes.set(part, this.#rest.length);
    let start = 0;
    for (let end = bytes.indexOf(10, start); end >= 0; end = bytes.indexOf(10, start)) {
      this.#add(bytes.subarray(start, end));
      start = end + 1;
    }
    this.#rest = bytes.slice(start);
    if (this.#isAtEnd && this.#rest.length) this.#add(this.#rest);
  }

  #add(line: Uint8Array): void {
    const text = this.#decoder.decode(line).trim();
    if (text) this.#waiting.push({ number: (this.#number += 1), text });
  }
}
